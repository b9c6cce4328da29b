"""Six classic mistakes of benchmarks, each beside the honest way of measuring the same thing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from pdlib import baseline, results
from pdlib.decode import decode, decode_step
from pdlib.models import Model
from pdlib.placement import columns, filled
from pdlib.prefill import prefill
from pdlib.spec import InputError, Workload
from pdlib.timers import Arm, Sample, Step, measure


@dataclass(frozen=True)
class Bench:
    """The workload on which all mistakes are made."""

    model: Model
    work: Workload
    repeats: int
    seed: int

    @property
    def prompts(self) -> Tensor:
        return self.model.prompt(self.work.requests, self.work.prompt_tokens)

    def step(self, phase: str, run: Callable[[], object], before: Callable[[], object] = lambda: None) -> Step:
        return Step(phase, run, self.model.device, before)

    def prefill_step(self) -> Step:
        """Prefill of the workload on a cache of its own."""
        prompts, cache = self.prompts, self.model.new_cache(self.work.requests, self.work.prompt_tokens)
        return self.step("prefill", lambda: prefill(self.model, prompts, cache), cache.rewind)


Report = tuple[str, Sample, Workload]  # "honest" or "mistaken", what it reports, and the work it did
Mistake = Callable[[Bench], list[Report]]


def no_warm_up(bench: Bench) -> list[Report]:
    """The first prefill at a shape, on untouched memory, against the second."""
    reports = []
    for repeat in range(bench.repeats):
        tokens = bench.prompts[:, : bench.work.prompt_tokens - repeat]  # no length has run before
        cache = bench.model.new_cache(*tokens.shape)
        run = _bound(prefill, bench.model, tokens, cache)
        arm = Arm("prefill", [bench.step("prefill", run, cache.rewind)])
        reports += _first_and_second(arm, repeat, replace(bench.work, prompt_tokens=tokens.shape[1]))
    return reports


def no_synchronise(bench: Bench) -> list[Report]:
    """The clock stopped while the device still works; on a CPU, which never queues, the first decode step timed."""
    steps, first = bench.work.decode_steps, bench.prompts[:, -1]
    reports = []
    for repeat in range(bench.repeats):
        requests = bench.work.requests + repeat + 1  # no batch of this size has run before
        if bench.model.device.is_cpu:
            cache = filled(bench.model, requests, bench.work.prompt_tokens, 1)
            run = _bound(decode_step, bench.model, bench.model.prompt(requests, 1)[:, 0], cache)
            back = _bound(cache.rewind, bench.work.prompt_tokens)
            arm = Arm("decode", [bench.step("decode", run, back)])
            reports += _first_and_second(arm, repeat, replace(bench.work, requests=requests))
            continue
        cache = filled(bench.model, bench.work.requests, bench.work.prompt_tokens, 2 * steps)
        run = _bound(decode, bench.model, first, cache, steps)
        (honest,) = measure([Arm("decode", [bench.step("decode", run)])], 1, warm_up=1)
        cache.rewind(bench.work.prompt_tokens)
        start = time.perf_counter()
        run()
        hasty = time.perf_counter() - start
        bench.model.device.synchronize()
        for name, seconds in (("honest", honest.seconds), ("mistaken", hasty)):
            reports.append((name, replace(honest, repeat=repeat, seconds=seconds / steps), bench.work))
    return reports


def fixed_order(bench: Bench) -> list[Report]:
    """The same prefill as two arms: the honest ratio is 1; run once each in a fixed order it need not be."""
    arms = [Arm(name, [bench.prefill_step()]) for name in ("first", "second")]
    reports = [("honest", sample, bench.work) for sample in measure(arms, bench.repeats, bench.seed)]
    for repeat in range(bench.repeats):
        fresh = [Arm(name, [bench.prefill_step()]) for name in ("first", "second")]
        for sample in measure(fresh, 1, warm_up=0, shuffle=False):
            reports.append(("mistaken", replace(sample, repeat=repeat), bench.work))
    return reports


def cache_left(bench: Bench) -> list[Report]:
    """Repeats on a rewound cache against repeats on the cache as the last one left it: the context creeps up."""
    steps, start = bench.work.decode_steps, bench.work.prompt_tokens
    room = steps * (bench.repeats + 1)  # the warm-up leaves its steps too
    first, arms = bench.prompts[:, -1], []
    for name in ("honest", "mistaken"):
        cache = filled(bench.model, bench.work.requests, start, room)
        back = _bound(cache.rewind, start) if name == "honest" else (lambda: None)
        arms.append(Arm(name, [bench.step("decode", _bound(decode, bench.model, first, cache, steps), back)]))
    samples = measure(arms, bench.repeats, bench.seed)
    return [(sample.arm, replace(sample, seconds=sample.seconds / steps), bench.work) for sample in samples]


def all_logits(bench: Bench) -> list[Report]:
    """The library's prefill with the logits of the last token only against those of every position."""
    arms = [
        Arm(name, [bench.step("prefill", _bound(baseline.prefill, bench.model, bench.prompts, every))])
        for name, every in (("honest", False), ("mistaken", True))
    ]
    return [(sample.arm, sample, bench.work) for sample in measure(arms, bench.repeats, bench.seed)]


