"""A causal language model on a device: local weights, or the same architecture seeded at random; and which."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdlib import kv_cache
from pdlib.cost import kv_bytes_per_token
from pdlib.devices import Device
from pdlib.gpt2 import GPT2Layers
from pdlib.kv_cache import KVCache
from pdlib.llama import LlamaLayers
from pdlib.ops import Linear
from pdlib.spec import DTYPE_BYTES, InputError, ModelSpec, one_of

# Sizes: huggingface.co/openai-community/gpt2 and HuggingFaceTB/SmolLM2-135M, config.json. "tiny" is ours, for tests.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-4-layers": ("gpt2", {"n_layer": 4}),  # the puzzle's: memory traffic a layer as in gpt2, a third of the time
    "gpt2-tiny": (
        "gpt2",
        {
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            "vocab_size": 211,
            "n_positions": 1024,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "smollm2-135m": (
        "llama",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True)
class Model:
    """A model ready to run: `layers` turns tokens (B, Q) into hidden states, `head` hidden states into logits."""

    spec: ModelSpec
    weights: str  # "pretrained" or "random"
    dtype: str
    device: Device
    hf: Any  # the library's model, which the baseline runs
    layers: Callable[[Tensor, KVCache], Tensor]  # tokens (B, Q) → (B, Q, d)
    head: Callable[[Tensor], Tensor]  # (B, d) → (B, V)

    def new_cache(self, requests: int, capacity: int) -> KVCache:
        """An empty cache for this model; InputError, with what would fit, when memory does not suffice."""
        per_request = capacity * kv_bytes_per_token(self.spec, self.dtype)
        free = self.device.free_bytes()
        if requests * per_request > free:
            raise InputError(
                f"a cache of {requests} × {capacity} positions takes {requests * per_request / 1e9:.2f} GB, "
                f"{self.device.name} has {free / 1e9:.2f} GB free: at most {int(free // per_request)} requests fit"
            )
        return KVCache(self.spec, requests, capacity, self.device.torch, getattr(torch, self.dtype))

    def prompt(self, requests: int, prompt_tokens: int, seed: int = 0) -> Tensor:
        """Random token ids (requests, prompt_tokens): the time does not depend on which."""
        generator = torch.Generator().manual_seed(seed)
        shape = (requests, prompt_tokens)
        return torch.randint(self.spec.vocab, shape, generator=generator).to(self.device.torch)

    def on(self, device: Device) -> Model:
        """The same weights for another device; shared, not copied, between CPU devices (`cpu`, `cpu@1`)."""
        if device.torch_name == self.device.torch_name:
            return Model(self.spec, self.weights, self.dtype, device, self.hf, self.layers, self.head)
        return from_library(copy.deepcopy(self.hf), self.spec.name, self.weights, device, self.dtype)


def load(name: str, device: Device, dtype: str = "float32", seed: int = 0) -> Model:
    """Load `name` without network: a local folder, PDLIB_MODELS/name or the library's cache; else random weights.

    Random weights keep the architecture of CONFIGS[name] and are seeded. InputError for a name that is neither
    local nor in CONFIGS.
    """
    one_of("dtype", dtype, DTYPE_BYTES)
    folder, config = _config(name)
    if folder is None:
        return from_library(random_model(config, seed), name, "random", device, dtype)
    import transformers

    transformers.utils.logging.disable_progress_bar()
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    return from_library(hf, name, "pretrained", device, dtype)


def sizes(name: str) -> ModelSpec:
    """The sizes of the model that `load` would take, without its weights; the same InputError."""
    return ModelSpec.from_hf(name, _config(name)[1])


def _config(name: str) -> tuple[str | None, Any]:
    """The local folder of `name`, None where there is none, and the library's config."""
    # Before transformers is imported: an unreachable hub costs tens of seconds of retries a load.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    folder = _local_folder(name)
    if folder is not None:
        return folder, transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    if name not in CONFIGS:
        raise InputError(
            f"model {name!r} is not here; give a folder with config.json and weights, put it under PDLIB_MODELS, "
            f"or take one that can be made with random weights: {', '.join(CONFIGS)}"
        )
    kind, changes = CONFIGS[name]
    return None, transformers.AutoConfig.for_model(kind, **changes)


