"""Parts of a cache in the order of the wire: a layer's keys, then its values, request by request, without padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from pdlib.kv_cache import KVCache
from pdlib.kv_transfer.manifest import Manifest, TransferError, raw

# A piece stays in a core's caches between packing, hashing and sending (measured: 0.8 – 3 MB are equally good).
PIECE_BYTES = 1_600_000


@dataclass(frozen=True)
class Piece:
    """What one message carries: keys (side 0), values (1) or both of a few requests of one layer."""

    layer: int
    sides: tuple[int, ...]
    rows: tuple[int, ...]  # requests of the manifest
    start: int
    counts: tuple[int, ...]  # positions of each of the rows


def pieces(manifest: Manifest, layer: int, start: int, stop: int, most: int = PIECE_BYTES) -> Iterator[Piece]:
    """A part cut into pieces of about `most` bytes; at least one request, at most one layer each."""
    counts = manifest.counts(start, stop)
    rows = [row for row, count in enumerate(counts) if count]
    position = manifest.bytes // max(1, 2 * manifest.model.layers * sum(manifest.lengths))  # bytes of one, one side
    if not rows:
        return
    if 2 * position * sum(counts) <= most:
        yield Piece(layer, (0, 1), tuple(rows), start, tuple(counts[r] for r in rows))
        return
    for side in (0, 1):
        taken: list[int] = []
        for row in rows:
            if taken and position * sum(counts[r] for r in [*taken, row]) > most:
                yield Piece(layer, (side,), tuple(taken), start, tuple(counts[r] for r in taken))
                taken = []
            taken.append(row)
        yield Piece(layer, (side,), tuple(taken), start, tuple(counts[r] for r in taken))


def views(cache: KVCache, piece: Piece, slots: Sequence[int]) -> list[Tensor]:
    """The cache's own memory of a piece, in the order of the wire, as few views (S, R, KV, n, D) as that takes."""
    first, at = slots[piece.rows[0]], [slots[row] for row in piece.rows]
    first_side, last_side = piece.sides[0], piece.sides[-1] + 1
    if len(set(piece.counts)) == 1 and at == list(range(first, first + len(at))):
        stop = piece.start + piece.counts[0]
        return [cache.data[piece.layer, first_side:last_side, first : first + len(at), :, piece.start : stop]]
    return [
        cache.data[piece.layer, side : side + 1, slot : slot + 1, :, piece.start : piece.start + count]
        for side in piece.sides
        for slot, count in zip(at, piece.counts, strict=True)
    ]


def runs(view: Tensor) -> Iterator[Tensor]:
    """The (n, D) of a view (…, n, D), in order: each is one run of memory, whatever lies between them."""
    if view.dim() == 2:
        yield view
    else:
        for one in view.unbind(0):
            yield from runs(one)


def pack(found: Sequence[Tensor], out: Tensor) -> Tensor:
    """Copy `found`, one after the other, into the flat buffer `out`, cast to its dtype; returns the part used."""
    at = 0
    for view in found:
        out[at : at + view.numel()].view(view.shape).copy_(view)
        at += view.numel()
    return out[:at]


def unpack(flat: Tensor, found: Sequence[Tensor]) -> None:
    """The reverse of `pack`: from a flat buffer into the cache's memory."""
    at = 0
    for view in found:
        view.copy_(flat[at : at + view.numel()].view(view.shape))
        at += view.numel()


def hash_views(into: xxhash.xxh3_64, found: Sequence[Tensor]) -> None:
    """Feed a hash with what `pack` would make of these views of CPU memory, run by run, without the copy."""
    for view in found:
        for run in [view] if view.is_contiguous() else runs(view):
            into.update(raw(run))


def settle(cache: KVCache, slots: Sequence[int], lengths: Sequence[int]) -> None:
    """Set the lengths of `slots`, last of all: until then the requests there are as they were."""
    wanted = list(cache.lengths)
    for slot, length in zip(slots, lengths, strict=True):
        wanted[slot] = length
    cache.rewind(wanted)


def layer_checksums(manifest: Manifest, cache: KVCache, slots: Sequence[int]) -> list[str]:
    """Checksum of each part of a filled cache on the CPU, as hexadecimal text."""
    found = []
    for part in manifest.parts:
        digest = xxhash.xxh3_64()
        for piece in pieces(manifest, *part):
            hash_views(digest, views(cache, piece, slots))
        found.append(digest.hexdigest())
    return found


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name, one of spec.DTYPE_BYTES."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


class ToSend:
    """The parts of a hand-over that have not left yet, in the order in which prefill makes them."""

    def __init__(self, manifest: Manifest, cache: KVCache) -> None:
        self.left, self._cache, self._longest = list(manifest.parts), cache, max(manifest.lengths)

    def made(self, layer: int) -> tuple[int, int, int] | None:
        """The part that a pass of prefill has made when it has written `layer`; None when all have left.

        TransferError when the passes are not those of the manifest: positions would leave before they are made.
        """
        before = max(self._cache.lengths)  # filled before this pass
        expected, start, _ = self.left[0] if self.left else (layer, self._longest, 0)
        if expected != layer or (start > before) or (start and start < min(before, self._longest)):
            raise TransferError(
                f"layer {layer} behind {before} positions was not the next of this hand-over (layer {expected} "
                f"behind {start}): prefill in the chunks announced, cuts=cuts_of(prompt_tokens, chunk)"
            )
        return self.left.pop(0) if self.left else None
