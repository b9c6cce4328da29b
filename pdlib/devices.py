"""What is here: devices, synchronising them, their memory, their measured peaks, a fingerprint."""

from __future__ import annotations

import functools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pdlib.machine import cores, cpu_name, settings
from pdlib.ops import Linear, attend
from pdlib.spec import DTYPE_BYTES, DeviceSpec, InputError, one_of

try:
    import psutil
except ImportError:  # `make record` asks a GPU machine for torch, transformers and pandas only
    psutil = None

CORES = cores()


@dataclass(frozen=True)
class Device:
    """A place to compute: `cuda`, `cuda:1`, `mps`, `xpu`, `cpu`, or `cpu@N`, the CPU with N threads."""

    name: str
    torch_name: str
    threads: int  # CPU threads while it computes; 0 on an accelerator

    @property
    def torch(self) -> torch.device:
        return torch.device(self.torch_name)

    @property
    def is_cpu(self) -> bool:
        return self.torch_name == "cpu"

    def same_as(self, other: Device) -> bool:
        """Whether both names mean one device: `cuda` and `cuda:0`, `cpu` and `cpu@N` with all cores."""
        return (self.torch_name, self.threads) == (other.torch_name, other.threads)

    def synchronize(self) -> None:
        """Wait until everything queued on this device is done; a CPU never queues."""
        if not self.is_cpu:
            getattr(torch, self.torch.type).synchronize(*([] if self.torch_name == "mps" else [self.torch]))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Compute inside with this device's number of CPU threads."""
        before = torch.get_num_threads()
        if self.threads and self.threads != before:
            torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def free_bytes(self) -> int:
        """Memory that can still be allocated, in bytes: also what torch's caching allocator holds unused."""
        if self.torch.type in ("cuda", "xpu"):
            kind = getattr(torch, self.torch.type)
            if hasattr(kind, "mem_get_info"):  # XPU: not in every release
                unused = kind.memory_reserved(self.torch) - kind.memory_allocated(self.torch)
                return int(kind.mem_get_info(self.torch)[0] + unused)
        return _memory_bytes()[1]  # MPS shares the machine's memory


def present() -> list[str]:
    """Names of the devices of this machine, accelerators first."""
    names = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    names += ["mps"] if torch.backends.mps.is_available() else []
    names += ["xpu"] if hasattr(torch, "xpu") and torch.xpu.is_available() else []
    return [*names, "cpu"]


def parse(name: str) -> Device:
    """Read a device name; InputError says what was asked and what is here."""
    here = f"this machine has: {', '.join(present())}; cpu@N is the CPU with N threads, N = 1 … {CORES}"
    match = re.fullmatch(r"(cuda|mps|xpu|cpu)(?::(\d+))?(?:@(\d+))?", name) if isinstance(name, str) else None
    kind, index, threads = match.groups() if match else (None, None, None)
    if kind is None or (threads and kind != "cpu") or (index and kind != "cuda"):
        raise InputError(f"unknown device {name!r}; {here}")
    if kind == "cpu":
        count = int(threads) if threads else CORES
        if not 1 <= count <= CORES:
            raise InputError(f"device {name!r} asks for {count} threads; {here}")
        return Device(name, "cpu", count)
    full = f"{kind}:{index or 0}" if kind == "cuda" else kind
    if full not in present():
        raise InputError(f"device {name!r} is not here; {here}")
    return Device(name, full, 0)


def pick_pair(fast: str, slow: str) -> tuple[Device, Device]:
    """Devices for P and D: the names given, or, for "auto", an accelerator and the CPU, or a CPU and 1 thread.

    Two names of one device are refused; but with slow "auto" a CPU of one core is both, as `cpu` and `cpu@1`.
    """
    default = present()[0]
    fast_device = parse(default if fast == "auto" else fast)
    slow_device = parse(("cpu@1" if fast_device.is_cpu else "cpu") if slow == "auto" else slow)
    if fast_device.name == slow_device.name or (fast_device.same_as(slow_device) and slow != "auto"):
        names = " = ".join(dict.fromkeys((fast_device.name, slow_device.name)))
        raise InputError(f"fast and slow are both {names}; give two devices that differ")
    return fast_device, slow_device


