"""Two hosts on one laptop: two network namespaces joined by a veth pair that `tc` makes as slow as a real link.

Linux only, as root, with iproute2. Each end is shaped for what it sends, by a token bucket (tc-tbf(8)), and loses
packets by netem (tc-netem(8)) where the kernel has it. A process started behind `Host.prefix` is on that host and
sees nothing but the link and its own loopback.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from pdlib.spec import InputError

PREFIX = "pdlib-"
DEVICE = "pdlib0"  # the link's name in both namespaces
NO_LINK = "there is the loopback, and two real hosts"


@dataclass(frozen=True)
class Host:
    """Where a process is started: the words before its command, its address and the interface it is on."""

    prefix: tuple[str, ...]
    address: str
    interface: str


@dataclass(frozen=True)
class Link:
    """What the hosts are joined by: a name for rows, bits a second in each direction (0: as it is), share lost."""

    name: str
    bits_per_s: float = 0.0
    loss: float = 0.0


LINKS = {
    "veth": Link("veth"),
    "10gbit": Link("10gbit", 10e9),
    "1gbit": Link("1gbit", 1e9),
    "1gbit loss=1%": Link("1gbit loss=1%", 1e9, 0.01),
}
LOOPBACK = Host((), "127.0.0.1", "lo0" if sys.platform == "darwin" else "lo")


class Unavailable(InputError):
    """This machine cannot make such hosts or such a link; says why."""


@dataclass(frozen=True)
class Hosts:
    """Two hosts, P's and D's, and the names of their namespaces (none: both are this one, joined by its loopback)."""

    p: Host
    d: Host
    names: tuple[str, ...] = ()

    def shape(self, link: Link) -> None:
        """Make both ends send as `link` does, in place of whatever they did before; Unavailable where it cannot be.

        The bucket holds a millisecond of traffic, at least 256 kB: a smaller one the kernel cannot time.
        """
        if not self.names:
            raise Unavailable(f"{link.name}: the loopback is not to be made slower, it is everybody's; {NO_LINK}")
        burst = max(256_000, int(link.bits_per_s / 8 / 1000))
        for name in self.names:
            root = ["tc", "-n", name, "qdisc", "replace", "dev", DEVICE]
            subprocess.run(
                ["tc", "-n", name, "qdisc", "del", "dev", DEVICE, "root"], capture_output=True, check=False
            )
            if link.bits_per_s:
                rate = ["rate", f"{link.bits_per_s:.0f}bit", "burst", f"{burst}b", "latency", "50ms"]
                _run(*root, "root", "handle", "1:", "tbf", *rate)
            if link.loss:
                lost = ["netem", "limit", "10000", "loss", f"{100 * link.loss:g}%"]
                _run(*root, *(["parent", "1:1"] if link.bits_per_s else ["root"]), *lost)


@contextmanager
def hosts() -> Iterator[Hosts]:
    """Two hosts joined by a veth pair, removed at the end whatever happens; Unavailable where it is not allowed.

    The caller ends the processes it started there first. Namespaces of callers that were killed are removed, too.
    """
    if sys.platform != "linux" or not (shutil.which("ip") and shutil.which("tc")):
        raise Unavailable(f"two hosts on one need Linux with iproute2 (ip, tc); {NO_LINK}")
    if os.geteuid() != 0:
        raise Unavailable(f"two hosts on one need root, for network namespaces; {NO_LINK}")
    sweep()
    names = tuple(f"{PREFIX}{side}-{os.getpid()}" for side in "pd")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        pair = ["type", "veth", "peer", "name", DEVICE, "netns", names[1]]
        _run("ip", "link", "add", DEVICE, "netns", names[0], *pair)
        made = []
        for at, name in enumerate(names, start=1):
            address = f"10.77.0.{at}"
            _run("ip", "-n", name, "addr", "add", f"{address}/30", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run("ip", "-n", name, "link", "set", device, "up")
            made.append(Host(("ip", "netns", "exec", name), address, DEVICE))
        yield Hosts(made[0], made[1], names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)  # absent if never made


def about(links: Sequence[str]) -> str:
    """What of `links` this machine can make, in a sentence or two, with the reason for what it cannot."""
    try:
        with hosts() as made:
            can, cannot = [], []
            for name in links:
                try:
                    made.shape(LINKS[name])
                    can.append(name)
                except Unavailable as error:
                    cannot.append(f"Not {name}: {error}.")
            return " ".join([f"Two network namespaces, joined by a veth pair: {', '.join(can)}.", *cannot])
    except Unavailable as error:
        return f"P and D meet on the loopback: {error}."


def why_not() -> str:
    """Why two hosts cannot be made here, '' when they can; found out by making them for a moment."""
    try:
        with hosts():
            return ""
    except Unavailable as error:
        return str(error)


def listed() -> list[str]:
    """Names of the namespaces of this module that there are now."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return re.findall(rf"^({PREFIX}[pd]-\d+)", done.stdout, re.M)


def sweep() -> list[str]:
    """Remove namespaces that a killed process left; returns their names."""
    left = [name for name in listed() if not _alive(int(name.rpartition("-")[2]))]
    for name in left:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return left


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise Unavailable(f"`{' '.join(command)}` is not possible here ({said}); {NO_LINK}")