def prefill_in_decode(bench: Bench) -> list[Report]:
    """Seconds a decode step, and the same samples with prefill's time booked on decode."""
    steps, prompts = bench.work.decode_steps, bench.prompts
    cache = bench.model.new_cache(bench.work.requests, bench.work.cache_tokens)
    first: list[Tensor] = []

    def run_prefill() -> None:
        first[:] = [prefill(bench.model, prompts, cache).argmax(dim=-1)]

    def run_decode() -> None:
        decode(bench.model, first[0], cache, steps)

    arm = Arm("job", [bench.step("prefill", run_prefill, cache.rewind), bench.step("decode", run_decode)])
    samples = measure([arm], bench.repeats, bench.seed)
    reports = []
    for before, after in zip(samples[::2], samples[1::2], strict=True):
        reports.append(("honest", replace(after, seconds=after.seconds / steps), bench.work))
        reports.append(("mistaken", replace(after, seconds=(before.seconds + after.seconds) / steps), bench.work))
    return reports


MISTAKES: tuple[Mistake, ...] = (
    no_warm_up,
    no_synchronise,
    fixed_order,
    cache_left,
    all_logits,
    prefill_in_decode,
)


def measure_mistakes(model: Model, work: Workload, repeats: int, seed: int) -> list[dict[str, Any]]:
    """All six, as rows: scenario = the mistake, kernel = honest | mistaken, seconds per call or decode step."""
    work.check_fits(model.spec)
    Workload(work.requests, work.prompt_tokens, work.decode_steps * (repeats + 1) + 1).check_fits(model.spec)
    if repeats >= work.prompt_tokens:
        raise InputError(f"{repeats} repeats need prompts of more than {repeats} tokens, not {work.prompt_tokens}")
    bench = Bench(model, work, repeats, seed)
    return [
        results.row(
            experiment="mistakes",
            kernel=kernel,
            scenario=mistake.__name__,
            placement=sample.arm if mistake is fixed_order else "-",
            requests=done.requests,
            prompt_tokens=done.prompt_tokens,
            new_tokens=done.new_tokens,
            tokens=done.requests * (1 if sample.phase == "decode" else done.prompt_tokens),
            **columns(model, sample),
        )
        for mistake in MISTAKES
        for kernel, sample, done in mistake(bench)
    ]


def _bound(function: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    """`function` with its arguments: a lambda in a loop would see the loop's last values."""
    return lambda: function(*arguments)


def _first_and_second(arm: Arm, repeat: int, work: Workload) -> list[Report]:
    first, second = measure([arm], 2, warm_up=0)
    return [("mistaken", replace(first, repeat=repeat), work), ("honest", replace(second, repeat=repeat), work)]
