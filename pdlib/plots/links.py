"""Charts about links: what speed hides a transfer, and where a slow one makes separation pointless."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from pdlib import hand_over, links, words
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
from pdlib.plots.transfer import spread
from pdlib.spec import ModelSpec
from pdlib.summary import GROUP, digits, group_name, groups

MODELS = ("#0072B2", "#D55E00", "#117733", "#AA4499", "#332288", "#BBA33D")
HOW = {"whole": PHASE["decode"], "layers": PHASE["prefill"], "none": PHASE["total"]}


@drawing
def needed(demands: pd.DataFrame, rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """GB/s that hide a transfer over the prompt length, a line a model, with the links of links.presets.

    `demands` is links.demands; `rows` are the rows that its measured and recorded prefill times are from, for the
    caption. Drawn: demands in GB/s.
    """
    figure = chart("links", checked(rows, *rows["experiment"].unique()), 4.3, lang, note)
    drawn = demands[["source", "model", "origin", "prompt_tokens", "bytes", "prefill_s"]].assign(
        needed_GB_per_s=demands["needed_bytes_per_s"] / 1e9
    )
    if drawn.empty:
        return empty(figure, lang, drawn.columns)
    axes = figure.add_subplot(xscale="log", yscale="log")
    ends: list[tuple[float, float, str, dict[str, Any]]] = []
    colours: dict[str, str] = {}
    for (source, model, origin), part in drawn.groupby(["source", "model", "origin"], sort=False):
        colour = colours.setdefault(model, MODELS[len(colours) % len(MODELS)])
        part = part.sort_values("prompt_tokens")
        at, rate = part["prompt_tokens"], part["needed_GB_per_s"]
        axes.plot(at, rate, "--" if source == "modelled" else "-", color=colour, linewidth=1.4, zorder=3)
        if source != "modelled":
            axes.scatter(at, rate, s=45, zorder=4, **fill(source, colour))
        ends.append((at.iloc[-1], rate.iloc[-1], f"{model}: {origin}", {"color": colour}))
    left, right = drawn["prompt_tokens"].min(), drawn["prompt_tokens"].max()
    axes.set_xlim(left / 1.2, right * 1.2)
    presets = links.presets().values()
    shown = [one for one in presets if not one.name.startswith("PCIe 5")]
    low = min(drawn["needed_GB_per_s"].min(), shown[0].bytes_per_s / 1e9) / 1.6
    axes.set_ylim(low, max(drawn["needed_GB_per_s"].max(), shown[-1].bytes_per_s / 1e9) * 1.4)
    below = 0.0
    for one in shown:
        rate = one.bytes_per_s / 1e9
        axes.axhline(rate, color=QUIET, linewidth=0.7, linestyle=":", zorder=1)
        aside = 130 if rate < 1.35 * below else 0  # two that are close: the second further right
        below = 0.0 if aside else rate
        look = {"ha": "left", "va": "bottom", "size": 7.5, "color": QUIET}
        label(axes, f"{one.name} · {rate:g} GB/s", (left / 1.17, rate), (aside, 2), **look)
    spread(axes, ends, 280)
    log_ticks(axes.xaxis)
    log_ticks(axes.yaxis)
    axes.set_xlabel(words.say("links.x", lang))
    axes.set_ylabel(words.say("links.y", lang))
    return finish(figure, drawn)


@drawing
def slow_link(rows: pd.DataFrame, model: ModelSpec, lang: str = "en", note: str = "") -> Chart:
    """Time to D's first token over the speed of the link: whole, layer by layer, and without any hand-over.

    Points are measured (experiment 'slow_link'); lines follow from the measured prefill, t0 + bytes / BW and
    links.exposed_s of `model`, so links that were not measured lie on them too. A panel a
    machine. Drawn: points, then lines with source 'modelled', then where each line meets D's own prefill.
    """
    found = checked(rows, "slow_link")
    points = hand_over.first_tokens(found)
    present = groups(points)
    figure = chart("slow_link", found, 4.0, lang, note)
    columns = [*GROUP, "link", "how", "GB_per_s", "median", "low", "high"]
    if not present:
        return empty(figure, lang, columns)
    made = [points[columns]]
    for axes, (source, machine) in zip(figure.subplots(1, len(present), squeeze=False)[0], present, strict=True):
        mine = points[(points["source"] == source) & (points["machine"] == machine)]
        axes.set_xscale("log")
        if len(present) > 1:
            axes.set_title(group_name(source, machine, lang))
        modelled = hand_over.link_model(mine, model)
        own = mine.loc[mine["how"] == "none", "median"]
        right = modelled["GB_per_s"].max()
        for how, colour in HOW.items():
            line, seen = modelled[modelled["how"] == how], mine[mine["how"] == how]
            if how == "none":
                if len(own):
                    axes.axhline(own.iloc[0], color=colour, linewidth=1.4, zorder=2)
                    text = words.say("slow_link.none", lang)
                    label(axes, text, (right, own.iloc[0]), (0, 4), ha="right", color=colour, weight="bold")
                continue
            axes.plot(line["GB_per_s"], line["median"], color=colour, linewidth=1.4, zorder=3)
            axes.vlines(seen["GB_per_s"], seen["low"], seen["high"], color=INK, linewidth=1.4, zorder=4)
            axes.scatter(seen["GB_per_s"], seen["median"], s=55, zorder=5, **fill(source, colour))
            if len(own):
                even = hand_over.break_even(line, own.iloc[0])
                text = words.say("slow_link.even", lang, digits(even)) if even else words.say("slow_link.never", lang)
                text = f"{words.say(how, lang)}\n{text}"
                here = even or float(line["GB_per_s"].median())
                axes.plot([here] * bool(even), [own.iloc[0]] * bool(even), "o", color="white", mec=colour, zorder=6)
                made.append(_crossing(source, machine, how, even, own.iloc[0]))
            else:
                text = words.say(how, lang)
            if how == "whole":
                where = line.iloc[(line["median"] - 1.35 * line["median"].min()).abs().argmin()]
                look: dict[str, Any] = {"va": "bottom", "ha": "left"}
            else:  # below its line, between the links
                between = np.sqrt(seen["GB_per_s"].min() * seen["GB_per_s"].max())
                where = line.iloc[(line["GB_per_s"] - between).abs().argmin()]
                look = {"va": "top", "ha": "center"}
            side = (8, 6) if how == "whole" else (0, -9)
            label(axes, text, (where["GB_per_s"], where["median"]), side, color=colour, weight="bold", **look)
        for link in mine.loc[mine["how"] == "whole"].itertuples():
            label(axes, words.name(link.link, lang), (link.GB_per_s, 0), (0, 3), color=QUIET)
            axes.axvline(link.GB_per_s, color=QUIET, linewidth=0.6, linestyle=":", zorder=1)
        top = max(mine["high"].max(), *(own * 1.25), 2.2 * modelled["median"].min())
        axes.set_ylim(0, top)
        axes.set_xlim(modelled["GB_per_s"].min(), right)
        log_ticks(axes.xaxis)
        axes.set_xlabel(words.say("slow_link.x", lang))
        made.append(modelled.assign(source="modelled", machine=machine, link="-", low=np.nan, high=np.nan)[columns])
    figure.axes[0].set_ylabel(words.say("slow_link.y", lang))
    return finish(figure, pd.concat(made, ignore_index=True))


def _crossing(source: str, machine: str, how: str, even: float | None, seconds: float) -> pd.DataFrame:
    at = float("nan") if even is None else even
    line = dict(source=source, machine=machine, link="break-even", how=how, GB_per_s=at, median=seconds)
    return pd.DataFrame([line | dict(low=np.nan, high=np.nan)])
