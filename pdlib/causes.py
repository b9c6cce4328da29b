"""Claim 0.13: what each factor of the experiment 'puzzle' does to the same decode, as numbers and a sentence."""

from __future__ import annotations

import numpy as np
import pandas as pd

from pdlib import metrics
from pdlib.spec import InputError

# factor: (the level of article 000's all-CPU arm, the other level)
FACTORS = {
    "malloc": ("default", "kept"),
    "logits": ("kept", "dropped"),
    "kv": ("views", "contiguous"),
    "order": ("first", "later"),
}
MEANING = {
    "malloc": "when the allocator returns freed memory to the system instead of keeping it",
    "logits": "while the logits of every prompt position stay alive",
    "kv": "when keys and values start as views of a larger block",
    "order": "when it is the first to run in its process",
}
ALL_CPU, AFTER_SPLIT = "logits=kept kv=views", "logits=dropped kv=contiguous"


def puzzle_effects(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a factor: time at its first level ÷ at its second, other factors equal, and the page faults.

    Columns factor, levels, ratio, low, high (95 % interval), faults_a, faults_b (median a step). Each sample is
    divided by the median of the samples that share its other factors, so that those cancel.
    """
    live = _samples(rows)
    made = []
    for factor, (a, b) in FACTORS.items():
        others = [name for name in FACTORS if name not in (factor, "order")]
        level = live[live["scenario"].notna()].groupby(["scenario", *others])["seconds"].transform("median")
        relative = live["seconds"] / level
        at_a, at_b = live[factor] == a, live[factor] == b
        if not at_a.any() or not at_b.any():
            continue  # no mallopt on this system: the factor was not varied
        interval = metrics.ratio_interval(relative[at_a], relative[at_b])
        faults = (_median(live.loc[at, "faults"]) for at in (at_a, at_b))
        made.append([factor, f"{a} ÷ {b}", *interval, *faults])
    return pd.DataFrame(made, columns=["factor", "levels", "ratio", "low", "high", "faults_a", "faults_b"])


def puzzle_sentence(rows: pd.DataFrame) -> str:
    """What decides, in words with numbers: the two arms under each allocator, then the strongest factor.

    A factor counts only when the interval of its ratio leaves out 1.
    """
    effects, live = puzzle_effects(rows), _samples(rows)
    said = [f"The all-CPU arm's decode takes {_arms(live, 'default')} × the split's, as memory is by default"]
    if (live["malloc"] == "kept").any():
        said[0] += f", and {_arms(live, 'kept')} × when the allocator keeps freed memory"
    seen = effects[(effects["low"] > 1) | (effects["high"] < 1)]
    if seen.empty:
        return f"{said[0]}. None of the factors makes a difference seen on this machine."
    top = seen.loc[np.log(seen["ratio"]).abs().idxmax()]
    rest = effects[effects["factor"] != top["factor"]]
    others = ", ".join(f"{r.factor} {r.ratio:.2f} [{r.low:.2f}, {r.high:.2f}]" for r in rest.itertuples())
    return (
        f"{said[0]}. The strongest factor is {top['factor']}: the same decode takes {top['ratio']:.2f} "
        f"[{top['low']:.2f}, {top['high']:.2f}] × as long {MEANING[top['factor']]} ({top['faults_a']:,.0f} page "
        f"faults a step against {top['faults_b']:,.0f}); the others: {others}."
    )


def _arms(live: pd.DataFrame, malloc: str) -> str:
    """All-CPU ÷ split under one allocator, with its interval."""
    arms = [live.loc[live["kernel"] == f"{arm} malloc={malloc}", "seconds"] for arm in (ALL_CPU, AFTER_SPLIT)]
    return "{:.2f} [{:.2f}, {:.2f}]".format(*metrics.ratio_interval(*arms))


def _samples(rows: pd.DataFrame) -> pd.DataFrame:
    live = rows[(rows["experiment"] == "puzzle") & (rows["source"] != "published")].copy()
    if live.empty:
        raise InputError("no rows of the experiment 'puzzle'; measure them, or name a machine that has some")
    for part in ("logits", "kv", "malloc"):
        live[part] = live["kernel"].str.extract(rf"\b{part}=(\w+)", expand=False)
    live["order"] = np.where(live["order"] == 0, "first", "later")
    live["faults"] = live["page_faults"].astype("Float64") * live["requests"] / live["tokens"]
    return live


def _median(column: pd.Series) -> float:
    known = column.dropna()
    return float(known.median()) if len(known) else float("nan")
