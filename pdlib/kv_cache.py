"""The preallocated KV cache, and the only place that knows the library's cache API.

Layout (B, KV, T, D) a layer, all layers in one block: a decode step reads each head's keys as one run of memory,
and a transfer moves one run a request. Nothing grows and nothing is copied; a repeat rewinds the lengths.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pdlib.spec import InputError, ModelSpec, whole_numbers


class KVCache:
    """Keys and values of `requests` sequences, up to `capacity` positions each.

    `lengths[b]` positions of request b are filled; they live on the host, so that nothing waits for a device.
    """

    def __init__(
        self, model: ModelSpec, requests: int, capacity: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        whole_numbers(requests=requests, capacity=capacity)
        if capacity > model.positions:
            raise InputError(
                f"a cache of {capacity} positions for {model.name}, which has {model.positions}: "
                f"ask for at most {model.positions}"
            )
        # Zeros, not garbage: a masked position still meets 0 · value, and 0 · NaN is NaN.
        shape = (model.layers, 2, requests, model.kv_heads, capacity, model.head_dim)
        self._take(torch.zeros(shape, device=device, dtype=dtype))

    def _take(self, data: Tensor) -> None:
        self.data = data  # (L, 2, B, KV, C, D)
        self.capacity = data.shape[4]
        self.lengths = [0] * data.shape[2]
        self._rows = torch.arange(data.shape[2], device=data.device)[:, None]  # (B, 1)
        # Called with the layer's number as soon as `append` has written to it: lets a layer leave while the next
        # one is computed.
        self.on_layer: Callable[[int], None] | None = None

    @classmethod
    def over(cls, data: Tensor, lengths: Sequence[int]) -> KVCache:
        """A cache in memory that is there already, data (L, 2, B, KV, C, D) with `lengths` filled; no copy.

        What lies behind the lengths has to be finite: a masked position still meets 0 · value.
        """
        if data.dim() != 6 or data.shape[1] != 2:
            raise InputError(f"memory of shape {tuple(data.shape)} is no cache; give (L, 2, B, KV, C, D)")
        cache = cls.__new__(cls)
        cache._take(data)
        cache.rewind(lengths)
        return cache

    @property
    def requests(self) -> int:
        return len(self.lengths)

    @property
    def uniform(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    @property
    def bytes(self) -> int:
        """Bytes allocated."""
        return self.data.nbytes

    @property
    def filled_bytes(self) -> int:
        """Bytes of the filled positions: κ · Σ lengths."""
        per_position = self.data[:, :, 0, :, 0].numel() * self.data.element_size()
        return per_position * sum(self.lengths)

    def rewind(self, lengths: int | Sequence[int] = 0) -> None:
        """Forget everything after `lengths` (one for all, or one a request) so that a repeat starts equal."""
        wanted = [lengths] * self.requests if isinstance(lengths, int) else list(lengths)
        if len(wanted) != self.requests or any(not 0 <= n <= self.capacity for n in wanted):
            raise InputError(f"lengths {wanted} for {self.requests} requests of at most {self.capacity} positions")
        self.lengths = wanted

    def check_room(self, new: int) -> None:
        """Raise InputError, before any work, unless `new` more positions fit every request."""
        if max(self.lengths) + new > self.capacity:
            raise InputError(
                f"cache full: {max(self.lengths)} positions filled + {new} new > capacity {self.capacity}; "
                f"make it with capacity ≥ {max(self.lengths) + new}"
            )

    def positions(self, new: int) -> Tensor:
        """Positions of the next `new` tokens, (B, new) or (1, new) when all requests are equally long."""
        lengths = self.lengths[:1] if self.uniform else self.lengths
        start = torch.tensor(lengths, device=self.data.device)[:, None]
        return start + torch.arange(new, device=self.data.device)  # (B or 1, new)

    def mask(self, new: int) -> tuple[Tensor | None, bool]:
        """What the next `new` queries may see: (bool mask (B or 1, 1, new, T) or None, causal).

        A key is visible when its position is at most the query's: that one rule covers chunks, decode, ragged
        lengths and the padding on the right, and does not lean on the library's alignment of `is_causal`.
        """
        if self.uniform and (new == 1 or self.lengths[0] == 0):
            return None, new > 1
        keys = torch.arange(max(self.lengths) + new, device=self.data.device)  # (T,)
        return (keys <= self.positions(new)[:, :, None])[:, None], False  # (B or 1, 1, new, T)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write new keys and values (B, KV, Q, D) behind each request's length; return all up to the longest.

        Lengths do not change until `advance`: every layer of one pass writes to the same positions. InputError for
        another number of requests or KV heads: a single one would be written to all.
        """
        if k.shape[:2] != self.data.shape[2:4]:
            raise InputError(
                f"keys of {k.shape[0]} requests and {k.shape[1]} KV heads for a cache of "
                f"{self.requests} and {self.data.shape[3]}"
            )
        new, longest = k.shape[2], max(self.lengths)
        keys, values = self.data[layer, 0], self.data[layer, 1]  # (B, KV, C, D)
        if self.uniform:
            keys[:, :, longest : longest + new] = k
            values[:, :, longest : longest + new] = v
        else:
            positions = self.positions(new)  # (B, Q); the indexed result is (B, Q, KV, D)
            keys[self._rows, :, positions] = k.transpose(1, 2)
            values[self._rows, :, positions] = v.transpose(1, 2)
        if self.on_layer is not None:
            self.on_layer(layer)
        return keys[:, :, : longest + new], values[:, :, : longest + new]  # (B, KV, T, D)

    def advance(self, new: int) -> None:
        self.lengths = [n + new for n in self.lengths]

    def equals(self, other: KVCache) -> bool:
        """Same lengths and bit for bit the same filled positions; capacity and device may differ."""
        if self.lengths != other.lengths:
            return False
        return all(
            torch.equal(self.data[:, :, b, :, :n].cpu(), other.data[:, :, b, :, :n].cpu())
            for b, n in enumerate(self.lengths)
        )


