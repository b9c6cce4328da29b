"""Normalised notebooks: the same text for the same sources and results, whoever ran them, whenever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pdlib.normalise import normalise


def notebook(folder: Path, run: int) -> Path:
    """One notebook as two runs on two machines leave it; `run` makes every accident differ."""
    home = f"/home/reader{run}/checkout"
    stamped = {"tags": ["keep"], "papermill": {"start_time": f"2030-01-0{run}"}, "execution": {"x": run}}
    stdout: list[Any] = [{"output_type": "stream", "name": "stdout", "text": ["a\n", "b\n"]}]
    if run == 2:  # the same text, cut in two by chance
        stdout = [{"output_type": "stream", "name": "stdout", "text": part} for part in ("a\n", "b\n")]
    outputs = [
        *stdout,
        {"output_type": "stream", "name": "stderr", "text": f"a warning of {home}\n"},
        {
            "output_type": "execute_result",
            "execution_count": 70 + run,
            "metadata": {"run": run},
            "data": {"text/plain": [f"<x at 0x7f00000{run}> {home}/figures/a.svg"], "image/png": f"{run and 'AAAA'}"},
        },
        {
            "output_type": "display_data",
            "metadata": {},
            "data": {"application/vnd.jupyter.widget-view+json": {"model_id": f"{run}"}, "text/plain": "0%"},
        },
    ]
    cells = [
        {"cell_type": "markdown", "id": f"m{run}", "metadata": {"x": run}, "source": "# Why?"},
        {
            "cell_type": "code",
            "id": f"c{run}",
            "metadata": stamped,
            "source": "x",
            "execution_count": run,
            "outputs": outputs,
        },
        {
            "cell_type": "code",
            "id": f"d{run}",
            "metadata": {},
            "source": "x",
            "execution_count": 9,
            "outputs": [],
        },
    ]
    content = {
        "cells": cells,
        "metadata": {"papermill": {"duration": run}, "widgets": {"state": run}, "language_info": {"version": run}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = folder / f"{run}.ipynb"
    path.write_text(json.dumps(content))
    return path


def test_two_runs_give_one_text(tmp_path: Path) -> None:
    one, two = (normalise(notebook(tmp_path, run), Path(f"/home/reader{run}/checkout")) for run in (1, 2))
    assert one == two
    cells = json.loads(one)["cells"]
    assert [cell.get("execution_count") for cell in cells] == [None, 1, 2]
    assert cells[1]["metadata"] == {"tags": ["keep"]}
    assert len({cell["id"] for cell in cells}) == 3
    stream, result = cells[1]["outputs"]
    assert stream["text"] == ["a\n", "b\n"]
    assert result["data"]["text/plain"] == ["<x at 0x0> figures/a.svg"] and result["execution_count"] == 1
    assert "reader" not in one and "papermill" not in one and "widget" not in one


def test_normalising_twice_changes_nothing(tmp_path: Path) -> None:
    path = notebook(tmp_path, 1)
    once = normalise(path)
    path.write_text(once)
    assert normalise(path) == once


def test_a_cell_put_in_between_keeps_the_others_ids(tmp_path: Path) -> None:
    path = notebook(tmp_path, 1)
    before = [cell["id"] for cell in json.loads(normalise(path))["cells"]]
    content = json.loads(path.read_text())
    content["cells"].insert(1, {"cell_type": "markdown", "metadata": {}, "source": "new"})
    path.write_text(json.dumps(content))
    after = [cell["id"] for cell in json.loads(normalise(path))["cells"]]
    assert [after[0], *after[2:]] == before
