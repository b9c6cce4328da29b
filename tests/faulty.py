"""Sides of a pair with something wrong with them, run in the place of `workers.serving.serve`.

Every fault is put into one child process from here: the package knows nothing of it.
"""

import os
import signal
import socket
import time
from dataclasses import replace

import torch
import torch.distributed as dist

from pdlib import kv_transfer
from pdlib.workers import decode_side, handover, serving
from pdlib.workers.link import Link
from pdlib.workers.meeting import Meeting


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def damaged(tensor):
    """The tensor with one bit flipped, the highest of an exponent: a number becomes huge or not a number."""
    flipped = tensor.clone()
    flipped.view(-1).view(torch.uint8)[3] ^= 0x40
    return flipped


# children: each puts one fault into its own process, then is the side itself


class OnTheWay:
    """Knows in P's process which request is handed over, and which of its messages this is.

    `begin(number)` is called before a hand-over, `end(number)` after it, `part(number, try, count, tensor)` for
    every tensor that leaves since prefill began; what `part` returns leaves in its place.
    """

    def __init__(self, begin=None, end=None, part=None):
        send, fill, isend = handover.Sender.send, handover.Sender.prefill, dist.isend
        self.now, self.tries, self.count, self.filling = -1, {}, 0, False

        def faulty_send(sender, link, number, prompt):
            self.now, self.count, self.filling = number, 0, False
            self.tries[number] = self.tries.get(number, 0) + 1
            if begin:
                begin(number)
            sent = send(sender, link, number, prompt)
            if end:
                end(number)
            return sent

        def faulty_fill(sender, prompt):
            self.filling = True
            return fill(sender, prompt)

        def faulty_isend(tensor, dst=None, group=None, tag=0):
            if part and self.filling and group is None:  # messages have a group of their own
                self.count += 1
                tensor = part(self.now, self.tries[self.now], self.count, tensor)
            return isend(tensor, dst, group, tag)

        handover.Sender.send, handover.Sender.prefill, dist.isend = faulty_send, faulty_fill, faulty_isend


def p_dies(when, number, role, settings, client):
    """P kills itself at request `number`: before its hand-over, in the middle, after it, or when it has started."""

    def begin(at):
        if at == number:
            time.sleep(0.3)  # what was told before has left
            if when == "before":
                die()

    def end(at):
        if at == number and when == "after":
            die()

    def part(at, _, count, tensor):
        if at == number and count == 3 and when == "middle":
            die()
        return tensor

    if when == "started":
        tell = Link.tell

        def faulty_tell(self, kind, **fields):
            tell(self, kind, **fields)
            if kind == "start" and fields["id"] == number:
                time.sleep(0.3)  # so that it is at D
                die()

        Link.tell = faulty_tell
    OnTheWay(begin, end, part)
    return serving.serve(role, settings, client)


def d_dies(when, number, role, settings, client):
    """D kills itself at the request that is the `number`-th to come: before, in the middle of, after its transfer."""
    receive, irecv, step = handover.Door._from_network, dist.irecv, decode_side.DecodeSide._step
    state = {"come": 0, "parts": 0, "steps": 0}

    def faulty_receive(self, *rest):
        state["come"] += 1
        if state["come"] == number and when == "before":
            die()
        receive(self, *rest)

    def faulty_irecv(tensor, src=None, group=None, tag=0):
        if group is None and state["come"] == number and when == "middle":
            state["parts"] += 1
            if state["parts"] == 4:
                die()
        return irecv(tensor, src, group, tag)

    def faulty_step(self):
        step(self)
        state["steps"] += state["come"] >= number and when == "after"
        if state["steps"] == 3:
            die()

    handover.Door._from_network, dist.irecv, decode_side.DecodeSide._step = faulty_receive, faulty_irecv, faulty_step
    return serving.serve(role, settings, client)


def p_flips(times, role, settings, client):
    """P's first part of request i arrives damaged in its first `times[i]` tries."""

    def part(at, attempt, count, tensor):
        return damaged(tensor) if count == 1 and attempt <= times.get(at, 0) else tensor

    OnTheWay(part=part)
    return serving.serve(role, settings, client)


