"""D: gives slots of one preallocated cache to requests, takes their caches in, and decodes all that are there."""

from __future__ import annotations

import queue
import time
from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from pdlib import kv_transfer, models
from pdlib.decode import decode_step
from pdlib.devices import parse
from pdlib.kv_cache import KVCache
from pdlib.spec import InputError
from pdlib.workers.handover import Door
from pdlib.workers.link import Link
from pdlib.workers.meeting import Hello, Meeting, PeerLost, gpu_name
from pdlib.workers.messages import (
    Finished,
    Lines,
    Message,
    Settings,
    Times,
    report,
    seconds,
    whole,
)

WORDS = ("want", "coming", "start", "drop", "bye")  # what P may say


@dataclass
class Held:
    """A request with a slot: reserved until its cache and its start have come, then active until its last token."""

    id: int
    slot: int
    prompt_tokens: int
    new_tokens: int
    here: float = 0.0  # since when its whole cache is usable
    start: Message = field(default_factory=dict)  # P's last word: the first token and P's times
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def active(self) -> bool:
        return bool(self.tokens)


class DecodeSide:
    """D's process. Its main thread owns the slots and decodes, while the door takes caches in."""

    def __init__(self, settings: Settings, client: Lines) -> None:
        self.settings, self.client = settings, client
        self.told_to_end = self.ending = False
        self.meeting = Meeting("d", settings, lambda: self.told_to_end)
        self.model = models.load(settings.model, parse(settings.d), settings.dtype, settings.seed)
        self.cache = self.model.new_cache(settings.slots, settings.capacity)
        self.events: queue.Queue[Message] = queue.Queue()
        self.held: dict[int, Held] = {}
        self.waiting: deque[tuple[float, Message]] = deque()  # wants without a slot, and until when
        self.link: Link | None = None
        self.offset_s = 0.0  # to P's clock

    def serve(self) -> None:
        """Work until P says that all is done, or a signal says so, and every request that is held is finished."""
        self._join()
        while self.held or not self.ending:
            active = any(held.active for held in self.held.values())
            if self.told_to_end:
                self._stop_taking()
            elif self.link is None and not self.held:
                self._join()  # P died; another one may come
            else:
                self._hear(0.0 if active else 0.2)
                self._refuse_late()
            if active:
                self._step()
        if self.link:
            self.link.close()

    def _join(self) -> None:
        """Meet P; PeerLost when it does not come in time."""
        hello = Hello(
            model=asdict(kv_transfer.fingerprint(self.model)),
            road=self.settings.road,
            capacity=self.settings.capacity,
            slots=self.settings.slots,
            gpu=gpu_name(self.model.device.torch),
        )
        p = self.meeting.knock(hello, self.settings.start_s)
        if p is None:
            if self.told_to_end:
                return
            raise PeerLost(
                f"D: P did not come to {self.meeting.host} port {self.settings.port} within "
                f"{self.settings.start_s:g} s; start P there, or check MASTER_ADDR and MASTER_PORT"
            )

        def place(number: int) -> tuple[int, int] | None:
            held = self.held.get(number)
            return None if held is None or held.active else (held.slot, held.prompt_tokens)

        def here(number: int, at: float) -> None:
            self.events.put({"kind": "here", "id": number, "at": at})

        door = Door(self.model, self.cache, self.settings, p, place, here)

        def heard(message: Message) -> None:
            """In the link's thread: hand a message to whoever waits for it."""
            if message["kind"] in ("coming", "bye", "lost"):
                door.announced.put(message)
            if message["kind"] != "coming":
                self.events.put(message)

        self.link = Link(self.meeting.talk, "P", self.settings.silence_s, WORDS, heard)
        door.open(self.link)
        self.client.tell(kind="ready")

    # what comes in

    def _hear(self, patience_s: float) -> None:
        """Take in all that came from P and from the door; wait `patience_s` for the first."""
        try:
            message = self.events.get(timeout=patience_s)
            while True:
                try:
                    self._of_p(message)
                except InputError as error:
                    if self.link:
                        self.link.lose(f"it sent {error}", tell=True)
                message = self.events.get_nowait()
        except queue.Empty:
            pass

    def _of_p(self, message: Message) -> None:
        kind = message["kind"]
        if kind in ("lost", "bye"):
            self._without_p(message)
        elif kind == "want":
            self._want(message)
        elif (held := self.held.get(whole(message, "id"))) is None:
            pass  # dropped meanwhile
        elif kind == "drop" and not held.active:
            self._free(held)
        elif kind == "here":
            held.here = message["at"]
        elif kind == "start":
            held.start = self._checked(message)
        else:
            raise InputError(f"a message {kind!r} that means nothing here")
        for held in self.held.values():
            if held.start and held.here and not held.active:
                held.tokens.append(held.start["token"])
        self._grant()

    def _checked(self, start: Message) -> Message:
        if whole(start, "token") >= self.model.spec.vocab:
            raise InputError(f"token {start['token']} where tokens end before {self.model.spec.vocab}")
        for name in ("arrived", "prefill_start", "prefill_end"):
            seconds(start, name)
        whole(start, "redone")
        return start

    def _want(self, message: Message) -> None:
        """Queue a request for a slot; refuse at once what no slot could hold."""
        number, prompt_tokens = whole(message, "id"), whole(message, "prompt_tokens", 1)
        positions = prompt_tokens + whole(message, "new_tokens", 2) - 1
        if number in self.held:
            raise InputError(f"request {number} for the second time")
        if self.ending:
            self._refuse(message, "D was told to end; send the request to another pair")
        elif positions > self.settings.capacity:
            self._refuse(
                message,
                f"its slots hold {self.settings.capacity} positions, this request needs {positions}: start D with "
                "more capacity or send a shorter one",
            )
        else:
            self.waiting.append((time.monotonic() + seconds(message, "patience_s"), message))

    def _grant(self) -> None:
        """Reserve free slots, the lowest first, for the requests that wait."""
        taken = {held.slot for held in self.held.values()}
        free = deque(slot for slot in range(self.settings.slots) if slot not in taken)
        while self.waiting and free:
            _, message = self.waiting.popleft()
            number = message["id"]
            self.held[number] = Held(number, free.popleft(), message["prompt_tokens"], message["new_tokens"])
            self._tell("go", id=number)

    def _free(self, held: Held) -> None:
        """Take a slot back before its request has started: what came may be damaged.

        A cache's memory has to be finite everywhere, as a masked position still meets 0 · value.
        """
        self.cache.data[:, :, held.slot].zero_()
        del self.held[held.id]

    def _refuse(self, message: Message, reason: str) -> None:
        self._tell("refused", id=message["id"], reason=reason)

    def _refuse_late(self) -> None:
        """End the waits that have run out."""
        while self.waiting and self.waiting[0][0] < time.monotonic():
            _, message = self.waiting.popleft()
            self._refuse(
                message,
                f"none of its {self.settings.slots} slots came free in {message['patience_s']:g} s; send fewer "
                "requests at a time or start D with more slots",
            )

    def _tell(self, kind: str, **fields: Any) -> None:
        if self.link:
            self.link.tell(kind, **fields)

    def _without_p(self, message: Message) -> None:
        """P is gone: keep what can be finished without it, and tell the client what that is."""
        self.link = None
        self.waiting.clear()
        for held in [held for held in self.held.values() if not held.active]:
            self._free(held)
        if message["kind"] == "bye":
            self.ending = True
        else:
            self.client.tell(kind="lost", reason=str(message["reason"]), holding=list(self.held))

    def _stop_taking(self) -> None:
        """A signal: wants end here, every slot that is given is seen through."""
        self.ending, self.told_to_end = True, False
        self._tell("ending", reason="D was told to end")
        while self.waiting:
            self._refuse(self.waiting.popleft()[1], "D was told to end; send the request to another pair")

    # decode

    def _step(self) -> None:
        """One token for every active request; those that are complete leave their slot."""
        active = [held for held in self.held.values() if held.active]
        # Rows between active ones ride along: what they compute is ignored, and what they write lies behind the
        # prompt that is arriving there, or in nobody's slot.
        rows = 1 + max(held.slot for held in active)
        lengths, last = [0] * rows, [0] * rows
        for held in self.held.values():
            if held.slot < rows:
                lengths[held.slot] = held.prompt_tokens + len(held.times)
                last[held.slot] = held.tokens[-1] if held.active else 0
        batch = KVCache.over(self.cache.data[:, :, :rows], lengths)
        tokens = torch.tensor(last, device=self.model.device.torch)  # (B,)
        made = decode_step(self.model, tokens, batch).argmax(-1).tolist()  # tolist() waits for the device
        now = time.perf_counter()
        for held in active:
            held.tokens.append(made[held.slot])
            held.times.append(now)
            if len(held.tokens) == held.new_tokens:
                self._finish(held)

    def _finish(self, held: Held) -> None:
        """Tell the client and P: whoever is left knows."""
        if self.link:
            self.offset_s = self.link.offset_s
        here, *later = [t + self.offset_s for t in (held.here, *held.times)]
        start = held.start
        times = Times(
            start["arrived"], start["prefill_start"], start["prefill_end"], here, (start["prefill_end"], *later)
        )
        done = report(Finished(held.id, tuple(held.tokens), times, start["redone"]))
        del self.held[held.id]
        self.client.tell(**done)
        self._tell(**done)
        self._grant()
