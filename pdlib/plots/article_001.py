"""Charts of article 001: the two phases side by side, and what lies between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from pdlib import metrics, published, words
from pdlib.plots.arms import PAIR, arm_label, arms_of
from pdlib.plots.style import (
    FAINT,
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
    whisker,
)
from pdlib.spec import DeviceSpec, ModelSpec
from pdlib.summary import GROUP, digits


@drawing
def two_phases(
    rows: pd.DataFrame, model: ModelSpec, devices: Mapping[str, DeviceSpec], lang: str = "en", note: str = ""
) -> Chart:
    """Throughput of prefill and decode on a log axis, one line an arm of the experiment 'phases'.

    `devices` maps a machine's name to its peaks; an arm of `model` on a machine without peaks has no
    roofline mark. Drawn: tokens per second with interval, roofline tokens per second, ratio.
    """
    arms = arms_of(checked(rows, "phases"), model, devices)
    figure = chart("two_phases", checked(rows, "phases"), 0.5 + 0.62 * max(len(arms), 2), lang, note)
    if not arms:
        return empty(figure, lang, DRAWN)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    for y, arm in enumerate(arms):
        ends = [arm[phase]["rate"][0] for phase in PAIR]
        axes.plot(ends, [y, y], color=FAINT, linewidth=3, zorder=1)
        ratio = metrics.ratio_interval(arm["prefill"]["rates"], arm["decode"]["rates"])[0]
        arm["ratio"] = ratio
        middle = float(np.sqrt(ends[0] * ends[1]))
        label(axes, f"{digits(ratio)}×", (middle, y), (0, 7), weight="bold", size=10.5)
        for phase in PAIR:
            at, colour = arm[phase], PHASE[phase]
            if len(at["roof"]) > 1:
                band = {"color": colour, "alpha": 0.25, "linewidth": 10, "solid_capstyle": "butt"}
                axes.plot([min(at["roof"]), max(at["roof"])], [y, y], zorder=2, **band)
            elif at["roof"]:
                axes.plot(at["roof"], [y], "|", color=colour, markersize=17, markeredgewidth=2.2, zorder=2)
            rate, low, high = at["rate"]
            axes.scatter([rate], [y], s=85, zorder=5, **fill(arm["source"], colour))
            whisker(axes, low, high, y)
            label(axes, digits(rate), (rate, y), (0, -8), color=colour)
            if y == 0:
                label(axes, words.say(phase, lang), (rate, y), (0, 8), color=colour, weight="bold", size=9.5)
    axes.set_yticks(range(len(arms)), [arm_label(arm, lang) for arm in arms])
    axes.set_ylim(len(arms) - 0.4, -0.75)
    axes.margins(x=0.08)
    axes.set_xlabel(words.say("throughput", lang))
    axes.tick_params(axis="y", length=0)
    log_ticks(axes.xaxis)
    if any(arm[phase]["roof"] for arm in arms for phase in PAIR):
        axes.text(
            1,
            1,
            words.say("two_phases.roof", lang),
            transform=axes.transAxes,
            ha="right",
            va="bottom",
            size=8.5,
            color=QUIET,
        )
    return finish(figure, _drawn(arms))


DRAWN = [
    *GROUP,
    "model",
    "kernel",
    "requests",
    "phase",
    "tokens_per_s",
    "low",
    "high",
    "roofline_tokens_per_s",
    "roofline_high",
    "ratio",
    "n",
]


def _drawn(arms: list[dict[str, Any]]) -> pd.DataFrame:
    made = []
    for arm in arms:
        for phase in PAIR:
            at = arm[phase]
            roof = (min(at["roof"]), max(at["roof"])) if at["roof"] else (np.nan, np.nan)
            made.append(
                [
                    arm["source"],
                    arm["machine"],
                    arm["model"],
                    arm["kernel"],
                    arm["requests"],
                    phase,
                    *at["rate"],
                    *roof,
                    arm["ratio"],
                    len(at["rates"]),
                ]
            )
    return pd.DataFrame(made, columns=DRAWN)


@drawing
def decomposition(
    rows: pd.DataFrame, model: ModelSpec, devices: Mapping[str, DeviceSpec], lang: str = "en", note: str = ""
) -> Chart:
    """Decode step = roofline + overhead (ms), and prefill ÷ decode = physics × overhead (log axis).

    Arms: article 001 and the author's hand loop on the same kind of device (published), and every kernel of
    the experiment 'phases' whose machine is in `devices`. The articles' Mac is taken as APPLE_M[0].
    """
    found = checked(rows, "phases", "decode_device")
    found = found[(found["model"] == model.name) & (found["phase"] != "transfer")]
    hand = (found["experiment"] == "decode_device") & (found["placement"] == "PD-GPU")
    found = found[((found["experiment"] == "phases") | hand)]
    arms = [arm for arm in arms_of(found, model, devices) if arm["prefill"]["roof"]]
    shown = [arm for arm in arms if arm["machine"] != "author-mps" or arm["experiment"] == "decode_device"]
    mac = published.APPLE_M[0]
    mac_name = f"{mac.name} ({mac.read_bytes_per_s / 1e9:.0f} GB/s)"
    kept = found[found["machine"].isin([arm["machine"] for arm in shown])]
    figure = chart("decomposition", kept, 0.65 + 0.62 * max(len(shown), 2), lang, note, [mac_name])
    columns = [
        *GROUP,
        "kernel",
        "requests",
        "ms_per_step",
        "low",
        "high",
        "roofline_ms",
        "overhead_ms",
        "times_roofline",
        "ratio",
        "physics",
        "overhead",
    ]
    if not shown:
        return empty(figure, lang, columns)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.25, 1))
    made = []
    for y, arm in enumerate(shown):
        step, low, high = metrics.median_interval(1e3 * arm["requests"] / arm["decode"]["rates"])
        roof = 1e3 * arm["requests"] / arm["decode"]["roof"][0]
        extra, times = metrics.overhead(step, roof)
        ratio = metrics.ratio_interval(arm["prefill"]["rates"], arm["decode"]["rates"])[0]
        physics = arm["prefill"]["roof"][0] / arm["decode"]["roof"][0]
        bars = {"height": 0.46, "zorder": 2}
        left.barh(y, roof, **bars, **fill(arm["source"], PHASE["prefill"]))
        left.barh(y, extra, left=roof, **bars, **fill(arm["source"], PHASE["decode"]))
        whisker(left, low, high, y)
        text = f"{digits(step)} = {digits(roof)} + {digits(max(extra, 0))}  ({digits(times)}×)"
        label(left, text, (max(step, high), y), (6, 0))
        right.barh(y, physics - 1, left=1, **bars, **fill(arm["source"], PHASE["prefill"]))
        arrow = {"arrowstyle": "-|>", "color": PHASE["decode"], "linewidth": 2, "shrinkA": 0, "shrinkB": 0}
        right.annotate("", (ratio, y), (physics, y), arrowprops=arrow, zorder=4)
        text = f"{digits(ratio)} = {digits(physics)} × {digits(ratio / physics)}"
        label(right, text, (max(ratio, physics), y), (7, 0))
        made.append(
            [
                arm["source"],
                arm["machine"],
                arm["kernel"],
                arm["requests"],
                step,
                low,
                high,
                roof,
                extra,
                times,
                ratio,
                physics,
                ratio / physics,
            ]
        )
    left.set_yticks(range(len(shown)), [arm_label(arm, lang) for arm in shown])
    left.set_ylim(len(shown) - 0.5, -0.8)
    left.set_xlim(0, 1.62 * max(row[6] for row in made))
    right.set_xscale("log")
    right.set_xlim(1, 4.5 * max(max(row[10], row[11]) for row in made) ** 1.12)
    for axes, key in ((left, "decomposition.x"), (right, "decomposition.ratio")):
        axes.set_xlabel(words.say(key, lang))
        axes.tick_params(axis="y", length=0)
    log_ticks(right.xaxis)
    for axes, first, sign in ((left, "roofline", " + "), (right, "physics", " × ")):
        look: dict[str, Any] = {"va": "baseline", "weight": "bold", "size": 9.5}
        start = axes.text(axes.get_xlim()[0], -0.42, words.say(first, lang), color=PHASE["prefill"], **look)
        rest = sign + words.say("overhead", lang)
        axes.annotate(rest, (1, -0.42), xycoords=(start, "data"), color=PHASE["decode"], **look)
    return finish(figure, pd.DataFrame(made, columns=columns))
