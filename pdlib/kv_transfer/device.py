"""Road 1: from device to device in one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdlib.kv_cache import KVCache
from pdlib.kv_transfer.manifest import TransferError, check_slots
from pdlib.kv_transfer.parts import dtype_of, runs, settle
from pdlib.spec import DTYPE_BYTES, one_of


def transfer(
    source: KVCache,
    target: KVCache,
    *,
    sources: Sequence[int] | None = None,
    slots: Sequence[int] | None = None,
    cast: str = "",
) -> int:
    """Copy the filled positions of `source` into `target`; returns the bytes moved (padding stays behind).

    `sources`: which requests of `source` (default: all); `slots`: where in `target` each of them lands (default:
    0, 1, …; without either, both caches must hold as many requests). Capacity and device may differ; `cast` rounds
    to another dtype on the way. Raises TransferError before any byte moves when they do not fit. The caller
    synchronises: the copy may still be on its way. From or to a `pinned` cache it does not wait at all.
    """
    layers, _, requests, heads, _, width = source.data.shape  # (L, 2, B, KV, C, D)
    there = target.data.shape
    whole = sources is None and slots is None
    if (layers, heads, width) != (there[0], there[3], there[5]) or (whole and requests != there[2]):
        raise TransferError(f"cannot hand a cache of shape {tuple(source.data.shape)} to one of {tuple(there)}")
    if cast:
        one_of("cast", cast, DTYPE_BYTES)
    wire = dtype_of(cast) if cast else source.data.dtype
    if target.data.dtype not in (source.data.dtype, wire):
        raise TransferError(f"cannot hand {source.data.dtype} to a cache of {target.data.dtype}")
    from_slots = check_slots(source, sources, requests if sources is None else len(sources))
    to_slots = check_slots(target, slots, len(from_slots))
    lengths = [source.lengths[s] for s in from_slots]
    if max(lengths) > target.capacity:
        raise TransferError(
            f"{max(lengths)} filled positions do not fit a cache of capacity {target.capacity}; "
            f"make it with capacity ≥ {max(lengths)}"
        )
    side = _side_stream(source, target)
    with torch.cuda.stream(side):  # None changes nothing
        for layer in range(layers):
            _copy_layer(source.data[layer], target.data[layer], from_slots, to_slots, lengths, wire, side is not None)
    if side is not None:
        torch.cuda.current_stream(side.device).wait_stream(side)
    settle(target, to_slots, lengths)
    return 2 * layers * heads * width * wire.itemsize * sum(lengths)


def pinned(cache: KVCache) -> KVCache:
    """A copy of a CPU cache in page-locked memory, which CUDA and XPU copy from and to without waiting."""
    return KVCache.over(cache.data.pin_memory(), cache.lengths)


def _copy_layer(
    source: torch.Tensor,
    target: torch.Tensor,
    from_slots: list[int],
    to_slots: list[int],
    lengths: list[int],
    wire: torch.dtype,
    by_head: bool,
) -> None:
    """One layer (2, B, KV, C, D): a single copy when slots are in order and equally long, else one a request.

    `by_head`: one a head, the only pieces that are contiguous on both sides. A device copies those without waiting.
    """
    plain = from_slots == to_slots == list(range(source.shape[1])) and len(set(lengths)) == 1
    if plain and target.shape[1] == source.shape[1]:
        pairs = [(source[:, :, :, : lengths[0]], target[:, :, :, : lengths[0]])]
    else:
        pairs = [
            (source[:, s, :, :n], target[:, t, :, :n]) for s, t, n in zip(from_slots, to_slots, lengths, strict=True)
        ]
    for there, here in pairs:
        if by_head:
            for one, other in zip(runs(there), runs(here), strict=True):
                other.copy_(one.to(wire), non_blocking=True)
        else:
            here.copy_(there.to(wire))


def _side_stream(*caches: KVCache) -> torch.cuda.Stream | None:
    """A stream beside the computing one, behind what is queued there; None unless page-locked memory meets CUDA."""
    cuda = [c.data.device for c in caches if c.data.is_cuda]
    if len(cuda) != 1 or not all(c.data.is_cuda or c.data.is_pinned() for c in caches):
        return None
    side = torch.cuda.Stream(cuda[0])
    side.wait_stream(torch.cuda.current_stream(cuda[0]))
    return side
