"""lab: rows measured here and saved, or recorded and read, told apart; refused before any work."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import synthetic
import torch

import pdlib
from pdlib import devices, experiments, models, paths, results
from pdlib.devices import Device
from pdlib.lab import Lab
from pdlib.spec import GPT2, DeviceSpec, InputError

PEAK = DeviceSpec("cpu", 2e11, 3e10, 2e10, "measured, float32")


@pytest.fixture(autouse=True)
def outside(monkeypatch, tmp_path):
    """Everything is written below tmp_path, on a machine of one core; peaks are not measured again for each lab."""
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path / "out"))
    monkeypatch.setattr(paths, "ROOT", tmp_path / "root")
    devices.machine_name()  # kept for the whole run, as it really is
    monkeypatch.setattr(devices, "CORES", 1)
    monkeypatch.setattr(devices, "present", lambda: ["cpu"])
    monkeypatch.setattr(devices, "measure_peaks", lambda device, dtype, known=None: PEAK)


@pytest.fixture
def no_work(monkeypatch):
    """Loading a model or measuring anything is a failure."""

    def refuse(*_, **__):
        raise AssertionError("work was begun")

    for module, name in ((models, "load"), (devices, "measure_peaks"), (experiments, "roofline")):
        monkeypatch.setattr(module, name, refuse)


def lab(**changes):
    return Lab("07_test", **dict(model="gpt2-tiny", slow="", seed=5, profile="smoke", note="a test") | changes)


def test_measured_rows_are_saved_as_they_come(tmp_path):
    here = lab()
    first = here.rows("roofline", requests=[1, 2], prompt_tokens=8, steps=2, repeats=1)
    folder = tmp_path / "out" / "results" / "measured" / devices.machine_name()
    saved, about = results.load("07_test", here.machine)
    pd.testing.assert_frame_equal(saved, first)
    assert (folder / "07_test.csv").is_file() and list(about["parameters"]) == ["roofline"]
    second = here.rows("by_batch", requests=[1], prompt_tokens=8, steps=2, repeats=1)
    saved, about = results.load("07_test", here.machine)
    pd.testing.assert_frame_equal(saved, pd.concat([first, second], ignore_index=True))
    assert about["parameters"]["roofline"] == {"requests": [1, 2], "prompt_tokens": 8, "steps": 2, "repeats": 1}
    assert set(about["parameters"]) == {"roofline", "by_batch"}
    assert (about["profile"], about["seed"], about["note"], about["weights"]) == ("smoke", 5, "a test", "random")
    assert about["machine"]["torch"] == torch.__version__ and about["peaks"]["cpu"]["flops_per_s"] == 2e11
    assert about["started"].startswith("20") and about["commit"]
    assert set(saved["source"]) == {"measured"}


def test_recording_one_experiment_keeps_the_others(tmp_path):
    sizes = dict(requests=[1], prompt_tokens=8, repeats=1)
    first = lab(keep="recorded")
    first.rows("roofline", steps=2, **sizes)
    first.rows("by_batch", steps=2, **sizes)
    second = lab(keep="recorded")
    second.rows("roofline", steps=3, **sizes)
    rows, facts = results.load("07_test", second.machine, "recorded")
    assert set(rows.loc[rows["experiment"] == "roofline", "new_tokens"]) == {4}  # steps + 1: the new ones alone
    assert set(rows.loc[rows["experiment"] == "by_batch", "new_tokens"]) == {3}
    assert {name: size["steps"] for name, size in facts["parameters"].items()} == {"by_batch": 2, "roofline": 3}


def test_rows_to_be_committed_go_beside_the_recorded_ones(tmp_path):
    here = lab(keep="recorded")
    here.rows("roofline", requests=[1], prompt_tokens=8, steps=2, repeats=1)
    assert (tmp_path / "root" / "results" / "recorded" / here.machine / "07_test.csv").is_file()
    assert not (tmp_path / "out").exists()
    again = lab(source="recorded", machine=here.machine)
    assert set(again.rows("roofline")["source"]) == {"recorded"}


def test_a_pair_of_devices_shares_the_weights():
    here = lab(slow="auto").here
    assert (here.model.device.name, here.slow.device.name) == ("cpu", "cpu@1")
    assert here.model.hf is here.slow.hf


def test_the_line_says_what_the_pair_is(monkeypatch):
    pair = "; fast is cpu, slow is cpu@1"
    assert str(lab(slow="auto")).endswith(f"{pair}, which are the same one core: expect no difference")
    monkeypatch.setattr(devices, "CORES", 2)
    assert str(lab(slow="auto")).endswith("float32" + pair)
    assert str(lab()).endswith("float32")


def test_all_but_where_rows_are_from_is_given_by_name(no_work):
    with pytest.raises(TypeError, match="positional"):
        Lab("07_test", "measured", "", "gpt2-tiny")


def test_one_device_where_there_is_no_pair():
    here = lab(fast="cpu@1").here
    assert here.slow is here.model and here.model.device.name == "cpu@1"


def test_the_line_about_the_machine_says_weights_dtype_and_peaks():
    line = str(lab(dtype="bfloat16"))
    assert line.startswith(f"measured on {devices.machine_name()} (")
    assert "200 GFLOP/s, 30.0 GB/s read on cpu; gpt2-tiny, random weights, bfloat16" in line


def test_peaks_and_sizes_are_those_of_the_model_here():
    here = lab()
    assert here.peaks == {devices.machine_name(): PEAK} and here.device == PEAK
    assert here.spec.vocab == 211


def test_peaks_are_the_best_of_the_whole_run(monkeypatch):
    """Measured again when rows are saved, from what is known: a disturbed first look does not stay."""

    def better(device, dtype, known=None):
        return replace(known, flops_per_s=known.flops_per_s * 2) if known else PEAK

    devices.machine_name()  # kept for the whole run, as it really is
    monkeypatch.setattr(devices, "CORES", 1)
    monkeypatch.setattr(devices, "present", lambda: ["cpu"])
    monkeypatch.setattr(devices, "measure_peaks", better)
    here = lab()
    assert here.device == PEAK
    here.rows("roofline", requests=[1], prompt_tokens=8, steps=2, repeats=1)
    assert here.device.flops_per_s == 4e11
    name = here.here.model.device.name
    assert results.load("07_test", here.machine)[1]["peaks"][name]["flops_per_s"] == 4e11


def test_pitfall_14_an_accelerator_checks_itself_before_a_model_is_loaded(monkeypatch, no_work):
    checked: list = []

    def self_check(device, dtype):
        checked.append((device.name, dtype))
        raise InputError("attention on mps is off")

    monkeypatch.setattr(devices, "present", lambda: ["mps", "cpu"])
    monkeypatch.setattr(devices, "self_check", self_check)
    for pair in (dict(fast="mps"), dict(slow="auto"), dict(fast="cpu", slow="mps")):
        with pytest.raises(InputError, match="attention on mps is off"):
            lab(**pair, dtype="float16")
    assert checked == [("mps", "float16")] * 3


@pytest.mark.parametrize(
    "changes, says",
    [
        (dict(source="published"), "unknown source 'published'; choose one of: measured, recorded"),
        (dict(source=""), "unknown source"),
        (dict(dtype="int8"), "unknown dtype 'int8'; choose one of: float32"),
        (dict(keep="elsewhere"), "unknown keep 'elsewhere'; choose one of: measured, recorded"),
        (dict(fast="gpu"), "unknown device 'gpu'"),
        (dict(fast="cpu@1", slow="cpu@1"), "fast and slow are both cpu@1"),
        (dict(fast="cpu@1", slow="gpu"), "unknown device 'gpu'"),
    ],
)
def test_bad_input_is_refused_before_any_work(no_work, changes, says):
    with pytest.raises(InputError, match=says):
        lab(**changes)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(monkeypatch, tmp_path, no_work):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path / "file"))
    with pytest.raises(InputError, match="could not be written"):
        lab()


def test_a_model_that_is_not_here_is_refused():
    with pytest.raises(InputError, match="model 'gpt5' is not here"):
        lab(model="gpt5")


@pytest.fixture
def recorded():
    """Rows of a laptop under results/recorded, and what is known of it."""
    about = {
        "machine": {"cpu": "A CPU", "gpu": "none", "cores": 2, "torch": "2.99"},
        "peaks": {"cpu": dict(vars(PEAK))},
        **{key: key for key in results.PROVENANCE if key not in ("machine", "peaks")},
    }
    about |= {"weights": "random", "note": "recorded in part"}
    results.save(synthetic.rows(repeats=1), about, "07_test", "laptop", "recorded")


def test_recorded_rows_are_read_and_say_so(recorded, no_work):
    here = lab(source="recorded", machine="laptop", model="gpt2")
    rows = here.rows("phases")
    assert set(rows["source"]) == {"recorded"} and set(rows["experiment"]) == {"phases"} and len(rows) == 4
    assert here.device == PEAK and here.peaks == {"laptop": PEAK} and here.spec == GPT2
    assert here.note == "recorded in part"
    assert str(here).startswith("recorded on laptop (A CPU, 2 cores, torch 2.99): 200 GFLOP/s, 30.0 GB/s")


def test_what_was_not_recorded_is_said(recorded):
    here = lab(source="recorded", machine="laptop")
    with pytest.raises(InputError, match="laptop has no recorded rows of 'extrapolation' in 07_test"):
        here.rows("extrapolation")
    with pytest.raises(InputError, match="recorded rows are of gpt2, not 'gpt2-tiny'"):
        _ = here.spec
    with pytest.raises(InputError, match="07_test.csv is not here"):
        lab(source="recorded", machine="nobody")


def test_recorded_rows_of_another_dtype_are_refused(recorded):
    here = lab(source="recorded", machine="laptop", dtype="float16")
    with pytest.raises(InputError, match="rows of 'phases' recorded on laptop are of float32, not float16"):
        here.rows("phases")


RECORDED = """
import json, sys
sys.modules["torch"] = sys.modules["transformers"] = None
from pathlib import Path
from pdlib import paths
paths.ROOT = Path(sys.argv[1])
from pdlib.lab import Lab
lab = Lab("07_test", source="recorded", machine="laptop")
print(json.dumps([len(lab.rows("phases")), lab.spec.name, str(lab)[:8]]))
"""


def test_recorded_rows_are_read_without_torch(recorded):
    done = subprocess.run(
        [sys.executable, "-c", RECORDED, str(paths.ROOT)],
        cwd=Path(pdlib.__file__).parent.parent,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [4, "gpt2", "recorded"]


def test_a_checkout_without_git_is_unknown(monkeypatch, tmp_path):
    from pdlib import lab as module

    assert module._commit() == "unknown"  # paths.ROOT is no checkout here
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._commit() == "unknown"


def test_experiments_run_on_the_labs_devices(monkeypatch):
    seen: list = []

    def roofline(here, **sizes):
        seen.append((here.model.device, here.seed, sizes))
        return []

    monkeypatch.setattr(experiments, "roofline", roofline)
    assert lab(fast="cpu@1").rows("roofline", requests=[3]).empty
    assert seen == [(Device("cpu@1", "cpu", 1), 5, {"requests": [3]})]
