"""Charts of the latency model: the phases' conflict over compute and memory, their ratio, held-out predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from pdlib import audit, cost, metrics, words
from pdlib.plots.style import (
    FAINT,
    INK,
    PHASE,
    QUIET,
    Chart,
    chart,
    checked,
    drawing,
    empty,
    fill,
    finish,
    log_ticks,
)
from pdlib.spec import DeviceSpec, ModelSpec
from pdlib.summary import GROUP, digits, group_name, significant

SERIES = [*GROUP, "model", "kernel", "dtype", "prompt_tokens", "new_tokens"]
NUMBERS = ("measured", "predicted", "low", "high", "error")
STYLE = {"compute": "-", "bandwidth": (0, (4, 2))}


def _series(rows: pd.DataFrame, least: int) -> Iterator[tuple[dict[str, Any], dict[int, dict[str, np.ndarray]]]]:
    """Every series with at least `least` batch sizes: its key, and seconds a pass by batch and phase."""
    for key, part in rows.groupby(SERIES, sort=False):
        found: dict[int, dict[str, np.ndarray]] = {}
        for (batch, phase), own in part.groupby(["requests", "phase"]):
            passes = own["tokens"] / own["requests"] if phase == "decode" else 1
            found.setdefault(int(batch), {})[phase] = (own["seconds"] / passes).to_numpy(float)
        both = {batch: times for batch, times in sorted(found.items()) if len(times) == 2}
        if len(both) >= least:
            yield dict(zip(SERIES, key, strict=True)), both


@drawing
def conflict(
    rows: pd.DataFrame,
    models: Mapping[str, ModelSpec],
    devices: Mapping[str, DeviceSpec],
    lang: str = "en",
    note: str = "",
) -> Chart:
    """Share of the peak FLOP/s and of the peak B/s that prefill and decode reach, over the batch; a panel a model.

    Rows of 'conflict', 'by_batch' and 'a100' whose machine is in `devices` and model in `models`, series of at least
    three batch sizes. Under a panel's name: the batch from which its decode is bound by compute.
    Drawn: the shares in % with their interval.
    """
    found = checked(rows, "conflict", "by_batch", "a100")
    found = found[found["machine"].isin(devices) & found["model"].isin(models)]
    figure = chart("conflict", found, 3.6, lang, note)
    series = list(_series(found, 3))
    names = list(dict.fromkeys(key["model"] for key, _ in series))
    columns = [*SERIES, "phase", "requests", "resource", "percent", "low", "high"]
    if not names:
        return empty(figure, lang, columns)
    made: list[list[Any]] = []
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        mine = [(key, times) for key, times in series if key["model"] == name]
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        for limit, said in ((30, "conflict.30"), (10, "conflict.10")):
            axes.axhline(limit, color=FAINT, linewidth=1, zorder=0)
            if name == names[-1]:
                side = axes.get_yaxis_transform()
                axes.text(1.01, limit, words.say(said, lang), transform=side, size=7, color=QUIET, va="center")
        for key, times in mine:
            made += _draw_shares(axes, key, times, models[name], devices[key["machine"]])
        places = dict.fromkeys(group_name(k["source"], k["machine"], lang) for k, _ in mine)
        axes.set_title(f"{name}: {', '.join(places)}", size=9.5, pad=26)
        first = mine[0][0]
        said = _crossing(first, models[name], devices[first["machine"]], lang)
        axes.text(0, 1.02, said, transform=axes.transAxes, size=8, color=QUIET, va="bottom")
        most = max(batch for _, times in mine for batch in times)
        ticks = [2**k for k in range(int(math.log2(most)) + 1)][:: 2 if most > 64 else 1]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(words.say("ratio_by_batch.x", lang))
    grid = figure.axes
    grid[0].set_ylim(min(0.05, *(row[-3] / 1.5 for row in made)), 130)
    log_ticks(grid[0].yaxis)
    grid[0].set_ylabel(words.say("conflict.y", lang))
    _legend(grid[-1], lang)
    return finish(figure, pd.DataFrame(made, columns=columns))


def _draw_shares(
    axes: Axes, key: dict[str, Any], times: dict[int, dict[str, np.ndarray]], model: ModelSpec, device: DeviceSpec
) -> list[list[Any]]:
    made = []
    for phase in ("prefill", "decode"):
        for at, resource in enumerate(STYLE):
            line = []
            for batch, seconds in times.items():
                work = _work(model, key, batch, phase)
                ends = metrics.median_interval(seconds[phase])
                middle, high, low = (100 * audit.shares(work, t, device)[at] for t in ends)
                line.append((batch, middle, low, high))
            x, y, lows, highs = (np.array(column) for column in zip(*line, strict=True))
            dashes = STYLE[resource] if key["source"] in ("modelled", "measured", "recorded") else ""
            axes.plot(x, y, color=PHASE[phase], linestyle=dashes, linewidth=1.5, zorder=3)
            if key["source"] != "modelled":
                axes.vlines(x, lows, highs, color=INK, linewidth=1.2, zorder=4)
                look = fill(key["source"], PHASE[phase])
                axes.scatter(x, y, s=30, marker="o" if resource == "compute" else "s", zorder=5, **look)
            made += [[*key.values(), phase, int(b), resource, *rest] for b, *rest in line]
    return made


def _work(model: ModelSpec, key: dict[str, Any], batch: int, phase: str) -> cost.Cost:
    return cost.of_phase(model, phase, batch, int(key["prompt_tokens"]), key["new_tokens"], key["dtype"])


def _crossing(key: dict[str, Any], model: ModelSpec, device: DeviceSpec, lang: str) -> str:
    """From which batch decode is bound by compute at the series' context, and beyond which context never."""
    context = key["prompt_tokens"] + key["new_tokens"] / 2
    batch = audit.crossing_batch(model, device, context, key["dtype"])
    never = audit.crossing_context(model, device, key["dtype"])
    if math.isinf(batch):
        return words.say("conflict.never", lang, f"{context:,.0f}")
    if math.isinf(never):
        return words.say("conflict.from", lang, f"{math.ceil(batch):,}", f"{context:,.0f}")
    return words.say("conflict.crossing", lang, f"{math.ceil(batch):,}", f"{context:,.0f}", f"{never:,.0f}")


