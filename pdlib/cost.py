"""FLOPs and bytes of the two phases, and the roofline times that follow. Arithmetic only, no torch.

Counting rules, the same everywhere: a multiply-add is 2 FLOPs; a weight is read once a pass, however many
tokens share it; causal attention computes half of the score matrix; activations are assumed to stay in cache.
Only the last token's logits are computed (one row a request).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdlib.spec import DTYPE_BYTES, DeviceSpec, InputError, ModelSpec, one_of, whole_numbers

# Weights may be stored in fewer bits than are computed with (DeepSeek-V3: 8).
STORED_BYTES = DTYPE_BYTES | {"float8": 1}


@dataclass(frozen=True)
class Cost:
    """Work of one pass: FLOPs, and the bytes that must cross the memory bus at least once."""

    flops: float
    weight_bytes: float
    kv_bytes: float  # keys and values read and written
    # Not part of `bytes`: what a cache holds back, and what goes over the link instead of the bus.
    activation_bytes: float = 0.0  # inputs and outputs of the matrix products
    link_bytes: float = 0.0  # sent by one device in the all-reduces of tensor parallelism

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP/B."""
        return self.flops / self.bytes


def kv_bytes_per_token(model: ModelSpec, dtype: str = "float32", tensor_parallel: int = 1) -> int:
    """κ = 2 · layers · kv_heads · head_dim · bytes(dtype): keys and values of one token, in bytes, on all devices.

    On more devices than KV heads the heads are replicated: × tensor_parallel / kv_heads. A latent cache holds
    layers · (kv_rank + rope_dim) elements, whole on every device.
    """
    one_of("dtype", dtype, DTYPE_BYTES)
    check_parallel(model, tensor_parallel)
    if model.kv_rank:
        return model.layers * (model.kv_rank + model.rope_dim) * DTYPE_BYTES[dtype] * tensor_parallel
    held = max(model.kv_heads, tensor_parallel)
    return 2 * model.layers * held * model.head_dim * DTYPE_BYTES[dtype]


def check_parallel(model: ModelSpec, tensor_parallel: int) -> None:
    """Raise InputError unless the heads, and the KV heads or their copies, spread evenly over the devices."""
    whole_numbers(tensor_parallel=tensor_parallel)
    few, many = sorted((model.kv_heads, tensor_parallel))
    if model.heads % tensor_parallel or many % few:
        allowed = [p for p in range(1, model.heads + 1) if not model.heads % p and _even(model.kv_heads, p)]
        raise InputError(
            f"{model.name}: {model.heads} heads and {model.kv_heads} KV heads do not spread over {tensor_parallel} "
            f"devices; tensor_parallel may be one of: {', '.join(map(str, allowed))}"
        )


def _even(a: int, b: int) -> bool:
    return not max(a, b) % min(a, b)


def prefill(model: ModelSpec, requests: int, prompt_tokens: int, dtype: str = "float32") -> Cost:
    """Prefill of `requests` prompts: 2·N·n + 2·n²·d·layers FLOPs each (causal), plus one row of logits.

    The n² term is QKᵀ and PV, 2·n²·d each for the whole matrix, halved by causality.
    """
    whole_numbers(requests=requests, prompt_tokens=prompt_tokens)
    width = model.heads * (model.head_dim + model.rope_dim / 2)
    linear = 2 * model.matmul_parameters * prompt_tokens + 2 * model.head_parameters
    attention = 2 * model.layers * width * prompt_tokens**2
    return Cost(
        flops=requests * (linear + attention),
        weight_bytes=weight_bytes(model, dtype, requests * prompt_tokens),
        kv_bytes=requests * prompt_tokens * kv_bytes_per_token(model, dtype),
    )


def decode_step(model: ModelSpec, requests: int, context: float, dtype: str = "float32") -> Cost:
    """One decode step of a batch: every weight and every filled cache position is read once.

    `context` is the number of filled positions per request, the new token included; it may be a mean.
    """
    whole_numbers(requests=requests)
    width = model.heads * ((model.kv_rank or model.head_dim) + model.rope_dim / 2)
    linear = 2 * (model.matmul_parameters + model.head_parameters)
    return Cost(
        flops=requests * (linear + 4 * model.layers * width * context),
        weight_bytes=weight_bytes(model, dtype, requests),
        kv_bytes=requests * (context + 1) * kv_bytes_per_token(model, dtype),  # read all, write one
    )


def weight_bytes(model: ModelSpec, dtype: str = "float32", tokens: float | None = None) -> int:
    """Bytes of the weights that one pass of `tokens` tokens reads: the layers' matrices and the output head.

    `tokens` matters to a mixture of experts alone; without it a single token's experts are read.
    """
    one_of("dtype", dtype, STORED_BYTES)
    experts = touched_experts(model, tokens) if tokens else model.experts_per_token
    return int((model.touched_parameters(experts) + model.head_parameters) * STORED_BYTES[dtype])


def touched_experts(model: ModelSpec, tokens: float) -> float:
    """Expected number of a layer's experts that `tokens` tokens hit when routing is even and independent.

    E · (1 − (1 − k/E)^tokens); 0 for a dense model. Uneven routing touches fewer.
    """
    if not model.experts:
        return 0.0
    return float(model.experts * (1 - (1 - model.experts_per_token / model.experts) ** tokens))