def random_model(config: Any, seed: int) -> Any:
    """A library model of this config with seeded random weights: matrices N(0, 0.02), norms 1, biases 0."""
    import transformers
    from transformers.initialization import no_init_weights

    with no_init_weights():  # the library would draw every weight twice
        hf = transformers.AutoModelForCausalLM.from_config(config)
    hf.tie_weights()  # which the library leaves out together with the drawing
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02, generator=generator)
            else:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
    return hf


def from_library(hf: Any, name: str, weights: str, device: Device, dtype: str) -> Model:
    """Wrap a transformers causal LM: our layers for GPT-2 and the Llama shape, the library's for the rest."""
    hf = hf.to(device.torch, getattr(torch, dtype)).eval()
    spec = ModelSpec.from_hf(name, hf.config)
    _check_parameters(spec, hf)
    window = getattr(hf.config, "sliding_window", None)
    if window and window < spec.positions and getattr(hf.config, "use_sliding_window", True):
        raise InputError(f"{name} attends through a window of {window} tokens, which the cache here does not model")
    ours: Any = {"gpt2": GPT2Layers, "llama": LlamaLayers}.get(hf.config.model_type)
    head = Linear(hf.get_output_embeddings().weight, getattr(hf.get_output_embeddings(), "bias", None))
    layers: Callable[[Tensor, KVCache], Tensor] = ours(hf) if ours else _LibraryLayers(hf)
    model = Model(spec, weights, dtype, device, hf, layers, head)
    _check_against_library(model)
    return model


class _LibraryLayers:
    """Any other architecture: the library's forward over our cache."""

    def __init__(self, hf: Any) -> None:
        self.body, self.argument = hf.base_model, kv_cache.cache_argument(hf.base_model)

    def __call__(self, tokens: Tensor, cache: KVCache) -> Tensor:
        new = tokens.shape[1]
        mask, _ = cache.mask(new)
        if mask is None:  # the library builds its own mask from a length; ours is explicit and never ambiguous
            keys = torch.arange(cache.lengths[0] + new, device=tokens.device)
            mask = (keys <= cache.positions(new)[:, :, None])[:, None]
        out = self.body(
            input_ids=tokens,
            attention_mask=mask.expand(tokens.shape[0], -1, -1, -1),
            position_ids=cache.positions(new).expand(tokens.shape[0], -1),
            use_cache=True,
            **{self.argument: kv_cache.as_library(cache)},
        )
        cache.advance(new)
        return out.last_hidden_state


def _check_parameters(spec: ModelSpec, hf: Any) -> None:
    """Refuse a model whose layers have other matrices than its sizes say: every FLOP and byte would be off."""
    tables = {id(module.weight) for module in hf.base_model.modules() if isinstance(module, torch.nn.Embedding)}
    there = sum(w.numel() for w in hf.base_model.parameters() if w.dim() > 1 and id(w) not in tables)
    counted = int(spec.touched_parameters(spec.experts))
    if there != counted:
        raise InputError(
            f"{spec.name}: {counted} weights of matrix products by its config, {there} in its layers; this "
            "architecture has matrices that pdlib does not count"
        )


def _check_against_library(model: Model) -> None:
    """Refuse a model whose logits our layers and head do not reproduce, on three tokens, before any measurement."""
    tokens = model.prompt(1, 3)
    cache = KVCache(model.spec, 1, 3, model.device.torch, getattr(torch, model.dtype))
    with torch.inference_mode():
        ours = model.head(model.layers(tokens, cache)[:, -1]).float()
        library = model.hf(input_ids=tokens, use_cache=False).logits[:, -1].float()
    error = ((ours - library).abs().max() / library.abs().max().clamp(min=1e-6)).item()
    if not error <= (1e-3 if model.dtype == "float32" else 5e-2):
        raise InputError(
            f"{model.spec.name}: logits differ from the library's by {error:.1%}; this architecture changes its "
            "logits after the output head or its attention in a way that pdlib does not know"
        )


def _local_folder(name: str) -> str | None:
    """A folder holding `name`: a path, PDLIB_MODELS/name, or a snapshot in the library's cache."""
    root = os.environ.get("PDLIB_MODELS")
    for folder in (Path(name), *([Path(root) / name] if root else [])):
        if (folder / "config.json").is_file():
            return str(folder)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for repository in (name, f"openai-community/{name}"):
        try:
            found = [try_to_load_from_cache(repository, file) for file in ("config.json", "model.safetensors")]
        except HFValidationError:  # no repository can have that name
            continue
        if all(isinstance(path, str) for path in found):
            return str(Path(str(found[0])).parent)
    return None
