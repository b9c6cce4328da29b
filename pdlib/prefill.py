"""Kernel 1: prefill. Reads whole prompts, fills the cache, returns the logits that choose the first token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdlib.kv_cache import KVCache
from pdlib.models import Model
from pdlib.spec import InputError, whole_numbers


def prefill(
    model: Model,
    tokens: Tensor,
    cache: KVCache,
    lengths: Sequence[int] | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Run prompts (B, n) through the model behind an equally long past; returns logits (B, V) of the last tokens.

    `lengths`: true lengths of prompts padded on the right to n; the padding is computed, never seen, and not
    counted in the cache. `chunk`: tokens a pass (default: all). Raises InputError before any work when the
    cache has no room, a length is out of 1 … n, or the requests' pasts differ in length.
    """
    requests, padded = tokens.shape
    true = [padded] * requests if lengths is None else list(lengths)
    chunk = padded if chunk is None else chunk
    whole_numbers(chunk=chunk)
    if len(true) != requests or any(not 1 <= n <= padded for n in true):
        raise InputError(f"lengths {true} for {requests} prompts padded to {padded}: give one in 1 … {padded} each")
    if not cache.uniform or cache.requests != requests:
        raise InputError(f"prefill of {requests} prompts needs a cache of {requests} equally long requests")
    cache.check_room(padded)

    past, last = cache.lengths[0], torch.tensor(true, device=tokens.device) - 1  # (B,)
    ends = torch.empty(requests, model.spec.hidden, device=tokens.device, dtype=cache.data.dtype)  # (B, d)
    with torch.inference_mode(), model.device.active():
        for start in range(0, padded, chunk):
            hidden = model.layers(tokens[:, start : start + chunk], cache)  # (B, ≤ chunk, d)
            here = ((last >= start) & (last < start + chunk)).nonzero()[:, 0]  # prompts that end in this chunk
            ends[here] = hidden[here, last[here] - start]
        cache.rewind([past + n for n in true])
        return model.head(ends)  # (B, V): logits of the last real token only
