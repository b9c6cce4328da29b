"""Charts of article 000: three placements, phase by phase, as published and live."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from pdlib import summary, words
from pdlib.plots.style import (
    FAINT,
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
    whisker,
)
from pdlib.summary import GROUP, digits, group_name, groups

TIMES = [*GROUP, "scenario", "placement", "role", "phase"]


def _times(rows: pd.DataFrame) -> pd.DataFrame:
    return summary.medians(summary.placed(rows), TIMES)


def _frame(axes: Axes, ticks: list[float], names: list[str]) -> None:
    axes.set_yticks(ticks, names, size=8.5)
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(left=0)


def _titles(grid: Any, found: list[tuple[str, str]], lang: str) -> None:
    for axes, group in zip(grid, found, strict=True):
        axes.set_title(group_name(*group, lang))


@drawing
def prefill(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """Prefill seconds of every scenario and placement, one panel a source and machine."""
    found = checked(rows, "placements")
    times = _times(found)
    times = times[times["phase"] == "prefill"]
    present = groups(times)
    scenarios = list(times["scenario"].unique())
    figure = chart("prefill", found, 0.6 + 0.78 * max(len(scenarios), 2), lang, note)
    if not present:
        return empty(figure, lang, times.columns)
    grid = figure.subplots(1, len(present), squeeze=False)[0]
    _titles(grid, present, lang)
    for axes, (source, machine) in zip(grid, present, strict=True):
        mine = times[(times["source"] == source) & (times["machine"] == machine)]
        ticks, names = [], []
        for row in mine.to_dict("records"):
            y = scenarios.index(row["scenario"]) + 0.27 * (list(ROLE).index(row["role"]) - 1)
            axes.barh(y, row["median"], height=0.22, zorder=2, **fill(source, ROLE[row["role"]]))
            whisker(axes, row["low"], row["high"], y)
            label(axes, digits(row["median"]), (max(row["median"], row["high"]), y), (5, 0))
            ticks.append(y)
            names.append(f"{row['scenario']}   {row['placement']}" if row["role"] == "split" else row["placement"])
        _frame(axes, ticks, names)
        axes.set_ylim(len(scenarios) - 0.5, -0.5)
        axes.set_xlim(right=1.18 * mine["high"].max())
        axes.set_xlabel(words.say("seconds", lang))
    return finish(figure, times)


@drawing
def phases(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """Prefill, KV transfer and decode end to end, a panel a scenario and machine, each with its own scale."""
    found = checked(rows, "placements")
    times = _times(found)
    present = groups(times)
    scenarios = list(times["scenario"].unique())
    figure = chart("phases", found, 0.5 + 0.98 * max(len(scenarios), 2), lang, note)
    if not present:
        return empty(figure, lang, times.columns)
    grid = figure.subplots(len(scenarios), len(present), squeeze=False)
    _titles(grid[0], present, lang)
    for line, scenario in zip(grid, scenarios, strict=True):
        for axes, (source, machine) in zip(line, present, strict=True):
            mine = times[
                (times["source"] == source) & (times["machine"] == machine) & (times["scenario"] == scenario)
            ]
            _stack(axes, mine, source, parts_said=len(present) < 3)
        line[0].set_ylabel(scenario, weight="bold")
    for axes in grid[-1]:
        axes.set_xlabel(words.say("seconds", lang))
    handles = [_patch(PHASE[phase]) for phase in ("prefill", "transfer", "decode")]
    names = [words.say(phase, lang) for phase in ("prefill", "transfer", "decode")]
    legend = figure.legend(handles, names, loc="upper right", ncols=3, handlelength=1, bbox_to_anchor=(0.995, 1))
    legend.set_in_layout(False)
    return finish(figure, times)


def _patch(colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(facecolor=colour, edgecolor=colour)


def _stack(axes: Axes, times: pd.DataFrame, source: str, parts_said: bool) -> None:
    """One bar a placement: the medians of its phases end to end, the interval of the total, and in
    numbers the sum of the medians, after its parts where there is room."""
    if times.empty:
        axes.set_axis_off()
        return
    names = list(times["placement"].unique())
    longest = times.loc[times["phase"] == "total", "high"].max()
    for y, placement in enumerate(names):
        at = times[times["placement"] == placement].set_index("phase")
        start = 0.0
        parts = [
            phase for phase in ("prefill", "transfer", "decode") if phase in at.index and at["median"][phase] > 0
        ]
        for phase in parts:
            axes.barh(y, at["median"][phase], left=start, height=0.62, zorder=2, **fill(source, PHASE[phase]))
            start += at["median"][phase]
        total = at.loc["total"]
        whisker(axes, total["low"], total["high"], y)
        said = " + ".join(digits(at["median"][phase]) for phase in parts) + " = " if parts_said else ""
        label(axes, f"{said}{digits(start)}", (max(start, total["high"]), y), (5, 0), size=7.8)
    _frame(axes, list(range(len(names))), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.set_xlim(right=(1.75 if parts_said else 1.35) * longest)


@drawing
def equal_decode(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """Total ratio all-slow ÷ split as it is, and with one decode time (the mean) in both arms."""
    found = checked(rows, "placements")
    numbers = summary.equal_decode(found)
    present, scenarios = groups(numbers), list(numbers["scenario"].unique())
    figure = chart(
        "equal_decode", found, 0.8 + (0.35 + 0.3 * max(len(present), 1)) * max(len(scenarios), 2), lang, note
    )
    if not present:
        return empty(figure, lang, numbers.columns)
    axes = figure.add_subplot()
    axes.axvline(1, color=QUIET, linewidth=1, zorder=1)
    low, high = numbers[["ratio", "equal_low"]].min().min(), numbers[["ratio", "equal_high"]].max().max()
    spread = max(high, 1) - min(low, 1)
    for row in numbers.to_dict("records"):
        group = row["source"], row["machine"]
        y = scenarios.index(row["scenario"]) + _shift(present.index(group), len(present))
        ends = row["ratio"], row["equal"]
        style = {"arrowstyle": "-|>", "color": QUIET, "shrinkA": 6, "shrinkB": 6, "linewidth": 1.2}
        if abs(ends[1] - ends[0]) > 0.04 * spread:
            axes.annotate("", (ends[1], y), (ends[0], y), arrowprops=style, zorder=3)
        axes.plot(
            [row["equal_low"], row["equal_high"]],
            [y, y],
            color=ROLE["split"],
            alpha=0.35,
            linewidth=9,
            zorder=2,
            solid_capstyle="butt",
        )
        for value, colour in zip(ends, (PHASE["decode"], ROLE["split"]), strict=True):
            axes.scatter([value], [y], s=62, zorder=5, **fill(row["source"], colour))
        away = 8 if ends[0] > ends[1] else -8
        label(axes, f"{ends[0]:.2f}", (ends[0], y), (away, 0), color=PHASE["decode"])
        label(
            axes,
            f"{ends[1]:.2f}",
            (max(ends[1], row["equal_high"]) if away < 0 else min(ends[1], row["equal_low"]), y),
            (-away, 0),
            color=ROLE["split"],
            weight="bold",
        )
        if len(present) > 1:
            axes.text(
                1.005,
                y,
                group_name(*group, lang),
                transform=axes.get_yaxis_transform(),
                va="center",
                size=8,
                color=QUIET,
            )
    _frame(axes, list(range(len(scenarios))), scenarios)
    axes.set_ylim(len(scenarios) - 0.45, -0.75)
    axes.set_xlim(min(low, 1) - 0.12 * spread - 0.02, max(high, 1) + 0.12 * spread + 0.02)
    look = {"ha": "right", "va": "top", "weight": "bold", "size": 9.5}
    end = axes.text(1, 1, words.say("decode alike", lang), transform=axes.transAxes, color=ROLE["split"], **look)
    start = words.say("as it is", lang) + " → "
    axes.annotate(start, (0, 1), xycoords=(end, axes.transAxes), color=PHASE["decode"], **look)
    label(axes, words.say("split wins", lang), (1, -0.72), (6, -6), color=QUIET)
    label(axes, words.say("slow wins", lang), (1, -0.72), (-6, -6), color=QUIET)
    axes.set_xlabel(words.say("equal_decode.x", lang))
    return finish(figure, numbers)


def _shift(place: int, count: int) -> float:
    """Where the place-th of `count` groups stands around its scenario's line."""
    return 0.0 if count == 1 else 0.5 * (place / (count - 1) - 0.5)


