"""How P and D find each other: a TCPStore at P, one ticket a try of D, and a hello of each before any group is made.

D draws ticket n and lays down `hello/d/n`; P, serving the tickets in order, answers with `hello/p/n` or with a
refusal. Only then do both make the process group of that ticket. So a stranger's garbage or another model's D is
turned away while P goes on waiting, and a new D may join after an old one died. After P's death D knocks again.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from pdlib.spec import InputError
from pdlib.workers.messages import LONGEST, Settings, decode, encode

RANK = {"p": 0, "d": 1}
LOOK_S = 0.02
STORE_S = 2.0  # of one request to the store; D tries again as long as it may
GROUP_S = 5.0  # both sides are there and have said so: making the group takes milliseconds


class PeerLost(Exception):
    """The other side is gone, or cannot be understood: the text says what was seen."""


@dataclass(frozen=True)
class Hello:
    """What a side says of itself before the first byte: what has to agree, and what the other one plans with."""

    model: dict[str, Any]  # the fingerprint
    road: str
    capacity: int
    slots: int
    gpu: str  # host and GPU where the cache is on one that NCCL serves, else ""
    segment: str = ""  # P's shared memory: its name and size
    segment_bytes: int = 0

    @classmethod
    def read(cls, raw: bytes) -> Hello:
        """InputError unless `raw` is a hello, every field of its type."""
        message = decode(raw)
        try:
            hello = cls(**message)
        except TypeError:
            raise InputError(f"{raw[:80]!r} is no hello of a side of ours") from None
        numbers = (hello.capacity, hello.slots, hello.segment_bytes)
        texts = (hello.road, hello.gpu, hello.segment)
        right = all(type(n) is int and 0 <= n < 2**53 for n in numbers) and all(type(t) is str for t in texts)
        if not right or not isinstance(hello.model, dict):
            raise InputError(f"{raw[:80]!r} is no hello of a side of ours")
        return hello

    def check(self, other: Hello, me: str, you: str) -> None:
        """Raise InputError, with both sides named, unless caches can go from one to the other."""
        here, there = self.model, other.model
        differ = [k for k in here if k != "name" and here[k] != there.get(k)]  # a name may be a folder
        if differ:
            raise InputError(
                f"{me} has the model {here['name']}, {you} has {str(there.get('name'))[:100]}; they differ in "
                + ", ".join(f"{k} ({here[k]} / {str(there.get(k))[:40]})" for k in differ)
                + ": start both with the same model, weights and dtype"
            )
        if self.road != other.road:
            raise InputError(f"{me} hands over by {self.road}, {you} by {other.road}: start both with the same road")


class Meeting:
    """A side's end of the meeting point."""

    def __init__(self, role: str, settings: Settings, told_to_end: Callable[[], bool]) -> None:
        """P opens the meeting point; InputError, at once, where the address or port cannot be had.

        `told_to_end` is asked while a side waits: a signal ends the wait.
        """
        self.role, self.settings, self.told_to_end = role, settings, told_to_end
        self.port, self.ticket, self.turned_away = settings.port, 0, ""
        self.host = socket.gethostbyname(settings.address)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface(self.host))
        # Under torchrun its agent holds the store, a new attempt in a corner of its own.
        self.agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.corner = f"pdlib/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        if role == "p" and not self.agent:
            # The store would listen to every host; a socket that is bound already keeps it to this address.
            try:
                listening = socket.create_server((self.host, self.port))
            except OSError as error:
                wrong = os.strerror(error.errno or 0)
                raise InputError(
                    f"P cannot listen on {self.host} port {self.port} ({wrong}): end what listens there or set "
                    "MASTER_PORT to another one, the same on both sides; MASTER_ADDR has to be P's own address"
                ) from error
            self.port = listening.getsockname()[1]
            self._open(listening.detach())

    def _open(self, listening: int | None = None) -> None:
        """P's store on a socket that listens, or the way to it."""
        store = dist.TCPStore(
            self.host,
            self.port,
            is_master=listening is not None,
            timeout=timedelta(seconds=STORE_S),
            wait_for_workers=False,
            master_listen_fd=listening,
        )
        self.store = dist.PrefixStore(self.corner, store)

    def wait_for_d(self, hello: Hello, patience_s: float) -> Hello | None:
        """P: serve tickets until a D fits, and make the group with it; None when none came in time.

        With a patience of 0 s it only looks whether a D is waiting.
        """
        if self.agent and not self.ticket:
            self._open()
        end = time.monotonic() + patience_s
        while True:
            key = f"hello/d/{self.ticket + 1}"
            if not self.store.check([key]):
                if time.monotonic() >= end or self.told_to_end():
                    return None
                time.sleep(LOOK_S)
                continue
            self.ticket += 1
            answer = f"hello/p/{self.ticket}"
            try:
                theirs = Hello.read(self.store.get(key)[: LONGEST + 1])
                hello.check(theirs, "P", "D")
                self.store.set(answer, encode(vars(hello)).decode())
                self._group(hello, theirs)
                return theirs
            except InputError as error:
                self.turned_away = f"; one was turned away: {error}"
                self.store.set(answer, encode({"refused": str(error)}).decode())
            except RuntimeError as error:  # it went away before the group was made
                self.turned_away = f"; one left again: {first_line(error)}"

    def knock(self, hello: Hello, patience_s: float) -> Hello | None:
        """D: go to P's meeting point, draw a ticket and make the group; None when P does not come in time.

        InputError when P, or D itself, finds that the two do not fit.
        """
        end = time.monotonic() + patience_s
        while time.monotonic() < end and not self.told_to_end():
            try:
                # A look first: a store that cannot be reached is tried by torch with much noise, deaf to signals.
                with socket.create_connection((self.host, self.port), timeout=1.0):
                    pass
                self._open()
                self.ticket = self.store.add("tickets", 1)
                self.store.set(f"hello/d/{self.ticket}", encode(vars(hello)).decode())
                key = f"hello/p/{self.ticket}"
                while not self.store.check([key]):
                    if time.monotonic() >= end or self.told_to_end():
                        return None
                    time.sleep(LOOK_S)
                answer = self.store.get(key)
                refused = decode(answer).get("refused")
                if refused is not None:
                    raise InputError(f"P turned this D away: {str(refused)[:1000]}")
                theirs = Hello.read(answer)
                hello.check(theirs, "D", "P")
                self._group(hello, theirs)
                return theirs
            except (OSError, RuntimeError):  # not there yet, or gone again
                time.sleep(0.1)
        return None

    def _group(self, mine: Hello, theirs: Hello) -> None:
        """The process groups of this ticket, whose two members are P and D: the default one for caches, `talk`.

        Two, so that a message does not queue behind the bytes of a cache. NCCL, which knows no checksums, serves
        two GPUs, never one GPU twice.
        """
        if dist.is_initialized():
            dist.destroy_process_group()  # of the peer before
        apart = bool(mine.gpu and theirs.gpu and mine.gpu != theirs.gpu)
        nccl = apart and not self.settings.checksums and dist.is_nccl_available()
        patience = timedelta(seconds=GROUP_S)
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=dist.PrefixStore(f"group/{self.ticket}", self.store),
            rank=RANK[self.role],
            world_size=2,
            timeout=patience,
        )
        self.talk = dist.new_group([0, 1], timeout=patience, backend="gloo")


def interface(host: str) -> str:
    """The network interface of this machine on whose network `host` is: gloo listens there and nowhere else."""
    wanted = ipaddress.ip_address(host)
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET and one.netmask:
                if wanted in ipaddress.ip_interface(f"{one.address}/{one.netmask}").network:
                    return name
    raise InputError(
        f"no network of this machine holds {host}: set GLOO_SOCKET_IFNAME to the interface that leads there"
    )


def gpu_name(device: torch.device) -> str:
    """Which GPU of which host, for telling two from one; "" for anything that NCCL does not serve."""
    if device.type != "cuda":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def first_line(error: BaseException) -> str:
    """What an error of torch says, without the stack of C++ frames behind it."""
    return str(error).strip().split("\n")[0][:300]
