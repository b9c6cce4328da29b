"""The error on rows that a fit has not seen. The split follows a rule and a seed, never the rows' times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pdlib import paths, presets
from pdlib.latency.fitting import Fit, _fit_shapes
from pdlib.latency.work import SHAPE, of_rows, shapes, words
from pdlib.spec import DeviceSpec, InputError, ModelSpec, one_of

if TYPE_CHECKING:  # half a second that a prediction in plain numbers does not need
    import pandas as pd

Folds = Iterator[tuple[str, "np.ndarray"]]  # the fold's name, and which shapes it holds out


def _by_shape(table: pd.DataFrame, seed: int) -> Folds:
    """Half of the sizes (requests × prompt and kernel) of every model and phase, drawn by the seed; then the others.

    Rows that differ in new_tokens alone are near twins: they stay on one side.
    """
    generator = np.random.default_rng(seed)
    half = np.zeros(len(table), bool)
    for _, own in table.groupby(["model", "phase"]):
        twins = own.groupby(["kernel", "requests", "prompt_tokens"]).ngroup()
        drawn = generator.permutation(twins.max() + 1)[: (twins.max() + 1) // 2]
        half[own.index[twins.isin(drawn)]] = True
    yield "first half", half
    yield "second half", ~half


def _by_model(table: pd.DataFrame, seed: int) -> Folds:
    """Fit on one model, hold out all others; once a model."""
    for name in table["model"].unique():
        yield f"fit on {name}", (table["model"] != name).to_numpy()


def _by_parallel(table: pd.DataFrame, seed: int) -> Folds:
    """Hold out one number of devices."""
    parallel = table["kernel"].map(lambda kernel: words(kernel).get("tp", 1))
    for count in sorted(parallel.unique()):
        yield f"without tp={count}", (parallel == count).to_numpy()


def _mixed(table: pd.DataFrame, seed: int) -> Folds:
    """Hold out the steps that mix prefill and decode; the fit sees pure ones."""

    yield "fit on pure steps", table["kernel"].str.contains("decodes=").to_numpy()


RULES: dict[str, Callable[[pd.DataFrame, int], Folds]] = {
    "shape": _by_shape,
    "model": _by_model,
    "tp": _by_parallel,
    "mixed": _mixed,
}


def holdout(
    rows: pd.DataFrame,
    device: DeviceSpec,
    by: str = "shape",
    models: Mapping[str, ModelSpec] | None = None,
    seed: int = 0,
    level: float = 0.9,
) -> pd.DataFrame:
    """Fit on a part of the rows' shapes, predict the rest: one line a held-out shape and fold.

    by: 'shape' (halves drawn by `seed`), 'model' (fit on one, predict the others), 'tp' (leave one number of devices
    out), 'mixed' (fit on pure steps). Columns: SHAPE, fold, measured, settled, predicted, low, high, warning, error
    (predicted / measured − 1), inside (the measured time lies in the interval of `level`).
    """
    import pandas as pd

    one_of("rule of a split", by, RULES)
    table = shapes(rows)
    made = []
    for fold, held in RULES[by](table, seed):
        if held.any():
            seen = _fit_shapes(table[~held].reset_index(drop=True), device, models)
            made.append(predicted(seen, table[held], models, level).assign(fold=fold))
    if not made:
        raise InputError(f"nothing to hold out by {by!r}: {table['model'].nunique()} model, {len(table)} shapes")
    return pd.concat(made, ignore_index=True)


def predicted(
    fit: Fit, table: pd.DataFrame, models: Mapping[str, ModelSpec] | None = None, level: float = 0.9
) -> pd.DataFrame:
    """The shapes of `table` (see latency.shapes) with what `fit` predicts, as holdout gives them."""
    import pandas as pd

    parallel = table["kernel"].map(lambda kernel: words(kernel).get("tp", 1))
    made = []
    for (name, tp), own in table.assign(tp=parallel).groupby(["model", "tp"], sort=False):
        model = models[name] if models is not None else presets.model(name)
        guess = fit.predict(of_rows(own), model, int(tp), level).set_axis(own.index)
        made.append(
            own[[*SHAPE, "measured", "settled"]].assign(
                predicted=guess["seconds"], **guess[["low", "high", "warning"]]
            )
        )
    joined = pd.concat(made).sort_index()
    inside = (joined["low"] <= joined["measured"]) & (joined["measured"] <= joined["high"])
    return joined.assign(error=joined["predicted"] / joined["measured"] - 1, inside=inside)


def errors(held: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Of |error|: median and 90th percentile; the share of shapes inside the interval; how many. One line a group."""
    import pandas as pd

    def one(own: pd.DataFrame) -> dict[str, float]:
        size = own["error"].abs()
        return {
            "median": float(size.median()),
            "p90": float(size.quantile(0.9)),
            "coverage": float(own["inside"].mean()),
            "shapes": len(own),
        }

    if not by:
        return pd.DataFrame([one(held)])
    lines = []
    for key, own in held.groupby(list(by), sort=False):
        lines.append(dict(zip(by, key, strict=True)) | one(own))
    return pd.DataFrame(lines)


def a100() -> Fit:
    """The fit to published rows of A100-80GB (Llama-2-70B on 2, 4, 8 and BLOOM-176B on 8, float16).

    Rows: github.com/Mutinifni/splitwise-sim, data/perf_model.csv (MIT; Patel et al. 2024, "Splitwise"), fitted by
    `python -m benchmarks.latency --write`.
    """
    return Fit.from_json((paths.DATA / "latency_a100.json").read_text("utf-8"))


def calibrated_path(machine: str, source: str = "measured") -> Path:
    """Where `make calibrate` keeps a machine's fit."""
    one_of("source", source, ("measured", "recorded"))
    return (paths.measured if source == "measured" else paths.recorded)(machine) / "latency.json"


def calibrated(machine: str, source: str = "measured") -> Fit:
    """The fit of a machine's calibration; InputError says how to make one."""
    path = calibrated_path(machine, source)
    if not path.is_file():
        raise InputError(f"{path} is not here; run `make calibrate` on that machine")
    return Fit.from_json(path.read_text("utf-8"))
