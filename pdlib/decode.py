"""Kernel 2: decode. One token a request a step, greedy, each at its own position."""

from __future__ import annotations

import torch
from torch import Tensor

from pdlib.kv_cache import KVCache
from pdlib.models import Model
from pdlib.spec import InputError, whole_numbers


def decode_step(model: Model, tokens: Tensor, cache: KVCache) -> Tensor:
    """Feed one token a request (B,) behind the cache; returns the next logits (B, V)."""
    if tokens.shape != (cache.requests,):
        raise InputError(f"{tuple(tokens.shape)} tokens for {cache.requests} requests: give one token each")
    cache.check_room(1)
    with torch.inference_mode(), model.device.active():
        hidden = model.layers(tokens[:, None], cache)  # (B, 1, d)
        return model.head(hidden[:, 0])  # (B, V)


def decode(model: Model, tokens: Tensor, cache: KVCache, steps: int) -> Tensor:
    """`steps` greedy steps from one token a request (B,); returns the new tokens (B, steps).

    The count alone ends it, never an end-of-text token. Raises InputError before any work when `steps` more
    positions do not fit the cache.
    """
    whole_numbers(steps=steps)
    cache.check_room(steps)
    made = torch.empty(cache.requests, steps, dtype=torch.long, device=tokens.device)  # (B, steps)
    for step in range(steps):
        tokens = decode_step(model, tokens, cache).argmax(dim=-1)  # (B,)
        made[:, step] = tokens
    return made
