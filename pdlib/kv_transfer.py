"""Kernel 3: KV transfer. Hands a filled cache from P to D; here from device to device in one process."""

from __future__ import annotations

from pdlib.kv_cache import KVCache
from pdlib.spec import InputError


def transfer(source: KVCache, target: KVCache) -> int:
    """Copy the filled positions of `source` into `target`; returns the bytes moved (padding stays behind).

    The capacity and the device may differ. Raises InputError before any byte moves when the shapes or dtypes
    differ or the target is too short. The caller synchronises: the copy may still be on its way.
    """
    layers, _, requests, heads, _, width = source.data.shape  # (L, 2, B, KV, C, D)
    there = target.data.shape
    if (layers, requests, heads, width) != (there[0], there[2], there[3], there[5]):
        raise InputError(f"cannot hand a cache of shape {tuple(source.data.shape)} to one of {tuple(there)}")
    if source.data.dtype != target.data.dtype:
        raise InputError(f"cannot hand {source.data.dtype} to a cache of {target.data.dtype}")
    filled = max(source.lengths)
    if filled > target.capacity:
        raise InputError(f"{filled} filled positions do not fit a cache of capacity {target.capacity}")
    for layer in range(layers):
        target.data[layer, :, :, :, :filled].copy_(source.data[layer, :, :, :, :filled])  # (2, B, KV, T, D)
    target.rewind(source.lengths)
    return source.filled_bytes
