"""What a pass has to do, as counts without a model: tokens, rows of logits, pairs of query and key, positions read.

A Work holds n batches as arrays; a batch is one pass or several one after the other (a prompt in chunks).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pdlib.spec import InputError

if TYPE_CHECKING:  # half a second that a prediction in plain numbers does not need
    import pandas as pd

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Work:
    """Passes of `batches` batches; every array has one entry a pass."""

    tokens: Floats  # new tokens: the rows of the layers' matrix products
    logits: Floats  # rows of the output head
    pairs: Floats  # (query, key) pairs of prefill
    past: Floats  # cached positions that prefill reads
    decodes: Floats  # sequences with one new token
    context: Floats  # positions they read, the new one included, summed
    batch: NDArray[np.int64]  # to which batch a pass belongs
    batches: int

    def __add__(self, other: Work) -> Work:
        """Both, one after the other: batch i of each becomes one batch."""
        if self.batches != other.batches:
            raise InputError(f"{self.batches} batches and {other.batches} do not pair up")
        return _joined([self, other], [0, 0], self.batches)


SHAPE = ["model", "phase", "kernel", "requests", "prompt_tokens", "new_tokens"]
APART = 0.05  # two least times of a shape that differ by more: it was disturbed
COUNTS = ("tokens", "logits", "pairs", "past", "decodes", "context")


def prefill(requests: ArrayLike, new: ArrayLike, past: ArrayLike = 0, chunk: int = 0) -> Work:
    """`requests` prompts of `new` tokens behind `past` cached ones, whole or `chunk` tokens a pass.

    Logits are made of each prompt's last token, in the last pass. Arrays make one batch an entry.
    """
    b, n, p = _numbers(requests=(requests, 1), new=(new, 1), past=(past, 0))
    if not chunk:
        return _passes(tokens=b * n, logits=b, pairs=b * (n * p + n * (n + 1) / 2), past=b * p)
    if chunk < 1:
        raise InputError(f"chunk = {chunk!r}: give at least 1 token a pass, or 0 for whole prompts")
    counts = np.ceil(n / chunk).astype(int)
    batch = np.repeat(np.arange(len(n)), counts)
    start = chunk * (np.arange(len(batch)) - np.repeat(np.cumsum(counts) - counts, counts))
    here = np.minimum(chunk, n[batch] - start)
    before, of = p[batch] + start, b[batch]
    last = start + here == n[batch]
    whole = _passes(
        tokens=of * here, logits=of * last, pairs=of * (here * before + here * (here + 1) / 2), past=of * before
    )
    return Work(**{name: getattr(whole, name) for name in COUNTS}, batch=batch, batches=len(n))


def decode(requests: ArrayLike, context: ArrayLike) -> Work:
    """One decode step of `requests` sequences at a mean `context` of filled positions, the new one included."""
    b, c = _numbers(requests=(requests, 1), context=(context, 1))
    return _passes(tokens=b, logits=b, decodes=b, context=b * c)


def mixed(new: ArrayLike, past: ArrayLike, decodes: ArrayLike, context: ArrayLike, fused: bool = True) -> Work:
    """A prompt's chunk of `new` tokens behind `past`, with `decodes` sequences at a mean `context`.

    In one pass, weights read once (`fused`, as servers do), or in two, as pdlib's kernels run them.
    """
    n, p, b, c = _numbers(new=(new, 1), past=(past, 0), decodes=(decodes, 1), context=(context, 1))
    if not fused:
        return prefill(1, n, p) + decode(b, c)
    pairs = n * p + n * (n + 1) / 2
    return _passes(tokens=n + b, logits=1 + b, pairs=pairs, past=p, decodes=b, context=b * c)


def shapes(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a shape of the rows: SHAPE, machine, and `measured`, seconds of a step.

    `measured` is the second least of three samples or more, the least of fewer: other work on a machine only ever
    adds time, often to most samples of a shape, and a single least one may be luck. `settled`: a single sample, or
    the two least within APART of each other; otherwise something disturbed all of them.
    """
    for name in (*SHAPE, "machine", "device", "dtype", "seconds"):
        if name not in rows.columns:
            raise InputError(f"rows lack the column {name!r}; give rows of the results schema")
    bad = ~(np.isfinite(rows["seconds"]) & (rows["seconds"] > 0))
    if rows.empty or bad.any():
        raise InputError(f"{int(bad.sum())} of {len(rows)} rows have no seconds above 0; measure them again")
    step = rows["seconds"] / np.where(rows["phase"] == "decode", np.maximum(rows["new_tokens"] - 1, 1), 1)
    keys = ["machine", "device", "dtype", *SHAPE]
    table = rows.assign(measured=step).groupby(keys, sort=True, observed=True)["measured"]
    least = table.agg(lambda samples: float(np.sort(samples)[1 if len(samples) > 2 else 0])).reset_index()
    apart = table.agg(lambda samples: float(np.sort(samples)[:2].max() / samples.min() - 1))
    return least.assign(settled=(apart <= APART).to_numpy())