def kernels(model: ModelSpec) -> int:
    """Kernels of one pass, nothing fused but biases: what a launch overhead multiplies.

    A layer: 2 norms, 4 matrix products, attention, cache write, activation, 2 residual sums (11), one more for
    rotary positions, 2 more (choose, combine) with experts, 2 more for a latent cache. Around
    them: embedding, norm, head.
    """
    rotary = 0 if model.learned_positions else 1
    a_layer = 11 + rotary + (2 if model.experts else 0) + (2 if model.kv_rank else 0)
    return a_layer * model.layers + 3


def terms(
    model: ModelSpec, new: Sequence[float], past: Sequence[float] | float = 0, logits: float | None = None
) -> dict[str, float]:
    """FLOPs of one pass, term by term: qkv, attention_out, mlp, scores (QKᵀ), values (PV), head.

    Sequence i brings new[i] tokens behind past[i] cached ones. Every query meets the keys up to its own, so
    new · past + new · (new + 1) / 2 pairs. `logits`: rows of logits, one a sequence unless given. Decodes (new = 1)
    over a latent cache work in it, kv_rank wide, without unpacking the keys.
    """
    sequences = _sequences(new, past)
    tokens = sum(n for n, _ in sequences)
    out = model.layers * model.heads * model.head_dim * model.hidden
    scores = values = 0.0
    for n, p in sequences:
        pairs = model.layers * model.heads * (n * p + n * (n + 1) / 2)
        latent = model.kv_rank and n == 1
        scores += 2 * pairs * ((model.kv_rank if latent else model.head_dim) + model.rope_dim)
        values += 2 * pairs * (model.kv_rank if latent else model.head_dim)
    attention = model.layers * model.attention_parameters
    return {
        "qkv": 2 * tokens * (attention - out),
        "attention_out": 2 * tokens * out,
        "mlp": 2 * tokens * (model.matmul_parameters - attention),
        "scores": scores,
        "values": values,
        "head": 2 * model.head_parameters * (len(sequences) if logits is None else logits),
    }


def batch(
    model: ModelSpec,
    new: Sequence[float],
    past: Sequence[float] | float = 0,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    tensor_parallel: int = 1,
    logits: float | None = None,
) -> Cost:
    """One pass of any sequences at once: whole prompts (past 0), chunks, decodes (new 1), ragged or mixed.

    Weights are read once (a mixture of experts: those its tokens touch), the past is read, the new tokens' keys
    and values are written. Totals over all `tensor_parallel` devices, but link_bytes, which each of them sends: a
    ring passes 2 · (p − 1) / p of every message, and a layer has two messages of tokens · hidden elements.
    Against `prefill` and `decode_step`: a prompt's diagonal is counted whole (n(n + 1)/2 pairs, not n²/2), and a
    decode's new keys are written but not read back.
    """
    one_of("dtype", dtype, STORED_BYTES)
    sequences = _sequences(new, past)
    tokens = sum(n for n, _ in sequences)
    size = DTYPE_BYTES.get(dtype, 2)  # weights of 8 bits are computed with in 16
    kv = kv_bytes_per_token(model, kv_dtype or (dtype if dtype in DTYPE_BYTES else "bfloat16"), tensor_parallel)
    return Cost(
        flops=sum(terms(model, new, past, logits).values()),
        weight_bytes=weight_bytes(model, dtype, tokens),
        kv_bytes=kv * sum(n + p for n, p in sequences),
        activation_bytes=tokens * activations_per_token(model) * size,
        link_bytes=4 * (1 - 1 / tensor_parallel) * model.layers * tokens * model.hidden * size,
    )


def activations_per_token(model: ModelSpec) -> int:
    """Elements that go into and come out of the layers' matrix products, per token."""
    wide = 3 if model.gated_mlp else 2  # the gate's and the values' outputs, and the input of the last product
    heads = 2 * model.heads + 2 * model.kv_heads  # queries, keys, values; and the attention's result
    mlp = (model.layers - model.expert_layers) * model.mlp
    mlp += model.expert_layers * (model.experts_per_token + model.shared_experts) * model.expert_mlp
    return model.layers * (4 * model.hidden + heads * model.head_dim) + wide * mlp


def _sequences(new: Sequence[float], past: Sequence[float] | float) -> list[tuple[float, float]]:
    """(new, past) of every sequence, checked."""
    before = [past] * len(new) if isinstance(past, (int, float)) else list(past)
    if not len(new) or len(before) != len(new):
        raise InputError(f"{len(new)} counts of new tokens and {len(before)} of past ones; give one each a sequence")
    if any(not n > 0 for n in new) or any(not p >= 0 for p in before):
        raise InputError(f"new {list(new)}, past {before}: give new tokens above 0 and a past of at least 0")
    return list(zip(new, before, strict=True))


def decode(model: ModelSpec, requests: int, prompt_tokens: int, steps: int, dtype: str = "float32") -> Cost:
    """`steps` decode steps after a prompt of `prompt_tokens`: contexts prompt + 1 … prompt + steps."""
    whole_numbers(steps=steps)
    one = decode_step(model, requests, prompt_tokens + (steps + 1) / 2, dtype)
    return Cost(steps * one.flops, steps * one.weight_bytes, steps * one.kv_bytes)


def of_phase(
    model: ModelSpec, phase: str, requests: int, prompt_tokens: int, new_tokens: int, dtype: str = "float32"
) -> Cost:
    """A workload's whole prefill, or one of its decode steps at the mean context, prompt_tokens + new_tokens / 2."""
    one_of("phase", phase, ("prefill", "decode"))
    if phase == "prefill":
        return prefill(model, requests, prompt_tokens, dtype)
    return decode_step(model, requests, prompt_tokens + new_tokens / 2, dtype)


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
