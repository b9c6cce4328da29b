"""The experiments of the notebooks, each one call: sizes in, rows out. Called through `lab` by notebooks and record.

A function's name is what its rows say in the column `experiment`. Those of KV transfers live in `transfers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdlib.calibrate import several
from pdlib.mistakes import measure_mistakes
from pdlib.models import Model
from pdlib.placement import Case, Runner, article_case, to_rows
from pdlib.puzzle import measure_puzzle
from pdlib.spec import InputError, Placement, Workload
from pdlib.timers import measure
from pdlib.transfers import bandwidth as bandwidth
from pdlib.transfers import busy as busy
from pdlib.transfers import hidden as hidden
from pdlib.transfers import kv_bytes as kv_bytes
from pdlib.transfers import slow_link as slow_link
from pdlib.transfers import timeline as timeline

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Here:
    """What is measured on: the model on the fast device, and on the slow one where there is a pair."""

    model: Model
    slow: Model
    seed: int

    @property
    def placements(self) -> tuple[str, str, str]:
        """Names of: both phases on the fast device, the split, both on the slow device."""
        devices = self.model.device, self.slow.device
        kinds = ("GPU", "CPU") if not devices[0].is_cpu and devices[1].is_cpu else ("fast", "slow")
        return f"PD-{kinds[0]}", f"P-{kinds[0]}/D-{kinds[1]}", f"PD-{kinds[1]}"


def roofline(here: Here, requests: Sequence[int], prompt_tokens: int, steps: int, repeats: int) -> Rows:
    """Prefill and decode of pdlib's kernels at several batch sizes."""
    works = [Workload(batch, prompt_tokens, steps + 1) for batch in requests]
    return _kernels(here, "roofline", works, steps, repeats)


def mistakes(here: Here, requests: int, prompt_tokens: int, steps: int, repeats: int) -> Rows:
    """Six classic mistakes, each beside the honest way."""
    return measure_mistakes(here.model, Workload(requests, prompt_tokens, steps + 1), repeats, here.seed)


def phases(here: Here, requests: int, prompt_tokens: int, new_tokens: int, timed_steps: int, repeats: int) -> Rows:
    """Article 001: its loop and pdlib's kernels on the same workload, interleaved."""
    work = Workload(requests, prompt_tokens, new_tokens)
    labels = {"experiment": "phases"}
    cases = [
        article_case(here.model, work, labels, timed_steps),
        _colocated(here.model, work, labels, timed_steps),
    ]
    return _measured(here, cases, repeats)


def extrapolation(
    here: Here, requests: int, prompt_tokens: int, new_tokens: int, timed_steps: int, repeats: int
) -> Rows:
    """The same decode timed whole and by its middle steps: how far off the extrapolation is."""
    work, labels = Workload(requests, prompt_tokens, new_tokens), {"experiment": "extrapolation"}
    if timed_steps >= work.decode_steps:
        raise InputError(f"{timed_steps} timed steps of {work.decode_steps} leave nothing to extrapolate; time fewer")
    cases = [
        _colocated(here.model, work, labels | {"scenario": name}, steps)
        for name, steps in (("whole", work.decode_steps), ("middle", timed_steps))
    ]
    return _measured(here, cases, repeats)


def by_batch(here: Here, requests: Sequence[int], prompt_tokens: int, steps: int, repeats: int) -> Rows:
    """Prefill and decode at several batch sizes around article 001's."""
    works = [Workload(batch, prompt_tokens, steps + 1) for batch in requests]
    return _kernels(here, "by_batch", works, steps, repeats)


def placements(
    here: Here, requests: int, scenarios: dict[str, Sequence[int]], timed_steps: int, repeats: int
) -> Rows:
    """Article 000: each scenario on fast alone, P on fast and D on slow, slow alone; arms interleaved.

    The caches of one scenario are freed before the next.
    """
    works = {name: Workload(requests, *lengths) for name, lengths in scenarios.items()}
    return [row for name, work in works.items() for row in _scenario(here, name, work, timed_steps, repeats)]


def _scenario(here: Here, scenario: str, work: Workload, timed_steps: int, repeats: int) -> Rows:
    """Rows of one scenario at all three placements; its caches live no longer than this call."""
    rows, cases, where = Rows(), [], {}
    labels = {"experiment": "placements", "scenario": scenario}
    pairs = ((here.model, here.model), (here.model, here.slow), (here.slow, here.slow))
    for name, (p, d) in zip(here.placements, pairs, strict=True):
        runner = Runner(p, d, work.requests, work.prompt_tokens, work.cache_tokens)
        case = runner.case(work, Placement(name, p.device.name, d.device.name), labels, timed_steps)
        cases.append(case)
        where[case.arm.name] = {"prefill": p.device.name, "transfer": p.device.name, "decode": d.device.name}
    for sample in measure([case.arm for case in cases], repeats, here.seed):
        rows += to_rows([sample], cases, here.model, where[sample.arm])
    return rows


def puzzle(here: Here, model: str, requests: int, context: int, steps: int, repeats: int) -> Rows:
    """Claim 0.13: the article's decode by logits kept × K/V layout × allocator × order, in fresh processes."""
    works = {"long": Workload(requests, context, steps + 1)}
    device = here.slow.device if here.slow.device.is_cpu and not here.model.device.is_cpu else here.model.device
    return measure_puzzle(model, here.model.dtype, device.name, works, steps, repeats, here.seed)


def calibration(here: Here, models: Sequence[str], repeats: int, limit_s: float) -> Rows:
    """Steps of a server at many shapes, one model after the other: what a latency model is fitted and held to.

    Disturbed shapes are timed again until `limit_s` seconds a model have passed.
    """
    return several(here.model, models, "full", repeats, here.seed, limit_s)


def conflict(here: Here, requests: Sequence[int], prompt_tokens: int, steps: int, repeats: int) -> Rows:
    """Prefill and decode at batch sizes from one to far beyond what a small machine is used with."""
    works = [Workload(batch, prompt_tokens, steps + 1) for batch in requests]
    return _kernels(here, "conflict", works, steps, repeats)


def _colocated(model: Model, work: Workload, labels: dict[str, str], timed_steps: int) -> Case:
    runner = Runner(model, model, work.requests, work.prompt_tokens, work.cache_tokens)
    return runner.case(work, Placement("-", model.device.name, model.device.name), labels, timed_steps)


def _kernels(here: Here, experiment: str, works: Sequence[Workload], steps: int, repeats: int) -> Rows:
    cases = [_colocated(here.model, work, {"experiment": experiment}, steps) for work in works]
    return _measured(here, cases, repeats)


def _measured(here: Here, cases: Sequence[Case], repeats: int) -> Rows:
    samples = measure([case.arm for case in cases], repeats, here.seed)
    name = here.model.device.name
    return to_rows(samples, cases, here.model, {"prefill": name, "transfer": name, "decode": name})