def of_rows(rows: pd.DataFrame) -> Work:
    """One batch a row of the results schema; the row's seconds must be those of one pass or chunked prefill.

    The words of `kernel` say the rest: chunk=, past=, decodes=, context=. A decode row is one step at its mean
    context.
    """
    parts, places = [], []
    for (phase, kernel), own in rows.reset_index(drop=True).groupby(["phase", "kernel"], sort=False):
        word = words(str(kernel))
        b, n = own["requests"].to_numpy(float), own["prompt_tokens"].to_numpy(float)
        if phase == "decode":
            part = decode(b, n + own["new_tokens"].to_numpy(float) / 2)
        elif phase == "prefill":
            part = prefill(b, n, word.get("past", 0), word.get("chunk", 0))
            if "decodes" in word:
                part = part + decode(np.full(len(own), word["decodes"]), word["context"])
        else:
            raise InputError(f"a row of phase {phase!r}: the latency model knows prefill and decode")
        parts.append(part)
        places.append(own.index.to_numpy())
    order = np.concatenate(places)
    joined = _joined(parts, list(np.cumsum([0] + [p.batches for p in parts[:-1]])), len(order))
    return Work(**{name: getattr(joined, name) for name in COUNTS}, batch=order[joined.batch], batches=len(order))


def words(kernel: str) -> dict[str, int]:
    """The numbers in a row's kernel: 'pdlib chunk=128 past=256' → {'chunk': 128, 'past': 256}."""
    pairs = (word.partition("=") for word in kernel.split() if "=" in word)
    return {name: int(value) for name, _, value in pairs if value.isdigit()}


def _numbers(**given: tuple[ArrayLike, float]) -> list[Floats]:
    """The arguments as arrays of one shape (n,), each at least its least."""
    for name, (value, least) in given.items():
        numbers = np.asarray(value, float)
        if not (numbers >= least).all() or not np.isfinite(numbers).all():
            raise InputError(f"{name} = {value!r}: give numbers of at least {least}")
    arrays = np.broadcast_arrays(*(np.atleast_1d(np.asarray(value, float)) for value, _ in given.values()))
    if arrays[0].ndim != 1:
        raise InputError(f"{', '.join(given)}: give numbers or flat lists, not arrays of {arrays[0].ndim} dimensions")
    return list(arrays)


def _passes(**counts: Any) -> Work:
    n = len(counts["tokens"])
    arrays = {name: np.asarray(counts.get(name, np.zeros(n)), float) for name in COUNTS}
    return Work(**arrays, batch=np.arange(n), batches=n)


def _joined(parts: list[Work], offsets: list[int], batches: int) -> Work:
    arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in COUNTS}
    batch = np.concatenate([part.batch + offset for part, offset in zip(parts, offsets, strict=True)])
    return Work(**arrays, batch=batch, batches=batches)
