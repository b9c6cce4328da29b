"""Two real processes for the tests of a hand-over: rank 0 is P, rank 1 is D, gloo on loopback between them."""

import os
from pathlib import Path

import torch.distributed as dist
import torch.multiprocessing as multiprocessing

SHARED = Path("/dev/shm")


def both(p, d, folder, *arguments):
    """Run p(*arguments) in one process and d(*arguments) in another; an exception in either is raised here."""
    multiprocessing.spawn(_run, (p, d, f"{folder}/store-{p.__name__}", arguments), nprocs=2)


def _run(rank, p, d, store, arguments):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    (d if rank else p)(*arguments)
    dist.barrier()
    dist.destroy_process_group()


def segments():
    """Names of our shared memory that can be seen."""
    return sorted(path.name for path in SHARED.glob("pdlib-kv-*")) if SHARED.is_dir() else []