@drawing
def live_pair(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """What the split gains (all-slow ÷ split) in prefill, decode and total, with intervals, by source."""
    found = checked(rows, "placements")
    numbers = summary.split_gain(found)
    present, scenarios = groups(numbers), list(numbers["scenario"].unique())
    figure = chart("live_pair", found, 0.8 + (0.3 + 0.3 * max(len(present), 1)) * max(len(scenarios), 2), lang, note)
    if not present:
        return empty(figure, lang, numbers.columns)
    grid = figure.subplots(1, 3, sharey=True)
    for axes, phase in zip(grid, ("prefill", "decode", "total"), strict=True):
        axes.set_title(words.say(phase, lang), color=PHASE[phase])
        axes.axvline(1, color=QUIET, linewidth=1, zorder=1)
        mine = numbers[numbers["phase"] == phase]
        for row in mine.to_dict("records"):
            group = row["source"], row["machine"]
            y = scenarios.index(row["scenario"]) + _shift(present.index(group), len(present))
            whisker(axes, row["low"], row["high"], y)
            axes.scatter([row["ratio"]], [y], s=62, zorder=5, **fill(row["source"], PHASE[phase]))
            label(axes, f"{digits(row['ratio'])}×", (max(row["ratio"], row["high"]), y), (8, 0))
            if phase == "total" and len(present) > 1:
                axes.text(
                    1.02,
                    y,
                    group_name(*group, lang),
                    transform=axes.get_yaxis_transform(),
                    va="center",
                    size=8,
                    color=QUIET,
                )
        axes.set_xlim(0, 1.3 * max(1.2, mine["high"].max()))
        axes.set_xlabel(words.say("live_pair.x", lang))
    for axes in grid:
        for y in range(1, len(scenarios)):
            axes.axhline(y - 0.5, color=FAINT, linewidth=0.8, zorder=0)
    _frame(grid[0], list(range(len(scenarios))), scenarios)
    grid[0].set_ylim(len(scenarios) - 0.45, -0.55)
    for axes in grid[1:]:
        axes.tick_params(axis="y", length=0)
    return finish(figure, numbers)
