"""The metrics, once: latencies and throughputs from token times, and the statistics of repeated samples.

One request arrives at a, asks for m new tokens, and its k-th new token is out at t_k (k = 1 … m).
`arrivals` has shape (R,) in s; `times` holds one array of shape (m_r,) in s a request, never falling.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdlib.spec import InputError

Floats = NDArray[np.float64]
Interval = tuple[float, float, float]  # estimate, low, high

RESAMPLES = 2000


def ttft(arrivals: ArrayLike, times: Sequence[ArrayLike]) -> Floats:
    """Time to first token t_1 − a, shape (R,), in s: queueing and prefill."""
    start, tokens = _requests(arrivals, times)
    return np.array([t[0] for t in tokens]) - start


def e2e(arrivals: ArrayLike, times: Sequence[ArrayLike]) -> Floats:
    """End-to-end latency t_m − a, shape (R,), in s."""
    start, tokens = _requests(arrivals, times)
    return np.array([t[-1] for t in tokens]) - start


def itl(times: Sequence[ArrayLike]) -> Floats:
    """Inter-token latencies t_k − t_{k−1}, k ≥ 2, of all requests pooled: shape (Σ(m_r − 1),), in s."""
    return np.concatenate([np.diff(t) for t in _tokens(times)])


def tpot(times: Sequence[ArrayLike]) -> Floats:
    """Time per output token (t_m − t_1) / (m − 1), shape (R,), in s.

    NaN where m = 1: it is undefined there, and a summary has to leave it out (np.nanpercentile).
    """
    return np.array([(t[-1] - t[0]) / (len(t) - 1) if len(t) > 1 else np.nan for t in _tokens(times)])


def throughput(tokens: Any, seconds: Any) -> Any:
    """Tokens per second. Prefill: prompt tokens; decode: Σ(m_r − 1), the first token not counted again."""
    return tokens / seconds


def attainment(arrivals: ArrayLike, times: Sequence[ArrayLike], ttft_slo_s: float, tpot_slo_s: float) -> float:
    """Share of requests with TTFT and TPOT within their SLOs; a request of one token has no TPOT to miss."""
    first = ttft(arrivals, times) <= ttft_slo_s
    per_token = tpot(times)
    return float(np.mean(first & ((per_token <= tpot_slo_s) | np.isnan(per_token))))


def goodput(rates: ArrayLike, attainments: ArrayLike, devices: int = 1, target: float = 0.9) -> float:
    """Highest of the tried request rates (req/s) whose attainment reaches `target`, per device; 0 if none."""
    rate, reached = np.asarray(rates, float), np.asarray(attainments, float)
    if rate.ndim != 1 or rate.shape != reached.shape or devices < 1:
        raise InputError(
            f"{rate.shape} rates, {reached.shape} attainments, {devices} devices; give one attainment "
            "a rate and at least one device"
        )
    return float(rate[reached >= target].max(initial=0.0) / devices)


def overhead(measured_s: float, roofline_s: float) -> tuple[float, float]:
    """What the roofline does not explain: (measured − roofline in s, measured / roofline)."""
    return measured_s - roofline_s, measured_s / roofline_s


def _tokens(times: Sequence[ArrayLike]) -> list[Floats]:
    tokens = [np.asarray(t, float) for t in times]
    if not tokens:
        raise InputError("no requests; give the token times of at least one")
    for at, t in enumerate(tokens):
        if t.ndim != 1 or not len(t) or not np.isfinite(t).all() or (np.diff(t) < 0).any():
            raise InputError(f"request {at}: its token times must be one or more numbers that never fall")
    return tokens


def _requests(arrivals: ArrayLike, times: Sequence[ArrayLike]) -> tuple[Floats, list[Floats]]:
    start, tokens = np.asarray(arrivals, float), _tokens(times)
    if start.shape != (len(tokens),):
        raise InputError(f"arrivals of shape {start.shape} for {len(tokens)} requests; give one a request")
    early = np.flatnonzero(~(start <= np.array([t[0] for t in tokens])))
    if early.size:
        raise InputError(f"request {early[0]}: its first token is out before it arrives")
    return start, tokens


def median_interval(samples: ArrayLike, level: float = 0.95) -> Interval:
    """(median, low, high) of the samples: percentile bootstrap, the same on every call.

    One sample gives an interval of no width: it says nothing about the spread, and looks it. Few samples give at
    most their range, whose own coverage of the median is 1 − 2^(1 − n): 75 % at n = 3, 94 % at 5, 97 % at 6.
    """
    values = _samples(samples)
    return (float(np.median(values)), *_bounds(_medians(values, seed=0), level))


def ratio_interval(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Interval:
    """(median(a) / median(b), low, high): both sides resampled independently, the same on every call."""
    over, under = _samples(a), _samples(b)
    if (under <= 0).any():
        raise InputError("a ratio needs a denominator whose samples are all above 0")
    ratios = _medians(over, seed=0) / _medians(under, seed=1)
    return (float(np.median(over) / np.median(under)), *_bounds(ratios, level))


def no_difference(interval: Interval) -> bool:
    """True when an interval of a ratio contains 1: no difference was seen."""
    return bool(interval[1] <= 1 <= interval[2])


def _samples(samples: ArrayLike) -> Floats:
    values = np.asarray(samples, float)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise InputError(f"samples of shape {values.shape}: give a list of one or more finite numbers")
    return values


def _medians(values: Floats, seed: int) -> Floats:
    """Medians of RESAMPLES draws with replacement, shape (RESAMPLES,)."""
    draws = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    return np.asarray(np.median(values[draws], axis=1), float)


def _bounds(estimates: Floats, level: float) -> tuple[float, float]:
    if not 0 < level < 1:
        raise InputError(f"level {level!r} of an interval: give a number between 0 and 1")
    low, high = np.quantile(estimates, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
