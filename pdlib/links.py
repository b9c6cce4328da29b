"""Links between P and D: what they carry, what hiding a transfer asks of them, and t = t0 + bytes / BW from samples.

Arithmetic only, no torch. GB are 10⁹ bytes; rates are of one direction, after line coding and before headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from pdlib import cost, metrics, paths
from pdlib.spec import DeviceSpec, InputError, ModelSpec, one_of, whole_numbers

RESAMPLES = 500  # fits of a bootstrap: 0.1 s


@dataclass(frozen=True)
class Link:
    """A kind of link: bytes a second in one direction, and who says so."""

    name: str
    bytes_per_s: float
    source: str
    url: str


def presets() -> dict[str, Link]:
    """The links of data/links.csv by name, slowest first; each with the source of its rate."""
    table = pd.read_csv(paths.DATA / "links.csv").sort_values("GB_per_s", kind="stable")
    return {r["name"]: Link(r["name"], 1e9 * r["GB_per_s"], r["source"], r["url"]) for r in table.to_dict("records")}


def link(name: str) -> Link:
    """A link of `presets`; InputError with the names there are."""
    known = presets()
    one_of("link", name, known)
    return known[name]


def lossy_bytes_per_s(loss: float, round_trip_s: float, segment_bytes: int = 1448) -> float:
    """What one TCP stream carries at most when a share `loss` of its segments is lost, in B/s.

    MSS / (RTT · √(2·loss / 3)): Mathis, Semke, Mahdavi and Ott, "The macroscopic behavior of the TCP congestion
    avoidance algorithm", 1997. For senders that take a loss for congestion (Reno, nearly CUBIC), not for BBR.
    """
    if not 0 < loss < 1 or not round_trip_s > 0:
        raise InputError(
            f"loss {loss!r}, round trip {round_trip_s!r} s; give a share between 0 and 1 and a time above 0"
        )
    return float(segment_bytes / (round_trip_s * np.sqrt(2 * loss / 3)))


def prefill_s(
    model: ModelSpec,
    requests: int,
    prompt_tokens: int,
    dtype: str,
    device: DeviceSpec,
    devices: int = 1,
    utilisation: float = 0.5,
) -> float:
    """Prefill time of a model that was not measured, in s: the roofline of `devices` devices ÷ `utilisation`.

    A model, not a measurement: it has to be said so wherever it is shown.
    """
    whole_numbers(devices=devices)
    if not 0 < utilisation <= 1:
        raise InputError(
            f"utilisation {utilisation!r}; give the share of the peak that is reached, above 0, at most 1"
        )
    work = cost.prefill(model, requests, prompt_tokens, dtype)
    return cost.roofline_s(work, device) / (devices * utilisation)


def needed_bytes_per_s(cache_bytes: float, prefill_s: float) -> float:
    """The rate at which a transfer just hides behind its prefill: κ·n / T_prefill, in B/s.

    Layers are alike, so this is also the condition layer by layer: transfer time ≤ compute time of a layer.
    """
    return cache_bytes / prefill_s


def exposed_s(prefill_s: ArrayLike, transfer_s: ArrayLike, layers: int, ahead: float = 0.0) -> np.ndarray:
    """Time from the end of prefill to the last byte when each layer leaves as soon as it is ready, in s.

    `transfer_s` is the whole transfer alone, X; prefill takes T. Layer i is ready at (i − ahead)·T/L and layers leave
    one after the other, so the last byte is there at max(T + X/L, T/L + X) − ahead·T/L. `ahead` = 0 is a layer
    that leaves when it is computed: then one layer's transfer always stays exposed. `layer_ahead` is the share of a
    layer that is still to be computed when its keys and values exist.
    """
    whole_numbers(layers=layers)
    computed, moved = np.asarray(prefill_s, float), np.asarray(transfer_s, float)
    late = np.maximum(moved / layers, computed / layers + moved - computed)
    return np.maximum(0.0, late - ahead * computed / layers)


def layer_ahead(model: ModelSpec) -> float:
    """Share of a layer's matrix FLOPs that follows its keys and values: all but the Q, K and V projections."""
    attention = model.hidden * model.head_dim * (model.heads + 2 * model.kv_heads)
    return 1 - attention * model.layers / model.matmul_parameters


