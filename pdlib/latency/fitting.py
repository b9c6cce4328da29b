"""Fitting the formula to rows, predicting with an interval, and the error on rows held out. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pdlib import presets
from pdlib.latency import form
from pdlib.latency.form import NAMES, PARAMETERS, Fast
from pdlib.latency.work import Floats, Work, of_rows, shapes, words
from pdlib.spec import DeviceSpec, InputError, ModelSpec

if TYPE_CHECKING:  # half a second that a prediction in plain numbers does not need
    import pandas as pd

TOLERANCE = 0.08  # relative: residuals well above it count less and less
ENOUGH = 8  # shapes that make a percentile
DISTURBED = 4.0  # times the tolerance of a shape that was disturbed
OPEN = 0.6  # a parameter whose posterior is wider than this share of its prior was not identified
# What the rows cannot tell of themselves, as log standard deviations: a model that is not among them, a device known
# by its data sheet alone, and every e-fold outside the range of the rows.
OTHER_MODEL, OTHER_DEVICE, PER_FOLD = 0.07, 0.20, 0.10
FAR = np.log(2.0)  # outside the range by more than a factor of two: said in the result


@dataclass(frozen=True)
class Fit:
    """Nine parameters with their covariance, and where they come from."""

    machine: str
    device: DeviceSpec
    dtype: str
    values: dict[str, float]
    covariance: list[list[float]]  # of the parameters' logarithms
    noise: dict[str, float]  # log standard deviation of a row, by phase
    models: tuple[str, ...]
    ranges: dict[str, tuple[float, float]]
    unidentified: tuple[str, ...]
    rows: int  # shapes fitted
    travelled: bool = False

    def seconds(self, work: Work, model: ModelSpec, tensor_parallel: int = 1) -> Floats:
        """Predicted seconds of every batch, shape (work.batches,)."""
        return form.seconds(self.values, self._sizes(model, tensor_parallel), work)

    def parts(self, work: Work, model: ModelSpec, tensor_parallel: int = 1) -> pd.DataFrame:
        """Predicted seconds of every batch, a column a part of the formula."""
        import pandas as pd

        every = form.parts(self.values, self._sizes(model, tensor_parallel), work)
        return pd.DataFrame({k: np.bincount(work.batch, v, minlength=work.batches) for k, v in every.items()})

    def predict(self, work: Work, model: ModelSpec, tensor_parallel: int = 1, level: float = 0.9) -> pd.DataFrame:
        """seconds, low and high of an interval of `level`, and a warning ('' where there is none), a row a batch.

        The interval holds the noise of a row, the parameters' covariance, and more for another model or device
        than the rows' and for sizes outside their range.
        """
        import pandas as pd
        from scipy.stats import norm

        if not 0 < level < 1:
            raise InputError(f"level {level!r} of an interval: give a number between 0 and 1")
        size = self._sizes(model, tensor_parallel)
        middle = form.seconds(self.values, size, work)
        gradient = _gradient(self.values, size, work, middle)
        variance = np.einsum("ni,ij,nj->n", gradient, np.asarray(self.covariance), gradient)
        decoding = np.bincount(work.batch, work.pairs, minlength=work.batches) == 0
        variance += np.where(decoding, self.noise["decode"], self.noise["prefill"]) ** 2
        folds, names = _outside(self.ranges, _ranged(work, size))
        variance += (PER_FOLD * folds) ** 2
        variance += OTHER_MODEL**2 * (model.name not in self.models) + OTHER_DEVICE**2 * self.travelled
        half = norm.ppf((1 + level) / 2) * np.sqrt(variance)
        said = [f"model {model.name} is not among the rows"] if model.name not in self.models else []
        said += [f"{self.device.name} is known by its data sheet alone"] if self.travelled else []
        far = [[f"far outside the rows: {name}"] if f > FAR else [] for f, name in zip(folds, names, strict=True)]
        warning = ["; ".join(said + outside) for outside in far]
        low, high = middle * np.exp(-half), middle * np.exp(half)
        return pd.DataFrame({"seconds": middle, "low": low, "high": high, "warning": warning})

    def parameters(self, level: float = 0.9) -> pd.DataFrame:
        """One row a parameter: name, value, low, high, unit, meaning, identified."""
        import pandas as pd
        from scipy.stats import norm

        half = norm.ppf((1 + level) / 2) * np.sqrt(np.diag(np.asarray(self.covariance)))
        rows = []
        for (name, value), h in zip(self.values.items(), half, strict=True):
            known = PARAMETERS[name]
            ends = {"value": value, "low": value * np.exp(-h), "high": value * np.exp(h)}
            about = {"unit": known.unit, "meaning": known.meaning, "identified": name not in self.unidentified}
            rows.append({"name": name, **ends, **about})
        return pd.DataFrame(rows)

    def specialise(self, model: ModelSpec, tensor_parallel: int = 1) -> Fast:
        """The formula made ready for one model: a microsecond a prediction, without interval."""
        return Fast(self.values, self._sizes(model, tensor_parallel))

    def to(self, device: DeviceSpec, dtype: str | None = None) -> Fit:
        """The same parameters on another device, known by its peaks; intervals become wider.

        Efficiencies stay. Overheads shrink with the bandwidth: a kernel that does little waits for memory and for
        its neighbours, and no data sheet says how long; the bandwidth follows a device's generation.
        """
        faster = device.read_bytes_per_s / self.device.read_bytes_per_s
        moved = {name: self.values[name] / faster for name in ("overhead", "sequence")}
        values = self.values | moved
        return replace(self, device=device, dtype=dtype or self.dtype, values=values, travelled=True)

    def to_json(self) -> str:
        """Everything, as text for a file."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Fit:
        """What `to_json` wrote; InputError for anything else."""
        try:
            given = json.loads(text)
            given["device"] = DeviceSpec(**given["device"])
            given["models"], given["unidentified"] = tuple(given["models"]), tuple(given["unidentified"])
            given["ranges"] = {name: (low, high) for name, (low, high) in given["ranges"].items()}
            made = cls(**given)
            if tuple(made.values) != NAMES:
                raise KeyError(f"parameters {list(made.values)}")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"not a fit of this project ({error}); calibrate again") from error
        return made

    def _sizes(self, model: ModelSpec, tensor_parallel: int) -> form.Sizes:
        return form.sizes(model, self.device, self.dtype, tensor_parallel)


