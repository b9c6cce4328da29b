"""The notebooks: every one runs in profile smoke, keeps to the rules of the house, and says what it said before."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pdlib import paths, runner

NOTEBOOKS = sorted((paths.ROOT / "notebooks").glob("[0-9]*.ipynb"))
TAGS = {"parameters", "nbval-ignore-output", "solution"}
IGNORE = "nbval-ignore-output"
MEASURED = r"source = \"measured\""  # as a notebook file spells it


def cells(notebook: Path, kind: str = "code") -> list[dict[str, Any]]:
    return [c for c in json.loads(notebook.read_text("utf-8"))["cells"] if c["cell_type"] == kind]


def tags(cell: dict[str, Any]) -> set[str]:
    return set(cell["metadata"].get("tags", []))


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


@pytest.fixture(scope="session")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout in which `figures` ran in profile smoke."""
    root = tmp_path_factory.mktemp("smoke")
    for name in ("notebooks", "pdlib", "requirements.lock"):
        (root / name).symlink_to(paths.ROOT / name)
    command = [sys.executable, "-m", "pdlib.runner", "figures", "--profile", "smoke", "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=paths.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return root


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_smoke_writes_every_figure(smoke: Path, notebook: Path) -> None:
    for name, endings in runner.OUTPUTS[notebook.stem].items():
        for ending in endings:
            assert (smoke / "figures" / f"{name}.{ending}").stat().st_size > 0


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_smoke_keeps_rows_and_where_they_come_from(smoke: Path, notebook: Path) -> None:
    (record,) = (smoke / "results" / "measured").glob(f"*/{notebook.stem}.json")
    facts = json.loads(record.read_text("utf-8"))
    assert facts["profile"] == "smoke" and facts["rows"] > 0 and facts["weights"] == "random"


def test_every_notebook_is_known_to_the_runner() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(runner.OUTPUTS)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_pitfall_17_parameters_are_literals_with_a_unit(notebook: Path) -> None:
    (cell,) = [c for c in cells(notebook) if "parameters" in tags(c)]
    for line, statement in zip(source(cell).splitlines(), ast.parse(source(cell)).body, strict=True):
        assert isinstance(statement, ast.Assign)
        ast.literal_eval(statement.value)
        assert "#" in line, f"say the unit or the choices behind: {line}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_pitfall_18_what_is_compared_has_stored_outputs(notebook: Path) -> None:
    compared = [c for c in cells(notebook) if IGNORE not in tags(c) and "parameters" not in tags(c)]
    assert compared, "nothing in this notebook is compared"
    for cell in compared:
        assert cell["outputs"], f"stored without its output: {source(cell)}"
    for cell in cells(notebook):
        assert cell["execution_count"] is not None, f"never executed: {source(cell)}"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_pitfall_19_tags_are_spelled_right(notebook: Path) -> None:
    for kind in ("code", "markdown"):
        for cell in cells(notebook, kind):
            assert tags(cell) <= TAGS


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_pitfall_20_outputs_hold_no_widgets_bars_errors_or_paths(notebook: Path) -> None:
    assert "widgets" not in json.loads(notebook.read_text("utf-8"))["metadata"]
    for cell in cells(notebook):
        for output in cell["outputs"]:
            assert output["output_type"] != "error" and output.get("name") != "stderr"
            assert not any("widget" in kind for kind in output.get("data", {}))
        assert str(paths.ROOT) not in json.dumps(cell["outputs"])


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_cells_are_short_and_define_nothing(notebook: Path) -> None:
    lengths = sorted(len(source(c).splitlines()) for c in cells(notebook) if "parameters" not in tags(c))
    assert lengths[-1] <= 20 and lengths[len(lengths) // 2] <= 6
    assert not any(line.startswith("def ") for c in cells(notebook) for line in source(c).splitlines())


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda p: p.stem)
def test_order_of_cells(notebook: Path) -> None:
    text = [source(c) for c in json.loads(notebook.read_text("utf-8"))["cells"]]
    heads = [
        "# ",
        "**After this notebook",
        "profile = ",
        "## Predict",
        "## Measure",
        "## Claims",
        "> **",
        "## Exercises",
    ]
    places = [next(i for i, t in enumerate(text) if t.startswith(head)) for head in heads]
    assert places == sorted(places)
    assert "*Cost: about" in text[0]


def test_nbval_finds_what_the_committed_notebooks_said(tmp_path: Path) -> None:
    """From a fresh kernel, on recorded rows: what is exact says the same whoever measured (live runs: smoke)."""
    for notebook in NOTEBOOKS:
        text = notebook.read_text("utf-8")
        assert text.count(MEASURED) == 1
        (tmp_path / notebook.name).write_text(text.replace(MEASURED, MEASURED.replace("measured", "recorded")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", "--nbval-current-env"]
    environment = {**os.environ, "PDLIB_OUT": str(tmp_path / "out")}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-6000:]