def hidden_share(prefill_s: ArrayLike, transfer_s: ArrayLike, layers: int, ahead: float = 0.0) -> np.ndarray:
    """1 − exposed ÷ transfer alone, by `exposed_s`: 1 − 1/L where a layer moves faster than it is computed."""
    return 1 - exposed_s(prefill_s, transfer_s, layers, ahead) / np.asarray(transfer_s, float)


@dataclass(frozen=True)
class Fit:
    """t = t0 + bytes / BW as fitted: estimates with 95 % intervals, and how far a median lies off the line."""

    t0_s: metrics.Interval
    bytes_per_s: metrics.Interval
    worst: float  # the largest |predicted ÷ median − 1| of a size

    def seconds(self, size: ArrayLike) -> np.ndarray:
        """Predicted transfer time of `size` bytes, in s."""
        return self.t0_s[0] + np.asarray(size, float) / self.bytes_per_s[0]


def fit(sizes: Sequence[float], seconds: Sequence[float]) -> Fit:
    """Fit t = t0 + bytes / BW to samples, one entry a sample; at least two different sizes.

    Non-negative least squares of the relative errors of each size's median, so that 64 kB weigh as much as 1 GB.
    Intervals: bootstrap, samples drawn anew within each size.
    """
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    kinds = np.unique(size)
    if size.shape != time.shape or len(kinds) < 2 or not (size > 0).all() or not (time > 0).all():
        raise InputError(
            f"{size.shape} sizes ({len(kinds)} different), {time.shape} times; give a time above 0 for each sample, "
            "and two sizes or more"
        )
    groups = [time[size == kind] for kind in kinds]
    t0, per_byte = _line(kinds, np.array([np.median(group) for group in groups]))
    generator = np.random.default_rng(0)
    drawn = [np.median(g[generator.integers(0, len(g), (RESAMPLES, len(g)))], axis=1) for g in groups]
    lines = np.array([_line(kinds, medians) for medians in np.column_stack(drawn)])
    low, high = np.quantile(lines, [0.025, 0.975], axis=0)
    worst = max(abs((t0 + kind * per_byte) / np.median(g) - 1) for kind, g in zip(kinds, groups, strict=True))
    return Fit(
        (t0, float(low[0]), float(high[0])), (1 / per_byte, float(1 / high[1]), float(1 / low[1])), float(worst)
    )


def _line(sizes: np.ndarray, seconds: np.ndarray) -> tuple[float, float]:
    """(t0, s a byte), both ≥ 0, that predict `seconds` best, relative to each."""
    from scipy.optimize import nnls  # here, not above: recording rows asks for torch, transformers and pandas only

    scale = sizes.max()
    columns = np.column_stack([1 / seconds, sizes / scale / seconds])
    (t0, slope), _ = nnls(columns, np.ones(len(sizes)))
    if not slope > 0:
        raise InputError("these times do not grow with the bytes: there is no bandwidth in them; give larger sizes")
    return float(t0), float(slope / scale)


@dataclass(frozen=True)
class Demand:
    """A cache that has to move: whose, how long a prompt, how many bytes, behind how long a prefill and says who."""

    model: str
    prompt_tokens: int
    bytes: int
    prefill_s: float
    source: str  # measured, recorded, published or modelled: where prefill_s is from
    origin: str  # what the prefill time rests on, e.g. "8 × A100 at 50 %"


def demands(cases: Iterable[Demand]) -> pd.DataFrame:
    """One row a case: what link it needs, and the transfer time on each of `presets`, in s (columns 'on <link>')."""
    made = []
    for case in cases:
        needed = needed_bytes_per_s(case.bytes, case.prefill_s)
        times = {f"on {one.name}": case.bytes / one.bytes_per_s for one in presets().values()}
        made.append({**vars(case), "needed_bytes_per_s": needed, **times})
    columns = [*Demand.__dataclass_fields__, "needed_bytes_per_s", *(f"on {name}" for name in presets())]
    return pd.DataFrame(made, columns=columns)
