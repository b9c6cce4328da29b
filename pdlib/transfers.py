"""The experiments of notebooks 03 and 08: what handing a KV cache over costs, how much of it hides, over which link.

Each is one call, sizes in, rows out, as in `experiments`, and is called through `lab`. P and D are two processes
(`probe`) except on the roads that need none. `p` and `d` name their devices; "auto" is the notebook's device where it
is an accelerator, with the CPU for D, and else half of the CPU's cores each, so that the two do not share one.
"""

from __future__ import annotations

import atexit
import contextlib
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pdlib import devices, hand_over, kv_transfer, namespaces, presets, probe
from pdlib.kv_cache import KVCache
from pdlib.spec import ModelSpec, Workload, one_of, whole_numbers
from pdlib.transfer_rows import Sheet, Size

if TYPE_CHECKING:
    from pdlib.experiments import Here

Rows = list[dict[str, Any]]
_kept: dict[tuple[Any, ...], probe.Pair] = {}  # at most one
HERE = namespaces.Hosts(namespaces.LOOPBACK, namespaces.LOOPBACK)


def kv_bytes(here: Here, shapes: Sequence[str], repeats: int, prompt_tokens: int = 16) -> Rows:
    """Bytes that travel for caches of real shapes, from device to device.

    A shape is a model of `presets`, a dtype and the devices of its tensor parallelism, "llama-2-70b float16 8"; each
    of these hands over the KV heads it holds. No weights are needed for that.
    """
    sheet = Sheet("kv_bytes", here.model, "cpu", "cpu")
    for shape in shapes:
        name, dtype, parallel = shape.split()
        one = _shard(presets.model(name), int(parallel), dtype, prompt_tokens)
        for repeat in range(repeats):
            start = time.perf_counter()
            moved = sum(kv_transfer.transfer(*one) for _ in range(int(parallel)))
            seconds = time.perf_counter() - start
            words = hand_over.kernel("device", devices=parallel)
            said = {"model": name, "dtype": dtype, "weights": "unknown", "repeat": repeat, "bytes": moved}
            sheet.add(words, (1, prompt_tokens), "transfer", seconds, **said)
    return sheet.rows


