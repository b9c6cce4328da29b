"""Charts of the audit of article 002: what its formula leaves out, and which machines its figures would fit."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from pdlib import audit, presets, published, words
from pdlib.plots.style import (
    FAINT,
    INK,
    PHASE,
    QUIET,
    ROLE,
    Chart,
    chart,
    drawing,
    fill,
    finish,
    label,
    log_ticks,
)
from pdlib.spec import DeviceSpec, ModelSpec
from pdlib.summary import digits

MARKS = {  # devices to compare with; those that nothing lies near are left out
    "prefill": ("m1", "epyc-7763", "a100-80gb-sxm", "a10", "rtx-4090"),
    "decode": ("m1", "epyc-7763", "l4", "a10", "rtx-4090", "a100-80gb-sxm"),
}


@drawing
def terms(model: ModelSpec, device: DeviceSpec, lang: str = "en", note: str = "") -> Chart:
    """Article 002's prefill formula beside the right one: a waterfall of the missing terms, at 4K and 32K tokens.

    Times at audit.UTILISATION of the peak of `device`, one card on the lower axis and eight on the upper.
    Drawn: prompt_tokens, term, flops, seconds on one card and on eight, share of the right total.
    """
    lines = [
        words.say("terms.note", lang, "; ".join(dict.fromkeys(device.origin.split("; ")))),
        *([note] if note else []),
    ]
    values = [model.name, device.name, round(100 * audit.UTILISATION)]
    figure = chart("terms", None, 3.5, lang, " ".join(lines), values)
    made: list[list[Any]] = []
    grid = figure.subplots(1, len(audit.PROMPTS), sharey=True)
    says = audit.article_002()
    for axes, prompt in zip(grid, audit.PROMPTS, strict=True):
        frame = audit.terms(model, prompt)
        total = float(frame["flops"].sum())
        one, eight = (audit.UTILISATION * audit.together(device, cards).flops_per_s for cards in (1, 8))
        inside = frame[frame["in_article"]]["flops"].sum()
        missing = frame[~frame["in_article"]]
        _bar(axes, 0, 0, inside / one, fill("published", INK), _both(inside / one, inside / eight))
        start = float(inside)
        for y, (term, flops) in enumerate(zip(missing["term"], missing["flops"], strict=True), 1):
            colour = _colour(term)
            text = f"{100 * flops / total:.1f} %" if flops / total > 5e-4 else "< 0.1 %"
            _bar(axes, y, start / one, flops / one, fill("modelled", colour), text)
            axes.plot([start / one] * 2, [y - 1.3, y + 0.3], color=QUIET, linewidth=0.7, zorder=1)
            start += flops
        _bar(axes, len(missing) + 1, 0, total / one, fill("modelled", QUIET), _both(total / one, total / eight))
        for term, flops in zip(frame["term"], frame["flops"], strict=True):
            made.append([prompt, term, int(flops), flops / one, flops / eight, flops / total])
        (quoted,) = says[(says["quantity"] == "prefill") & (says["prompt_tokens"] == prompt)].to_dict("records")
        low, high = (f"{quoted[end]:g}" for end in ("low", "high"))
        axes.set_title(words.say("terms.panel", lang, f"{prompt:,}", f"{low}–{high}"), pad=4)
        axes.set_xlim(0, total / one * 1.45)
        axes.set_xlabel(words.say("terms.one", lang))
        above = axes.secondary_xaxis("top", functions=(lambda x: x / 8, lambda x: x * 8))
        above.set_xlabel(words.say("terms.eight", lang), size=8.5, color=QUIET, labelpad=2)
        above.tick_params(labelsize=8, labelcolor=QUIET)
        axes.tick_params(axis="y", length=0)
    names = [words.say("terms.article", lang)]
    names += [
        words.say(t, lang, *{"all_layers": [model.layers], "all_heads": [model.heads]}.get(t, []))
        for t in missing["term"]
    ]
    grid[0].set_yticks(range(len(names) + 1), [*names, words.say("terms.right", lang)])
    grid[0].set_ylim(len(names) + 0.6, -0.6)
    for tick, term in zip(grid[0].get_yticklabels()[1:-1], missing["term"], strict=True):
        tick.set_color(_colour(term))
    columns = ["prompt_tokens", "term", "flops", "seconds_1", "seconds_8", "share"]
    return finish(figure, pd.DataFrame(made, columns=columns))


def _colour(term: str) -> str:
    return ROLE["split"] if term in audit.SQUARE else ROLE["fast"]


def _both(one: float, eight: float) -> str:
    """'3.74 s (0.467 s)', in ms where that reads better."""
    unit, scale = ("s", 1) if one > 0.5 else ("ms", 1e3)
    return f"{digits(scale * one)} {unit} ({digits(scale * eight)} {unit})"


def _bar(axes: Axes, y: int, left: float, width: float, look: dict[str, Any], text: str) -> None:
    axes.barh(y, width, left=left, height=0.6, zorder=3, **look)
    label(axes, text, (left + width, y), (5, 0))


@drawing
def inferred_hardware(model: ModelSpec, device: DeviceSpec, lang: str = "en", note: str = "") -> Chart:
    """Machines inferred from published times. Above: article 002's, in cards of `device` at their full peak.

    Below: articles 000's and 001's, FLOP/s of their prefills and B/s of their decodes, beside data sheets; what a
    decode step takes beyond any roofline is written behind it. Drawn: part, name, low, high and, for article 002,
    the number of GPUs at measured utilisations; overhead in ms. An interval without an upper end has NaN there.
    """
    cards, machines = audit.inferred_cards(model, device), _pairs(lang)
    height = 1.35 + 0.3 * (len(cards) + len(machines))
    source = published.rows()
    lines = [words.say("inferred_hardware.note", lang), *([note] if note else [])]
    figure = chart("inferred_hardware", source, height, lang, " ".join(lines), [device.name])
    grid = figure.add_gridspec(2, 2, height_ratios=(len(cards) + 1, len(machines) + 1))
    top, left, right = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    made = _draw_cards(top, cards, lang)
    made += _draw_machines(left, right, machines, lang)
    columns = ["part", "name", "low", "high", "gpus_low", "gpus_high", "overhead_ms_low", "overhead_ms_high"]
    return finish(figure, pd.DataFrame(made, columns=columns))


def _draw_cards(top: Axes, cards: pd.DataFrame, lang: str) -> list[list[Any]]:
    says, made, names = audit.article_002(), [], []
    top.set_xscale("log")
    for y, row in enumerate(cards.to_dict("records")):
        phase = str(row["phase"])
        colour = PHASE.get(phase, PHASE["decode"])
        open_end = math.isinf(row["high"])
        high = 200.0 if open_end else row["high"]
        if row["gpus_low"] == row["gpus_low"]:
            top.plot([row["gpus_low"], row["gpus_high"]], [y, y], color=colour, linewidth=1.2, zorder=2)
        top.barh(y, high - row["low"], left=row["low"], height=0.5, zorder=3, **fill("published", colour))
        if open_end:
            label(top, f"≥ {digits(row['low'])}", (row["low"], y), (-5, 0), color=colour)
        else:
            text, where = f"{digits(row['low'])}–{digits(row['high'])}", row["high"]
            if row["gpus_low"] == row["gpus_low"]:
                gpus = (f"{row[end]:.0f}" for end in ("gpus_low", "gpus_high"))
                text, where = f"{text} → {words.say('gpus', lang, *gpus)}", max(where, row["gpus_high"])
            label(top, text, (where, y), (6, 0), color=colour)
        if phase in PHASE:
            (quoted,) = says[says["claim"] == row["claim"]].to_dict("records")
            scale, unit = (1, "s") if phase == "prefill" else (1e3, "ms")
            ends = "–".join(f"{scale * quoted[end]:g}" for end in ("low", "high")) + f" {unit}"
            text = words.say("time at", lang, words.say(phase, lang), f"{row['prompt_tokens']:,} tokens", ends)
        else:
            text = words.say(phase, lang)
        names.append(text)
        most = math.nan if open_end else row["high"]
        made.append(["002", text, row["low"], most, row["gpus_low"], row["gpus_high"], math.nan, math.nan])
    for count in audit.CARDS:
        top.axvline(count, color=FAINT, linewidth=1, zorder=0)
    top.set_xlim(0.03, 150)
    top.set_ylim(len(names) - 0.1, -0.6)
    top.set_yticks(range(len(names)), names)
    top.tick_params(axis="y", length=0)
    top.set_xlabel(words.say("inferred_hardware.cards", lang))
    top.set_xticks([0.1, 1, 2, 8, 50], ["0.1", "1", "2", "8", "50"])
    top.minorticks_off()
    return made


def _pairs(lang: str) -> list[dict[str, Any]]:
    """One line a machine and loop of audit.machines, with its prefill and its decode."""
    lines: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in audit.machines().to_dict("records"):
        loop = "article's generate" if row["experiment"] == "phases" else "hand loop"
        who = words.name(row["machine"], lang)
        if row["machine"] == "article-000":
            who = words.say("cpu of" if row["device"] == "cpu" else "gpu of", lang, who)
        elif row["device"] == "cpu":
            who = words.say("cpu of", lang, who)
        size = "" if row["model"] == "gpt2" else f", {row['model']}"
        line = lines.setdefault((who, loop, size), {"name": f"{who}, {words.say(loop, lang)}{size}"})
        line[row["phase"]] = row
    return list(lines.values())


def _draw_machines(left: Axes, right: Axes, machines: list[dict[str, Any]], lang: str) -> list[list[Any]]:
    made: list[list[Any]] = []
    for axes, phase, unit in ((left, "prefill", 1e12), (right, "decode", 1e9)):
        axes.set_xscale("log")
        for y, line in enumerate(machines):
            row = line.get(phase)
            if row is None:
                continue
            low, high, colour = row["low"] / unit, row["high"] / unit, PHASE[phase]
            axes.barh(y, max(high - low, low * 0.02), left=low, height=0.5, zorder=3, **fill("published", colour))
            over = row["overhead_ms_low"], row["overhead_ms_high"]
            text = f"{digits(low)}–{digits(high)}"
            if over[1] == over[1]:
                text += " " + words.say("inferred_hardware.over", lang, *(f"{v:.3g}" for v in over))
            label(axes, text, (high, y), (5, 0), color=colour)
            made.append([phase, line["name"], low, high, math.nan, math.nan, *over])
        values = [row[phase]["low"] / unit for row in machines if phase in row]
        marks = {}
        for name in MARKS[phase]:
            known = presets.device(name, "float32")
            marks[name] = (known.flops_per_s if phase == "prefill" else known.read_bytes_per_s) / unit
        for name, value in marks.items():
            axes.axvline(value, color=FAINT, linewidth=1, zorder=0)
            axes.text(value, -0.65, f"{name} ", rotation=90, ha="center", va="bottom", size=6.5, color=QUIET)
        axes.set_xlim(min(values) / 2, max(marks.values()) * (6 if phase == "prefill" else 40))
        axes.set_ylim(len(machines) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        log_ticks(axes.xaxis)
        axes.set_xlabel(
            words.say("inferred_hardware.flops" if phase == "prefill" else "inferred_hardware.bytes", lang)
        )
    left.set_yticks(range(len(machines)), [line["name"] for line in machines])
    right.set_yticks([])
    return made
