"""The article's own way, written anew: the library's forward, a growing cache, logits of all positions.

Each habit of its loop is a switch, because the difference between its two CPU arms hangs on them
(notebook 02, the puzzle).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pdlib import kv_cache
from pdlib.models import Model
from pdlib.spec import whole_numbers


@dataclass(frozen=True)
class Habits:
    """What the article's loop does between the two phases; the defaults are the article's all-CPU arm."""

    all_logits: bool = True  # prefill computes the logits of every prompt position
    keep_logits: bool = True  # and the result stays alive while decode runs
    kv_views: bool = False  # keys and values start as views of the packed QKV, which stays alive too

    # The article's library version handed out views; the one installed here copies on the first write.


@dataclass
class Started:
    """State after the article's prefill: what decode needs, and what happens to stay alive."""

    tokens: Tensor  # (B, 1), the first new token
    cache: Any  # the library's growing cache
    kept: list[Tensor]  # held only because the article's variables hold it


def prefill(model: Model, tokens: Tensor, habits: Habits = Habits()) -> Started:  # noqa: B008 (frozen)
    """The article's prefill of prompts (B, n): logits (B, n, V) of which it uses the last row only."""
    cache = kv_cache.growing_cache()
    rows = {} if habits.all_logits else {"logits_to_keep": 1}
    with torch.inference_mode(), model.device.active():
        logits = model.hf(
            input_ids=tokens, use_cache=True, **{kv_cache.cache_argument(model.hf): cache}, **rows
        ).logits  # (B, n, V)
        first = logits[:, -1:].argmax(dim=-1)  # (B, 1)
        kept = [logits] if habits.keep_logits else []
        if habits.kv_views:
            kept += _as_views(cache)
    return Started(first, cache, kept)


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


def _as_views(cache: Any) -> list[Tensor]:
    """Turn a growing cache's tensors into views of a packed (B, T, 3, H, D) block; returns the blocks."""
    blocks, views = [], []
    for keys, values in kv_cache.growing_tensors(cache):
        stacked = torch.stack((keys, keys, values)).permute(1, 3, 0, 2, 4)  # (B, T, 3, H, D)
        block = stacked.contiguous()
        blocks.append(block)
        views.append((block[:, :, 1].transpose(1, 2), block[:, :, 2].transpose(1, 2)))
    kv_cache.replace_growing(cache, views)
    return blocks
