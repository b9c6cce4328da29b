"""`make record`: rows from a machine that has torch, transformers and pandas, and nothing else of ours."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pdlib import paths, record
from pdlib.spec import InputError

BLOCKED = (
    "psutil",
    "matplotlib",
    "seaborn",
    "papermill",
    "nbformat",
    "IPython",
    "ipykernel",
    "jupyterlab",
)
RUN = "import sys; sys.modules.update(dict.fromkeys({blocked!r})); from pdlib import record; sys.exit(record.main())"


def test_needs_torch_transformers_and_pandas_only(tmp_path: Path) -> None:
    for name in ("pdlib", "notebooks"):
        (tmp_path / name).mkdir()
    for folder in ("pdlib", "notebooks"):
        subprocess.run(["cp", "-r", f"{paths.ROOT / folder}/.", tmp_path / folder], check=True)
    command = [sys.executable, "-c", RUN.format(blocked=BLOCKED), "--profile", "smoke", "--cpu", "--only", "phases"]
    done = subprocess.run(
        [*command, "--note", "a test"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (facts,) = (tmp_path / "results" / "recorded").glob("*/01_two_phases.json")
    recorded = json.loads(facts.read_text("utf-8"))
    assert recorded["note"] == "a test" and recorded["parameters"]["phases"]["requests"] == 2


def test_every_experiment_finds_its_sizes_in_the_notebook() -> None:
    for notebook, mapping in record.EXPERIMENTS.values():
        for profile in ("smoke", "article"):
            values = record.sizes(profile, notebook)
            assert set(mapping.values()) <= set(values)


def calls(notebook: str, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Experiment → sizes of every `bench.rows(…)` of a notebook whose parameters are `values`."""
    cells = json.loads((paths.ROOT / "notebooks" / f"{notebook}.ipynb").read_text("utf-8"))["cells"]
    found: dict[str, dict[str, Any]] = {}
    bench = SimpleNamespace(rows=lambda experiment, **sizes: found.update({experiment: sizes}))
    names: dict[str, Any] = {**values, "bench": bench}
    code = [c for c in cells if c["cell_type"] == "code" and "parameters" not in c["metadata"].get("tags", [])]
    for statement in ast.parse("\n".join("".join(c["source"]) for c in code)).body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "bench.rows":
                eval(ast.unparse(node), names)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict | ast.Call):
            with contextlib.suppress(Exception):  # only sizes are wanted, made of the parameters alone
                exec(ast.unparse(statement), names)
    return found


@pytest.mark.parametrize("notebook", sorted({notebook for notebook, _ in record.EXPERIMENTS.values()}))
def test_record_measures_the_sizes_of_the_notebooks_own_calls(notebook: str) -> None:
    values = record.sizes("article", notebook)
    recorded = {
        name: {size: values[own] for size, own in mapping.items()}
        for name, (where, mapping) in record.EXPERIMENTS.items()
        if where == notebook
    }
    assert recorded == calls(notebook, values)


def test_without_a_gpu_it_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdlib.devices.present", lambda: ["cpu"])
    assert record.main([]) == 2
    assert "--cpu" in capsys.readouterr().err


def test_an_unknown_experiment_is_refused_before_any_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert record.main(["--cpu", "--only", "prefil"]) == 2
    assert "prefil" in capsys.readouterr().err


def test_sizes_of_an_unknown_profile() -> None:
    with pytest.raises((InputError, FileNotFoundError)):
        record.sizes("fast", "01_two_phases")
