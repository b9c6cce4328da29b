"""The time-line of one hand-over: prefill's layers above, the transfer below, whole against streamed."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from pdlib import hand_over, words
from pdlib.plots.style import INK, PHASE, Chart, chart, checked, drawing, empty, fill, finish, label, plain
from pdlib.summary import GROUP, digits, group_name

LANES = {"prefill": 1.0, "transfer": 0.0}
DRAWN = [*GROUP, "how", "phase", "layer", "start_ms", "end_ms"]


@drawing
def timeline(rows: pd.DataFrame, lang: str = "en", note: str = "") -> Chart:
    """One hand-over of each way in 'timeline', from real timestamps; the end of prefill enlarged beside it.

    Of several repeats the first is drawn, and of several machines or workloads each gets a panel of its own.
    Drawn: start and end of every layer, in ms since prefill began.
    """
    found = checked(rows, "timeline")
    found = found[found["repeat"] == found["repeat"].min()]
    bars = _bars(found)
    panels = list(bars.groupby([*GROUP, "road", "scenario", "how"], sort=False))
    figure = chart("timeline", found, 0.7 + 1.15 * max(len(panels), 1), lang, note)
    if not panels:
        return empty(figure, lang, DRAWN)
    grid = figure.subplots(len(panels), 2, width_ratios=(1.9, 1), squeeze=False)
    for (left, right), ((source, machine, road, link, how), mine) in zip(grid, panels, strict=True):
        done = mine.loc[mine["phase"] == "prefill", "end_ms"].max()
        usable = mine["end_ms"].max()
        where = words.name(link if link != "-" else road, lang)
        left.set_title(f"{words.say(how, lang)} · {where} · {group_name(source, machine, lang)}")
        for axes in (left, right):
            _draw(axes, mine, str(source))
            axes.axvline(done, color=INK, linewidth=0.9, linestyle=":", zorder=4)
        left.set_xlim(0, 1.02 * max(usable, done))
        left.set_yticks(list(LANES.values()), [words.say(phase, lang) for phase in LANES])
        right.set_yticks([])
        # enlarged: from the last part's start, or as far before the end of prefill as the transfer lasts after it
        last = mine.loc[mine["phase"] == "transfer", "start_ms"].max()
        begin, end = min(last, 2 * done - usable), max(done, usable)
        right.set_xlim(begin - 0.3 * (end - begin), end + 0.3 * (end - begin))
        text = words.say("timeline.exposed", lang, digits(usable - done))
        label(right, text, ((done + usable) / 2, -0.42), (0, -1), va="top", color=PHASE["decode"], weight="bold")
        right.plot([done, usable], [-0.42, -0.42], color=PHASE["decode"], linewidth=2.5, solid_capstyle="butt")
    grid[-1][0].set_xlabel(words.say("timeline.x", lang))
    grid[-1][1].set_xlabel(words.say("timeline.zoom", lang))
    return finish(figure, bars[DRAWN])


def _bars(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows as bars: how, layer (text, '' for the whole), start and end in ms since the panel's prefill began."""
    found = hand_over.transfers(rows, "timeline")
    layer = found["scenario"].str.extract(r"layer=(\d+)", expand=False).fillna("")
    link = found["scenario"].str.replace(r"\s*layer=\d+", "", regex=True).replace("", "-")
    found = found.assign(layer=layer, scenario=link)
    key = [*GROUP, "road", "scenario", "how"]
    began = found[found["phase"] == "prefill"].groupby(key, sort=False)["start_s"].min()
    start = found["start_s"] - pd.Series([began.get(tuple(k), 0.0) for k in found[key].to_numpy()], found.index)
    return found.assign(start_ms=1e3 * start, end_ms=1e3 * (start + found["seconds"]))


def _draw(axes: Axes, bars: pd.DataFrame, source: str) -> None:
    for phase, y in LANES.items():
        mine = bars[bars["phase"] == phase]
        # a transfer may be a hair's breadth of the prefill: its edge keeps it visible
        edge = "white" if phase == "prefill" else PHASE[phase]
        look = fill(source, PHASE[phase]) | {"edgecolor": edge, "linewidth": 0.7}
        axes.barh([y] * len(mine), mine["end_ms"] - mine["start_ms"], left=mine["start_ms"], height=0.62, **look)
    axes.set_ylim(-0.95, 1.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_formatter(plain)
