"""The nouns of the project: models, devices, workloads, placements. Frozen, validated, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# What the library's modules of these types have; a config does not say, and an activation's name tells nothing.
GATED = {
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text"),
    *("cohere", "cohere2", "granite", "olmo", "olmo2", "olmoe", "phi3", "smollm3", "deepseek_v2", "deepseek_v3"),
}
UNGATED = {"gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "opt", "bloom", "falcon", "phi", "starcoder2"}


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
    tied_head: bool = True  # the output head is the token embedding
    # Mixture of experts: the first dense_layers have an MLP of width `mlp`, the others experts of width expert_mlp.
    experts: int = 0  # a layer; 0 = every layer dense
    experts_per_token: int = 0
    shared_experts: int = 0  # that every token passes, beside its own
    expert_mlp: int = 0
    dense_layers: int = 0
    # Latent attention (DeepSeek): keys and values kept as one vector of kv_rank + rope_dim; head_dim = values' width.
    kv_rank: int = 0  # 0 = keys and values kept as they are
    q_rank: int = 0
    rope_dim: int = 0

    def __post_init__(self) -> None:
        sizes = ("layers", "heads", "kv_heads", "head_dim", "hidden", "mlp", "vocab", "positions")
        whole_numbers(**{k: getattr(self, k) for k in sizes})
        if self.experts:
            whole_numbers(experts_per_token=self.experts_per_token, expert_mlp=self.expert_mlp)
            if self.experts_per_token > self.experts or not 0 <= self.dense_layers < self.layers:
                raise InputError(
                    f"{self.name}: {self.experts_per_token} experts a token of {self.experts}, {self.dense_layers} "
                    f"dense layers of {self.layers}; give at most all experts and at least one layer with experts"
                )
        if self.kv_rank:
            whole_numbers(kv_rank=self.kv_rank, q_rank=self.q_rank, rope_dim=self.rope_dim)
        if self.heads % self.kv_heads:
            raise InputError(
                f"{self.name}: {self.heads} heads cannot share {self.kv_heads} KV heads evenly; "
                "heads must be a multiple of kv_heads"
            )

    @property
    def attention_parameters(self) -> int:
        """Weights of one layer's attention: Q, K, V and output projections."""
        if not self.kv_rank:
            return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        # DeepSeek-AI 2024, "DeepSeek-V2", equations 9-19: down to a rank, up to the heads.
        queries = self.q_rank * (self.hidden + self.heads * (self.head_dim + self.rope_dim))
        latent = self.hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * self.heads * 2 * self.head_dim
        return queries + latent + self.heads * self.head_dim * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Weights of one expert."""
        return (3 if self.gated_mlp else 2) * self.hidden * self.expert_mlp

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    def _layers_parameters(self, experts: float) -> float:
        """Weights of the layers' matrix products with `experts` routed experts a layer."""
        dense = (3 if self.gated_mlp else 2) * self.hidden * self.mlp
        routed = self.hidden * self.experts + (experts + self.shared_experts) * self.expert_parameters
        return (
            self.layers * self.attention_parameters
            + (self.layers - self.expert_layers) * dense
            + self.expert_layers * routed
        )

    @property
    def matmul_parameters(self) -> int:
        """Weights of the layers' matrix products that a token meets: 2 FLOPs each. Embeddings excluded."""
        return int(self._layers_parameters(self.experts_per_token))

    def touched_parameters(self, experts: float) -> float:
        """Weights of the layers' matrix products that a pass reads when `experts` routed experts a layer are hit."""
        return self._layers_parameters(experts)

    @property
    def parameters(self) -> int:
        """All matrices: layers with every expert, embeddings, output head. Norms and biases are left out."""
        tables = self.vocab + (self.positions if self.learned_positions else 0)
        head = 0 if self.tied_head else self.head_parameters
        return int(self._layers_parameters(self.experts)) + self.hidden * tables + head

    @property
    def head_parameters(self) -> int:
        """Weights of the output head (hidden × vocab), read once for every logits row batch."""
        return self.hidden * self.vocab

    @classmethod
    def from_hf(cls, name: str, config: Any) -> ModelSpec:
        """Read the sizes from a transformers config of a decoder-only model.

        InputError for a model type of which it is not known whether its MLP is gated, or without a longest sequence.
        """
        one_of("model type", config.model_type, sorted(GATED | UNGATED))

        def first(*names: str, default: Any = 0) -> Any:
            return next((v for v in (getattr(config, n, None) for n in names) if v), default)

        hidden, heads, latent = config.hidden_size, config.num_attention_heads, first("kv_lora_rank")
        experts = first("n_routed_experts", "num_local_experts", "num_experts")
        positions = first("max_position_embeddings", "seq_length")
        if not positions:
            raise InputError(
                f"the config of {name} does not say its longest sequence; give it max_position_embeddings, in tokens"
            )
        inner = first("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
        return cls(
            name=name,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=first("num_key_value_heads", default=heads),
            # in latent attention the library's head_dim is the rotated part alone
            head_dim=config.v_head_dim if latent else first("head_dim", default=hidden // heads),
            hidden=hidden,
            mlp=inner,
            vocab=config.vocab_size,
            positions=positions,
            gated_mlp=config.model_type in GATED,
            learned_positions=config.model_type in ("gpt2", "opt"),
            tied_head=bool(getattr(config, "tie_word_embeddings", True)),
            experts=experts,
            experts_per_token=config.num_experts_per_tok if experts else 0,
            shared_experts=first("n_shared_experts") if experts else 0,
            expert_mlp=first("moe_intermediate_size", default=inner) if experts else 0,
            dense_layers=first("first_k_dense_replace") if experts else 0,
            kv_rank=latent,
            q_rank=config.q_lora_rank if latent else 0,
            rope_dim=config.qk_rope_head_dim if latent else 0,
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
    memory_bytes: float = 0.0  # 0 = not known, here and below
    link_bytes_per_s: float = 0.0  # to a neighbour, one direction
    power_w: float = 0.0

    def __post_init__(self) -> None:
        for field in ("flops_per_s", "read_bytes_per_s", "copy_bytes_per_s"):
            if not getattr(self, field) > 0:
                raise InputError(f"{self.name}: {field} = {getattr(self, field)!r} must be above 0")
        for field in ("memory_bytes", "link_bytes_per_s", "power_w"):
            if not getattr(self, field) >= 0:
                raise InputError(
                    f"{self.name}: {field} = {getattr(self, field)!r} must be at least 0 (0 = not known)"
                )


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
