"""Numbers that tables and charts share: medians with their spread, totals, ratios, and digits to show."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from pdlib import metrics, words
from pdlib.results import SOURCES
from pdlib.spec import SCENARIOS

GROUP = ["source", "machine"]
# The three places of article 000 and, on a machine without a GPU, their counterparts.
ROLES = {
    "PD-GPU": "fast",
    "P-GPU/D-CPU": "split",
    "PD-CPU": "slow",
    "PD-fast": "fast",
    "P-fast/D-slow": "split",
    "PD-slow": "slow",
}
PLACEMENTS = {"fast": "PD-GPU", "split": "P-GPU/D-CPU", "slow": "PD-CPU"}
ARTICLE_COLUMNS = {"fast": "pd_gpu", "split": "p_gpu_d_cpu", "slow": "pd_cpu"}
MISTAKES = ("no_warm_up", "no_synchronise", "fixed_order", "cache_left", "all_logits", "prefill_in_decode")


def medians(rows: pd.DataFrame, by: list[str], value: str = "seconds") -> pd.DataFrame:
    """One row a group: the columns `by`, then median, low, high (95 % interval) of `value`, and n."""
    made = []
    for key, part in rows.groupby(by, sort=False):
        median, low, high = metrics.median_interval(part[value].to_numpy(float))
        made.append([*key, median, low, high, len(part)])
    return pd.DataFrame(made, columns=[*by, "median", "low", "high", "n"])


def groups(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """The (source, machine) pairs present: published first, then recorded, measured, modelled, simulated."""
    order = ("published", "recorded", "measured", *SOURCES)
    pairs = [(source, machine) for source, machine in rows[GROUP].drop_duplicates().to_numpy()]
    return sorted(pairs, key=lambda pair: order.index(pair[0]))


def _partly_timed(rows: pd.DataFrame) -> pd.Series:
    """Which rows are of a decode of which only some steps were timed."""
    return (rows["phase"] == "decode") & (rows["tokens"] < rows["requests"] * (rows["new_tokens"] - 1))


def whole_seconds(rows: pd.DataFrame) -> pd.Series:
    """Seconds of the whole phase: where a part of the decode steps was timed, scaled to all of them."""
    scale = rows["requests"] * (rows["new_tokens"] - 1) / rows["tokens"]
    return rows["seconds"] * scale.where(_partly_timed(rows), 1.0)


def timed_part(rows: pd.DataFrame, lang: str) -> list[str]:
    """What a caption says where only a part of the decode steps was timed (and scaled by whole_seconds)."""
    part = rows[_partly_timed(rows) & (rows["experiment"] != "mistakes")]
    if part.empty:
        return []
    steps = (part["tokens"] // part["requests"]).unique(), (part["new_tokens"] - 1).unique()
    return [words.say("timed part", lang, *("/".join(map(str, sorted(n))) for n in steps))]


def placed(rows: pd.DataFrame) -> pd.DataFrame:
    """Samples of the experiment 'placements' with their role (fast, split, slow) and, as a further
    phase 'total', the sum of the phases of every repeat; scenarios in the articles' order."""
    found = rows[(rows["experiment"] == "placements") & rows["placement"].isin(ROLES)]
    found = found.assign(seconds=whole_seconds(found))
    key = [*GROUP, "scenario", "placement", "repeat"]
    total = found.groupby(key, sort=False, as_index=False)["seconds"].sum().assign(phase="total")
    both = pd.concat([found[[*key, "phase", "seconds"]], total], ignore_index=True)
    both.insert(4, "role", both["placement"].map(ROLES))
    names = [*SCENARIOS, *(s for s in both["scenario"].unique() if s not in SCENARIOS)]
    ranks = both["scenario"].map(names.index), both["role"].map(list(ARTICLE_COLUMNS).index)
    return (
        both.assign(a=ranks[0], b=ranks[1])
        .sort_values(["a", "b"], kind="stable")
        .drop(columns=["a", "b"])
        .reset_index(drop=True)
    )


def split_gain(rows: pd.DataFrame) -> pd.DataFrame:
    """slow ÷ split for prefill, decode and total: source, machine, scenario, phase, ratio, low, high, n."""
    made = []
    for (source, machine, scenario, phase), part in placed(rows).groupby([*GROUP, "scenario", "phase"], sort=False):
        slow, split = (part.loc[part["role"] == role, "seconds"] for role in ("slow", "split"))
        if phase != "transfer" and len(slow) and len(split):
            interval = metrics.ratio_interval(slow, split)
            made.append([source, machine, scenario, phase, *interval, min(len(slow), len(split))])
    return pd.DataFrame(made, columns=[*GROUP, "scenario", "phase", "ratio", "low", "high", "n"])


