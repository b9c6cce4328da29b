"""Road 3: from host to host on torch.distributed: gloo between CPUs, nccl where both ends have CUDA.

P offers a manifest, D accepts or refuses it; then the parts travel, each in a few messages, straight from and into
the caches where their memory lies in one run, else through buffers of at most one layer; at last D answers whether
everything arrived. A connection that breaks, or time that runs out, is torch.distributed's RuntimeError.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from pdlib.kv_cache import KVCache
from pdlib.kv_transfer.manifest import MOST_BYTES, Manifest, TransferError, check_slots, raw
from pdlib.kv_transfer.parts import Piece, ToSend, dtype_of, pack, pieces, settle, unpack, views

ACCEPTED = b"accepted"
Part = tuple[int, int, int]  # layer, start, stop


def offer(manifest: Manifest, peer: int, tag: int = 0, timeout_s: float = 30.0) -> None:
    """P: announce a hand-over to rank `peer` and wait for its consent; TransferError with its reason otherwise."""
    _say(manifest.to_json(), peer, tag, timeout_s)
    _hear_consent(peer, tag, timeout_s)


def await_offer(peer: int, tag: int = 0, timeout_s: float = 30.0) -> Manifest:
    """D: the manifest that rank `peer` sends next; what is none is answered with a refusal and raised."""
    try:
        return Manifest.from_json(_hear(peer, tag, timeout_s), f"rank {peer}")
    except TransferError as error:
        refuse(peer, str(error), tag, timeout_s)
        raise


def accept(peer: int, tag: int = 0, timeout_s: float = 30.0) -> None:
    """D: let the parts come."""
    _say(ACCEPTED, peer, tag, timeout_s)


def refuse(peer: int, reason: str, tag: int = 0, timeout_s: float = 30.0) -> None:
    """D: say why nothing, or nothing more, is taken."""
    _say(reason.encode()[: MOST_BYTES // 2] or b"refused", peer, tag, timeout_s)


class Outgoing:
    """P's side of an accepted hand-over: parts leave as prefill makes them (`on_layer`), the rest in `finish`.

    The cache must not change before `finish` has returned: parts leave from its own memory where that is one run.
    """

    def __init__(
        self,
        cache: KVCache,
        manifest: Manifest,
        peer: int,
        slots: Sequence[int] | None = None,
        tag: int = 0,
        timeout_s: float = 30.0,
    ) -> None:
        self.cache, self.manifest, self.peer, self.tag, self.timeout_s = cache, manifest, peer, tag, timeout_s
        self.slots = check_slots(cache, slots, len(manifest.lengths))
        self._to_send, self._buffers = ToSend(manifest, cache), _Buffers(manifest, cache)
        self._leaving: deque[tuple[dist.Work, Tensor | None]] = deque()
        # A GPU is given the next layer's work before the last one's is waited for, so that it never idles.
        self._side = torch.cuda.Stream(cache.data.device) if cache.data.is_cuda else None
        self._behind: deque[tuple[Part, torch.cuda.Event]] = deque()

    def on_layer(self, layer: int) -> None:
        """Send the part that prefill has just made; to be set as the cache's `on_layer`."""
        part = self._to_send.made(layer)
        if part is None or self._side is None:
            return self._send(part) if part else None
        self._behind.append((part, torch.cuda.current_stream().record_event()))
        if len(self._behind) > 1:
            self._send(*self._behind.popleft())

    def finish(self) -> None:
        """Send what has not left, wait until it has, hear D's answer; TransferError when D could not take it."""
        while self._behind:
            self._send(*self._behind.popleft())
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())
        while self._to_send.left:
            self._send(self._to_send.left.pop(0))
        while self._leaving:
            self._wait()
        _hear_consent(self.peer, self.tag, self.timeout_s)

    def _send(self, part: Part, made: torch.cuda.Event | None = None) -> None:
        digest = xxhash.xxh3_64()
        with torch.inference_mode(), torch.cuda.stream(self._side):
            if made is not None and self._side is not None:
                self._side.wait_event(made)
            for piece in pieces(self.manifest, *part):
                found = views(self.cache, piece, self.slots)
                flat, buffer = self._buffers.direct(found), None
                if flat is None:
                    while not self._buffers.free:
                        self._wait()
                    buffer = self._buffers.free.pop()
                    flat = pack(found, buffer)
                if self.manifest.checksums:
                    digest.update(raw(flat))
                self._leaving.append((_isend(flat, self.peer, self.tag), buffer))
        if self.manifest.checksums:
            self._leaving.append((_isend(_bytes(digest.digest()), self.peer, self.tag), None))

    def _wait(self) -> None:
        work, buffer = self._leaving.popleft()
        work.wait(_seconds(self.timeout_s))
        if buffer is not None:
            self._buffers.free.append(buffer)