def _best_rate(work: float, run: Callable[[], Any], device: Device, seconds: float = 0.25) -> float:
    """Highest work ÷ time of repeated calls within a time budget (≥ 3 calls), after one warm-up."""
    best, spent, calls = 0.0, 0.0, 0
    run()
    while spent < seconds or calls < 3:
        device.synchronize()
        start = time.perf_counter()
        run()
        device.synchronize()
        elapsed = time.perf_counter() - start
        best, spent, calls = max(best, work / elapsed), spent + elapsed, calls + 1
    return best


def measure_peaks(
    device: Device, dtype: str = "float32", known: DeviceSpec | None = None, megabytes: int = 256
) -> DeviceSpec:
    """Measured peaks: matrix product at two sizes, read (sum) and copy of `megabytes`; never below `known`.

    The best of all calls counts: a peak is what the device can do when nothing disturbs it.
    """
    one_of("dtype", dtype, DTYPE_BYTES)
    kind = getattr(torch, dtype)
    with torch.inference_mode(), device.active():
        flops = known.flops_per_s if known else 0.0
        for n in (1024, 2048) if device.is_cpu else (4096, 8192):
            x = torch.randn(n, n, device=device.torch, dtype=kind)
            flops = max(flops, _best_rate(2 * n**3, functools.partial(Linear(x, None), x), device))
        source = torch.ones(megabytes * 2**20 // 4, device=device.torch)
        target = torch.empty_like(source)
        read = _best_rate(source.nbytes, source.sum, device)
        copy = _best_rate(2 * source.nbytes, lambda: target.copy_(source), device)
    if known:
        read, copy = max(read, known.read_bytes_per_s), max(copy, known.copy_bytes_per_s)
    return DeviceSpec(device.name, flops, read, copy, f"measured, {dtype}")


def self_check(device: Device, dtype: str = "float32", tolerance: float | None = None) -> str:
    """Compare attention on `device` with the CPU in fp32, causal and one query, at awkward lengths.

    MPS has returned wrong results at lengths that are no multiple of 32. Returns a line with the largest
    difference; raises InputError with the length when it passes the tolerance (2e-3 fp32, 3e-2 half).
    """
    allowed = tolerance if tolerance is not None else (2e-3 if dtype == "float32" else 3e-2)
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for length in (31, 32, 33, 63, 64, 65):
        for queries in (length, 1):
            q = torch.randn(2, 4, queries, 64, generator=generator)
            k, v = torch.randn(2, 2, 4, length, 64, generator=generator)
            there = [t.to(device.torch, getattr(torch, dtype)) for t in (q, k, v)]
            expected = attend(q, k, v, None, queries > 1)
            given = attend(there[0], there[1], there[2], None, queries > 1)
            error = (given.float().cpu() - expected).abs().max().item()
            if not error <= allowed:
                raise InputError(
                    f"attention on {device.name} in {dtype} is off by {error:.2g} at length {length} "
                    f"(allowed {allowed}); choose float32 or another device"
                )
            worst = max(worst, error)
    return f"attention on {device.name} in {dtype}: at most {worst:.1e} from CPU float32"


def _memory_bytes() -> tuple[int, int]:
    """The machine's memory: all of it, and what is available (without psutil: all of it again)."""
    if psutil is not None:
        memory = psutil.virtual_memory()
        return memory.total, memory.available
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total


def fingerprint() -> dict[str, Any]:
    """What a number measured here depends on: processor, memory, system, versions, settings."""
    import transformers

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu_name(),
        "cores": CORES,
        "gpu": ", ".join(gpus) or next((n for n in present() if n in ("mps", "xpu")), "none"),
        "memory_bytes": _memory_bytes()[0],
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "settings": settings(),
    }


@functools.cache
def machine_name() -> str:
    """A short name for results/: the GPU, or the CPU and its cores, in lower case with dashes."""
    facts = fingerprint()
    label = facts["gpu"] if facts["gpu"] not in ("none", "mps", "xpu") else facts["cpu"]
    return f"{re.sub(r'[^a-z0-9]+', '-', label.lower()).strip('-')}-{facts['cores']}c"
