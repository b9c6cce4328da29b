"""The nouns of the project: models, devices, workloads, placements. Frozen, validated, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class InputError(ValueError):
    """Bad input, refused before any work: says what was given, what is allowed and what to do."""


def one_of(what: str, given: object, allowed: Any) -> None:
    """Raise InputError unless `given` is one of `allowed`."""
    if given not in allowed:
        raise InputError(f"unknown {what} {given!r}; choose one of: {', '.join(map(str, allowed))}")


def whole_numbers(**counts: int) -> None:
    """Raise InputError unless every keyword is an int ≥ 1 (a bool is not a count)."""
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} = {value!r}: give a whole number of at least 1")


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a decoder-only transformer; every count is per model, every size in elements."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    mlp: int  # width of the MLP's inner layer
    vocab: int
    positions: int  # longest sequence the model was made for, in tokens
    gated_mlp: bool = False  # three MLP matrices (SwiGLU) instead of two
    learned_positions: bool = False  # a table of position embeddings (GPT-2)

    def __post_init__(self) -> None:
        sizes = ("layers", "heads", "kv_heads", "head_dim", "hidden", "mlp", "vocab", "positions")
        whole_numbers(**{k: getattr(self, k) for k in sizes})
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.name}: {self.heads} heads cannot share {self.kv_heads} KV heads evenly; "
                "heads must be a multiple of kv_heads"
            )

    @property
    def matmul_parameters(self) -> int:
        """Weights of the layers' matrix products: each costs 2 FLOPs a token. Embeddings excluded."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        mlp = (3 if self.gated_mlp else 2) * self.hidden * self.mlp
        return self.layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """Weights of the output head (hidden × vocab), read once for every logits row batch."""
        return self.hidden * self.vocab

    @classmethod
    def from_hf(cls, name: str, config: Any) -> ModelSpec:
        """Read the sizes from a transformers config of a decoder-only model."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
        return cls(
            name=name,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            hidden=hidden,
            mlp=inner,
            vocab=config.vocab_size,
            positions=config.max_position_embeddings,
            gated_mlp=getattr(config, "hidden_act", "") == "silu",
            learned_positions=config.model_type == "gpt2",
        )


# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners": 12 layers, width 768.
GPT2 = ModelSpec("gpt2", 12, 12, 12, 64, 768, 3072, 50257, 1024, learned_positions=True)


@dataclass(frozen=True)
class DeviceSpec:
    """What a device can do at best. Measured (devices.measure_peaks) or quoted with its source."""

    name: str
    flops_per_s: float  # matrix product, at the dtype in use
    read_bytes_per_s: float
    copy_bytes_per_s: float  # bytes read + bytes written, per second
    origin: str  # "measured", or where the numbers were published

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "read_bytes_per_s", "copy_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise InputError(f"{self.name}: {field} = {getattr(self, field)!r} must be above 0")


@dataclass(frozen=True)
class Workload:
    """`requests` prompts of `prompt_tokens` each, answered with `new_tokens` each.

    The first new token comes out of prefill; decode makes the other new_tokens − 1.
    """

    requests: int
    prompt_tokens: int
    new_tokens: int

    def __post_init__(self) -> None:
        whole_numbers(requests=self.requests, prompt_tokens=self.prompt_tokens, new_tokens=self.new_tokens)

    @property
    def decode_steps(self) -> int:
        return self.new_tokens - 1

    @property
    def cache_tokens(self) -> int:
        """Positions a cache must hold: the last new token is never fed back."""
        return self.prompt_tokens + self.decode_steps

    def check_fits(self, model: ModelSpec) -> None:
        """Raise InputError when prompt + new tokens pass the model's positions."""
        total = self.prompt_tokens + self.new_tokens
        if total > model.positions:
            raise InputError(
                f"{self.prompt_tokens} prompt tokens + {self.new_tokens} new tokens = {total}, but "
                f"{model.name} has {model.positions} positions; shorten one by {total - model.positions}"
            )


# Article 000: long and short are 512 and 64 tokens, on the input and the output side.
SCENARIOS = {
    "LILO": (512, 512),
    "LISO": (512, 64),
    "SILO": (64, 512),
    "SISO": (64, 64),
}


@dataclass(frozen=True)
class Placement:
    """Which device runs which phase, e.g. Placement("P-GPU/D-CPU", "cuda", "cpu")."""

    name: str
    prefill_device: str
    decode_device: str

    @property
    def separated(self) -> bool:
        return self.prefill_device != self.decode_device
