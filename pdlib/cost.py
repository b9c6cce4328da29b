"""FLOPs and bytes of the two phases, and the roofline times that follow. Arithmetic only, no torch.

Counting rules, the same everywhere: a multiply-add is 2 FLOPs; a weight is read once a pass, however many
tokens share it; causal attention computes half of the score matrix; activations are assumed to stay in cache.
Only the last token's logits are computed (one row a request).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdlib.spec import DTYPE_BYTES, DeviceSpec, ModelSpec, one_of, whole_numbers


@dataclass(frozen=True)
class Cost:
    """Work of one pass: FLOPs, and the bytes that must cross the memory bus at least once."""

    flops: float
    weight_bytes: float
    kv_bytes: float  # keys and values read and written

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/B."""
        return self.flops / self.bytes


def kv_bytes_per_token(model: ModelSpec, dtype: str = "float32") -> int:
    """κ = 2 · layers · kv_heads · head_dim · bytes(dtype): keys and values of one token, in bytes."""
    one_of("dtype", dtype, DTYPE_BYTES)
    return 2 * model.layers * model.kv_heads * model.head_dim * DTYPE_BYTES[dtype]


def prefill(model: ModelSpec, requests: int, prompt_tokens: int, dtype: str = "float32") -> Cost:
    """Prefill of `requests` prompts: 2·N·n + 2·n²·d·layers FLOPs each (causal), plus one row of logits.

    The n² term is QKᵀ and PV, 2·n²·d each for the whole matrix, halved by causality.
    """
    whole_numbers(requests=requests, prompt_tokens=prompt_tokens)
    width = model.heads * model.head_dim
    linear = 2 * model.matmul_parameters * prompt_tokens + 2 * model.head_parameters
    attention = 2 * model.layers * width * prompt_tokens**2
    return Cost(
        flops=requests * (linear + attention),
        weight_bytes=weight_bytes(model, dtype),
        kv_bytes=requests * prompt_tokens * kv_bytes_per_token(model, dtype),
    )


def decode_step(model: ModelSpec, requests: int, context: float, dtype: str = "float32") -> Cost:
    """One decode step of a batch: every weight and every filled cache position is read once.

    `context` is the number of filled positions per request, the new token included; it may be a mean.
    """
    whole_numbers(requests=requests)
    width = model.heads * model.head_dim
    linear = 2 * (model.matmul_parameters + model.head_parameters)
    return Cost(
        flops=requests * (linear + 4 * model.layers * width * context),
        weight_bytes=weight_bytes(model, dtype),
        kv_bytes=requests * (context + 1) * kv_bytes_per_token(model, dtype),  # read all, write one
    )


def weight_bytes(model: ModelSpec, dtype: str = "float32") -> int:
    """Bytes of the weights that one pass reads: the layers' matrices and the output head."""
    one_of("dtype", dtype, DTYPE_BYTES)
    return (model.matmul_parameters + model.head_parameters) * DTYPE_BYTES[dtype]


def decode(model: ModelSpec, requests: int, prompt_tokens: int, steps: int, dtype: str = "float32") -> Cost:
    """`steps` decode steps after a prompt of `prompt_tokens`: contexts prompt + 1 … prompt + steps."""
    whole_numbers(steps=steps)
    one = decode_step(model, requests, prompt_tokens + (steps + 1) / 2, dtype)
    return Cost(steps * one.flops, steps * one.weight_bytes, steps * one.kv_bytes)


def roofline_s(cost: Cost, device: DeviceSpec) -> float:
    """max(FLOPs / peak FLOP/s, bytes / peak B/s) in s: compute and traffic overlap perfectly."""
    return max(cost.flops / device.flops_per_s, cost.bytes / device.read_bytes_per_s)


def sum_s(cost: Cost, device: DeviceSpec) -> float:
    """FLOPs / peak + bytes / peak in s: nothing overlaps. A real kernel ends between the two."""
    return cost.flops / device.flops_per_s + cost.bytes / device.read_bytes_per_s


def phase_ratio_limit(device: DeviceSpec, requests: int, dtype: str = "float32") -> float:
    """Ideal prefill ÷ decode throughput at a small batch: peak · bytes per weight / (2 · B · bandwidth).

    Prefill bound by compute, decode by reading the weights; attention and KV left out.
    """
    whole_numbers(requests=requests)
    return device.flops_per_s * DTYPE_BYTES[dtype] / (2 * requests * device.read_bytes_per_s)


def article_002_prefill_s(
    prompt_tokens: int, hidden: int, head_dim: int, layers: int, flops_per_s: float, utilisation: float
) -> float:
    """Article 002's formula as printed: (2·n·d² + n²·d_head·layers) / (FLOP/s · utilisation), in s.

    Its linear term lacks the layers and the MLP, its quadratic term the heads.
    """
    whole_numbers(prompt_tokens=prompt_tokens, hidden=hidden, head_dim=head_dim, layers=layers)
    flops = 2 * prompt_tokens * hidden**2 + prompt_tokens**2 * head_dim * layers
    return flops / (flops_per_s * utilisation)
