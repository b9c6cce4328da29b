"""One process of a probe: `python -m pdlib.probe.side p|d <settings as JSON>`. Started by `pdlib.probe.Pair`."""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from pdlib import devices, kv_transfer, models
from pdlib.decode import decode
from pdlib.kv_cache import KVCache
from pdlib.prefill import prefill

P, D = 0, 1  # ranks
TOKEN_TAG, TEXT_TAG = 701, 702  # of the first tokens and of a text: apart from the tags of transfers
PATIENCE_S = 100.0  # D waits for the first part while P's prefill runs
clock = time.perf_counter


class Side:
    """What P and D share: a model on a device, caches that stay, and the process group of two."""

    def __init__(self, rank: int, settings: dict[str, Any]) -> None:
        self.device = devices.parse(settings["device"])
        torch.set_num_threads(self.device.threads or 1)
        self.model = models.load(settings["model"], self.device, settings["dtype"], settings["seed"])
        self.caches: dict[tuple[int, int], KVCache] = {}
        self.segments: dict[Any, kv_transfer.Segment] = {}
        os.environ["GLOO_SOCKET_IFNAME"] = settings["interface"]
        store = dist.FileStore(settings["store"], 2)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=PATIENCE_S)
        )

    def cache(self, requests: int, capacity: int) -> KVCache:
        """The cache of this size; of other sizes none is kept, so that memory holds one."""
        if (requests, capacity) not in self.caches:
            self.caches.clear()
            self.caches[requests, capacity] = self.model.new_cache(requests, capacity)
        return self.caches[requests, capacity]

    def job(self, requests: int, prompt_tokens: int, steps: int, skip: int) -> dict[str, float]:
        """The whole job here: seconds of prefill, and of `steps` decode steps `skip` steps after it."""
        cache = self.cache(requests, prompt_tokens + skip + steps)
        cache.rewind()
        tokens = self.model.prompt(requests, prompt_tokens)
        start = self.now()
        first = prefill(self.model, tokens, cache).argmax(dim=-1)
        middle = self.now()
        cache.rewind(prompt_tokens + skip)
        again = self.now()
        if steps:
            decode(self.model, first, cache, steps)
        return {"prefill_s": middle - start, "decode_s": self.now() - again}

    def now(self) -> float:
        """The clock, when what was queued on the device is done."""
        self.device.synchronize()
        return clock()


class PSide(Side):
    def hand_over(
        self, requests: int, prompt_tokens: int, road: str, decode: bool, how: str, prefill: bool, checksums: bool
    ) -> dict[str, Any]:
        """See Pair.hand_over; returns P's half of Times."""
        cache = self.cache(requests, prompt_tokens)
        segment = self._segment(cache, requests, prompt_tokens + decode) if road == "memory" else None
        cache.rewind(0 if prefill else prompt_tokens)
        lengths = [prompt_tokens] * requests
        manifest = kv_transfer.manifest_of(self.model, cache, lengths=lengths, checksums=checksums)
        offered = self.now()
        kv_transfer.offer(manifest, D, timeout_s=PATIENCE_S)
        outgoing = kv_transfer.Outgoing(cache, manifest, D, timeout_s=PATIENCE_S) if segment is None else None
        ready: list[float] = []

        def on_layer(layer: int) -> None:
            ready.append(clock())
            if outgoing is not None and how == "layers":
                outgoing.on_layer(layer)

        start = end = self.now()
        first = torch.zeros(requests, dtype=torch.long)
        if prefill:
            cache.on_layer = on_layer
            first = self._prefill(cache, requests, prompt_tokens)
            cache.on_layer = None
            end = self.now()
        if outgoing is not None:
            outgoing.finish()
        else:
            assert segment is not None
            sums = kv_transfer.share(cache, manifest, segment, prompt_tokens + decode)
            _send_text(json.dumps(sums))
        if decode:
            dist.send(first.cpu(), D, tag=TOKEN_TAG)
        times = {"offered_s": offered, "prefill_start_s": start, "prefill_end_s": end, "left_s": clock()}
        return {**times, "bytes": manifest.bytes, "layers": ready}

    def _prefill(self, cache: KVCache, requests: int, prompt_tokens: int) -> torch.Tensor:
        return prefill(self.model, self.model.prompt(requests, prompt_tokens), cache).argmax(dim=-1)

    def _segment(self, cache: KVCache, requests: int, capacity: int) -> kv_transfer.Segment:
        """The pages for caches of this size, kept over repeats; says their name to `Pair`."""
        key = requests, capacity
        if key not in self.segments:
            manifest = kv_transfer.manifest_of(self.model, cache, lengths=[cache.capacity] * requests)
            self.segments[key] = kv_transfer.Segment.create(kv_transfer.segment_bytes(manifest, capacity))
        _say({"segment": self.segments[key].name})
        return self.segments[key]


class DSide(Side):
    def receive(self, requests: int, prompt_tokens: int, road: str, decode: bool, segment: str) -> dict[str, Any]:
        """Take what P offers; returns D's half of Times."""
        cache = self.cache(requests, prompt_tokens + 1)
        manifest = kv_transfer.await_offer(P, timeout_s=PATIENCE_S)
        manifest.check(self.model, cache if road == "network" else None)
        room = prompt_tokens + decode
        pages = self._attach(segment, kv_transfer.segment_bytes(manifest, room)) if segment else None
        kv_transfer.accept(P)
        parts: list[float] = []
        if pages is None:
            kv_transfer.receive(manifest, cache, P, timeout_s=PATIENCE_S, on_part=lambda _: parts.append(clock()))
        else:
            sums = json.loads(_receive_text())
            seen = kv_transfer.view(manifest, pages, room, sums)
            if self.device.is_cpu:
                cache = seen
            else:
                kv_transfer.transfer(seen, cache)
        usable = self.now()
        if decode:
            self._decode(cache, requests)
        return {"usable_s": usable, "first_token_s": self.now(), "parts": parts}

    def _decode(self, cache: KVCache, requests: int) -> None:
        first = torch.empty(requests, dtype=torch.long)
        dist.recv(first, P, tag=TOKEN_TAG)
        decode(self.model, first.to(self.device.torch), cache, 1)

    def _attach(self, name: str, nbytes: int) -> kv_transfer.Segment:
        if name not in self.segments:
            self.segments[name] = kv_transfer.Segment.attach(name, nbytes)
        return self.segments[name]


def _send_text(text: str) -> None:
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    dist.send(torch.tensor([len(raw)]), D, tag=TEXT_TAG)
    dist.send(raw, D, tag=TEXT_TAG)


def _receive_text() -> bytes:
    size = torch.empty(1, dtype=torch.long)
    dist.recv(size, P, tag=TEXT_TAG)
    raw = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(raw, P, tag=TEXT_TAG)
    return raw.numpy().tobytes()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main(side: str, settings: str) -> None:
    """Answer questions until the other end of standard input is closed."""
    process = PSide(P, json.loads(settings)) if side == "p" else DSide(D, json.loads(settings))
    _say({"ready": side})
    for line in sys.stdin:
        question = json.loads(line)
        _say(getattr(process, question.pop("do"))(**question))
    os._exit(0)  # nobody is asking any more: gloo's threads are not to be waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
