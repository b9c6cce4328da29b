"""Executed notebooks as text that depends only on their sources and results, so that a diff shows results."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

KEPT_CELL_METADATA = ("tags", "jupyter")
ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def normalise(path: Path, *folders: Path) -> str:
    """The notebook at `path` as text that depends only on sources and results.

    Without timestamps, widget state, random ids and addresses, standard error and the names of `folders`;
    cells are counted from 1. The same cells always have the same ids.
    """
    notebook = json.loads(path.read_text("utf-8"))
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    notebook["nbformat"], notebook["nbformat_minor"] = 4, 5
    ids: set[str] = set()
    count = 0
    for cell in notebook["cells"]:
        cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k in KEPT_CELL_METADATA}
        cell["id"] = _new_id("".join(cell["source"]), ids)
        if cell["cell_type"] == "code":
            ran = bool("".join(cell["source"]).strip())
            count += ran
            cell["execution_count"] = count if ran else None
            cell["outputs"] = _outputs(cell["outputs"], cell["execution_count"], folders)
    return json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _new_id(source: str, taken: set[str]) -> str:
    """An id that depends on the source and on how often it stood before."""
    number = 0
    while (name := hashlib.sha256(f"{number} {source}".encode()).hexdigest()[:8]) in taken:
        number += 1
    taken.add(name)
    return name


def _outputs(outputs: list[Any], count: int | None, folders: tuple[Path, ...]) -> list[Any]:
    kept: list[Any] = []
    for output in outputs:
        kind = output["output_type"]
        if kind == "stream" and output["name"] == "stderr":
            continue
        if any("widget" in mime for mime in output.get("data", {})):
            continue
        if kind == "execute_result":
            output["execution_count"] = count
        if "metadata" in output:
            output["metadata"] = {}
        output = _cleaned(output, folders)
        if kind == "stream":
            output["text"] = "".join(output["text"])
            if kept and kept[-1]["output_type"] == "stream":  # how it was cut is chance
                kept[-1]["text"] += output["text"]
                continue
        kept.append(output)
    for output in kept:
        if output["output_type"] == "stream":
            output["text"] = output["text"].splitlines(keepends=True)
    return kept


def _cleaned(value: Any, folders: tuple[Path, ...]) -> Any:
    """Every text in `value` without memory addresses and without the names of `folders`."""
    if isinstance(value, dict):
        return {k: v if k == "image/png" else _cleaned(v, folders) for k, v in value.items()}
    if isinstance(value, list):
        return [_cleaned(item, folders) for item in value]
    if isinstance(value, str):
        for folder in sorted(map(str, folders), key=len, reverse=True):
            value = value.replace(folder + os.sep, "").replace(folder, ".")
        return ADDRESS.sub("0x0", value)
    return value