def _legend(axes: Axes, lang: str) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=PHASE[p], linewidth=2, label=words.say(p, lang)) for p in ("prefill", "decode")]
    for (resource, dashes), mark in zip(STYLE.items(), "os", strict=True):
        look = {"color": QUIET, "linestyle": dashes, "marker": mark, "markerfacecolor": "white", "markersize": 5}
        lines.append(Line2D([], [], label=words.say(resource, lang), **look))
    axes.legend(handles=lines, loc="lower right", fontsize=8, ncols=2)


@drawing
def ratio(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """Prefill ÷ decode throughput over the batch: a panel a model, a line a device and context, points measured.

    Rows of 'conflict', 'by_batch', 'a100' and the articles' experiments; a roofline is dashed, a fit solid.
    Drawn: the ratio with its interval.
    """
    found = checked(rows, "conflict", "by_batch", "a100", "phases", "decode_device", "placements")
    found = found[(found["source"] != "published") | found["placement"].isin(["-", "PD-GPU"])]
    figure = chart("ratio", found[found["source"] != "modelled"], 4.0, lang, note)
    series = list(_series(found, 1))
    columns = [*SERIES, "requests", "ratio", "low", "high"]
    if not series:
        return empty(figure, lang, columns)
    big = [key["model"].startswith("llama-2-70b") for key, _ in series]
    panels = [kind for kind in (False, True) if kind in big]
    made: list[list[Any]] = []
    for axes, kind in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ends: list[tuple[float, float, str, dict[str, Any]]] = []
        for (key, times), is_big in zip(series, big, strict=True):
            if is_big != kind:
                continue
            line = [(batch, *_ratio(key, batch, seconds)) for batch, seconds in times.items()]
            made += [[*key.values(), *point] for point in line]
            ends.append(_draw_ratio(axes, key, line, lang))
        low, high = (f(row[-3] for row in made if (row[2].startswith("llama-2-70b")) == kind) for f in (min, max))
        axes.set_ylim(low / 1.6, high * 1.6)
        axes.set_xlim(0.8, 256 * 40)
        _label_ends(axes, ends, low, high)
        axes.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axes.minorticks_off()
        log_ticks(axes.yaxis)
        axes.set_title(words.say("ratio.big" if kind else "ratio.small", lang), size=9)
        axes.set_xlabel(words.say("ratio_by_batch.x", lang))
    figure.axes[0].set_ylabel(words.say("ratio_by_batch.y", lang))
    return finish(figure, pd.DataFrame(made, columns=columns))


def _ratio(key: dict[str, Any], batch: int, seconds: dict[str, np.ndarray]) -> metrics.Interval:
    """Prompt tokens a second ÷ new tokens a second: the batch cancels, a request's prompt tokens do not."""
    return metrics.ratio_interval(key["prompt_tokens"] * seconds["decode"], seconds["prefill"])


def _draw_ratio(
    axes: Axes, key: dict[str, Any], line: list[tuple[Any, ...]], lang: str
) -> tuple[float, float, str, dict[str, Any]]:
    """Draw one series; returns where its label is to stand, and what it says."""
    x, middle, low, high = (np.array(column) for column in zip(*line, strict=True))
    if key["source"] == "modelled":
        dashes = "--" if key["kernel"] == "roofline" else "-"
        axes.plot(x, middle, color=QUIET, linestyle=dashes, linewidth=1.3, zorder=2)
        text, look = f"{key['machine']}, {key['prompt_tokens']:,}", {"color": QUIET}
    else:
        colour = PHASE["decode" if key["source"] == "published" else "prefill"]
        if key["source"] != "published":
            axes.plot(x, middle, color=colour, linewidth=1.5, zorder=3)
        axes.vlines(x, low, high, color=INK, linewidth=1.2, zorder=4)
        axes.scatter(x, middle, s=42, zorder=5, **fill(key["source"], colour))
        who = group_name(key["source"], key["machine"], lang)
        size = "" if key["model"] in ("gpt2", "llama-2-70b") else f", {key['model']}"
        text, look = f"{who}{size}, {key['prompt_tokens']:,}: {digits(middle[-1])}×", {"color": colour}
    return float(x[-1]), float(middle[-1]), text, look


def _label_ends(axes: Axes, ends: list[tuple[float, float, str, dict[str, Any]]], low: float, high: float) -> None:
    """Labels right of all points, joined to them by a hair; they keep a line's distance from one another."""
    level = math.inf
    for x, y, text, look in sorted(ends, key=lambda end: -end[1]):
        height = 250 * math.log(y / low) / math.log(high / low)  # the axis is about 250 points high
        level = min(height, level - 9.5)
        at = low * (high / low) ** (level / 250)
        axes.plot([x, 300], [y, at], color=FAINT, linewidth=0.7, zorder=1)
        axes.text(320, at, text, size=7, va="center", **look)


@drawing
def heldout(held: pd.DataFrame, rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """Predicted against measured time of shapes that the fit has not seen, with the interval; a panel a split.

    `held`: latency.holdout's frames, each with the columns split (a key of words 'split …'), source and machine;
    `rows`: what they were measured in, for the caption. Crosses: shapes that are not `settled`. Drawn: `held`,
    at four significant digits.
    """
    held = held.assign(**{name: significant(held[name]) for name in NUMBERS})
    figure_rows = rows[rows["experiment"].isin(["calibration", "a100"])]
    splits = list(dict.fromkeys(held["split"]))
    wide = 2 if len(splits) == 4 else min(3, max(1, len(splits)))
    high = math.ceil(len(splits) / wide) or 1
    figure = chart("heldout", figure_rows, 3.0 * high, lang, note)
    if not splits:
        return empty(figure, lang, held.columns)
    grid = figure.subplots(high, wide, squeeze=False).flat
    for axes, split in zip(grid, splits, strict=False):
        mine = held[held["split"] == split]
        axes.set_xscale("log")
        axes.set_yscale("log")
        ends = [1e3 * f(mine[["measured", "predicted"]].to_numpy()) for f in (np.min, np.max)]
        ends = [ends[0] / 1.6, ends[1] * 1.6]
        axes.fill_between(
            ends, [0.75 * e for e in ends], [1.25 * e for e in ends], color=FAINT, alpha=0.5, linewidth=0
        )
        axes.plot(ends, ends, color=QUIET, linewidth=0.9, zorder=1)
        for (source, phase), part in mine.groupby(["source", "phase"], sort=False):
            blend = part["kernel"].str.contains("decodes=").any()
            colour = PHASE["total" if blend else phase]
            x, y = 1e3 * part["measured"], 1e3 * part["predicted"]
            axes.vlines(x, 1e3 * part["low"], 1e3 * part["high"], color=colour, alpha=0.45, linewidth=1, zorder=2)
            calm = part["settled"].to_numpy(bool)
            axes.scatter(x[calm], y[calm], s=20, zorder=3, **{**fill(source, colour), "linewidth": 0.9})
            axes.scatter(x[~calm], y[~calm], s=18, zorder=3, marker="x", color=colour, linewidth=0.9)
        size = mine["error"].abs()
        said = words.say(
            "heldout.error",
            lang,
            *(f"{100 * size.quantile(q):.1f}" for q in (0.5, 0.9)),
            f"{100 * mine['inside'].mean():.0f}",
        )
        axes.text(0.03, 0.97, said, transform=axes.transAxes, va="top", size=8)
        axes.set_title(words.name(f"split {split}", lang), size=9)
        axes.set_xlim(ends)
        axes.set_ylim(ends)
        for axis in (axes.xaxis, axes.yaxis):
            log_ticks(axis)
    for axes in list(figure.axes)[len(splits) :]:
        axes.set_axis_off()
    for axes in figure.axes[: len(splits)]:
        axes.set_xlabel(words.say("heldout.x", lang), size=8.5)
    for at in range(0, len(splits), wide):
        figure.axes[at].set_ylabel(words.say("heldout.y", lang), size=8.5)
    return finish(figure, held)