@dataclass(frozen=True)
class _Group:
    """Shapes of one model on one number of devices."""

    work: Work
    size: form.Sizes
    at: np.ndarray  # places in the table of shapes


def fit(rows: pd.DataFrame, device: DeviceSpec, models: Mapping[str, ModelSpec] | None = None) -> Fit:
    """Fit the parameters to rows of one machine, device and dtype; `device` gives its peaks at that dtype.

    `models` has the sizes of every model in the rows (default: presets). Least squares on log seconds, far residuals
    weighing less, priors holding what rows leave open: those parameters are named in `unidentified`. InputError
    for rows of several machines, fewer shapes than parameters, times that are not above 0.
    """
    return _fit_shapes(shapes(rows), device, models)


def _fit_shapes(table: pd.DataFrame, device: DeviceSpec, models: Mapping[str, ModelSpec] | None) -> Fit:
    from scipy.optimize import least_squares

    for name in ("machine", "device", "dtype"):
        if table[name].nunique() > 1:
            raise InputError(f"rows of several {name}s: {', '.join(sorted(table[name].unique()))}; fit each alone")
    dtype = str(table["dtype"].iloc[0])
    groups = _groups(table, device, dtype, models)
    free = [n for n in NAMES if n != "link" or any(g.size.link for g in groups)]
    if len(table) < len(free):
        raise InputError(f"{len(table)} shapes for {len(free)} parameters ({', '.join(free)}); measure more shapes")
    measured = np.log(table["measured"].to_numpy(float))
    known = {n: PARAMETERS[n].prior for n in NAMES}
    if str(table["device"].iloc[0]).startswith("cpu"):
        known["overlap"] = form.CPU_OVERLAP
    prior = np.log(list(known.values()))
    spread = np.array([PARAMETERS[n].spread for n in NAMES])

    settled = table["settled"].to_numpy(bool)
    tolerance = TOLERANCE * np.where(settled, 1.0, DISTURBED)

    def residuals(logs: Floats) -> Floats:
        values = dict(zip(NAMES, np.exp(logs), strict=True))
        return (np.log(_seconds(values, groups, len(table))) - measured) / tolerance

    def objective(logs: Floats) -> Floats:
        r = residuals(logs)
        soft = np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r**2) - 1))  # as |r| far out: one bad row cannot pull the fit
        return np.concatenate([soft, (logs - prior) / spread])

    done = least_squares(objective, prior, bounds=(prior - 4 * spread, prior + 4 * spread))
    r = residuals(done.x)
    slope = done.jac[: len(table)]
    information = slope.T @ slope + np.diag(spread**-2.0)
    inverse = np.linalg.inv(information)
    # Left out, a row would be missed by its residual over 1 − leverage: the noise of rows not seen.
    leverage = np.clip(np.einsum("ni,ij,nj->n", slope, inverse, slope), 0, 0.9)
    missed = np.abs(r) * tolerance / (1 - leverage)
    trusted = settled if settled.sum() >= ENOUGH else np.ones_like(settled)
    phase = table["phase"].to_numpy()
    noise = {name: _noise(missed[trusted & (phase == name)], missed[trusted]) for name in ("prefill", "decode")}
    open_ = np.sqrt(np.diag(inverse)) > OPEN * spread
    # Rows that scatter more than the tolerance tell less than they were taken to.
    inverse = inverse * max(1.0, min(max(noise.values()) / TOLERANCE, 3.0)) ** 2
    spans = [_ranged(g.work, g.size) for g in groups]
    joined = {name: np.concatenate([span[name] for span in spans]) for name in spans[0]}
    return Fit(
        machine=str(table["machine"].iloc[0]),
        device=device,
        dtype=dtype,
        values=dict(zip(NAMES, map(float, np.exp(done.x)), strict=True)),
        covariance=inverse.tolist(),
        noise=noise,
        models=tuple(sorted(table["model"].unique())),
        ranges={name: _span(values) for name, values in joined.items()},
        unidentified=tuple(n for n, o in zip(NAMES, open_, strict=True) if o and n in free),
        rows=len(table),
    )


