"""Rows in and out: one tidy table for everything published, measured, recorded, modelled, simulated.

One row is one sample of one phase. Beside each CSV lies a JSON that says where the rows come from and
holds the CSV's checksum, so that a truncated or foreign file is refused and not drawn.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pdlib import paths
from pdlib.spec import InputError, one_of

TEXT = ("experiment", "machine", "source", "model", "weights", "dtype", "device", "kernel", "scenario")
COLUMNS = [
    *TEXT,
    "placement",
    "requests",
    "prompt_tokens",
    "new_tokens",
    "phase",
    "repeat",
    "order",
    "start_s",
    "seconds",
    "tokens",
    "bytes",
    "page_faults",
    "peak_bytes",
]
SOURCES = ("measured", "recorded", "published", "modelled", "simulated")
WEIGHTS = ("pretrained", "random", "unknown")
PHASES = ("prefill", "transfer", "decode")

_CHOICES = {"source": SOURCES, "weights": WEIGHTS, "phase": PHASES}
_TEXT = (*TEXT, "placement", "phase")
_LEAST = {  # smallest whole number allowed
    "requests": 1,
    "prompt_tokens": 1,
    "new_tokens": 1,
    "repeat": 0,
    "order": 0,
    "tokens": 0,
    "bytes": 0,
    "page_faults": 0,
    "peak_bytes": 0,
}
_NULLABLE = ("start_s", "page_faults", "peak_bytes")
PROVENANCE = ("machine", "peaks", "parameters", "profile", "seed", "started", "commit", "note", "weights")


def row(
    *,
    experiment: str,
    machine: str,
    model: str,
    weights: str,
    dtype: str,
    device: str,
    kernel: str,
    requests: int,
    prompt_tokens: int,
    new_tokens: int,
    phase: str,
    seconds: float,
    source: str = "measured",
    scenario: str = "-",
    placement: str = "-",
    repeat: int = 0,
    order: int = 0,
    tokens: int | None = None,
    bytes: int = 0,
    start_s: float | None = None,
    page_faults: int | None = None,
    peak_bytes: int | None = None,
) -> dict[str, Any]:
    """One sample as a dict with the keys of COLUMNS, in order; a list of them makes a frame.

    Without `tokens`, those of the phase: requests × prompt_tokens for prefill and transfer,
    requests × (new_tokens − 1) for decode, since the first new token comes out of prefill.
    `start_s`: when the sample began, in s on the run's clock, where a time-line is to be drawn.
    """
    if tokens is None:
        tokens = requests * (new_tokens - 1 if phase == "decode" else prompt_tokens)
    given = locals()
    return {name: given[name] for name in COLUMNS}


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A validated frame of the dicts made by `row`; also of an empty list."""
    return validate(pd.DataFrame(rows, columns=COLUMNS))


