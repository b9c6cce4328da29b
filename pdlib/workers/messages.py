"""What is said between a client, P and D: requests, results, settings, and lines of JSON that carry them.

Nothing received is trusted or executed: every message is JSON of bounded length, and every field that is used is
checked first. Times are seconds of `time.perf_counter`, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from pdlib.spec import DTYPE_BYTES, InputError, one_of, whole_numbers

LONGEST = 2**20  # bytes of one message; a result of 40,000 tokens fits
ROADS, WAYS = ("network", "memory"), ("layers", "whole")

Message = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """A prompt of token ids to be answered with `new_tokens` tokens, the first of which P makes."""

    prompt: tuple[int, ...]
    new_tokens: int

    def __post_init__(self) -> None:
        whole_numbers(new_tokens=self.new_tokens)
        object.__setattr__(self, "prompt", tuple(self.prompt))
        if not self.prompt or any(isinstance(t, bool) or not isinstance(t, int) or t < 0 for t in self.prompt):
            raise InputError(f"a prompt of {len(self.prompt)} tokens: give one or more token ids, whole numbers ≥ 0")

    @property
    def positions(self) -> int:
        """Positions of the cache in the end: the last new token is never fed back."""
        return len(self.prompt) + self.new_tokens - 1


@dataclass(frozen=True)
class Times:
    """When what happened to one request, in s on P's clock; `tokens` holds one time a new token."""

    arrived: float
    prefill_start: float
    prefill_end: float
    transfer_end: float  # the whole cache is usable at D; prefill_end where D was not needed
    tokens: tuple[float, ...]


@dataclass(frozen=True)
class Finished:
    """All tokens of a request. `redone`: how often the cache had to be made and sent again."""

    id: int
    tokens: tuple[int, ...]
    times: Times
    redone: int = 0


@dataclass(frozen=True)
class Failed:
    """A request that ends without its tokens: the reason says which side, what, and what to do."""

    id: int
    reason: str


@dataclass(frozen=True)
class Settings:
    """What P and D have to know. Every wait has a bound here, in s."""

    model: str = "gpt2"
    p: str = "cpu@1"
    d: str = "cpu@1"
    dtype: str = "float32"
    seed: int = 0
    road: str = "network"
    how: str = "layers"  # over the network: layer by layer while prefill runs, or the whole cache after it
    checksums: bool = True
    slots: int = 8  # requests that D decodes at a time
    capacity: int = 512  # positions a request, in P's cache and in D's
    address: str = "127.0.0.1"  # P's; with one of loopback nothing listens to other hosts
    port: int = 0  # of the meeting point at P; 0: any that is free
    start_s: float = 30.0  # a side that is ready waits so long for the other one
    slot_s: float = 60.0  # a request waits so long for a free slot at D
    transfer_s: float = 30.0  # the longest pause within a transfer
    silence_s: float = 10.0  # a peer that says nothing for so long is gone; it speaks five times in between

    def __post_init__(self) -> None:
        one_of("dtype", self.dtype, DTYPE_BYTES)
        one_of("road", self.road, ROADS)
        one_of("way", self.how, WAYS)
        whole_numbers(slots=self.slots, capacity=self.capacity)
        for name in ("start_s", "slot_s", "transfer_s", "silence_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} = {getattr(self, name)!r}: give seconds above 0")
        if not 0 <= self.port < 2**16:
            raise InputError(f"port {self.port!r}: give 1 … 65535, or 0 for any that is free")


def encode(message: Message) -> bytes:
    """One message as JSON; InputError when it is longer than a message may be."""
    raw = json.dumps(message, separators=(",", ":")).encode()
    if len(raw) > LONGEST:
        raise InputError(f"a message of {len(raw)} bytes; {LONGEST} is the most: send fewer tokens in one request")
    return raw


def decode(raw: bytes) -> Message:
    """The message in `raw`; InputError, with the first bytes, when it is no JSON object of bounded length."""
    try:
        if len(raw) > LONGEST:
            raise ValueError
        message = json.loads(raw)
        if not isinstance(message, dict):
            raise ValueError
    except (ValueError, RecursionError):  # wrong UTF-8 is a ValueError; deep nesting is not
        raise InputError(f"{len(raw)} bytes that are no message: {raw[:40]!r}") from None
    return message


def whole(message: Message, name: str, least: int = 0) -> int:
    """A field that has to be a whole number of at least `least`."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**53:
        raise InputError(f"a message with {name} = {value!r}: a whole number of at least {least} was due")
    return value


def seconds(message: Message, name: str) -> float:
    """A field that has to be a finite number."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        raise InputError(f"a message with {name} = {value!r}: a number was due")
    return float(value)


def report(done: Finished) -> Message:
    """A result as a message."""
    return asdict(done) | {"kind": "finished"}


def finished(message: Message) -> Finished:
    """The result in a message; InputError unless it is one, a time for every token."""
    t = message.get("times")
    tokens, redone = _list(message, "tokens"), whole(message, "redone")
    if not isinstance(t, dict) or len(_list(t, "tokens")) != len(tokens):
        raise InputError("a result without a time for each of its tokens")
    names = ("arrived", "prefill_start", "prefill_end", "transfer_end")
    at_tokens = tuple(seconds({"time": at}, "time") for at in t["tokens"])
    times = Times(**{name: seconds(t, name) for name in names}, tokens=at_tokens)
    return Finished(whole(message, "id"), tuple(whole({"token": at}, "token") for at in tokens), times, redone)


def _list(message: Message, name: str) -> list[Any]:
    value = message.get(name)
    if not isinstance(value, list):
        raise InputError(f"a message with {name} = {value!r}: a list was due")
    return value


class ClientGone(Exception):
    """Nobody reads what a side reports any more."""


@dataclass
class Lines:
    """One end of a pair of pipes, or of standard input and output: one JSON object a line."""

    reading: int
    writing: int
    patience_s: float = 60.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, **message: Any) -> None:
        """Write one line; ClientGone when the other end is closed, or has not read for `patience_s`."""
        line, end = memoryview(encode(message) + b"\n"), time.monotonic() + self.patience_s
        with self._lock:
            while line:
                # A pipe that select calls writable takes PIPE_BUF bytes without blocking.
                if not select.select([], [self.writing], [], max(0.0, end - time.monotonic()))[1]:
                    raise ClientGone(f"nothing was read for {self.patience_s:g} s")
                try:
                    line = line[os.write(self.writing, line[: select.PIPE_BUF]) :]
                except OSError as error:
                    raise ClientGone(str(error)) from error

    def lines(self) -> Iterator[bytes]:
        """Lines as they come, without their ends; ends when the other end is closed.

        A line longer than a message may be comes in pieces, none of which is a message.
        """
        rest = b""
        while chunk := os.read(self.reading, 65536):
            *whole_lines, rest = (rest + chunk).split(b"\n")
            yield from whole_lines
            if len(rest) > LONGEST:
                yield rest
                rest = b""
        if rest:
            yield rest

    def listen(self, heard: Callable[[bytes | None], None]) -> threading.Thread:
        """Hand every line to `heard`, in a thread; None after the last one."""

        def run() -> None:
            try:
                for line in self.lines():
                    heard(line)
            except OSError:  # closed under us: that is an end, too
                pass
            heard(None)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread
