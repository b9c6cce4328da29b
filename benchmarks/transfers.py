"""`make bench`: roads of a cache between two processes of one host, beside what they cannot beat, arms interleaved.

Beside shared memory stands one thread's memcpy, beside the network dist.send of one flat tensor of the same size.
A time runs from P's start to the last byte usable at D, on the system's monotonic clock, which both processes share.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from pdlib import cost, devices, kv_transfer, metrics, models
from pdlib.probe import Pair

P, D = 0, 1
Arm = Callable[[], None]


class Side:
    """P (rank 0) or D (rank 1): every arm is called on both, each does its half of it."""

    def __init__(self, rank: int, model: str, requests: int, prompt_tokens: int, room: int, folder: Path) -> None:
        self.rank, self.room, self.path = rank, prompt_tokens + room, folder / "cache.safetensors"
        self.model = models.load(model, devices.parse("cpu@1"))
        # P's cache holds the prompts, D's has room to decode: the sizes of a real pair
        self.cache = self.model.new_cache(requests, prompt_tokens if rank == P else self.room)
        if rank == P:
            self.cache.data.normal_()
            self.cache.rewind(prompt_tokens)
        self.manifests = {
            on: kv_transfer.manifest_of(self.model, self.cache, lengths=[prompt_tokens] * requests, checksums=on)
            for on in (False, True)
        }
        nbytes = kv_transfer.segment_bytes(self.manifests[True], self.room)
        self.flat = torch.ones(self.manifests[True].bytes // 4)
        self.second = torch.zeros_like(self.flat) if rank == P else self.flat
        name: list[str] = [""]
        if rank == P:
            self.segment = kv_transfer.Segment.create(nbytes)
            name = [self.segment.name]
        dist.broadcast_object_list(name, P)
        if rank == P:  # as a P has it that prefills where D will read
            self.inside = self.segment.new_cache(self.model, requests, self.room)
            self.inside.rewind(prompt_tokens)
        else:
            self.segment = kv_transfer.Segment.attach(name[0], nbytes)

    def memcpy(self) -> None:
        if self.rank == P:
            np.copyto(self.second.numpy(), self.flat.numpy())

    def memory(self, threads: int, checksums: bool) -> None:
        """Shared memory, D works on P's pages; P tells D when they are packed, with their checksums."""
        manifest = self.manifests[checksums]
        torch.set_num_threads(threads)
        if self.rank == P:
            _tell(kv_transfer.share(self.cache, manifest, self.segment, self.room))
        else:
            kv_transfer.view(manifest, self.segment, self.room, _told())
        torch.set_num_threads(1)

    def memory_in_place(self) -> None:
        """P has prefilled in the pages that D reads: nothing to pack, P only says so."""
        if self.rank == P:
            _tell(kv_transfer.share(self.inside, self.manifests[False], self.segment, self.room))
        else:
            kv_transfer.view(self.manifests[False], self.segment, self.room, _told())

    def memory_copied(self) -> None:
        """Shared memory, and a second copy into D's own cache."""
        if self.rank == P:
            _tell(kv_transfer.share(self.cache, self.manifests[False], self.segment, self.room))
        else:
            pages = kv_transfer.view(self.manifests[False], self.segment, self.room, _told())
            kv_transfer.transfer(pages, self.cache)

    def flat_send(self) -> None:
        dist.send(self.flat, D) if self.rank == P else dist.recv(self.flat, P)

    def network(self, checksums: bool) -> None:
        """The whole cache over gloo: offer, consent, parts, answer."""
        if self.rank == P:
            kv_transfer.offer(self.manifests[checksums], D)
            kv_transfer.Outgoing(self.cache, self.manifests[checksums], D).finish()
        else:
            manifest = kv_transfer.await_offer(P)
            manifest.check(self.model, self.cache)
            kv_transfer.accept(P)
            kv_transfer.receive(manifest, self.cache, P)

    def save(self) -> None:
        if self.rank == P:
            kv_transfer.save(self.path, self.model, self.cache, checksums=False)

    def load(self) -> None:
        if self.rank == D:
            kv_transfer.load(self.path, self.model, self.cache)

    def arms(self) -> dict[str, Arm]:
        """Every arm's half, in the order of the table."""
        return {
            "memcpy, one thread": self.memcpy,
            "memory": lambda: self.memory(1, False),
            "memory, P prefilled in it": self.memory_in_place,
            "memory, two threads pack": lambda: self.memory(2, False),
            "memory, checksums": lambda: self.memory(1, True),
            "memory, copied again by D": self.memory_copied,
            "gloo, dist.send of one tensor": self.flat_send,
            "gloo": lambda: self.network(False),
            "gloo, checksums": lambda: self.network(True),
            "safetensors, save": self.save,
            "safetensors, load": self.load,
        }


def _tell(checksums: list[str]) -> None:
    """P: the pages are packed; 8 bytes a checksum."""
    dist.send(torch.tensor([len(checksums)]), D)
    if checksums:
        dist.send(torch.tensor([int(text, 16) - 2**63 for text in checksums]), D)


def _told() -> list[str] | None:
    """D: the checksums that `_tell` sent, None without."""
    count = torch.empty(1, dtype=torch.long)
    dist.recv(count, P)
    if not int(count):
        return None
    numbers = torch.empty(int(count), dtype=torch.long)
    dist.recv(numbers, P)
    return [f"{n + 2**63:016x}" for n in numbers.tolist()]


