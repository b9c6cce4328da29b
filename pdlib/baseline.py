"""The article's own way, written anew: the library's forward, a growing cache, logits of all positions.

The habits of its loop are switches, because the difference between its two CPU arms may hang on them
(notebook 02, the puzzle).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdlib import cost, kv_cache
from pdlib.models import Model
from pdlib.spec import DTYPE_BYTES, ModelSpec, whole_numbers


@dataclass
class Started:
    """State after the article's prefill: what decode needs, and what happens to stay alive."""

    tokens: Tensor  # (B, 1), the first new token
    cache: Any  # the library's growing cache
    kept: list[Tensor]  # held only because the article's variables hold it


def prefill(model: Model, tokens: Tensor, all_logits: bool = True) -> Started:
    """The article's prefill of prompts (B, n): logits (B, n, V), kept, of which it uses the last row only.

    With `all_logits` false the library is asked for the last row alone.
    """
    cache = kv_cache.growing_cache()
    rows = {} if all_logits else {"logits_to_keep": 1}
    argument = {kv_cache.cache_argument(model.hf): cache}
    with torch.inference_mode(), model.device.active():
        logits = model.hf(input_ids=tokens, use_cache=True, **argument, **rows).logits  # (B, n or 1, V)
        return Started(logits[:, -1:].argmax(dim=-1), cache, [logits])


def decode(model: Model, started: Started, steps: int) -> Tensor:
    """The article's decode loop: `steps` forwards, each a concatenation longer; returns tokens (B, steps)."""
    whole_numbers(steps=steps)
    tokens, made = started.tokens, []
    argument = {kv_cache.cache_argument(model.hf): started.cache}
    with torch.inference_mode(), model.device.active():
        for _ in range(steps):
            logits = model.hf(input_ids=tokens, use_cache=True, **argument).logits  # (B, 1, V)
            tokens = logits.argmax(dim=-1)  # (B, 1)
            made.append(tokens)
    return torch.cat(made, dim=1)


def prefilled_bytes(spec: ModelSpec, requests: int, prompt_tokens: int, dtype: str) -> int:
    """Most bytes alive in a decode step behind `as_if_prefilled`: its habits are kept QKV, keys and values, logits.

    Views of the packed QKV cost their block (½ more than the cache) and, from the first step on, their copies.
    """
    copies = cost.kv_bytes_per_token(spec, dtype)
    return requests * prompt_tokens * (copies * 3 // 2 + copies + spec.vocab * DTYPE_BYTES[dtype])


def as_if_prefilled(model: Model, requests: int, prompt_tokens: int, keep_logits: bool, kv_views: bool) -> Started:
    """The memory that `prefill` leaves behind, without its arithmetic: same sizes, layout and lifetimes.

    `keep_logits`: the logits of all positions stay alive, as the article's variables keep them. `kv_views`: keys
    and values are views of the packed QKV, which stays alive too, as in the library version of the article;
    later versions copy them.
    """
    spec, kind = model.spec, getattr(torch, model.dtype)
    shape = (requests, spec.kv_heads, prompt_tokens, spec.head_dim)  # (B, KV, T, D)
    cache, kept, tensors = kv_cache.growing_cache(), [], []
    for layer in range(spec.layers):
        block = torch.ones(3 if kv_views else 2, *shape, dtype=kind)
        if kv_views:
            block = block.permute(1, 3, 0, 2, 4).contiguous()  # (B, T, 3, KV, D), as QKV comes out
            kept.append(block)
            block = block.permute(2, 0, 3, 1, 4)  # back to (3, B, KV, T, D): a view
        keys, values = (t if kv_views else t.clone() for t in block[-2:])
        cache.update(keys, values, layer)
        tensors.append((keys, values))
    if kv_views:
        kv_cache.replace_growing(cache, tensors)  # `update` has made copies
    if keep_logits:
        kept.append(torch.ones(requests, prompt_tokens, spec.vocab, dtype=kind))  # (B, n, V)
    first = torch.zeros(requests, 1, dtype=torch.long)
    return Started(first, cache, kept)
