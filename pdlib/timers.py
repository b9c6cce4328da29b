"""measure(): warm-up at the measured shapes, synchronise on both sides, arms interleaved, every sample kept."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from pdlib.devices import Device
from pdlib.spec import InputError, whole_numbers

try:
    import resource
except ImportError:  # Windows has no resource usage of this kind: the columns stay empty
    resource = None  # type: ignore[assignment]

Action = Callable[[], object]


def _nothing() -> None:
    """For an arm or step that needs no preparation."""


@dataclass(frozen=True)
class Step:
    """One timed phase of an arm, on the device to synchronise with; `before` runs untimed just before it."""

    phase: str
    run: Action
    device: Device
    before: Action = _nothing


@dataclass(frozen=True)
class Arm:
    """What is compared: `prepare`, untimed (rewind a cache), then the steps in order, each timed alone."""

    name: str
    steps: Sequence[Step]
    prepare: Action = _nothing


@dataclass(frozen=True)
class Sample:
    """One timing of one phase. `order` is the arm's place in the whole run, warm-up not counted."""

    arm: str
    phase: str
    repeat: int
    order: int
    seconds: float
    page_faults: int | None  # minor faults of the process; None where the OS does not tell
    peak_bytes: int | None  # highest resident (CPU) or allocated (CUDA) memory during the step; None where unknown


def measure(
    arms: Sequence[Arm],
    repeats: int,
    seed: int = 0,
    warm_up: int = 1,
    shuffle: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Sample]:
    """Time every arm `repeats` times, in an order shuffled anew each repeat by `seed`.

    Before anything is timed every arm runs `warm_up` times, at the shapes that are measured. All samples are
    returned, none dropped; `clock` gives seconds.
    """
    whole_numbers(repeats=repeats)
    if len({arm.name for arm in arms}) != len(arms) or not arms:
        raise InputError(f"arms need names, each its own: {[arm.name for arm in arms]}")
    for arm in arms:
        for _ in range(warm_up):
            arm.prepare()
            for step in arm.steps:
                step.before()
                step.run()
                step.device.synchronize()
    generator, samples, order = random.Random(seed), [], 0
    for repeat in range(repeats):
        for arm in generator.sample(list(arms), len(arms)) if shuffle else arms:
            arm.prepare()
            for step in arm.steps:
                samples.append(_time(arm.name, step, repeat, order, clock))
            order += 1
    return samples


def _time(arm: str, step: Step, repeat: int, order: int, clock: Callable[[], float]) -> Sample:
    step.before()
    from_here = _reset_peak(step.device)
    faults = _page_faults()
    step.device.synchronize()  # what was queued before is not ours
    start = clock()
    step.run()
    step.device.synchronize()  # what we queued is
    seconds = clock() - start
    after = _page_faults()
    spent = None if faults is None or after is None else after - faults
    return Sample(arm, step.phase, repeat, order, seconds, spent, _peak(step.device) if from_here else None)


def _page_faults() -> int | None:
    return None if resource is None else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _reset_peak(device: Device) -> bool:
    """Start a new peak; False where that cannot be done: what `_peak` reads would be an older step's."""
    if device.torch_name.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device.torch)
        return True
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
            file.write("5")  # proc(5): reset the peak resident set size
    except OSError:
        return False  # not Linux, or a container that may not write here
    return device.is_cpu  # the process's memory is not another accelerator's


def _peak(device: Device) -> int | None:
    if device.torch_name.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device.torch)
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        return None
