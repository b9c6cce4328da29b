"""Rows and the files that hold them: what is refused, what survives a save, what is written whole."""

import io
import json
import os

import numpy as np
import pandas as pd
import pytest

from pdlib import paths, results
from pdlib.spec import InputError

NOTE = dict.fromkeys(results.PROVENANCE, "-")


def sample(**changes):
    given = dict(
        experiment="phases",
        machine="laptop",
        model="gpt2",
        weights="random",
        dtype="float32",
        device="cpu",
        kernel="pdlib",
        requests=5,
        prompt_tokens=255,
        new_tokens=256,
        phase="decode",
        seconds=1.5,
    )
    return results.row(**{**given, **changes})


@pytest.fixture
def staged(tmp_path, monkeypatch):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    monkeypatch.setattr(paths, "ROOT", tmp_path)
    return tmp_path


def test_the_first_token_belongs_to_prefill():
    assert sample()["tokens"] == 5 * 255
    assert sample(phase="prefill")["tokens"] == sample(phase="transfer")["tokens"] == 5 * 255
    assert sample(new_tokens=11)["tokens"] == 5 * 10


def test_columns_order_and_types():
    shuffled = pd.DataFrame([sample(page_faults=7), sample()])[results.COLUMNS[::-1]]
    rows = results.validate(shuffled)
    assert list(rows.columns) == results.COLUMNS
    assert rows["seconds"].dtype == "float64" and rows["requests"].dtype == "int64"
    assert rows["page_faults"].dtype == "Int64" and rows["page_faults"].tolist() == [7, pd.NA]
    assert results.frame([]).empty


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("seconds", -1.0),
        ("seconds", 0.0),
        ("seconds", float("nan")),
        ("seconds", float("inf")),
        ("seconds", "soon"),
        ("seconds", True),
        ("requests", 0),
        ("requests", 2.5),
        ("requests", None),
        ("tokens", -3),
        ("bytes", True),
        ("page_faults", -1),
        ("page_faults", "many"),
        ("peak_bytes", 1.5),
        ("source", "guessed"),
        ("weights", ""),
        ("phase", "warm-up"),
        ("kernel", ""),
        ("machine", None),
        ("scenario", " "),
    ],
)
def test_a_bad_value_is_refused_with_its_row_and_column(column, value):
    bad = pd.DataFrame([sample(), {**sample(), column: value}], dtype=object)
    with pytest.raises(InputError, match=rf"row 1, column {column}"):
        results.validate(bad)


def test_a_transfer_may_take_no_time():
    assert results.frame([sample(phase="transfer", seconds=0.0)])["seconds"].item() == 0


def test_missing_unknown_and_doubled_columns_are_refused():
    rows = results.frame([sample()])
    with pytest.raises(InputError, match=r"missing: \['dtype'\]"):
        results.validate(rows.drop(columns="dtype"))
    with pytest.raises(InputError, match=r"unknown: \['mood'\]"):
        results.validate(rows.assign(mood=1))
    with pytest.raises(InputError, match="wrong columns"):
        results.validate(pd.concat([rows, rows[["dtype"]]], axis=1))


def test_rows_survive_a_save_exactly(staged):
    rows = results.frame([sample(seconds=np.pi / 1e3, peak_bytes=2**40), sample(model="NA")])
    path = results.save(rows, NOTE, "01_two_phases", "laptop")
    assert path == staged / "results/measured/laptop/01_two_phases.csv"
    loaded, provenance = results.load("01_two_phases", "laptop", "measured")
    pd.testing.assert_frame_equal(loaded, rows)
    assert provenance["rows"] == 2 and b"\r" not in path.read_bytes()
    before = path.read_bytes()
    results.save(rows, NOTE, "01_two_phases", "laptop")
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir()) == ["01_two_phases.csv", "01_two_phases.json"]


def test_recorded_rows_say_so(staged):
    rows = results.frame([sample(), sample(source="modelled")])
    results.save(rows, NOTE, "n", "laptop", source="recorded")
    assert results.load("n", "laptop", "recorded")[0]["source"].tolist() == ["recorded", "modelled"]
    with pytest.raises(InputError, match="is not here"):
        results.load("n", "laptop", "measured")
    with pytest.raises(InputError, match="choose one of"):
        results.load("n", "laptop", "published")


def test_a_truncated_changed_or_foreign_csv_is_refused(staged):
    path = results.save(results.frame([sample(), sample()]), NOTE, "n", "laptop")
    whole = path.read_bytes()
    for broken in (whole[:-20], whole + b"1,2\n", b"", b"a,b\n1,2\n"):
        path.write_bytes(broken)
        with pytest.raises(InputError, match="truncated or changed"):
            results.load("n", "laptop", "measured")
    path.write_bytes(whole)
    record = json.loads(path.with_suffix(".json").read_text())
    path.with_suffix(".json").write_text(json.dumps({**record, "rows": 3}))
    with pytest.raises(InputError, match="has 2 rows where"):
        results.load("n", "laptop", "measured")
    for foreign in ("not json", "[]", "{}"):
        path.with_suffix(".json").write_text(foreign)
        with pytest.raises(InputError, match="not a provenance record"):
            results.load("n", "laptop", "measured")


def test_provenance_is_complete_and_serialisable_before_anything_is_written(staged):
    rows = results.frame([sample()])
    with pytest.raises(InputError, match="lacks seed"):
        results.save(rows, {k: v for k, v in NOTE.items() if k != "seed"}, "n", "laptop")
    with pytest.raises(TypeError):
        results.save(rows, {**NOTE, "seed": object()}, "n", "laptop")
    assert not (staged / "results").exists()


@pytest.mark.parametrize("machine", ["", "..", "a/b", "c:d", ".hidden"])
def test_a_machine_that_cannot_name_a_folder(machine):
    with pytest.raises(InputError, match="cannot name a folder"):
        results.load("n", machine)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_rubbish(tmp_path, monkeypatch):
    path = paths.write_atomic(tmp_path / "deep" / "a.txt", "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        paths.write_atomic(path, "new")
    assert path.read_text() == "old" and [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match="could not be written"):
        paths.check_writable(tmp_path / "file" / "results")
    assert list(paths.check_writable(tmp_path / "good").iterdir()) == []


def test_a_full_disk_is_found_before_any_work(tmp_path, monkeypatch):
    """It still takes an empty file."""

    class Full(io.BytesIO):
        def fileno(self):
            return os.open(os.devnull, os.O_WRONLY)

        def write(self, data):
            if data:
                raise OSError(28, "No space left on device")

    def fdopen(handle, mode):
        os.close(handle)
        return Full()

    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.raises(InputError, match="No space left"):
        paths.check_writable(tmp_path)