def equal_decode(rows: pd.DataFrame) -> pd.DataFrame:
    """Total ratio slow ÷ split as it is and with one decode time for both arms, the mean of the two.

    Columns source, machine, scenario, ratio, equal, and equal_low and equal_high: the same with the
    decode time of one arm or of the other for both.
    """
    made = []
    times = medians(placed(rows), [*GROUP, "scenario", "role", "phase"])
    for (source, machine, scenario), part in times.groupby([*GROUP, "scenario"], sort=False):
        at = part.set_index(["role", "phase"])["median"]
        if not {"slow", "split"} <= set(part["role"]):
            continue
        moved = at.get(("split", "transfer"), 0.0)
        before = at["slow", "prefill"], at["split", "prefill"] + moved
        decodes = at["slow", "decode"], at["split", "decode"]
        one, other = sorted((before[0] + d) / (before[1] + d) for d in decodes)
        mean = sum(decodes) / 2
        as_is = at["slow", "total"] / at["split", "total"]
        equal = (before[0] + mean) / (before[1] + mean)
        made.append([source, machine, scenario, as_is, equal, one, other])
    return pd.DataFrame(made, columns=[*GROUP, "scenario", "ratio", "equal", "equal_low", "equal_high"])


def mistake_numbers(rows: pd.DataFrame) -> pd.DataFrame:
    """For every mistake measured: honest and mistaken in ms (second ÷ first for 'fixed_order'), and the
    factor mistaken ÷ honest, each with the 95 % interval; columns *_low and *_high."""
    made = []
    found = rows[rows["experiment"] == "mistakes"]
    for (source, machine, scenario), part in found.groupby([*GROUP, "scenario"], sort=False):
        cells: list[tuple[float, ...]] = []
        for kernel in ("honest", "mistaken"):
            arm = part[part["kernel"] == kernel]
            if scenario == "fixed_order":
                second, first = (arm.loc[arm["placement"] == p, "seconds"] for p in ("second", "first"))
                cells.append(metrics.ratio_interval(second, first))
            else:
                cells.append(tuple(1e3 * v for v in metrics.median_interval(arm["seconds"])))
        honest, mistaken = cells
        if scenario == "fixed_order":  # the honest ratio is the yardstick, not a sample set to resample
            factor: tuple[float, ...] = tuple(v / honest[0] for v in mistaken)
        else:
            kernels = (part.loc[part["kernel"] == k, "seconds"] for k in ("mistaken", "honest"))
            factor = metrics.ratio_interval(*kernels)
        rank = MISTAKES.index(scenario) if scenario in MISTAKES else len(MISTAKES)
        made.append([rank, source, machine, scenario, *honest, *mistaken, *factor])
    ends = ("", "_low", "_high")
    columns = [f"{name}{end}" for name in ("honest", "mistaken", "factor") for end in ends]
    frame = pd.DataFrame(made, columns=["rank", *GROUP, "mistake", *columns])
    return frame.sort_values("rank", kind="stable").drop(columns="rank").reset_index(drop=True)


def digits(value: float) -> str:
    """Three significant digits, no exponent: 0.0123, 1.23, 12.3, 123, 12,300."""
    if not value:
        return "0"
    places = 2 - math.floor(math.log10(abs(value)))
    return f"{round(value, places):,.{max(0, places)}f}"


def significant(values: Any, places: int = 4) -> list[float]:
    """Numbers at `places` significant digits: what an optimiser finds differs in its last bits between machines."""
    return [float(f"{value:.{places}g}") for value in values]


def interval(median: float, low: float, high: float) -> str:
    """'12.3 [11.9, 12.8]', or only the median where the interval has no width."""
    return digits(median) if low == high else f"{digits(median)} [{digits(low)}, {digits(high)}]"


def group_name(source: str, machine: str, lang: str) -> str:
    """How a (source, machine) pair is called: the reader's own machine, or its name and where it is from."""
    if source == "measured":
        return words.say("this machine", lang)
    if source == "published":
        return words.name(machine, lang)
    return f"{machine} ({words.say(source, lang)})"


def verdict(numbers: dict[str, Any], lang: str) -> str:
    """What a mistake does to the verdict, in words; `numbers` is a row of mistake_numbers."""
    factor = numbers["factor"]
    if metrics.no_difference((factor, numbers["factor_low"], numbers["factor_high"])):
        return words.say("no difference", lang)
    key = "times slower" if factor > 1 else "times faster"
    return words.say(key, lang, digits(max(factor, 1 / factor)))
