"""calibrate: rows say what was run, disturbed shapes are timed again, rows and fit land where notebooks look."""

import dataclasses

import pandas as pd
import pytest
from tiny import counting

from pdlib import calibrate, devices, latency, models, results
from pdlib.calibrate import Shape
from pdlib.spec import InputError
from pdlib.timers import Sample


@pytest.fixture(scope="module")
def model():
    return models.load("gpt2-tiny", devices.parse("cpu@1"))


SMALL = [
    Shape(1, 16),
    Shape(3, 10),
    Shape(1, 50, chunk=16),
    Shape(2, 20, past=30),
    Shape(1, 34, past=7, chunk=8),
    Shape(decodes=4, context=25),
    Shape(decodes=1, context=9),
    Shape(1, 12, past=20, decodes=3, context=40),
    Shape(1, 12, decodes=1, context=15),
]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_a_row_says_what_was_run(model, shape):
    """Passes counted inside the model are those that latency reads from the row."""
    log = []
    step = calibrate._Bench(counting(model, log), [shape]).arm(shape).steps[0]
    for _ in range(2):  # the second time from the same state
        log.clear()
        step.before()
        step.run()
    sample = Sample(repr(shape), step.phase, 0, 0, 1.0, None, None)
    row = calibrate._row(shape, calibrate.placement.columns(model, sample))
    work = latency.of_rows(results.frame([row]))
    steps = shape.steps if not shape.requests else 1
    tokens = sum(b * n for (b, n), _ in log)
    assert work.tokens.sum() * steps == tokens
    assert work.batches == 1 and len(work.tokens) * steps == len(log)
    prefills = [((b, n), lengths) for (b, n), lengths in log if n > 1]
    pairs = sum(n * lengths[0] + n * (n + 1) / 2 for (b, n), lengths in prefills for _ in range(b))
    reads = sum(lengths[0] + 1 for (b, n), lengths in log for _ in range(b) if n == 1)
    assert (work.pairs.sum(), work.context.sum() * steps) == (pairs, reads)
    assert work.logits.sum() == shape.requests + shape.decodes


@pytest.mark.parametrize("size", calibrate.SIZES)
def test_sizes_are_distinct_fit_a_model_of_1024_positions_and_outnumber_the_parameters(size):
    shapes = calibrate.SIZES[size]()
    assert len(set(shapes)) == len(shapes) > len(latency.NAMES)
    for shape in shapes:
        assert max(shape.past + shape.new, shape.context + calibrate.STEPS) <= 1024
    assert {bool(shape.decodes) for shape in shapes} == {True, False}


def test_the_full_size_holds_the_quick_one():
    assert set(calibrate.quick()) < set(calibrate.full())


def fake(seconds):
    """timers.measure that takes the next of `seconds[arm]` for every sample and notes the calls."""
    calls = []

    def measure(arms, repeats, seed=0, warm_up=1):
        calls.append([arm.name for arm in arms])
        return [
            Sample(arm.name, arm.steps[0].phase, repeat, 0, seconds[arm.name].pop(0), None, None)
            for repeat in range(repeats)
            for arm in arms
        ]

    return measure, calls


def test_a_disturbed_shape_is_timed_again_until_two_times_agree(model, monkeypatch):
    calm, shaken, hopeless = SMALL[0], SMALL[1], SMALL[5]
    times = {
        repr(calm): [1.0, 1.01],
        repr(shaken): [1.0, 2.0, 5.0, 1.02],
        repr(hopeless): [2.0**i for i in range(9)],
    }
    measure, calls = fake(times)
    monkeypatch.setattr(calibrate, "measure", measure)
    rows = calibrate.calibration(model, [calm, shaken, hopeless], repeats=2, rounds=4)
    assert [len(call) for call in calls] == [3, 2, 2, 1, 1]
    assert [len([r for r in rows if r["requests"] == s.requests + s.decodes]) for s in (calm, shaken, hopeless)] == [
        2,
        4,
        6,
    ]
    [bad] = calibrate.unsettled(rows)
    assert dict(zip(latency.SHAPE, bad, strict=True))["phase"] == "decode"
    repeats = [r["repeat"] for r in rows if r["phase"] == "decode"]
    assert repeats == sorted(set(repeats))


def test_it_ends_when_the_time_is_up(model, monkeypatch):
    measure, calls = fake({repr(SMALL[0]): [2.0**i for i in range(99)]})
    monkeypatch.setattr(calibrate, "measure", measure)
    calibrate.calibration(model, SMALL[:1], repeats=2, rounds=50, limit_s=0.0)
    assert len(calls) == 1  # the repeats alone


def test_rows_and_fit_are_kept(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    assert calibrate.main("--models gpt2-tiny --device cpu@1 --seconds 0".split()) == 0
    said = capsys.readouterr()
    assert "sizes held out: 7 shapes for 8 parameters" in said.out and "overhead" in said.out
    machine = devices.machine_name()
    rows, facts = results.load("calibration", machine)
    assert set(rows["experiment"]) == {"calibration"} and facts["peaks"]
    fit = latency.calibrated(machine)
    assert (fit.machine, fit.models, fit.rows) == (machine, ("gpt2-tiny",), len(calibrate.quick()))
    again = latency.fit(rows, fit.device, {"gpt2-tiny": models.load("gpt2-tiny", devices.parse("cpu")).spec})
    assert again.values == pytest.approx(fit.values, rel=0.05)


def test_shapes_that_stay_disturbed_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    shape = ("gpt2-tiny", "prefill", "pdlib past=8", 2, 16, 1)
    monkeypatch.setattr(calibrate, "unsettled", lambda rows: [shape])
    assert calibrate.main("--models gpt2-tiny --device cpu@1 --seconds 0".split()) == 0
    assert f"disturbed: repeats of 1 of {len(calibrate.quick())} shapes" in (said := capsys.readouterr().out)
    assert said.endswith("  gpt2-tiny, pdlib past=8: prefill of 2 × 16\n")


def test_bad_requests_are_refused(model, capsys):
    with pytest.raises(InputError, match="unknown size 'huge'.*quick, full"):
        calibrate.several(model, ["gpt2-tiny"], "huge", 2, 0, 1.0)
    with pytest.raises(InputError, match="repeats"):
        calibrate.calibration(model, SMALL, 0)
    with pytest.raises(InputError, match="shapes"):
        calibrate.calibration(model, [], 2)
    assert calibrate.main(["--device", "abacus"]) == 2
    assert "unknown device 'abacus'" in capsys.readouterr().err


def test_a_preset_of_the_llama_shape_is_made():
    spec = calibrate.presets.model("llama-4-layers")
    made = calibrate.load("llama-4-layers", devices.parse("cpu@1"))
    assert dataclasses.replace(made.spec, name=spec.name) == spec and made.weights == "random"


def test_samples_of_one_shape_are_one_line():
    rows = pd.DataFrame(
        [
            {
                "model": "gpt2",
                "phase": "decode",
                "kernel": "pdlib",
                "requests": 1,
                "prompt_tokens": 8,
                "new_tokens": 5,
            }
            | {"machine": "m", "device": "cpu", "dtype": "float32", "seconds": seconds}
            for seconds in (4.0, 40.0, 4.4, 400.0)
        ]
    )
    assert latency.shapes(rows)["measured"].tolist() == [1.1]  # of four steps; the second least
    assert latency.shapes(rows[:2])["measured"].tolist() == [1.0]  # of two, the least
