"""Charts against the roofline: where the phases lie under it, and what it makes of their ratio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from pdlib import cost, metrics, published, words
from pdlib.plots.arms import arms_of
from pdlib.plots.style import (
    INK,
    PHASE,
    QUIET,
    Chart,
    chart,
    checked,
    drawing,
    fill,
    finish,
    label,
    log_ticks,
)
from pdlib.spec import DeviceSpec, ModelSpec
from pdlib.summary import GROUP, digits, group_name

SIZE = ["phase", "requests", "prompt_tokens", "new_tokens", "dtype"]


@drawing
def ratio_by_batch(
    rows: pd.DataFrame, model: ModelSpec, devices: Mapping[str, DeviceSpec], lang: str = "en", note: str = ""
) -> Chart:
    """Prefill ÷ decode throughput over the batch: live rows of 'by_batch', published points, the roofline.

    A band runs from phases whose compute and traffic overlap (max) to phases where they add up (sum), for
    every machine in `devices` at the workload of its rows, else for APPLE_M[0] at article 001's workload.
    The dashed line is its limit at small batches, peak · bytes per weight / (2 · B · bandwidth).
    """
    found = checked(rows, "by_batch", "phases", "decode_device", "placements")
    paper = (found["source"] == "published") & found["placement"].isin(["-", "PD-GPU"])
    kept = (found["experiment"] == "by_batch") | paper
    found = found[kept & (found["model"] == model.name)]
    figure = chart("ratio_by_batch", found, 3.9, lang, note)
    axes = figure.add_subplot(xscale="log", yscale="log")
    axes.set_xscale("log", base=2)
    arms = arms_of(found, model, devices)
    for arm in arms:
        arm["ratio"] = metrics.ratio_interval(arm["prefill"]["rates"], arm["decode"]["rates"])
    live = [arm for arm in arms if arm["source"] != "published"]
    most = max([100, *(arm["requests"] for arm in arms)])
    made = [_line(a["source"], a["machine"], a["requests"], a, *a["ratio"]) for a in arms]
    ends = []  # (x, y, text, look) of the labels to the right of what they name
    for machine, device, workload in _roofs(live, devices):
        band = _draw_band(axes, machine, device, workload, model, most)
        text = f"{words.say('roofline', lang)}, {machine}"
        ends.append((most, float(np.sqrt(band[-1][-2] * band[-1][-1])), text, {"color": QUIET}))
        made += band
    for source, machine in dict.fromkeys((arm["source"], arm["machine"]) for arm in live):
        mine = [arm for arm in live if (arm["source"], arm["machine"]) == (source, machine)]
        mine.sort(key=lambda arm: arm["requests"])
        at, ratio = [a["requests"] for a in mine], [a["ratio"][0] for a in mine]
        axes.plot(at, ratio, color=PHASE["prefill"], linewidth=1.5, zorder=3)
        for arm in mine:
            axes.plot([arm["requests"]] * 2, arm["ratio"][1:], color=INK, linewidth=1.4, zorder=4)
        axes.scatter(at, ratio, s=60, zorder=5, **fill(source, PHASE["prefill"]))
        look = {"color": PHASE["prefill"], "weight": "bold"}
        ends.append((at[-1], ratio[-1], group_name(source, machine, lang), look))
    for arm in (arm for arm in arms if arm["source"] == "published"):
        axes.scatter(arm["requests"], arm["ratio"][0], s=60, zorder=5, **fill("published", PHASE["decode"]))
        who = group_name("published", arm["machine"], lang)
        who = who if arm["experiment"] == "phases" else f"{who}, {arm['scenario']}"
        text = f"{who}: {digits(arm['ratio'][0])}×"
        ends.append((arm["requests"], arm["ratio"][0], text, {"color": PHASE["decode"]}))
    values = [value for row in made for value in row[5:] if value == value]  # a band has no middle: NaN
    low, high = min(values), max(values)
    axes.set_ylim(low / 1.4, high * 1.5)
    _label_ends(axes, ends, low, high)
    axes.set_xlim(0.85, most * 2.6)
    ticks = [*(2**k for k in range(int(np.log2(most / 1.3)) + 1)), most]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    log_ticks(axes.yaxis)
    axes.set_xlabel(words.say("ratio_by_batch.x", lang))
    axes.set_ylabel(words.say("ratio_by_batch.y", lang))
    columns = [*GROUP, "requests", "prompt_tokens", "new_tokens", "ratio", "low", "high"]
    return finish(figure, pd.DataFrame(made, columns=columns))


def _line(source: str, machine: str, requests: int, arm: Mapping[str, Any], *ratio: float) -> list[Any]:
    return [source, machine, requests, arm["prompt_tokens"], arm["steps"] + 1, *ratio]


def _roofs(
    live: list[dict[str, Any]], devices: Mapping[str, DeviceSpec]
) -> list[tuple[str, DeviceSpec, Mapping[str, Any]]]:
    """(machine, peaks, an arm whose workload the band is for); article 001's without a live machine."""
    first = {arm["machine"]: arm for arm in reversed(live) if arm["machine"] in devices}
    if first:
        return [(machine, devices[machine], arm) for machine, arm in sorted(first.items())]
    workload = {"prompt_tokens": 255, "steps": 255, "dtype": "float32"}
    return [(published.APPLE_M[0].name, published.APPLE_M[0], workload)]