def receive(
    manifest: Manifest,
    cache: KVCache,
    peer: int,
    slots: Sequence[int] | None = None,
    tag: int = 0,
    timeout_s: float = 30.0,
    on_part: Callable[[int], None] | None = None,
) -> None:
    """D's side of an accepted hand-over: parts into `slots` (default: 0, 1, …) of the cache, lengths last.

    `on_part(i)` is called when part i of manifest.parts is in the cache. TransferError when a checksum does not
    match: P is told, and the cache's lengths are as they were.
    """
    rows = check_slots(cache, slots, len(manifest.lengths))
    buffers, coming = _Buffers(manifest, cache), deque[tuple[dist.Work | None, int, list[Tensor], Tensor, bool]]()
    digest, damaged = xxhash.xxh3_64(), list[Part]()

    def take() -> None:
        """The oldest message on its way."""
        nonlocal digest
        work, part, found, flat, through_buffer = coming.popleft()
        if work is not None:
            work.wait(_seconds(timeout_s))
        if found:
            if manifest.checksums:
                digest.update(raw(flat))
            if through_buffer:
                unpack(flat, found)
                buffers.give_back(flat)
            return
        if manifest.checksums and digest.digest() != flat.numpy().tobytes():
            damaged.append(manifest.parts[part])
        digest = xxhash.xxh3_64()
        if on_part is not None:
            on_part(part)

    with torch.inference_mode():
        for part, piece in _messages(manifest):
            if piece is None:  # the end of a part
                told = torch.empty(8, dtype=torch.uint8)
                coming.append((_irecv(told, peer, tag) if manifest.checksums else None, part, [], told, False))
                continue
            found = views(cache, piece, rows)
            flat, through_buffer = buffers.direct(found), False
            if flat is None:
                while not buffers.free:
                    take()
                flat, through_buffer = buffers.free.pop()[: sum(view.numel() for view in found)], True
            coming.append((_irecv(flat, peer, tag), part, found, flat, through_buffer))
        while coming:
            take()
    if damaged:
        layer, start, stop = damaged[0]
        reason = f"layer {layer}, positions {start} … {stop}, is not what rank {peer} sent (checksum): prefill again"
        refuse(peer, reason, tag, timeout_s)
        raise TransferError(reason)
    settle(cache, rows, manifest.lengths)
    accept(peer, tag, timeout_s)


def _messages(manifest: Manifest) -> Iterator[tuple[int, Piece | None]]:
    """What goes over the wire, in order: the pieces of part 0, its end (None), the pieces of part 1, …"""
    for number, part in enumerate(manifest.parts):
        yield from ((number, piece) for piece in pieces(manifest, *part))
        yield number, None


class _Buffers:
    """Flat buffers for pieces that do not lie in one run: together at most one layer, made when first needed."""

    def __init__(self, manifest: Manifest, cache: KVCache) -> None:
        on_gpu = dist.get_backend() == "nccl"
        if on_gpu and (manifest.checksums or not cache.data.is_cuda):
            raise TransferError("nccl moves caches on CUDA, without checksums: turn those off, or use gloo")
        self.device, self.dtype = cache.data.device if on_gpu else torch.device("cpu"), dtype_of(manifest.wire)
        self._manifest, self._pin = manifest, cache.data.is_cuda and not on_gpu
        self._free: list[Tensor] | None = None
        self._size = 0

    def direct(self, found: Sequence[Tensor]) -> Tensor | None:
        """The cache's own memory when a message can come from it or go to it, else None."""
        one = found[0]
        fits = len(found) == 1 and one.is_contiguous() and one.dtype == self.dtype
        return one.view(-1) if fits and one.device == self.device else None

    @property
    def free(self) -> list[Tensor]:
        if self._free is None:
            per_position = self._manifest.bytes // self.dtype.itemsize // sum(self._manifest.lengths)  # elements
            per_side = per_position // self._manifest.model.layers // 2
            largest = biggest_layer = 0
            for _, start, stop in self._manifest.parts[:: self._manifest.model.layers]:
                sizes = [len(p.sides) * sum(p.counts) * per_side for p in pieces(self._manifest, 0, start, stop)]
                largest, biggest_layer = max([largest, *sizes]), max(biggest_layer, sum(sizes))
            count = min(8, max(1, biggest_layer // largest))
            self._size = largest
            whole = torch.empty(count * largest, dtype=self.dtype, device=self.device)
            self._whole = whole.pin_memory() if self._pin else whole
            self._free = list(self._whole.view(count, largest))
        return self._free

    def give_back(self, flat: Tensor) -> None:
        """Take back a buffer, or the part of it that was used."""
        at = flat.storage_offset()
        self.free.append(self._whole[at : at + self._size])


def _seconds(timeout_s: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=timeout_s)


def _isend(flat: Tensor, peer: int, tag: int) -> dist.Work:
    work = dist.isend(flat, peer, tag=tag)
    assert work is not None  # this process belongs to the group
    return work


def _irecv(flat: Tensor, peer: int, tag: int) -> dist.Work:
    work = dist.irecv(flat, peer, tag=tag)
    assert work is not None
    return work


def _bytes(text: bytes) -> Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _control_device() -> torch.device:
    return torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")


def _say(text: bytes, peer: int, tag: int, timeout_s: float) -> None:
    device = _control_device()
    for message in (torch.tensor([len(text)], device=device), _bytes(text).to(device)):
        _isend(message, peer, tag).wait(_seconds(timeout_s))


def _hear(peer: int, tag: int, timeout_s: float) -> bytes:
    size = torch.empty(1, dtype=torch.long, device=_control_device())
    _irecv(size, peer, tag).wait(_seconds(timeout_s))
    if not 0 < int(size) <= MOST_BYTES:
        raise TransferError(f"rank {peer} announces {int(size)} bytes of text, at most {MOST_BYTES} are read")
    text = torch.empty(int(size), dtype=torch.uint8, device=size.device)
    _irecv(text, peer, tag).wait(_seconds(timeout_s))
    return text.cpu().numpy().tobytes()


def _hear_consent(peer: int, tag: int, timeout_s: float) -> None:
    answer = _hear(peer, tag, timeout_s)
    if answer != ACCEPTED:
        raise TransferError(f"rank {peer} refuses: {answer.decode('utf-8', 'replace')}")
