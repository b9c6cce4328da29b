"""timers: what is timed, in which order, and what is not."""

import io
import sys
from dataclasses import dataclass, field

import pytest
import torch
from tiny import Clock, FakeDevice

from pdlib import devices, timers
from pdlib.devices import Device
from pdlib.spec import InputError
from pdlib.timers import Arm, Step, measure

HERE = FakeDevice()


def arms(names="abcd", log=None):
    log = [] if log is None else log
    return [Arm(n, [Step("decode", (lambda n=n: log.append(n)), HERE)]) for n in names]


def order(samples):
    return [sample.arm for sample in samples]


def test_pitfall_01_synchronise_on_both_sides_of_the_timed_part():
    """Work queued before is over when the clock starts, work queued inside when it stops."""
    log: list = []

    def clock():
        log.append("clock")
        return float(len(log))

    device = FakeDevice(log=log)
    step = Step("prefill", lambda: log.append("run"), device, lambda: log.append("before"))
    measure([Arm("a", [step], lambda: log.append("prepare"))], 2, warm_up=1, clock=clock)
    assert log[:4] == ["prepare", "before", "run", "synchronise"]  # the warm-up
    assert log[4:] == 2 * ["prepare", "before", "synchronise", "clock", "run", "synchronise", "clock"]


@dataclass(frozen=True)
class Queue(FakeDevice):
    """Starts work at once and ends it later, as a GPU does: only synchronise lets the time pass."""

    clock: Clock = field(default_factory=Clock)
    queued: list = field(default_factory=list)

    def synchronize(self):
        while self.queued:
            self.clock.wait(self.queued.pop())


def test_pitfall_01_the_seconds_are_those_of_the_queued_work_and_of_nothing_else():
    clock = Clock()
    device = Queue(clock=clock)
    run = Step("decode", lambda: device.queued.append(3.0), device, lambda: device.queued.append(100.0))
    for sample in measure([Arm("a", [run])], 3, clock=clock):
        assert sample.seconds == 3.0


def test_pitfall_02_each_step_waits_for_its_own_device():
    first, second = [], []
    steps = [
        Step("prefill", lambda: None, FakeDevice(log=first)),
        Step("decode", lambda: None, FakeDevice(log=second)),
    ]
    measure([Arm("a", steps)], 1, warm_up=0)
    assert first == second == ["synchronise"] * 2


