"""A workload with P here and D there: caches, arms to time, and rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pdlib import baseline, cost, kv_cache, results
from pdlib.decode import decode
from pdlib.devices import machine_name
from pdlib.kv_cache import KVCache
from pdlib.kv_transfer import transfer
from pdlib.models import Model
from pdlib.prefill import prefill
from pdlib.spec import Placement, Workload
from pdlib.timers import Arm, Sample, Step


@dataclass(frozen=True)
class Case:
    """An arm with what its rows have to say. `timed_steps` of the workload's decode steps are run and timed.

    They are run around the middle of the decode, where a step costs the mean: its time grows linearly with the
    context. The whole decode is then seconds · requests · (new_tokens − 1) / tokens.
    """

    arm: Arm
    workload: Workload
    timed_steps: int
    labels: dict[str, str] = field(default_factory=dict)  # experiment, kernel, scenario, placement


class Runner:
    """Caches of one pair of models, shared by all workloads: one for P, one for D (the same when colocated)."""

    def __init__(self, p: Model, d: Model, requests: int, prompt_tokens: int, capacity: int) -> None:
        self.p, self.d = p, d
        self.separated = p.device != d.device
        self.d_cache = d.new_cache(requests, capacity)
        self.p_cache = p.new_cache(requests, prompt_tokens) if self.separated else self.d_cache

    def case(self, workload: Workload, placement: Placement, labels: dict[str, str], timed_steps: int) -> Case:
        """Prefill on P, hand over if D is elsewhere, decode on D; `timed_steps` decode steps are timed."""
        workload.check_fits(self.p.spec)
        steps = min(timed_steps, workload.decode_steps)
        prompts = self.p.prompt(workload.requests, workload.prompt_tokens)
        first: list[Tensor] = []

        def run_prefill() -> None:
            self.p_cache.rewind()
            first[:] = [prefill(self.p, prompts, self.p_cache).argmax(dim=-1)]

        def run_transfer() -> None:
            transfer(self.p_cache, self.d_cache)
            first[:] = [first[0].to(self.d.device.torch)]
            self.d.device.synchronize()  # the step waits for P alone, and it is D that receives

        def skip_to_middle() -> None:  # what lies between is zeros or an older repeat: the same work
            self.d_cache.rewind(middle(workload, steps))

        def run_decode() -> None:
            decode(self.d, first[0], self.d_cache, steps)

        hand_over = [Step("transfer", run_transfer, self.p.device)] if self.separated else []
        after = [Step("decode", run_decode, self.d.device, skip_to_middle)] if steps else []
        arm = Arm(
            f"{placement.name} {workload} {steps} steps",
            [Step("prefill", run_prefill, self.p.device), *hand_over, *after],
        )
        return Case(arm, workload, steps, labels | {"placement": placement.name})


def middle(workload: Workload, steps: int) -> int:
    """Filled positions at which `steps` decode steps see the workload's mean context."""
    return workload.prompt_tokens + (workload.decode_steps - steps) // 2


def article_case(model: Model, workload: Workload, labels: dict[str, str], timed_steps: int) -> Case:
    """The article's loop on one device, its decode timed around the middle like pdlib's."""
    workload.check_fits(model.spec)
    steps = min(timed_steps, workload.decode_steps)
    prompts = model.prompt(workload.requests, workload.prompt_tokens)
    started: list[baseline.Started] = []

    def skip_to_middle() -> None:
        kv_cache.lengthen_growing(started[0].cache, middle(workload, steps))

    arm = Arm(
        f"article {workload}",
        [
            Step("prefill", lambda: started.append(baseline.prefill(model, prompts)), model.device),
            Step("decode", lambda: baseline.decode(model, started[0], steps), model.device, skip_to_middle),
        ],
        prepare=started.clear,
    )
    return Case(arm, workload, steps, labels | {"kernel": "article"})


def filled(model: Model, requests: int, context: int, room: int) -> KVCache:
    """A cache with `context` random positions a request and `room` more: decode's time does not ask which."""
    cache = model.new_cache(requests, context + room)
    generator = torch.Generator(device=cache.data.device).manual_seed(0)
    cache.data.normal_(generator=generator)
    cache.rewind(context)
    return cache


def columns(model: Model, sample: Sample) -> dict[str, Any]:
    """What a row says of the model it ran on and of the sample it is."""
    return {
        "machine": machine_name(),
        "model": model.spec.name,
        "weights": model.weights,
        "dtype": model.dtype,
        "device": model.device.name,
        "phase": sample.phase,
        "repeat": sample.repeat,
        "order": sample.order,
        "seconds": sample.seconds,
        "page_faults": sample.page_faults,
        "peak_bytes": sample.peak_bytes,
    }


def to_rows(
    samples: Iterable[Sample], cases: Sequence[Case], model: Model, devices: dict[str, str]
) -> list[dict[str, Any]]:
    """Samples as rows of the results schema; `devices` names the device of each phase."""
    by_name, rows = {case.arm.name: case for case in cases}, []
    for sample in samples:
        case = by_name[sample.arm]
        work, steps = case.workload, case.timed_steps
        said: dict[str, Any] = {
            "kernel": "pdlib",
            **columns(model, sample),
            "device": devices[sample.phase],
            **case.labels,
        }
        rows.append(
            results.row(
                requests=work.requests,
                prompt_tokens=work.prompt_tokens,
                new_tokens=work.new_tokens,
                tokens=work.requests * (steps if sample.phase == "decode" else work.prompt_tokens),
                bytes=_bytes(sample.phase, model, work, steps),
                **said,
            )
        )
    return rows


def _bytes(phase: str, model: Model, work: Workload, steps: int) -> int:
    """Bytes that the timed part has to move at least: the KV cache, or what `cost` says of the phase."""
    if phase == "transfer":
        return work.requests * work.prompt_tokens * cost.kv_bytes_per_token(model.spec, model.dtype)
    if phase == "prefill":
        return int(cost.prefill(model.spec, work.requests, work.prompt_tokens, model.dtype).bytes)
    start = middle(work, steps)
    return int(cost.decode(model.spec, work.requests, start, steps, model.dtype).bytes)
