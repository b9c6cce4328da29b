"""The experiments of the notebooks, each one call: workloads in, rows out. Called by notebooks and `make record`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdlib.models import Model
from pdlib.placement import Case, Runner, article_case, to_rows
from pdlib.spec import Placement, Workload
from pdlib.timers import measure

Rows = list[dict[str, Any]]


def phases_at(
    model: Model, experiment: str, workloads: Sequence[Workload], timed_steps: int, repeats: int, seed: int
) -> Rows:
    """Prefill and decode of each workload with pdlib's kernels, arms interleaved."""
    cases = []
    for work in workloads:
        runner = Runner(model, model, work.requests, work.prompt_tokens, work.cache_tokens)
        labels = {"experiment": experiment}
        cases.append(runner.case(work, Placement("-", model.device.name, model.device.name), labels, timed_steps))
    return _measured(cases, model, repeats, seed)


def two_phases(model: Model, work: Workload, timed_steps: int, repeats: int, seed: int) -> Rows:
    """Article 001: its loop and pdlib's kernels on the same workload, interleaved."""
    labels = {"experiment": "phases"}
    runner = Runner(model, model, work.requests, work.prompt_tokens, work.cache_tokens)
    here = Placement("-", model.device.name, model.device.name)
    cases = [article_case(model, work, labels, timed_steps), runner.case(work, here, labels, timed_steps)]
    return _measured(cases, model, repeats, seed)


def extrapolation(model: Model, work: Workload, timed_steps: int, repeats: int, seed: int) -> Rows:
    """The same decode timed whole and by its middle steps: how far off the extrapolation is."""
    rows = []
    for steps in (work.decode_steps, timed_steps):
        rows += phases_at(model, "extrapolation", [work], steps, repeats, seed)
    return rows


def placements(
    fast: Model, slow: Model, names: Sequence[str], works: dict[str, Workload], timed_steps: int, repeats: int, seed: int
) -> Rows:
    """Article 000: each scenario on fast alone, P on fast and D on slow, and slow alone; arms interleaved.

    `names` are the three placements' names in that order. The caches of one scenario are freed before the next.
    """
    rows: Rows = []
    pairs = ((fast, fast), (fast, slow), (slow, slow))
    for scenario, work in works.items():
        cases, devices = [], {}
        for name, (p, d) in zip(names, pairs, strict=True):
            runner = Runner(p, d, work.requests, work.prompt_tokens, work.cache_tokens)
            labels = {"experiment": "placements", "scenario": scenario}
            case = runner.case(work, Placement(name, p.device.name, d.device.name), labels, timed_steps)
            cases.append(case)
            devices[case.arm.name] = {"prefill": p.device.name, "transfer": p.device.name, "decode": d.device.name}
        samples = measure([case.arm for case in cases], repeats, seed)
        for case in cases:
            mine = [sample for sample in samples if sample.arm == case.arm.name]
            rows += to_rows(mine, [case], fast, devices[case.arm.name])
    return rows


def _measured(cases: Sequence[Case], model: Model, repeats: int, seed: int) -> Rows:
    samples = measure([case.arm for case in cases], repeats, seed)
    name = model.device.name
    return to_rows(samples, cases, model, {"prefill": name, "transfer": name, "decode": name})

