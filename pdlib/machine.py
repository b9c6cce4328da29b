"""This machine without torch: its processor, the cores that are ours, and settings that change what is measured."""

from __future__ import annotations

import os
import platform

# Threads, kernels and allocators read these where they start.
SETTINGS = (
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "DNNL_", "ONEDNN_", "PYTORCH_", "TORCH_", "CUDA_"),
    *("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"),
)


def cores() -> int:
    """Cores this process may run on, at least 1: in a container with a cpuset fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """The processor as its maker calls it, where the system tells; else its architecture."""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def settings() -> dict[str, str]:
    """The environment's variables of SETTINGS that are set, by name."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