def _shard(model: ModelSpec, parallel: int, dtype: str, tokens: int) -> tuple[KVCache, KVCache]:
    """A filled cache as one of `parallel` devices has it, and an empty one: its share of the KV heads, at least 1."""
    own = replace(model, heads=model.heads // parallel, kv_heads=max(1, model.kv_heads // parallel))
    source, target = (KVCache(own, 1, tokens, "cpu", getattr(torch, dtype)) for _ in range(2))
    source.rewind(tokens)
    return source, target


def bandwidth(
    here: Here,
    sizes: Sequence[Sequence[int]],
    repeats: int,
    p: str = "auto",
    d: str = "auto",
    roads: Sequence[str] = tuple(hand_over.ROADS),
) -> Rows:
    """A filled cache of `sizes` (requests, prompt tokens) over every road, interleaved; whole, nothing else running.

    Shared memory also with checksums, device to device from CUDA also pinned. Timed from P's offer to the last byte
    usable at D.
    """
    for road in roads:
        one_of("road", road, hand_over.ROADS)
    arms = [(road, False, False) for road in roads]
    arms += [("memory", True, False)] * ("memory" in roads)
    arms += [("device", False, True)] * ("device" in roads and here.model.device.torch_name.startswith("cuda"))
    p, d = _sides(here, p, d)
    sheet = Sheet("bandwidth", here.model, p, d)
    with contextlib.ExitStack() as stack:
        pair = stack.enter_context(_pair(here, p, d)) if {"memory", "network"} & set(roads) else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pdlib-file-")))
        for requests, tokens in sizes:
            alone = _Alone(here, (requests, tokens), d, folder / "cache.safetensors")
            for repeat, (road, sums, pinned) in _shuffled(here, repeats, arms):
                if pair and road in ("memory", "network"):
                    times = pair.hand_over(requests, tokens, prefill=False, road=road, checksums=sums)
                    seconds, moved, where = times.usable_s - times.offered_s, times.bytes, sheet.between
                else:
                    seconds, moved, where = alone.move(road, pinned)
                if repeat >= 0:
                    words = hand_over.kernel(road, checksums=sums, pinned=pinned)
                    said = {"repeat": repeat, "bytes": moved, "device": where}
                    sheet.add(words, (requests, tokens), "transfer", seconds, **said)
    return sheet.rows


class _Alone:
    """The roads that need no second process: device to device, and a file, written and read."""

    def __init__(self, here: Here, size: Size, d: str, path: Path) -> None:
        self.model, self.path = here.model, path
        self.other = here.model.device if here.model.device.is_cpu else devices.parse(d)
        self.source = here.model.new_cache(*size)
        self.target = KVCache(here.model.spec, *size, self.other.torch, getattr(torch, here.model.dtype))
        self.source.rewind(size[1])
        self.fixed = kv_transfer.pinned(self.target) if here.model.device.torch_name.startswith("cuda") else None

    def move(self, road: str, pinned: bool) -> tuple[float, int, str]:
        """(seconds, bytes, devices) of one transfer."""
        self._wait()
        start = time.perf_counter()
        if road == "file":
            kv_transfer.save(self.path, self.model, self.source, checksums=False)
            kv_transfer.load(self.path, self.model, self.source)
        else:
            kv_transfer.transfer(self.source, self.fixed if pinned and self.fixed else self.target)
        self._wait()
        seconds, name = time.perf_counter() - start, self.model.device.name
        return seconds, self.source.filled_bytes, f"{name}->{name if road == 'file' else self.other.name}"

    def _wait(self) -> None:
        self.model.device.synchronize()
        self.other.synchronize()


def hidden(here: Here, requests: int, prompts: Sequence[int], repeats: int, p: str = "auto", d: str = "auto") -> Rows:
    """Each prompt length handed over whole and layer by layer over gloo, interleaved: both parts of both ways.

    part=alone and part=whole are the prefill and the transfer after it, with nothing beside either; part=streaming
    and part=exposed the prefill while it streams and what is left after its end.
    """
    p, d = _sides(here, p, d)
    sheet = Sheet("hidden", here.model, p, d)
    with _pair(here, p, d) as pair:
        for tokens in prompts:
            for repeat, how in _shuffled(here, repeats, ("whole", "layers")):
                times = pair.hand_over(requests, tokens, how)
                if repeat >= 0:
                    sheet.parts(times, how, (requests, tokens), repeat=repeat)
    return sheet.rows


def timeline(here: Here, requests: int, prompt_tokens: int, p: str = "auto", d: str = "auto") -> Rows:
    """When each layer was computed and each part arrived: one hand-over whole, one layer by layer, over gloo."""
    p, d = _sides(here, p, d)
    sheet = Sheet("timeline", here.model, p, d)
    with _pair(here, p, d) as pair:
        for how in ("whole", "layers"):
            for _ in range(2):  # the first is the warm-up
                times = pair.hand_over(requests, prompt_tokens, how)
            sheet.layers(times, how, (requests, prompt_tokens))
    return sheet.rows


def busy(
    here: Here,
    requests: int,
    prompt_tokens: int,
    new_tokens: int,
    timed_steps: int,
    repeats: int,
    p: str = "auto",
    d: str = "auto",
) -> Rows:
    """Claim 0.12: how long a batch takes P when it hands over synchronously, streaming, or does the whole job.

    A hand-over takes P until it is told that all has arrived. Of the whole job's decode `timed_steps` around the
    middle are timed.
    """
    work = Workload(requests, prompt_tokens, new_tokens)
    work.check_fits(here.model.spec)
    steps, size = min(timed_steps, work.decode_steps), (requests, prompt_tokens)
    p, d = _sides(here, p, d)
    sheet = Sheet("busy", here.model, p, d)
    with _pair(here, p, d) as pair:
        for repeat, kind in _shuffled(here, repeats, hand_over.HAND_OVERS):
            how = "layers" if kind == "streaming" else "whole"
            said: dict[str, Any] = {"repeat": repeat, "new_tokens": new_tokens}
            words = hand_over.kernel("network", how, checksums=True, hand_over=kind)
            if kind == "none":
                job = pair.job(*size, steps, skip=(work.decode_steps - steps) // 2)
                prefill, rest = job["prefill_s"], ("decode", job["decode_s"])
                said |= {"tokens": requests * steps}
            else:
                times = pair.hand_over(*size, how)
                prefill, rest = times.prefill_s, ("transfer", max(0.0, times.left_s - times.prefill_end_s))
            if repeat >= 0:
                sheet.add(words, size, "prefill", prefill, **said | {"tokens": requests * prompt_tokens})
                sheet.add(words, size, *rest, **said)
    return sheet.rows


def slow_link(
    here: Here, requests: int, prompt_tokens: int, small_tokens: int, links: Sequence[str], repeats: int
) -> Rows:
    """Start of prefill to D's first token over each of namespaces.LINKS, whole and layer by layer; and D all alone.

    P is the notebook's fast device, D its slow one. A further transfer of one request of `small_tokens` tells t0.
    Links that this machine cannot make are left out; without namespaces P and D meet on the loopback.
    """
    for name in links:
        one_of("link", name, namespaces.LINKS)
    p, d, size = here.model.device.name, here.slow.device.name, (requests, prompt_tokens)
    sheet = Sheet("slow_link", here.model, p, d)
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(namespaces.hosts())
            there = [name for name in links if _shaped(hosts, name)]
        except namespaces.Unavailable:
            hosts, there = HERE, ["loopback"]
        pair = stack.enter_context(_pair(here, p, d, hosts))
        arms = [*((link, how) for link in there for how in ("whole", "layers")), ("none", "none")]
        for repeat, (link, how) in _shuffled(here, repeats, arms):
            first = {"repeat": repeat, "scenario": link, "tokens": requests}
            if link == "none":
                job, own = pair.job(*size, 1, side="d"), {"device": d}
                until, words = job["prefill_s"] + job["decode_s"], "part=first-token"
                if repeat >= 0:
                    alone = {"repeat": repeat, "scenario": link, "device": d}
                    sheet.add("part=alone", size, "prefill", job["prefill_s"], **alone)
            else:
                _shaped(hosts, link)
                times, own = pair.hand_over(*size, how, decode=True), {"device": sheet.between}
                words = hand_over.kernel("network", how, checksums=True, part="first-token")
                until = times.first_token_s - times.prefill_start_s
                few = pair.hand_over(1, small_tokens, prefill=False) if how == "whole" else None
                if repeat >= 0:
                    sheet.parts(times, how, size, repeat=repeat, scenario=link)
                if repeat >= 0 and few:
                    whole = hand_over.kernel("network", how, checksums=True, part="whole")
                    said = {"repeat": repeat, "scenario": link, "bytes": few.bytes}
                    sheet.add(whole, (1, small_tokens), "transfer", few.exposed_s, **said)
            if repeat >= 0:
                sheet.add(words, size, "decode", until, **first | own)
    return sheet.rows


def _shaped(hosts: namespaces.Hosts, link: str) -> bool:
    """Make the hosts' link so; False where this machine cannot."""
    if link == "loopback":
        return True
    try:
        hosts.shape(namespaces.LINKS[link])
    except namespaces.Unavailable:
        return False
    return True


def _sides(here: Here, p: str, d: str) -> tuple[str, str]:
    """The devices' names, checked, with "auto" replaced."""
    half, own = f"cpu@{max(1, devices.CORES // 2)}", here.model.device
    named = (
        p if p != "auto" else half if own.is_cpu else own.name,
        d if d != "auto" else half if own.is_cpu else "cpu",
    )
    for name in named:
        devices.parse(name)
    return named


@contextlib.contextmanager
def _pair(here: Here, p: str, d: str, hosts: namespaces.Hosts = HERE) -> Iterator[probe.Pair]:
    """Two processes with the notebook's model. On this host they stay for the next experiment that asks for the same,
    and end with another one, an error, an interrupt, or this process."""
    asked = here.model.spec.name, here.model.dtype, here.seed, p, d, hosts.p, hosts.d
    if asked not in _kept:
        _end_kept()
        _kept[asked] = probe.Pair(*asked)
    try:
        yield _kept[asked]
    except BaseException:
        _end_kept()
        raise
    if hosts.names:
        _end_kept()  # before its network goes


@atexit.register
def _end_kept() -> None:
    while _kept:
        _kept.popitem()[1].close()


def _shuffled(here: Here, repeats: int, arms: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """(repeat, arm) of every arm, shuffled anew each repeat; repeat −1 is the warm-up at these shapes."""
    whole_numbers(repeats=repeats)
    for repeat in range(-1, repeats):
        for arm in random.Random(f"{here.seed} {repeat}").sample(list(arms), len(arms)):
            yield repeat, arm