def p_flips_memory(times, role, settings, client):
    """The same in shared memory."""
    way, share = OnTheWay(), kv_transfer.share

    def faulty_share(cache, manifest, segment, capacity):
        sums = share(cache, manifest, segment, capacity)
        if way.tries[way.now] <= times.get(way.now, 0):
            page = segment.tensor((4,), torch.uint8)
            page.copy_(damaged(page))
        return sums

    kv_transfer.share = faulty_share
    return serving.serve(role, settings, client)


def p_truncates(number, role, settings, client):
    """Half of a part is missing in the first try of one request."""

    def part(at, attempt, count, tensor):
        return tensor[: len(tensor) // 2].clone() if (at, attempt, count) == (number, 1, 1) else tensor

    OnTheWay(part=part)
    return serving.serve(role, settings, client)


def p_stalls(number, pause_s, role, settings, client):
    """P stops sending in the middle of one request, for longer than a transfer may pause."""

    def part(at, attempt, count, tensor):
        if (at, attempt, count) == (number, 1, 3):
            time.sleep(pause_s)
        return tensor

    OnTheWay(part=part)
    return serving.serve(role, settings, client)


def p_lies(changes, role, settings, client):
    """The manifest of request i says something else: `changes[i]` are its fields, or the bytes that go instead."""
    way, make = OnTheWay(), handover.manifest_of

    def lie(*rest, **more):
        manifest, change = make(*rest, **more), changes.get(way.now)
        if isinstance(change, bytes):
            object.__setattr__(manifest, "to_json", lambda: change)
        elif change and "model" in change:
            return replace(manifest, model=replace(manifest.model, **change["model"]))
        elif change:
            return replace(manifest, **change)
        return manifest

    handover.manifest_of = lie
    return serving.serve(role, settings, client)


def says(kind, raw, role, settings, client):
    """A side that sends `raw` instead of its first message of a kind."""
    tell, said = Link.tell, []

    def faulty_tell(self, word, **fields):
        if word == kind and not said:
            said.append(word)
            self._outbox.put(raw)
        else:
            tell(self, word, **fields)

    Link.tell = faulty_tell
    return serving.serve(role, settings, client)


def d_after_garbage(hellos, role, settings, client):
    """At P's meeting point: connections that say nothing of ours, hellos that are none, then a D that is one."""
    for raw in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100):
        with socket.create_connection((settings.address, settings.port)) as stranger:
            stranger.sendall(raw)
    for raw in hellos:
        false = Meeting("d", settings, lambda: False)
        false._open()
        ticket = false.store.add("tickets", 1)
        false.store.set(f"hello/d/{ticket}", raw)
        while not false.store.check([f"hello/p/{ticket}"]):
            time.sleep(0.01)
        client.tell(kind="failed", id=-1, reason=false.store.get(f"hello/p/{ticket}").decode(), doubt=False)
    return serving.serve(role, settings, client)


def other(changes, role, settings, client):
    """A side started with other settings than its peer."""
    return serving.serve(role, replace(settings, **changes), client)


def never_comes(role, settings, client):
    """A side that is there and does nothing."""
    time.sleep(60)
    return 0


def slow(pause_s, role, settings, client):
    """A D whose every step takes so long."""
    step = decode_side.DecodeSide._step

    def slow_step(self):
        time.sleep(pause_s)
        step(self)

    decode_side.DecodeSide._step = slow_step
    return serving.serve(role, settings, client)


def p_chaos(faults, role, settings, client):
    """P with several faults: `faults[i]` is what happens to request i."""

    def begin(number):
        if faults.get(number) == "P killed":
            die()

    def part(at, attempt, count, tensor):
        fault = faults.get(at)
        if count == 1 and (fault == "flipped twice" or (fault == "flipped" and attempt == 1)):
            return damaged(tensor)
        if count == 1 and fault == "truncated" and attempt == 1:
            return tensor[: len(tensor) // 2].clone()
        return tensor

    OnTheWay(begin=begin, part=part)
    return serving.serve(role, settings, client)


def d_chaos(faults, role, settings, client):
    """D that dies when a request comes for which `faults` says so."""
    receive = handover.Door._from_network

    def faulty_receive(self, message, *rest):
        if faults.get(message["id"]) == "D killed":
            die()
        receive(self, message, *rest)

    handover.Door._from_network = faulty_receive
    return serving.serve(role, settings, client)