def run(rank: int, store: str, asked: argparse.Namespace, into: str) -> None:
    """One process: all arms, shuffled anew each repeat, the same way on both sides; D writes the samples."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    side = Side(rank, asked.model, asked.requests, asked.prompt_tokens, asked.room, Path(store).parent)
    arms, order, rows = side.arms(), random.Random(asked.seed), []
    for repeat in range(-1, asked.repeats):  # one to warm up
        names = list(arms)
        for name in names if repeat < 0 else order.sample(names, len(names)):  # a file is saved before it is loaded
            dist.barrier()
            start = time.perf_counter()
            arms[name]()
            mine = torch.tensor([start, time.perf_counter()], dtype=torch.float64)
            both = [torch.empty_like(mine), torch.empty_like(mine)]
            dist.all_gather(both, mine)
            alone = {"memcpy, one thread": P, "safetensors, save": P}.get(name, D)  # whose end ends it
            begin = both[D if name == "safetensors, load" else P][0]
            if repeat >= 0:
                rows.append((name, repeat, float(both[alone][1] - begin)))
    if rank == D:
        pd.DataFrame(rows, columns=["arm", "repeat", "seconds"]).to_csv(into, index=False)
    side.segment.close()
    dist.barrier()
    dist.destroy_process_group()


def table(rows: pd.DataFrame, nbytes: int) -> pd.DataFrame:
    """GB/s of each arm, and its rate over that of the arm it stands beside (median [95 % interval])."""
    seconds = {str(name): group["seconds"] for name, group in rows.groupby("arm", sort=False)}
    beside = {"memory": "memcpy, one thread", "gloo": "gloo, dist.send of one tensor"}
    lines = []
    for name, values in seconds.items():
        middle, low, high = metrics.median_interval(nbytes / values / 1e9)
        kind = name.split(",")[0]
        other = kind if name.endswith("checksums") else beside.get(kind, name)
        ratio = metrics.ratio_interval(seconds[other], values)
        lines.append(
            {
                "road": name,
                "ms": f"{1e3 * values.median():.1f}",
                "GB/s": f"{middle:.2f} [{low:.2f}, {high:.2f}]",
                "beside": "" if other == name else other,
                "share of its rate": "" if other == name else "{:.0%} [{:.0%}, {:.0%}]".format(*ratio),
            }
        )
    return pd.DataFrame(lines)


def hidden(asked: argparse.Namespace) -> pd.DataFrame:
    """What streaming hides of a transfer, and what it costs the prefill: cpu@1 → cpu@1 over gloo, interleaved."""
    size = (asked.requests, asked.prompt_tokens)
    with Pair(asked.model, "float32", asked.seed, "cpu@1", "cpu@1") as pair:
        rounds = [
            (
                pair.hand_over(*size, how="whole"),
                pair.hand_over(*size, how="layers"),
                pair.hand_over(*size, how="layers", checksums=False),
                pair.hand_over(*size, prefill=False),
            )
            for _ in range(1 + asked.hidden_repeats)
        ]
    whole, streamed, bare, alone = zip(*rounds[1:], strict=True)  # the first one warms up
    transfer = np.array([t.usable_s - t.prefill_start_s for t in alone])
    share = 1 - np.array([t.exposed_s for t in streamed]) / np.median(transfer)
    slower = metrics.ratio_interval([t.prefill_s for t in streamed], [t.prefill_s for t in whole])
    return pd.DataFrame(
        [
            (
                "prefill alone, s",
                "{:.3f} [{:.3f}, {:.3f}]".format(*metrics.median_interval([t.prefill_s for t in whole])),
            ),
            ("whole transfer alone, s", "{:.4f} [{:.4f}, {:.4f}]".format(*metrics.median_interval(transfer))),
            ("exposed, whole after prefill, s", f"{np.median([t.exposed_s for t in whole]):.4f}"),
            ("exposed, layer by layer, s", f"{np.median([t.exposed_s for t in streamed]):.4f}"),
            ("the same without checksums, s", f"{np.median([t.exposed_s for t in bare]):.4f}"),
            ("share hidden by streaming", "{:.1%} [{:.1%}, {:.1%}]".format(*metrics.median_interval(share))),
            ("prefill while streaming ÷ alone", "{:.4f} [{:.4f}, {:.4f}]".format(*slower)),
        ],
        columns=["", "median [95 % interval]"],
    )


def main() -> None:
    """Run both comparisons and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transfers", description=__doc__)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--room", type=int, default=64, help="positions for D to decode into")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--hidden-repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if asked.repeats:
        with tempfile.TemporaryDirectory() as folder:
            into = f"{folder}/rows.csv"
            multiprocessing.spawn(run, (f"{folder}/store", asked, into), nprocs=2)
            rows = pd.read_csv(into)
        spec = models.load(asked.model, devices.parse("cpu@1")).spec
        nbytes = asked.requests * asked.prompt_tokens * cost.kv_bytes_per_token(spec)
        print(f"{asked.model}, {asked.requests} × {asked.prompt_tokens}: {nbytes / 1e6:.0f} MB")
        print(table(rows, nbytes).to_string(index=False))
    if asked.hidden_repeats:
        print(hidden(asked).to_string(index=False))


if __name__ == "__main__":
    main()