def test_pitfall_03_mps_is_timed_by_the_clock_and_never_by_events(monkeypatch):
    waits: list = []

    def no_events(*_, **__):
        raise AssertionError("an event on MPS hangs or runs backwards")

    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(1))
    for owner in (torch, torch.mps, torch.cuda, torch.xpu):
        monkeypatch.setattr(owner, "Event", no_events, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", no_events)
    mps, clock = Device("mps", "mps", 0), Clock()
    samples = measure([Arm("a", [Step("decode", lambda: clock.wait(0.25), mps)])], 2, warm_up=0, clock=clock)
    assert [sample.seconds for sample in samples] == [0.25, 0.25] and len(waits) == 4


@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_pitfall_04_every_arm_is_warmed_up_at_its_own_shapes_in_both_phases(warm_up):
    """The shapes of the warm-up are those measured, phase by phase, and all of it comes before the first sample."""
    log: list = []

    def arm(batch, prompt):
        return Arm(
            f"{batch}",
            [
                Step("prefill", lambda: log.append(("prefill", batch, prompt)), HERE),
                Step("decode", lambda: log.append(("decode", batch, 1)), HERE),
            ],
        )

    both = [arm(1, 512), arm(8, 64)]
    once = [("prefill", 1, 512), ("decode", 1, 1), ("prefill", 8, 64), ("decode", 8, 1)]
    samples = measure(both, 2, warm_up=warm_up)
    warm, timed = log[: 4 * warm_up], log[4 * warm_up :]
    assert sorted(warm) == sorted(once * warm_up)
    assert sorted(timed) == sorted(once * 2)
    assert len(samples) == 8 and all(sample.repeat >= 0 for sample in samples)


def test_pitfall_04_one_warm_up_unless_asked_otherwise():
    log: list = []
    measure(arms("ab", log), 1)
    assert log[:2] == ["a", "b"] and len(log) == 4


def test_before_and_prepare_are_not_timed():
    clock = Clock()
    step = Step("prefill", lambda: clock.wait(2.0), HERE, lambda: clock.wait(50.0))
    other = Step("decode", lambda: clock.wait(7.0), HERE)
    samples = measure([Arm("a", [step, other], lambda: clock.wait(900.0))], 2, clock=clock)
    assert [(s.phase, s.seconds) for s in samples] == 2 * [("prefill", 2.0), ("decode", 7.0)]


def test_steps_of_an_arm_run_in_their_order_after_prepare():
    log: list = []
    steps = [Step(p, lambda p=p: log.append(p), HERE) for p in ("prefill", "transfer", "decode")]
    measure([Arm("a", steps, lambda: log.append("prepare"))], 2, warm_up=1)
    assert log == 3 * ["prepare", "prefill", "transfer", "decode"]


def test_order_is_shuffled_by_the_seed_and_reproducible():
    runs = {seed: order(measure(arms(), 6, seed)) for seed in range(4)}
    for seed, names in runs.items():
        assert order(measure(arms(), 6, seed)) == names
    assert len({tuple(names) for names in runs.values()}) == 4
    repeats = [tuple(runs[0][i : i + 4]) for i in range(0, 24, 4)]
    assert len(set(repeats)) > 1  # anew each repeat, not one shuffle for all


def test_the_order_is_that_in_which_the_arms_really_ran():
    log: list = []
    samples = measure(arms("abcd", log), 5, seed=3, warm_up=0)
    assert order(samples) == log
    assert [sample.order for sample in samples] == list(range(20))


def test_arms_are_interleaved_each_once_a_repeat():
    samples = measure(arms(), 5, seed=1)
    for repeat in range(5):
        here = [sample for sample in samples if sample.repeat == repeat]
        assert sorted(order(here)) == list("abcd")
        assert {sample.order for sample in here} == set(range(4 * repeat, 4 * repeat + 4))


def test_phases_of_one_arm_share_its_place():
    steps = [Step("prefill", lambda: None, HERE), Step("decode", lambda: None, HERE)]
    samples = measure([Arm("a", steps), Arm("b", steps)], 2)
    assert [sample.order for sample in samples] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_without_shuffling_the_order_is_as_given():
    assert order(measure(arms(), 3, shuffle=False)) == list("abcd") * 3


def test_every_sample_is_kept_also_the_odd_ones():
    clock, took = Clock(), iter([1.0, 1.0, 1.0, 500.0, 0.001])
    samples = measure([Arm("a", [Step("decode", lambda: clock.wait(next(took)), HERE)])], 4, clock=clock)
    assert [sample.seconds for sample in samples] == pytest.approx([1.0, 1.0, 500.0, 0.001])
    assert [sample.repeat for sample in samples] == [0, 1, 2, 3]


@pytest.mark.parametrize("repeats", [0, -1, 1.5, True, None])
def test_repeats_are_a_whole_number_above_zero(repeats):
    log: list = []
    with pytest.raises(InputError, match="repeats"):
        measure(arms("ab", log), repeats)
    assert log == []


@pytest.mark.parametrize("names", ["aa", "aba", ""])
def test_arms_need_names_of_their_own(names):
    log: list = []
    with pytest.raises(InputError, match="arms need names, each its own"):
        measure(arms(names, log), 1)
    assert log == []


def test_page_faults_and_peak_are_counts_or_nothing():
    for sample in measure(arms("ab"), 2):
        for value in (sample.page_faults, sample.peak_bytes):
            assert value is None or (isinstance(value, int) and value >= 0)


def test_without_the_systems_help_the_columns_are_empty(monkeypatch):
    def no_proc(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(timers, "resource", None)
    monkeypatch.setattr(timers, "open", no_proc, raising=False)
    (sample,) = measure(arms("a"), 1)
    assert sample.page_faults is None and sample.peak_bytes is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_peak_and_faults_are_those_of_the_step_alone():
    """A step that touches 256 MiB shows them; the next step, which does not, no longer does."""
    size = 256 * 2**20
    big = Arm("big", [Step("decode", lambda: bytearray(b"x") * size, HERE)])
    small = Arm("small", [Step("decode", lambda: None, HERE)])
    seen = {s.arm: s for s in measure([big, small], 1, warm_up=0, shuffle=False)}
    assert seen["big"].peak_bytes - seen["small"].peak_bytes > size // 2
    assert seen["big"].page_faults > seen["small"].page_faults


def test_a_peak_that_cannot_be_started_anew_is_not_told(monkeypatch):
    """A container may read /proc/self/status and not write clear_refs: the peak read is then an older step's."""

    def read_only(path, mode="r", **keywords):
        if mode != "r":
            raise PermissionError(path)
        return io.StringIO("VmHWM:\t  4711 kB\n")

    monkeypatch.setattr(timers, "open", read_only, raising=False)
    (sample,) = measure(arms("a"), 1)
    assert sample.peak_bytes is None


def test_the_process_does_not_know_another_accelerators_peak(monkeypatch):
    monkeypatch.setattr(torch.mps, "synchronize", lambda: None)
    (sample,) = measure([Arm("a", [Step("decode", lambda: None, Device("mps", "mps", 0))])], 1, warm_up=0)
    assert sample.peak_bytes is None


def test_a_gpus_peak_is_its_allocators(monkeypatch):
    calls: list = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 4711)
    cuda = Device("cuda:1", "cuda:1", 0)
    (sample,) = measure([Arm("a", [Step("decode", lambda: None, cuda)])], 1, warm_up=0)
    assert sample.peak_bytes == 4711 and calls == [torch.device("cuda:1")]


def test_the_clock_here_runs_forward():
    """The default clock gives positive seconds for real work on this machine."""
    cpu = devices.parse("cpu")
    x = torch.ones(64, 64)
    (sample,) = measure([Arm("a", [Step("decode", lambda: x @ x, cpu)])], 1)
    assert sample.seconds > 0
