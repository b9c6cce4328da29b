"""Road 2: from process to process on one host, through shared memory. P packs, D works on the same pages.

A file in /dev/shm, mapped with the standard library's mmap: multiprocessing.shared_memory registers with a tracker
that, until Python 3.13, also unlinks what another process still uses, and its mapping cannot be checked beforehand.
Rules: the maker creates a segment and tells its name; who attaches removes the name, so that from then on the
memory goes with the last of the two processes, however they end; the maker's `close` removes a name never used.
A maker that is killed before anyone attached leaves a name that the next `create` (or `sweep`) removes.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
import xxhash
from torch import Tensor

from pdlib.kv_cache import KVCache
from pdlib.kv_transfer.manifest import Manifest, TransferError, check_slots
from pdlib.kv_transfer.parts import ToSend, dtype_of, hash_views, layer_checksums, pieces, views
from pdlib.models import Model
from pdlib.spec import whole_numbers

try:
    import fcntl
except ImportError:  # Windows: nobody else's segments are swept there
    fcntl = None  # type: ignore[assignment]

FOLDER = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())  # macOS shares pages of a file
_NAME = re.compile(r"pdlib-kv-[0-9a-f]{32}")


class Segment:
    """`nbytes` of memory that another process can map under `name`; used for one cache after another."""

    def __init__(self, name: str, nbytes: int, handle: int) -> None:
        """Use `create` or `attach`."""
        self.name, self.nbytes, self._handle = name, nbytes, handle
        self._map: mmap.mmap | None = mmap.mmap(handle, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> Segment:
        """A new segment, all of its memory taken at once; TransferError when the host has not that much.

        A file that only looks that large would kill the process that writes where no page is left.
        """
        whole_numbers(nbytes=nbytes)
        sweep()
        name = f"pdlib-kv-{uuid.uuid4().hex}"
        handle = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_SH)  # says, as long as this process lives, that it does
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            else:
                os.truncate(handle, nbytes)
            return cls(name, nbytes, handle)
        except OSError as error:
            os.close(handle)
            (FOLDER / name).unlink(missing_ok=True)
            raise TransferError(
                f"{nbytes / 1e6:.0f} MB of shared memory cannot be had in {FOLDER} ({error.strerror}; "
                f"{shutil.disk_usage(FOLDER).free / 1e6:.0f} MB are free there): "
                "make it larger (docker run --shm-size), or take fewer requests or the network road"
            ) from error

    @classmethod
    def attach(cls, name: str, nbytes: int) -> Segment:
        """Map the segment another process of this user made, and remove its name; sizes are checked first."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise TransferError(f"{name!r:.60} is no name of a segment: the other side does not speak pdlib's terms")
        try:
            handle = os.open(FOLDER / name, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
        except OSError as error:
            raise TransferError(
                f"the shared memory {name} cannot be opened ({error.strerror}): the side that made it has ended, "
                "or runs on another host or as another user"
            ) from error
        size = os.fstat(handle).st_size
        if size != nbytes:
            os.close(handle)
            raise TransferError(f"the shared memory {name} has {size} bytes, {nbytes} were announced; ask again")
        found = cls(name, nbytes, handle)
        found.unlink()
        return found

    def unlink(self) -> None:
        """Remove the name; the memory stays for those who have mapped it."""
        (FOLDER / self.name).unlink(missing_ok=True)

    def close(self) -> None:
        """Give up this side's hold. Memory that a cache still lies in stays until that cache is gone."""
        self.unlink()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._map = None  # unmapped here, or with the last tensor that lies in it: never under a tensor

    def __enter__(self) -> Segment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The first bytes of the segment as a tensor; TransferError when it is too small for that."""
        count = torch.Size(shape).numel()
        if self._map is None:
            raise TransferError(f"the shared memory {self.name} is closed: make or attach another segment")
        if count * dtype.itemsize > self.nbytes:
            raise TransferError(
                f"a cache of {count * dtype.itemsize} bytes does not fit the shared memory of {self.nbytes}: "
                "make a larger segment (segment_bytes)"
            )
        return torch.frombuffer(self._map, dtype=dtype, count=count).view(*shape)

    def new_cache(self, model: Model, requests: int, capacity: int) -> KVCache:
        """An empty cache in this memory: P that prefills into it hands over without any copy."""
        spec = model.spec
        shape = (spec.layers, 2, requests, spec.kv_heads, capacity, spec.head_dim)
        return KVCache.over(self.tensor(shape, dtype_of(model.dtype)).zero_(), [0] * requests)


def segment_bytes(manifest: Manifest, capacity: int) -> int:
    """Bytes of the segment in which D can work with room for `capacity` positions a request."""
    return torch.Size(_shape(manifest, capacity)).numel() * dtype_of(manifest.wire).itemsize


class Sharing:
    """P's side: packs each part into the segment, as prefill makes it (`on_layer`) or all at once (`finish`)."""

    def __init__(
        self,
        cache: KVCache,
        manifest: Manifest,
        segment: Segment,
        capacity: int,
        slots: Sequence[int] | None = None,
    ) -> None:
        self.cache, self.manifest = cache, manifest
        self.slots = check_slots(cache, slots, len(manifest.lengths))
        self.target = _cache_in(segment, manifest, capacity)
        self.checksums: list[str] = []
        self._to_send = ToSend(manifest, cache)
        self._in_place = cache.data.data_ptr() == self.target.data.data_ptr()  # P's cache lies in it already
        if self._in_place and (cache.data.shape != self.target.data.shape or self.slots != sorted(self.slots)):
            raise TransferError("a cache that lies in the segment is handed over whole, with its own capacity")

    def on_layer(self, layer: int) -> None:
        """Pack the part that prefill has just made; ask KVCache.on_layer to call it."""
        if part := self._to_send.made(layer):
            self._share(part)

    def finish(self) -> list[str]:
        """Pack what has not been packed yet; returns the checksums of all parts ([] when they are off)."""
        while self._to_send.left:
            self._share(self._to_send.left.pop(0))
        return self.checksums

    def _share(self, part: tuple[int, int, int]) -> None:
        sums = self.manifest.checksums
        digest, rows = xxhash.xxh3_64(), range(len(self.slots))
        # hashed while still in the core's cache; without a hash there is nothing to stay small for
        for piece in pieces(self.manifest, *part, **({} if sums else {"most": 2**62})):
            source = views(self.cache, piece, self.slots)
            if not self._in_place:
                for here, there in zip(*_alike(source, views(self.target, piece, rows)), strict=True):
                    there.copy_(here)
            if sums:
                hash_views(digest, views(self.target, piece, rows))
        if sums:
            self.checksums.append(digest.hexdigest())


def share(
    cache: KVCache, manifest: Manifest, segment: Segment, capacity: int, slots: Sequence[int] | None = None
) -> list[str]:
    """P: pack `slots` of a filled cache into the segment, as a cache of `capacity`; returns the parts' checksums."""
    return Sharing(cache, manifest, segment, capacity, slots).finish()


def view(manifest: Manifest, segment: Segment, capacity: int, checksums: Sequence[str] | None = None) -> KVCache:
    """D: the segment's pages as a filled cache of `capacity` positions; nothing is copied.

    `checksums`: as `share` returned them; TransferError when a part is not what P packed. P must not pack into the
    segment again before D is done with the cache. For a D with another device or slots, `transfer` it from there.
    """
    if max(manifest.lengths) > capacity:
        raise TransferError(f"{max(manifest.lengths)} positions do not fit a cache of capacity {capacity}")
    cache = _cache_in(segment, manifest, capacity)
    cache.rewind(manifest.lengths)
    if manifest.checksums and checksums is not None:
        found = layer_checksums(manifest, cache, range(len(manifest.lengths)))
        for (layer, start, stop), mine, told in zip(manifest.parts, found, [*checksums], strict=True):
            if mine != told:
                raise TransferError(
                    f"layer {layer}, positions {start} … {stop}, is not what P packed (checksum): prefill again"
                )
    return cache


def sweep() -> list[str]:
    """Remove the names of segments whose makers have ended; returns them."""
    gone = []
    for path in FOLDER.glob("pdlib-kv-*"):
        with contextlib.suppress(OSError):  # another user's, removed meanwhile, or in use
            handle = os.open(path, os.O_RDWR)
            try:
                if fcntl is None or not _NAME.fullmatch(path.name) or not os.fstat(handle).st_size:
                    continue  # empty: being made at this moment
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                gone.append(path.name)
            finally:
                os.close(handle)
    return gone


def _shape(manifest: Manifest, capacity: int) -> tuple[int, ...]:
    m = manifest.model
    return (m.layers, 2, len(manifest.lengths), m.kv_heads, capacity, m.head_dim)


def _cache_in(segment: Segment, manifest: Manifest, capacity: int) -> KVCache:
    whole_numbers(capacity=capacity)
    if manifest.wire != manifest.model.dtype:
        raise TransferError(
            f"shared memory holds {manifest.model.dtype} as it is, D works on it: leave the cast to {manifest.wire}"
        )
    data = segment.tensor(_shape(manifest, capacity), dtype_of(manifest.wire))
    return KVCache.over(data, [0] * len(manifest.lengths))


def _alike(source: list[Tensor], target: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Two lists of views of the same piece, cut into requests where one side is and the other is not."""
    if len(source) == len(target):
        return source, target
    cut = [[row for view in found for side in view for row in side] for found in (source, target)]  # (KV, n, D)
    return cut[0], cut[1]
