"""Both ends of a cache's way from P to D: the sender, and the door through which D lets it into a slot."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pdlib import kv_transfer
from pdlib.kv_cache import KVCache
from pdlib.kv_transfer import Manifest, Outgoing, Segment, TransferError, manifest_of
from pdlib.models import Model
from pdlib.prefill import prefill
from pdlib.spec import InputError
from pdlib.workers.link import Link
from pdlib.workers.meeting import Hello, first_line
from pdlib.workers.messages import Message, Settings, whole

TAGS = 2**20  # a tag for each transfer: what is left of a broken one is not taken for the next


@dataclass(frozen=True)
class Sent:
    """What P knows of a request once its cache is at D."""

    token: int  # the first
    prefill_start: float
    prefill_end: float


class Sender:
    """P's end: prefills one prompt at a time in a cache of its own, and has it taken to D."""

    def __init__(self, model: Model, settings: Settings) -> None:
        self.model, self.settings = model, settings
        self.cache = model.new_cache(1, settings.capacity)
        self.segment: Segment | None = None
        self.answers: queue.Queue[Message] = queue.Queue()  # D's to caches in shared memory, or its end
        self._transfers = 0

    def new_segment(self) -> None:
        """Shared memory for one D: once that has it, its name is gone."""
        longest = manifest_of(self.model, self.cache, lengths=[self.settings.capacity])
        self.segment = Segment.create(kv_transfer.segment_bytes(longest, self.settings.capacity))

    def close_segment(self) -> None:
        """Give the shared memory back."""
        if self.segment is not None:
            self.segment.close()
        self.segment = None

    def prefill(self, prompt: Sequence[int]) -> Sent:
        """Fill the cache with one prompt; the first token and the times."""
        self.cache.rewind()
        tokens = torch.tensor([prompt], device=self.model.device.torch)  # (1, n)
        start = time.perf_counter()
        first = int(prefill(self.model, tokens, self.cache).argmax())  # int() waits for the device
        return Sent(first, start, time.perf_counter())

    def send(self, link: Link, number: int, prompt: Sequence[int]) -> Sent:
        """Prefill, and return when D has the whole cache; TransferError when it did not take it, or is gone."""
        if self.segment is not None:
            return self._through_memory(link, number, prompt)
        return self._over_network(link, number, prompt)

    def _over_network(self, link: Link, number: int, prompt: Sequence[int]) -> Sent:
        """The manifest, D's consent, then the cache, layer by layer while prefill runs or whole after it."""
        self._transfers += 1
        tag, patience_s = self._transfers % TAGS, self.settings.transfer_s
        manifest = manifest_of(self.model, self.cache, lengths=[len(prompt)], checksums=self.settings.checksums)
        link.tell("coming", id=number, tag=tag)
        try:
            kv_transfer.offer(manifest, link.rank, tag, patience_s)
            outgoing = Outgoing(self.cache, manifest, link.rank, tag=tag, timeout_s=patience_s)
            self.cache.on_layer = outgoing.on_layer if self.settings.how == "layers" else None
            sent = self.prefill(prompt)
            outgoing.finish()
        finally:
            self.cache.on_layer = None
        return sent

    def _through_memory(self, link: Link, number: int, prompt: Sequence[int]) -> Sent:
        """Prefill, lay the cache down in shared memory, and wait until D has taken it from there."""
        assert self.segment is not None
        sent = self.prefill(prompt)
        manifest = manifest_of(self.model, self.cache, checksums=self.settings.checksums)
        sums = kv_transfer.share(self.cache, manifest, self.segment, len(prompt))
        link.tell("coming", id=number, manifest=manifest.to_json().decode(), checksums=sums)
        end = time.monotonic() + self.settings.transfer_s
        while True:
            try:
                answer = self.answers.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                lost = link.lose(f"it did not take a cache within {self.settings.transfer_s:g} s")
                raise TransferError(f"P: {lost}") from None
            if answer["kind"] in ("lost", "bye"):
                raise TransferError(f"P: {answer.get('reason', 'D has ended')}")
            if answer.get("id") != number:
                continue  # of an earlier D
            if answer["kind"] == "damaged":
                raise TransferError(str(answer.get("reason")))
            return sent


class Door:
    """D's end: a thread that takes in one cache after the other while the main thread decodes; one a link.

    `place(number)` says which slot is reserved for a request, if any, and for how many positions; `here(number, at)`
    is called when its whole cache is usable there. The main thread never writes to these positions meanwhile.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        settings: Settings,
        p: Hello,
        place: Callable[[int], tuple[int, int] | None],
        here: Callable[[int, float], None],
    ) -> None:
        self.model, self.cache, self.settings, self.place, self.here = model, cache, settings, place, here
        self.announced: queue.Queue[Message] = queue.Queue()  # "coming", and at last "bye" or "lost"
        self.segment = Segment.attach(p.segment, p.segment_bytes) if settings.road == "memory" else None

    def open(self, link: Link) -> None:
        """Begin to take caches in."""
        threading.Thread(target=self._run, args=(link,), daemon=True).start()

    def _run(self, link: Link) -> None:
        torch.set_num_threads(self.model.device.threads or 1)  # a new thread has a count of its own
        while (message := self.announced.get())["kind"] == "coming":
            try:
                number = whole(message, "id")
                place = self.place(number)
                if place is None:
                    raise InputError(f"a cache for request {number}, which has no slot")
                slot, positions = place
                row = KVCache.over(self.cache.data[:, :, slot : slot + 1], [0])
                if self.segment is not None:
                    self._from_memory(message, positions, row, link, self.segment)
                else:
                    self._from_network(message, positions, row, link)
                self.model.device.synchronize()
                self.here(number, time.perf_counter())
            except TransferError:
                pass  # P has been told: it makes the cache anew, or drops the request
            except InputError as error:
                link.lose(f"it sent {error}", tell=True)
            except RuntimeError as error:
                link.lose(first_line(error))
        if self.segment is not None:
            self.segment.close()

    def _from_network(self, message: Message, positions: int, row: KVCache, link: Link) -> None:
        tag, patience_s = whole(message, "tag") % TAGS, self.settings.transfer_s
        manifest = kv_transfer.await_offer(link.rank, tag, patience_s)
        try:
            self._check(manifest, positions, row)
        except TransferError as error:
            kv_transfer.refuse(link.rank, str(error), tag, patience_s)
            raise
        kv_transfer.accept(link.rank, tag, patience_s)
        kv_transfer.receive(manifest, row, link.rank, [0], tag, patience_s)

    def _from_memory(self, message: Message, positions: int, row: KVCache, link: Link, segment: Segment) -> None:
        number = message["id"]
        try:
            manifest = Manifest.from_json(str(message.get("manifest")).encode())
            self._check(manifest, positions, row)
            sums = message.get("checksums")
            if not isinstance(sums, list):
                raise TransferError("D: a cache without its list of checksums")
            pages = kv_transfer.view(manifest, segment, positions, sums)
            kv_transfer.transfer(pages, row)  # D decodes a batch: each cache has to lie in its slot
            self.model.device.synchronize()
        except TransferError as error:
            link.tell("damaged", id=number, reason=str(error))
            raise
        link.tell("taken", id=number)

    def _check(self, manifest: Manifest, positions: int, row: KVCache) -> None:
        manifest.check(self.model, row, [0])
        if manifest.lengths != (positions,):
            raise TransferError(f"D: a cache of {manifest.lengths} positions, {positions} were announced")