def _draw_band(
    axes: Any,
    machine: str,
    device: DeviceSpec,
    arm: Mapping[str, Any],
    model: ModelSpec,
    most: int,
) -> list[list[Any]]:
    """The roofline's ratio over the batch as a band, its limit as a dashed line; returns the numbers."""
    batches = [int(b) for b in np.unique(np.geomspace(1, most, 60).round())]
    prompt, steps, dtype = arm["prompt_tokens"], arm["steps"], arm["dtype"]
    ends = []
    for requests in batches:
        whole, step = (
            cost.of_phase(model, phase, requests, prompt, steps + 1, dtype) for phase in ("prefill", "decode")
        )
        ends.append(sorted(prompt * t(step, device) / t(whole, device) for t in (cost.roofline_s, cost.sum_s)))
    low, high = zip(*ends, strict=True)
    axes.fill_between(batches, low, high, color=QUIET, alpha=0.22, linewidth=0, zorder=1)
    limit = [cost.phase_ratio_limit(device, requests, dtype) for requests in batches]
    shown = [at for at, value in enumerate(limit) if value >= low[-1]]
    axes.plot([batches[i] for i in shown], [limit[i] for i in shown], "--", color=QUIET, linewidth=1, zorder=1)
    return [
        _line("modelled", machine, requests, arm, np.nan, *pair) for requests, pair in zip(batches, ends, strict=True)
    ]


def _label_ends(axes: Any, ends: list[tuple[float, float, str, dict[str, Any]]], low: float, high: float) -> None:
    """Labels right of their points; those of one batch keep a line's distance (points) from one another."""
    beside, level = 0.0, 0.0
    for x, y, text, look in sorted(ends, key=lambda end: (end[0], -end[1])):
        height = 240 * np.log(y / low) / np.log(high / low)  # the axis is about 240 points high
        level = min(height, level - 11.5) if x == beside else height
        beside = x
        label(axes, text, (x, y), (9, level - height), va="center", **look)