def validate(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy with COLUMNS in order and the right types; InputError names the first bad row and column.

    Refused: a missing, unknown or doubled column, an empty text, an unknown source, weights or phase,
    a missing value (but in start_s, page_faults and peak_bytes), a count that is negative, fractional or not a
    number, and seconds that are not above 0 (0 is allowed for a transfer that moves nothing).
    """
    missing = [name for name in COLUMNS if name not in frame.columns]
    unknown = [str(name) for name in frame.columns if name not in COLUMNS]
    if missing or unknown or len(frame.columns) != len(COLUMNS):
        raise InputError(
            f"rows have the wrong columns (missing: {missing or 'none'}; unknown: {unknown or 'none'}; "
            f"{len(frame.columns)} of {len(COLUMNS)}); give exactly: {', '.join(COLUMNS)}"
        )
    checked = frame[COLUMNS].reset_index(drop=True)
    for name in _TEXT:
        column = checked[name]
        text = column.map(lambda value: isinstance(value, str) and bool(value.strip())).astype(bool)
        _refuse(column, ~text, "give a text, '-' where there is nothing to say")
        if name in _CHOICES:
            _refuse(column, ~column.isin(_CHOICES[name]), f"choose one of: {', '.join(_CHOICES[name])}")
        checked[name] = column.astype("str")
    for name, least in _LEAST.items():
        checked[name] = _whole(checked[name], least, name in _NULLABLE)
    seconds = pd.to_numeric(checked["seconds"], errors="coerce").astype("float64")
    still = (seconds == 0) & (checked["phase"] == "transfer")
    bad = ~(np.isfinite(seconds) & ((seconds > 0) | still)) | _is_bool(checked["seconds"])
    _refuse(checked["seconds"], bad, "give seconds above 0 (0 only for a transfer that moves nothing)")
    checked["seconds"] = seconds
    start = pd.to_numeric(checked["start_s"], errors="coerce").astype("float64")
    bad = (checked["start_s"].notna() & ~np.isfinite(start)) | _is_bool(checked["start_s"])
    _refuse(checked["start_s"], bad, "give seconds on the run's clock or nothing")
    checked["start_s"] = start
    return checked


def _is_bool(column: pd.Series) -> pd.Series:
    return column.map(lambda value: isinstance(value, (bool, np.bool_))).astype(bool)


def _whole(column: pd.Series, least: int, nullable: bool) -> pd.Series:
    number = pd.to_numeric(column, errors="coerce")
    absent = column.isna()
    with np.errstate(invalid="ignore"):
        good = (number.astype("Float64") >= least).fillna(False) & (number.astype("Float64") % 1 == 0).fillna(False)
    bad = ~(good.astype(bool) | (absent & nullable)) | _is_bool(column)
    _refuse(column, bad, f"give a whole number of at least {least}" + (" or nothing" if nullable else ""))
    return number.astype("Int64") if nullable else number.astype("int64")


def _refuse(column: pd.Series, bad: pd.Series, allowed: str) -> None:
    if bad.any():
        at = int(np.flatnonzero(bad)[0])
        raise InputError(f"row {at}, column {column.name}: {column.iloc[at]!r}; {allowed}")


def save(
    frame: pd.DataFrame,
    provenance: dict[str, Any],
    notebook: str,
    machine: str,
    source: str = "measured",
) -> Path:
    """Write <notebook>.csv and, beside it, <notebook>.json under the folder of `machine`; returns the CSV.

    `provenance` holds every key of PROVENANCE; the number of rows and the CSV's checksum are added.
    `source` is the folder: 'measured' for a reader's rows, 'recorded' for rows to be committed.
    """
    absent = [key for key in PROVENANCE if key not in provenance]
    if absent:
        raise InputError(f"provenance lacks {', '.join(absent)}; give all of: {', '.join(PROVENANCE)}")
    path = _folder(machine, source) / f"{notebook}.csv"
    buffer = io.StringIO()
    validate(frame).to_csv(buffer, index=False, lineterminator="\n")
    content = buffer.getvalue().encode()
    record = {"rows": len(frame), "sha256": hashlib.sha256(content).hexdigest(), **provenance}
    # Serialise before anything is written: a value JSON cannot hold must not leave a lone CSV behind.
    text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
    paths.write_atomic(path, content)
    paths.write_atomic(path.with_suffix(".json"), text)
    return path


def load(notebook: str, machine: str, source: str = "measured") -> tuple[pd.DataFrame, dict[str, Any]]:
    """Rows and provenance written by `save`; with source 'recorded' the measured rows say 'recorded'.

    Raises InputError when a file is absent, was not written by this project, is truncated or changed.
    """
    path = _folder(machine, source) / f"{notebook}.csv"
    beside = path.with_suffix(".json")
    for needed in (path, beside):
        if not needed.is_file():
            raise InputError(f"{needed} is not here; measure it, or name another notebook or machine")
    content = path.read_bytes()
    try:
        provenance = json.loads(beside.read_text(encoding="utf-8"))
        count, checksum = int(provenance["rows"]), str(provenance["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{beside} is not a provenance record of this project; measure again") from error
    if hashlib.sha256(content).hexdigest() != checksum:
        raise InputError(f"{path} is not the file that {beside.name} describes (truncated or changed); measure again")
    rows = validate(pd.read_csv(io.BytesIO(content), keep_default_na=False, na_values={k: [""] for k in _NULLABLE}))
    if len(rows) != count:
        raise InputError(f"{path} has {len(rows)} rows where {beside.name} says {count}; measure again")
    if source == "recorded":
        rows["source"] = rows["source"].replace("measured", "recorded")
    return rows, provenance


def _folder(machine: str, source: str) -> Path:
    one_of("source of saved rows", source, ("measured", "recorded"))
    return paths.measured(machine) if source == "measured" else paths.recorded(machine)