def _noise(own: Floats, every: Floats) -> float:
    """Log standard deviation from the 90th percentile of what was missed; of all rows when a phase has few."""
    return max(float(np.quantile(own if len(own) >= ENOUGH else every, 0.9)) / 1.645, 0.01)


def _groups(
    table: pd.DataFrame, device: DeviceSpec, dtype: str, models: Mapping[str, ModelSpec] | None
) -> list[_Group]:
    parallel = table["kernel"].map(lambda kernel: words(kernel).get("tp", 1))
    groups = []
    for (name, tp), own in table.assign(tp=parallel).groupby(["model", "tp"]):
        if models is not None and name not in models:
            raise InputError(f"rows of model {name!r}, whose sizes are not given; models has: {', '.join(models)}")
        spec = models[name] if models is not None else presets.model(name)
        groups.append(_Group(of_rows(own), form.sizes(spec, device, dtype, int(tp)), own.index.to_numpy()))
    return groups


def _seconds(values: dict[str, float], groups: Sequence[_Group], count: int) -> Floats:
    made = np.empty(count)
    for group in groups:
        made[group.at] = form.seconds(values, group.size, group.work)
    return made


def _gradient(values: dict[str, float], size: form.Sizes, work: Work, middle: Floats) -> Floats:
    """d log seconds / d log parameter, shape (batches, parameters)."""
    step = 1e-4
    moved = [form.seconds(values | {n: values[n] * np.exp(step)}, size, work) for n in NAMES]
    return (np.log(np.stack(moved, axis=1)) - np.log(middle)[:, None]) / step


def _ranged(work: Work, size: form.Sizes) -> dict[str, Floats]:
    """What has a calibrated range, one number a batch; 0 where it does not apply."""

    def most(values: Floats) -> Floats:
        made = np.zeros(work.batches)
        np.maximum.at(made, work.batch, values)
        return made

    with np.errstate(invalid="ignore", divide="ignore"):
        context = np.where(work.decodes > 0, work.context / work.decodes, 0.0)
        keys = np.where(work.pairs > 0, work.pairs / np.maximum(work.tokens - work.decodes, 1), 0.0)
    return {
        "tokens a pass": most(work.tokens),
        "decoding sequences": most(work.decodes),
        "context": most(context),
        "keys a prompt token meets": most(keys),
        "weights": np.full(work.batches, size.weight_bytes),
    }


def _span(values: Floats) -> tuple[float, float]:
    used = values[values > 0]
    return (float(used.min()), float(used.max())) if len(used) else (0.0, 0.0)


def _outside(ranges: Mapping[str, tuple[float, float]], found: dict[str, Floats]) -> tuple[Floats, list[str]]:
    """How many e-folds every batch lies outside the ranges (the farthest one), and which range that is."""
    folds, names = [], list(found)
    for name, values in found.items():
        low, high = ranges.get(name, (0.0, 0.0))
        safe = np.where(values > 0, values, max(low, 1e-300))
        if high == 0:  # nothing of the kind was measured
            folds.append(np.where(values > 0, 3.0, 0.0))
        else:
            folds.append(np.maximum(np.log(low / safe), np.log(safe / high)).clip(min=0))
    every = np.stack(folds)
    return every.max(axis=0), [names[i] for i in every.argmax(axis=0)]