def cache_argument(model: Any) -> str:
    """The name by which a library model's forward takes a cache: `past_key_values`, in later releases `cache`."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def growing_cache() -> Any:
    """The library's own cache, which grows by concatenation: the baseline's."""
    from transformers import DynamicCache

    return DynamicCache()


def growing_tensors(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (B, KV, T, D) of every layer of a growing cache."""
    return [(layer.keys, layer.values) for layer in cache.layers]


def replace_growing(cache: Any, tensors: list[tuple[Tensor, Tensor]]) -> None:
    """Put other keys and values in a growing cache, layer by layer."""
    for layer, (keys, values) in zip(cache.layers, tensors, strict=True):
        layer.keys, layer.values = keys, values


def lengthen_growing(cache: Any, context: int) -> None:
    """Lengthen a growing cache to `context` positions with zeros, as if decode had come that far."""
    room = context - cache.get_seq_length()
    if room > 0:
        pad = [[torch.nn.functional.pad(t, (0, 0, 0, room)) for t in pair] for pair in growing_tensors(cache)]
        replace_growing(cache, [(keys, values) for keys, values in pad])


def static_cache(config: Any, capacity: int) -> Any:
    """The library's preallocated cache, for the benchmarks."""
    from transformers import StaticCache

    return StaticCache(config=config, max_cache_len=capacity)


def fill_library(target: Any, source: KVCache, context: int) -> None:
    """Copy `context` positions of our cache into an empty cache of the library."""
    for layer in range(source.data.shape[0]):
        keys, values = source.data[layer, :, :, :, :context].clone()  # 2 × (B, KV, T, D)
        target.update(keys, values, layer)


def as_library(cache: KVCache) -> Any:
    """`cache` behind the library's cache API, for architectures without layers of our own."""
    from transformers.cache_utils import Cache, CacheLayerMixin

    class Layer(CacheLayerMixin):
        is_sliding = False

        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index
            self.is_initialized = True

        def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
            """Nothing to do: the memory is there."""

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return cache.append(self.index, key_states, value_states)

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return max(cache.lengths) + query_length, 0

        def get_seq_length(self) -> int:
            return max(cache.lengths)

        def get_max_length(self) -> int:
            return cache.capacity

    return Cache(layers=[Layer(i) for i in range(cache.data.shape[0])])
