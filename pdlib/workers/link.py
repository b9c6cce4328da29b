"""The link between P and D, once they have met: messages both ways, a pulse, and one account of a peer's death."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from pdlib.spec import InputError
from pdlib.workers.meeting import first_line
from pdlib.workers.messages import LONGEST, Message, decode, encode, seconds

PINGS = 5


class Link:
    """Messages between the two members of the process group, each side one object.

    `heard(message)` is called in the link's own thread, in the order the peer sent, and must not wait; `words` are
    the kinds of message the peer may send. The last message is "bye" (the peer ends, all is said) or, from the link
    itself, "lost" with its reason.

    Who notices a death: the system closes a dead process's connection and gloo raises at once in whatever waits for
    it; a machine that vanishes closes nothing, so each side sends a pulse five times in `silence_s`, and a receive
    that gets nothing for that long ends the link. gloo closes a connection for good when a wait runs out: a link
    that is lost stays lost, and only a new ticket makes another one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: str,
        silence_s: float,
        words: Sequence[str],
        heard: Callable[[Message], None],
    ) -> None:
        self.group, self.peer, self.silence_s, self.words, self.heard = group, peer, silence_s, words, heard
        self.rank = 1 - dist.get_rank()  # the peer's
        self.lost = ""  # why, once it is
        self.offset_s = 0.0  # to add to a time of ours to have it on the peer's clock
        self._outbox: queue.Queue[bytes] = queue.Queue()
        self._noting, self._closing = threading.Lock(), False
        self._best_trip_s = float("inf")
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._listen, self._speak)]
        for thread in self._threads:
            thread.start()
        for _ in range(PINGS):
            self.tell("ping", sent=time.perf_counter())

    def tell(self, kind: str, **fields: object) -> None:
        """Have one message sent, without waiting. To a peer that is lost nothing is said: `heard` knows already."""
        self._outbox.put(encode({"kind": kind, **fields}))

    def lose(self, seen: str, tell: bool = False) -> str:
        """Note that the peer is gone, and why, the first time; returns the reason.

        `tell`: it is there but cannot be understood, and is told so.
        """
        with self._noting:
            first = not self.lost
            if first:
                self.lost = f"{self.peer} is gone ({seen})"
        if first:
            self._outbox.put(encode({"kind": "broken", "reason": seen}) if tell else b"")
            if not self._closing:
                self.heard({"kind": "lost", "reason": self.lost})
        return self.lost

    def close(self, patience_s: float = 2.0) -> None:
        """Say bye, after everything told so far, and wait for the peer's."""
        self._closing = True
        self.tell("bye")
        for thread in self._threads:
            thread.join(patience_s)

    def _speak(self) -> None:
        """The one thread that sends: a peer slow to listen keeps neither serving nor listening waiting."""
        raw = PULSE
        while raw != BYE and not raw.startswith(BROKEN):
            try:
                raw = self._outbox.get(timeout=self.silence_s / 5)
            except queue.Empty:
                raw = PULSE
            if not raw:
                return
            frame = torch.frombuffer(bytearray(len(raw).to_bytes(8, "little") + raw), dtype=torch.uint8)
            try:
                sent = dist.isend(frame, self.rank, self.group)
                assert sent is not None
                sent.wait(timedelta(seconds=self.silence_s))
            except (RuntimeError, ValueError) as error:
                self.lose(first_line(error))

    def _listen(self) -> None:
        # gloo ends a process that gets more than it asked for, so every receive asks for the longest message.
        frame = torch.zeros(8 + LONGEST, dtype=torch.uint8)
        kind = ""
        while kind != "bye":
            try:
                coming = dist.irecv(frame, self.rank, self.group)
                assert coming is not None
                coming.wait(timedelta(seconds=self.silence_s))
                message = _read(frame)
                kind = message["kind"]
                if kind == "ping":
                    self._outbox.put(
                        encode({"kind": "pong", "sent": message.get("sent"), "here": time.perf_counter()})
                    )
                elif kind == "pong":
                    self._compare_clocks(seconds(message, "sent"), seconds(message, "here"))
                elif kind in self.words:
                    if kind != "bye" or not self._closing:
                        self.heard(message)
                    self._closing = self._closing or kind == "bye"  # what breaks after that is no loss
                elif kind == "broken":
                    self.lose(f"it ended the connection: {str(message.get('reason'))[:1000]}")
                elif kind != "pulse":
                    raise InputError(f"a message of the kind {kind[:40]!r}, which means nothing here")
            except InputError as error:
                self.lose(f"it sent {error}", tell=True)
            except (RuntimeError, ValueError) as error:
                self.lose(first_line(error))
            if self.lost:
                return
        self._outbox.put(BYE)  # in answer, or not needed

    def _compare_clocks(self, sent: float, here: float) -> None:
        """The middle of the fastest ping is when the peer looked at its clock.

        Clocks that agree within that ping's time are taken as one: on one host they are.
        """
        now = time.perf_counter()
        if now - sent < self._best_trip_s:
            self._best_trip_s = now - sent
            offset = here - (now + sent) / 2
            self.offset_s = offset if abs(offset) > self._best_trip_s / 2 else 0.0


BYE, PULSE, BROKEN = encode({"kind": "bye"}), encode({"kind": "pulse"}), b'{"kind":"broken"'


def _read(frame: torch.Tensor) -> Message:
    """The message in a frame: 8 bytes of length, then JSON."""
    size = int.from_bytes(frame[:8].numpy().tobytes(), "little")
    if size > LONGEST:
        raise InputError(f"a message of {size} bytes; {LONGEST} is the most")
    raw = frame[8 : 8 + size].numpy().tobytes()
    frame[: 8 + size] = 0  # a shorter frame with a false size must not find the old message
    message = decode(raw)
    if not isinstance(message.get("kind"), str):
        raise InputError(f"a message without a kind: {raw[:40]!r}")
    return message
