"""Charts of moving a KV cache: achieved GB/s by road and size, and how much of it hides behind prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from pdlib import hand_over, words
from pdlib.plots.style import (
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
    label,
    log_ticks,
)
from pdlib.spec import DeviceSpec, ModelSpec
from pdlib.summary import GROUP, digits, group_name, groups

ROAD = {"device": "#332288", "memory": "#117733", "network": PHASE["transfer"], "file": "#AA4499", "rdma": "#0072B2"}


def colour_of(road: str) -> str:
    """A road's colour; a published transfer that names no road is drawn in ink."""
    return ROAD.get(road.split(",")[0], INK)


def road_label(source: str, machine: str, road: str, lang: str) -> str:
    """'network (loopback)', 'shared memory, with checksums'; who published it where it is not of ours."""
    if source == "published":
        return group_name(source, machine, lang)
    named = ", ".join(words.name(word, lang) for word in road.split(", "))
    return named if source == "measured" else f"{named}, {machine}"


def bytes_tick(value: float, _: Any = None) -> str:
    """64 kB, 1 MB, 300 MB, 12 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g} B"


def spread(
    axes: Axes, ends: list[tuple[float, float, str, dict[str, Any]]], points: float, gap: float = 11.5
) -> None:
    """Labels of lines that end at (x, y), in a column right of a log axis `points` high, at least `gap` points apart.

    A faint line leads from an end to its label.
    """
    low, high = axes.get_ylim()
    right, last = axes.get_xlim()[1], float("inf")
    for x, y, text, look in sorted(ends, key=lambda end: -end[1]):
        axes.plot([x, right], [y, y], color=look["color"], linewidth=0.6, alpha=0.45, zorder=1)
        height = points * np.log(y / low) / np.log(high / low)
        level = min(height, last - gap)
        last = level
        label(axes, text, (right, y), (5, level - height), **{"va": "center", **look})


@drawing
def bandwidth(rows: pd.DataFrame, devices: Mapping[str, DeviceSpec], lang: str = "en", note: str = "") -> Chart:
    """Achieved GB/s of 'bandwidth' over bytes, a line a road with its fit t = t0 + bytes / BW (hand_over.fits).

    `devices` maps a machine's name to its peaks: a byte copied is one read and one written, so half of its
    copy bandwidth is the dotted ceiling. Drawn: hand_over.rates with the fitted GB/s beside each.
    """
    found = checked(rows, "bandwidth")
    figure = chart("bandwidth", found, 4.1, lang, note)
    rates, fits = hand_over.rates(found), hand_over.fits(found).set_index([*GROUP, "road"])
    if rates.empty:
        return empty(figure, lang, [*rates.columns, "fitted"])
    axes = figure.add_subplot(xscale="log", yscale="log")
    ends, fitted = [], pd.Series(np.nan, index=rates.index)
    for key, part in rates.groupby([*GROUP, "road"], sort=False):
        source, machine, road = key
        colour = colour_of(road)
        axes.vlines(part["bytes"], part["low"], part["high"], color=INK, linewidth=1.3, zorder=4)
        axes.scatter(part["bytes"], part["median"], s=42, zorder=5, **fill(source, colour))
        text = road_label(source, machine, road, lang)
        if key in fits.index:
            line = fits.loc[key]
            at = np.geomspace(part["bytes"].min(), part["bytes"].max(), 60)
            rate = at / (line["t0_us"] / 1e6 + at / (1e9 * line["GB_per_s"])) / 1e9
            axes.plot(at, rate, "--", color=colour, linewidth=1.2, zorder=3)
            fitted[part.index] = np.interp(part["bytes"], at, rate)
            figures = digits(line["GB_per_s"]), digits(line["t0_us"] / 1e3)
            text = words.say("bandwidth.fit", lang, text, *figures)
        ends.append((part["bytes"].iloc[-1], part["median"].iloc[-1], text, {"color": colour}))
    left, right = rates["bytes"].min(), rates["bytes"].max()
    axes.set_xlim(left / 1.5, right * 1.5)
    bottom, top = rates["median"].min() / 1.6, rates["median"].max() * 1.8
    for machine, device in devices.items():
        if machine in set(rates["machine"]):
            ceiling = device.copy_bytes_per_s / 2e9
            axes.axhline(ceiling, color=QUIET, linestyle=":", linewidth=1, zorder=1)
            text = words.say("bandwidth.copy", lang, digits(ceiling))
            label(axes, text, (left / 1.4, ceiling), (0, 3), ha="left", color=QUIET)
            top = max(top, ceiling * 1.6)
    axes.set_ylim(bottom, top)
    spread(axes, ends, 265)
    axes.xaxis.set_major_locator(LogLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(bytes_tick))
    axes.xaxis.set_minor_formatter(NullFormatter())
    log_ticks(axes.yaxis)
    axes.set_xlabel(words.say("bandwidth.x", lang))
    axes.set_ylabel(words.say("bandwidth.y", lang))
    return finish(figure, rates.assign(fitted=fitted))


@drawing
def hidden(rows: pd.DataFrame, model: ModelSpec, lang: str = "en", note: str = "") -> Chart:
    """Share of the transfer that hides behind prefill over the prompt length (experiment 'hidden').

    The line is links.hidden_share of the measured prefill and transfer of `model`; below, the condition itself:
    a layer's transfer against its compute. Drawn: hand_over.hidden.
    """
    found, layers = checked(rows, "hidden"), model.layers
    figure = chart("hidden", found, 4.6, lang, note, [layers])
    table = hand_over.hidden(found, model)
    if table.empty:
        return empty(figure, lang, table.columns)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.35, 1))
    upper.set_xscale("log", base=2)
    lower.set_yscale("log")
    right = table["prompt_tokens"].max()
    times: list[tuple[float, float, str, dict[str, Any]]] = []
    for source, machine in groups(table):
        for road, part in table[(table["source"] == source) & (table["machine"] == machine)].groupby("road"):
            colour, at = colour_of(str(road)), part["prompt_tokens"]
            upper.plot(at, 100 * part["bound_share"], "--", color=colour, linewidth=1.3, zorder=2)
            upper.vlines(at, 100 * part["share_low"], 100 * part["share_high"], color=INK, linewidth=1.4, zorder=4)
            upper.scatter(at, 100 * part["share"], s=55, zorder=5, **fill(source, colour))
            last = part.iloc[-1]
            name = road_label(source, machine, str(road), lang)
            here = (at.iloc[-1], 100 * last["share"])
            label(upper, name, here, (9, 0), color=colour, weight="bold")
            for key, column, paint in (
                ("hidden.compute", "prefill_s", PHASE["prefill"]),
                ("hidden.moved", "whole_s", colour),
            ):
                each = 1e3 * part[column] / layers
                lower.plot(at, each, color=paint, linewidth=1.4, zorder=3)
                lower.scatter(at, each, s=38, zorder=4, **fill(source, paint))
                text = words.say(key, lang) if source == "measured" else f"{words.say(key, lang)}, {machine}"
                times.append((at.iloc[-1], each.iloc[-1], text, {"color": paint}))
    least = 100 * min(table["share_low"].min(), table["bound_share"].min())
    upper.set_ylim(min(0.0, least - 3), 106)
    ticks = sorted(table["prompt_tokens"].unique())
    lower.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    lower.minorticks_off()
    lower.set_xlim(ticks[0] / 1.1, right * 1.1)
    low, high = lower.get_ylim()
    lower.set_ylim(low / 1.3, high * 1.3)
    log_ticks(lower.yaxis)
    spread(lower, times, 120)
    lower.set_xlabel(words.say("hidden.x", lang))
    upper.set_ylabel(words.say("hidden.y", lang))
    lower.set_ylabel(words.say("hidden.layer", lang))
    return finish(figure, table)