@drawing
def roofline(rows: pd.DataFrame, model: ModelSpec, device: DeviceSpec, lang: str = "en", note: str = "") -> Chart:
    """`device`'s roofline with prefill and decode of the experiment 'roofline' under it, a point a batch.

    FLOPs and bytes come from `pdlib.cost`; open diamonds are where the roofline itself puts the batches of
    the rows (without rows: 1, 8, 32, 100 at 512 prompt tokens). Drawn: intensity, GFLOP/s, share of the roof.
    """
    found = checked(rows, "roofline")
    found = found[found["model"] == model.name]
    figure = chart("roofline", found, 4.1, lang, note, [device.name, model.name])
    axes = figure.add_subplot(xscale="log", yscale="log")
    peak, slope = device.flops_per_s / 1e9, device.read_bytes_per_s / 1e9
    usual = [(phase, b, 512, 2, "float32") for phase in ("prefill", "decode") for b in (1, 8, 32, 100)]
    sizes = [tuple(values) for values in found[SIZE].drop_duplicates().to_numpy()] or usual
    work = {size: cost.of_phase(model, *size) for size in sizes}
    made = []
    for size, one in work.items():
        roof = min(peak, one.intensity * slope)
        axes.scatter([one.intensity], [roof], s=34, marker="D", zorder=3, **fill("published", PHASE[size[0]]))
        made.append(["modelled", device.name, *size, one.intensity, roof, roof, roof, 1.0])
    for (source, machine, *rest), part in found.groupby([*GROUP, *SIZE], sort=False):
        one = work[tuple(rest)]
        passes = part["tokens"] / part["requests"] if rest[0] == "decode" else 1
        seconds = metrics.median_interval(part["seconds"] / passes)
        rate, high, low = (one.flops / 1e9 / s for s in seconds)
        colour, roof = PHASE[rest[0]], min(peak, one.intensity * slope)
        axes.plot([one.intensity] * 2, [low, high], color=INK, linewidth=1.4, zorder=4)
        axes.plot([one.intensity] * 2, [rate, roof], ":", color=colour, linewidth=1, zorder=1)
        axes.scatter([one.intensity], [rate], s=60, zorder=5, **fill(source, colour))
        made.append([source, machine, *rest, one.intensity, rate, low, high, rate / roof])
    columns = [*GROUP, *SIZE, "flop_per_byte", "gflop_per_s", "low", "high", "share_of_roof"]
    drawn = pd.DataFrame(made, columns=columns)
    for phase in ("prefill", "decode"):
        mine = drawn[drawn["phase"] == phase]
        shown = mine[mine["source"] != "modelled"] if len(found) else mine
        if shown.empty:
            continue
        _label_batches(axes, shown, PHASE[phase])
        text = words.say(phase, lang)
        if len(found):
            shares = [f"{100 * share:.0f}" for share in (shown["share_of_roof"].min(), shown["share_of_roof"].max())]
            text = words.say("roofline.share", lang, text, *shares)
        look = {"color": PHASE[phase], "weight": "bold", "size": 9.5}
        middle = np.sqrt(
            shown[["flop_per_byte", "gflop_per_s"]].min() * shown[["flop_per_byte", "gflop_per_s"]].max()
        )
        if phase == "prefill":
            label(axes, text, (middle["flop_per_byte"], shown["gflop_per_s"].min()), (0, -26), **look)
        else:
            label(axes, text, (shown["flop_per_byte"].max(), middle["gflop_per_s"]), (26, 0), **look)
    ridge, ends = peak / slope, drawn["flop_per_byte"]
    left, right = min(0.4, ends.min()) / 2, max(ends.max(), ridge) * 2
    axes.plot([left, ridge, right], [left * slope, peak, peak], color=INK, linewidth=1.6, zorder=2)
    label(
        axes,
        words.say("roofline.peak", lang, digits(peak)),
        (ridge * 1.3, peak),
        (0, 5),
        ha="left",
        color=QUIET,
    )
    half = (left * ridge) ** 0.5  # above the middle of the slope, where no point can lie
    text = words.say("roofline.slope", lang, digits(slope))
    label(axes, text, (half, half * slope), (-6, 4), ha="right", va="bottom", color=QUIET)
    note_at = {"transform": axes.transAxes, "ha": "right", "size": 8.5, "color": QUIET}
    axes.text(1, 0.02, words.say("roofline.ideal", lang), **note_at)
    axes.set_xlim(left, right)
    axes.set_ylim(drawn["gflop_per_s"].min() / 4, peak * 2)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.set_xlabel(words.say("roofline.x", lang))
    axes.set_ylabel(words.say("roofline.y", lang))
    return finish(figure, drawn)


def _label_batches(axes: Any, points: pd.DataFrame, colour: str) -> None:
    """The batch under each point; two that stand close are pushed to their outer sides."""
    order = points.sort_values("flop_per_byte").to_dict("records")
    for at, point in enumerate(order):
        near = [p["flop_per_byte"] / point["flop_per_byte"] for p in order[max(0, at - 1) : at + 2]]
        side = "right" if max(near) < 1.4 and max(near) > 1 else "left" if 1 > min(near) > 1 / 1.4 else "center"
        here = (point["flop_per_byte"], point["gflop_per_s"])
        label(axes, str(point["requests"]), here, (0, -7), ha=side, color=colour, weight="bold")
