"""puzzle: every arm in a fresh process a repeat and allocator, in shuffled order, with its page faults."""

import os
import sys

import pytest

from pdlib import devices, puzzle, results
from pdlib.spec import InputError, Workload

WORKS = {"long": Workload(2, 8, 3)}


@pytest.fixture(scope="module")
def rows():
    return results.frame(puzzle.measure_puzzle("gpt2-tiny", "float32", "cpu@1", WORKS, 2, 1, 0))


def test_every_arm_is_there_once_a_repeat(rows):
    names = {
        f"logits={logits} kv={kv} malloc={malloc}"
        for logits in ("kept", "dropped")
        for kv in ("views", "contiguous")
        for malloc in puzzle.allocators()
    }
    assert sorted(rows["kernel"]) == sorted(names)
    assert set(rows["experiment"]) == {"puzzle"} and set(rows["phase"]) == {"decode"}
    assert set(rows["scenario"]) == {"long"} and set(rows["device"]) == {"cpu@1"} and set(rows["repeat"]) == {0}


def test_order_is_the_place_in_the_process(rows):
    for _, part in rows.groupby(rows["kernel"].str.split().str[-1]):
        assert sorted(part["order"]) == [0, 1, 2, 3]


def test_tokens_are_those_of_the_steps(rows):
    assert set(rows["tokens"]) == {2 * 2} and set(rows["new_tokens"]) == {3} and set(rows["prompt_tokens"]) == {8}


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted where the system tells them")
def test_page_faults_are_counted(rows):
    assert rows["page_faults"].notna().all() and rows["peak_bytes"].notna().all()


@pytest.mark.parametrize("platform, names", [("linux", ["default", "kept"]), ("darwin", ["default"])])
def test_the_allocator_is_compared_where_mallopt_is(monkeypatch, platform, names):
    monkeypatch.setattr(sys, "platform", platform)
    assert puzzle.allocators() == names


def no_process(*_, **__):
    raise AssertionError("a process was started")


@pytest.mark.parametrize(
    "device, steps, repeats, says",
    [("cpu", 0, 1, "steps"), ("cpu", 1, 0, "repeats"), ("gpu", 1, 1, "unknown device 'gpu'")],
)
def test_bad_input_starts_no_process(monkeypatch, device, steps, repeats, says):
    monkeypatch.setattr(puzzle, "ProcessPoolExecutor", no_process)
    with pytest.raises(InputError, match=says):
        puzzle.measure_puzzle("gpt2-tiny", "float32", device, WORKS, steps, repeats, 0)


def test_an_accelerator_is_refused(monkeypatch):
    monkeypatch.setattr(puzzle, "ProcessPoolExecutor", no_process)
    monkeypatch.setattr(puzzle.devices, "present", lambda: ["mps", "cpu"])
    with pytest.raises(InputError, match="the puzzle is about a CPU's memory; device 'mps' is none"):
        puzzle.measure_puzzle("gpt2-tiny", "float32", "mps", WORKS, 1, 1, 0)


class Deadly(str):
    """A model name that kills the process which receives it, as the system does when memory is out."""

    def __reduce__(self):
        return os._exit, (9,)


def test_a_child_that_is_killed_is_an_error_and_not_a_wait():
    from concurrent.futures.process import BrokenProcessPool

    with pytest.raises(BrokenProcessPool):
        puzzle.measure_puzzle(Deadly("gpt2-tiny"), "float32", "cpu", WORKS, 1, 1, 0)


def test_a_model_that_is_not_here_starts_no_process(monkeypatch):
    monkeypatch.setattr(puzzle, "ProcessPoolExecutor", no_process)
    with pytest.raises(InputError, match="model 'nobody' is not here"):
        puzzle.measure_puzzle("nobody", "float32", "cpu", WORKS, 1, 1, 0)


def test_what_does_not_fit_the_memory_starts_no_process(monkeypatch):
    """The largest arm: per position QKV (3 · 2 layers · 32), keys and values (2 · 2 · 32), logits (211), of 4 B."""
    needed = 2 * 8 * (3 * 2 * 32 + 2 * 2 * 32 + 211) * 4
    monkeypatch.setattr(puzzle, "ProcessPoolExecutor", no_process)
    monkeypatch.setattr(devices.Device, "free_bytes", lambda self: needed - 1)
    with pytest.raises(InputError, match=r"long: caches and logits of 2 × 8 positions .* at most 1 requests fit"):
        puzzle.measure_puzzle("gpt2-tiny", "float32", "cpu", WORKS, 1, 1, 0)
    monkeypatch.setattr(devices.Device, "free_bytes", lambda self: needed)
    with pytest.raises(AssertionError, match="a process was started"):
        puzzle.measure_puzzle("gpt2-tiny", "float32", "cpu", WORKS, 1, 1, 0)
