"""Charts of single causes: six mistakes of measuring, and the habits behind article 000's decode times."""

from __future__ import annotations

import math

import pandas as pd

from pdlib import metrics, summary, words
from pdlib.plots.style import (
    FAINT,
    INK,
    PHASE,
    QUIET,
    ROLE,
    Chart,
    chart,
    checked,
    drawing,
    empty,
    fill,
    finish,
    label,
    log_ticks,
    plain,
    whisker,
)
from pdlib.summary import GROUP, digits, group_name, groups


@drawing
def mistakes(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """By which factor each mistake moves the verdict, on a log axis, with its interval."""
    found = checked(rows, "mistakes")
    numbers = summary.mistake_numbers(found)
    present = groups(numbers)
    names = list(numbers["mistake"].unique())
    figure = chart("mistakes", found, 0.8 + 0.42 * max(len(numbers), 2), lang, note)
    if numbers.empty:
        return empty(figure, lang, numbers.columns)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.axvline(1, color=QUIET, linewidth=1, zorder=1)
    for row in numbers.to_dict("records"):
        place = present.index((row["source"], row["machine"]))
        y = names.index(row["mistake"]) + (0 if len(present) == 1 else 0.5 * (place / (len(present) - 1) - 0.5))
        same = metrics.no_difference((row["factor"], row["factor_low"], row["factor_high"]))
        colour = QUIET if same else PHASE["decode"]
        axes.plot([1, row["factor"]], [y, y], color=FAINT, linewidth=3, zorder=1)
        whisker(axes, row["factor_low"], row["factor_high"], y)
        axes.scatter([row["factor"]], [y], s=75, zorder=5, **fill(row["source"], colour))
        side = 9 if row["factor"] >= 1 else -9
        end = row["factor_high"] if side > 0 else row["factor_low"]
        label(axes, f"{digits(row['factor'])}×", (end, y), (side, 0), weight="bold", color=colour)
        unit = "" if row["mistake"] == "fixed_order" else " ms"
        who = f"{group_name(row['source'], row['machine'], lang)}: " if len(present) > 1 else ""
        text = f"{who}{digits(row['honest'])} → {digits(row['mistaken'])}{unit}"
        axes.text(1.01, y, text, transform=axes.get_yaxis_transform(), va="center", size=8.5, color=QUIET)
    axes.set_yticks(range(len(names)), [words.name(name, lang) for name in names])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.45, -0.95)
    reach = max(abs(math.log(v)) for v in [*numbers["factor_low"], *numbers["factor_high"], 2]) * 1.35
    low = min(0, math.log(numbers["factor_low"].min())) * 1.35 - 0.3
    axes.set_xlim(
        math.exp(max(low, -reach) - 0.35),
        math.exp(math.log(max(2, numbers["factor_high"].max())) * 1.2 + 0.6),
    )
    label(axes, words.say("mistakes.more", lang) + " →", (1, -0.9), (6, -6), color=QUIET)
    label(axes, "← " + words.say("mistakes.less", lang), (1, -0.9), (-6, -6), color=QUIET)
    log_ticks(axes.xaxis)
    axes.set_xlabel(words.say("mistakes.x", lang))
    return finish(figure, numbers)


