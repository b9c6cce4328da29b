"""Claim 0.13: why does the same decode on the same CPU take longer in one arm of article 000 than in the other?

What can differ is the memory that prefill leaves behind and what the allocator does with it. So every sample
builds exactly that state, without computing it, and times the article's decode loop on it. Samples of one process
share its heap: children are fresh, run every arm once in a shuffled order, and end. Half of them keep glibc from
giving memory back to the system.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import multiprocessing
import random
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

from pdlib import baseline, devices, models, results
from pdlib.placement import columns
from pdlib.spec import InputError, ModelSpec, Workload, whole_numbers
from pdlib.timers import Arm, Sample, Step, measure

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # mallopt(3)
HABITS = {
    f"logits={'kept' if keep else 'dropped'} kv={'views' if views else 'contiguous'}": (keep, views)
    for keep, views in itertools.product((True, False), repeat=2)
}


def allocators() -> list[str]:
    """Allocator settings that can be compared here: mallopt is glibc's."""
    return ["default", "kept"] if sys.platform == "linux" else ["default"]


def measure_puzzle(
    model: str, dtype: str, device: str, works: dict[str, Workload], steps: int, repeats: int, seed: int
) -> list[dict[str, Any]]:
    """Decode times of the article's loop on `device`, by order × logits × K/V layout × allocator, as rows.

    One child process a repeat and allocator; in it every arm runs once, and its place is the row's `order`.
    Each work's prompt_tokens is the context at which `steps` decode steps are timed.
    """
    whole_numbers(steps=steps, repeats=repeats)
    if not devices.parse(device).is_cpu:
        raise InputError(f"the puzzle is about a CPU's memory; device {device!r} is none")
    _check_memory(models.sizes(model), dtype, device, works)
    jobs = list(itertools.product(works, range(repeats), allocators()))
    random.Random(seed).shuffle(jobs)
    # A server that has imported torch but never computed forks children in which nothing was allocated yet.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    context.set_forkserver_preload(["pdlib.puzzle", "transformers.models.gpt2.modeling_gpt2"])
    rows: list[dict[str, Any]] = []
    for scenario, repeat, allocator in jobs:
        job = (model, dtype, device, scenario, works[scenario], steps, allocator, repeat, seed)
        # An executor, not a Pool: a child that is killed (out of memory) raises instead of waiting for ever.
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            rows += pool.submit(_child, *job).result()
    return rows


def _check_memory(spec: ModelSpec, dtype: str, device: str, works: dict[str, Workload]) -> None:
    """Raise InputError unless the largest arm of every work fits the free memory: a child would be killed."""
    free = devices.parse(device).free_bytes()
    for name, work in works.items():
        needed = baseline.prefilled_bytes(spec, work.requests, work.prompt_tokens, dtype)
        if needed > free:
            raise InputError(
                f"{name}: caches and logits of {work.requests} × {work.prompt_tokens} positions of {spec.name} take "
                f"{needed / 1e9:.2f} GB, {free / 1e9:.2f} GB are free: at most "
                f"{int(free // (needed / work.requests))} requests fit"
            )


def _child(
    name: str,
    dtype: str,
    device: str,
    scenario: str,
    work: Workload,
    steps: int,
    allocator: str,
    repeat: int,
    seed: int,
) -> list[dict[str, Any]]:
    if allocator == "kept":
        libc = ctypes.CDLL(None)
        if not (libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)):
            raise InputError("this C library refuses mallopt; leave the allocator out")
    model = models.load(name, devices.parse(device), dtype, seed)
    arms = list(HABITS)
    random.Random(f"{seed} {allocator} {repeat} {scenario}").shuffle(arms)
    rows = []
    for order, arm in enumerate(arms):
        sample = replace(_run(model, work, steps, *HABITS[arm]), repeat=repeat, order=order)
        rows.append(_row(model, sample, scenario, work, steps, f"{arm} malloc={allocator}"))
        gc.collect()
    return rows


def _run(model: models.Model, work: Workload, steps: int, keep_logits: bool, kv_views: bool) -> Sample:
    """Build what prefill leaves behind, then time `steps` steps of the article's decode on it, after one untimed.

    The first step copies views and meets a cold start; the other 511 of the article do not.
    """
    started = baseline.as_if_prefilled(model, work.requests, work.prompt_tokens, keep_logits, kv_views)
    step = Step(
        "decode",
        lambda: baseline.decode(model, started, steps),
        model.device,
        before=lambda: baseline.decode(model, started, 1),
    )
    (sample,) = measure([Arm("decode", [step])], 1, warm_up=0)
    return sample


def _row(
    model: models.Model, sample: Sample, scenario: str, work: Workload, steps: int, kernel: str
) -> dict[str, Any]:
    return results.row(
        experiment="puzzle",
        kernel=kernel,
        scenario=scenario,
        requests=work.requests,
        prompt_tokens=work.prompt_tokens,
        new_tokens=steps + 1,
        **columns(model, sample),
    )