@drawing
def puzzle(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """Decode time of every arm of the experiment 'puzzle', run by run, and its page faults per step.

    Times are relative to the arm that decodes as after a split (logits dropped, KV copied, memory returned),
    so that article 000's two arms, drawn above, compare whatever the machine.
    """
    import seaborn as sns

    found = checked(rows, "puzzle", "placements")
    found = found[(found["experiment"] == "puzzle") | (found["source"] == "published")]
    table = _puzzle_numbers(found)
    scenarios = list(dict.fromkeys(table["scenario"]))
    counts = [max(2, int((table["scenario"] == scenario).sum())) for scenario in scenarios]
    height = 0.75 + 0.26 * sum(counts) + 0.25 * len(scenarios)
    arm = _arm_words(REFERENCE_ARM, lang)
    figure = chart("puzzle", found, height if scenarios else 2, lang, note, [arm])
    if not scenarios:
        return empty(figure, lang, table.columns)
    faults = bool(table["faults"].notna().any())
    grid = figure.subplots(
        len(scenarios),
        2 if faults else 1,
        squeeze=False,
        height_ratios=counts,
        width_ratios=(2.2, 1) if faults else (1,),
        sharex="col",
    )
    samples = _puzzle_samples(found)
    for line, scenario in zip(grid, scenarios, strict=True):
        mine = table[table["scenario"] == scenario].reset_index(drop=True)
        for y, row in mine.iterrows():
            line[0].scatter([row["relative"]], [y], s=48, zorder=5, **fill(row["source"], PHASE["decode"]))
            whisker(line[0], row["low"], row["high"], y)
            text = words.say("puzzle.step", lang, digits(row["ms_per_step"]))
            line[0].text(
                1.0,
                y,
                text,
                transform=line[0].get_yaxis_transform(),
                va="center",
                ha="right",
                size=8,
                color=QUIET,
            )
            if faults and pd.notna(row["faults"]):
                line[1].barh(y, row["faults"], height=0.55, zorder=2, **fill(row["source"], ROLE["fast"]))
                label(line[1], f"{row['faults']:,.0f}", (row["faults"], y), (5, 0))
        dots = samples.merge(mine.assign(y=mine.index + 0.27)[[*ARM, "y"]], on=ARM)
        for rounds, marker in ((dots["repeat"] > 0, "o"), (dots["repeat"] == 0, "X")):
            sns.stripplot(
                dots[rounds],
                x="relative",
                y="y",
                orient="h",
                native_scale=True,
                jitter=False,
                size=3.6,
                marker=marker,
                color=INK,
                alpha=0.55,
                linewidth=0,
                legend=False,
                ax=line[0],
                zorder=6,
            )
        line[0].axvline(1, color=QUIET, linewidth=1, zorder=1)
        several = len(groups(mine[mine["source"] != "published"])) > 1
        names = [_line_name(row, several, lang) for row in mine.to_dict("records")]
        line[0].set_yticks(range(len(mine)), names, size=8.5)
        line[0].set_title(words.name(scenario, lang))
        line[0].set(xlabel="", ylabel="")
        for axes in line:
            axes.set_ylim(len(mine) - 0.4, -0.6)
            axes.tick_params(axis="y", length=0)
        if faults:
            line[1].set_yticks([])
    low, high = min(table["low"].min(), 0.9), max(table["high"].max(), samples["relative"].max(), 1.1)
    grid[-1][0].set_xlim(low - 0.08 * (high - low), high + 0.32 * (high - low))
    grid[-1][0].set_xlabel(words.say("puzzle.x", lang))
    if faults:
        grid[-1][1].set_xlim(0, 1.35 * max(table["faults"].dropna().max(), 1))
        grid[-1][1].set_xlabel(words.say("puzzle.faults", lang))
        grid[-1][1].xaxis.set_major_formatter(plain)
        grid[-1][1].locator_params(axis="x", nbins=4)
    return finish(figure, table)


ARM = [*GROUP, "scenario", "kernel"]
REFERENCE_ARM = "logits=dropped kv=contiguous malloc=default"


def _arm_words(kernel: str, lang: str) -> str:
    return ", ".join(words.name(part, lang) for part in kernel.split())


def _line_name(row: dict[str, str], several: bool, lang: str) -> str:
    who = group_name(row["source"], row["machine"], lang)
    if row["source"] == "published":
        return f"{who}, {row['kernel']}"
    return (f"{who}: " if several else "") + _arm_words(row["kernel"], lang)


def _puzzle_samples(found: pd.DataFrame) -> pd.DataFrame:
    """The live samples with `relative`: seconds ÷ median seconds of the reference arm (or of the fastest)."""
    live = found[found["experiment"] == "puzzle"].copy()
    middle = live.groupby(ARM, sort=False)["seconds"].median()
    base = {}
    for key, arms in middle.groupby(level=ARM[:3], sort=False):
        arms = arms.droplevel(ARM[:3])
        base[key] = float(arms.get(REFERENCE_ARM, arms.min()))
    yard = [base[key] for key in zip(*(live[c] for c in ARM[:3]), strict=True)]
    live["relative"] = live["seconds"] / pd.Series(yard, index=live.index, dtype=float)
    steps = live["tokens"] / live["requests"]
    live["ms_per_step"] = 1e3 * live["seconds"] / steps
    live["faults"] = live["page_faults"].astype("Float64") / steps
    return live


def _puzzle_numbers(found: pd.DataFrame) -> pd.DataFrame:
    """One line an arm: relative decode time with interval, ms and page faults per step, n."""
    made = []
    paper = found[(found["experiment"] == "placements") & (found["phase"] == "decode")]
    for scenario, part in paper.groupby("scenario", sort=False):
        at = part.set_index("placement")
        if {"PD-CPU", "P-GPU/D-CPU"} <= set(at.index):
            slow, split = at.loc["PD-CPU"], at.loc["P-GPU/D-CPU"]
            ratio = slow["seconds"] / split["seconds"]
            step = 1e3 * slow["seconds"] * slow["requests"] / slow["tokens"]
            facet = "long" if scenario.startswith("L") else "short"
            made.append(["published", slow["machine"], facet, scenario, ratio, ratio, ratio, step, math.nan, 1])
    for key, part in _puzzle_samples(found).groupby(ARM, sort=False):
        middle = metrics.median_interval(part["relative"])
        faults = part["faults"].dropna().astype(float).median()
        made.append([*key, *middle, part["ms_per_step"].median(), faults, len(part)])
    columns = [*ARM, "relative", "low", "high", "ms_per_step", "faults", "n"]
    table = pd.DataFrame(made, columns=columns)
    return table.sort_values("scenario", key=lambda c: c == "short", kind="stable").reset_index(drop=True)
