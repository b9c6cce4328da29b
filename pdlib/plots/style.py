"""How every chart looks, and how it is written: fonts, colours, marks of the sources, caption, alt text.

Fonts: pdlib/data/fonts holds a subset of Noto Sans CJK SC (OFL) with Latin and the Chinese of `words`;
tools/font.py makes it anew. Behind it stands DejaVu Sans, which travels with matplotlib, so a system's
own fonts are never asked and the same rows give the same bytes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from html import escape
from pathlib import Path
from typing import Any, Literal, ParamSpec

import matplotlib as mpl
import pandas as pd
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from pdlib import paths, words
from pdlib.results import validate
from pdlib.spec import InputError
from pdlib.summary import group_name, groups, timed_part

P = ParamSpec("P")

# Okabe and Ito's and Paul Tol's colours: told apart with any colour vision, and in grey by their lightness.
PHASE = {"prefill": "#0072B2", "transfer": "#E69F00", "decode": "#D55E00", "total": "#333333"}
ROLE = {"fast": "#332288", "split": "#44AA99", "slow": "#BBA33D"}
INK, QUIET, FAINT = "#222222", "#666666", "#D8D8D8"

WIDTH = 9.0  # inches; 900 pixels in a notebook
DPI = 200  # of a file: two dots a pixel there
INLINE_DPI = 130  # of what a notebook stores: a dozen charts in about a megabyte
RC = {
    "font.family": ["pdlib Sans", "DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.unicode_minus": False,
    "axes.formatter.use_locale": False,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    "text.hinting": "no_hinting",
    "text.usetex": False,
    "hatch.linewidth": 0.9,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",  # outlines, so that a browser needs no font
    "svg.hashsalt": "pdlib",
    "path.simplify": True,
    "agg.path.chunksize": 0,
}


@cache
def _fonts() -> None:
    for path in sorted((paths.DATA / "fonts").glob("*.otf")):
        font_manager.fontManager.addfont(path)


@contextmanager
def _looks() -> Iterator[None]:
    """The project's style and nothing of the caller's; the caller's settings come back at the end."""
    _fonts()
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RC)
        yield


class Chart(Figure):
    """A figure that carries the numbers it draws and an alternative text, and shows itself in a notebook."""

    drawn: pd.DataFrame
    alt: str = ""
    heading: str = ""

    def png(self, dpi: int = DPI) -> bytes:
        """The chart as PNG; the same bytes for the same rows."""
        # iTXt holds the Chinese that the older text chunks cannot; no date, no version.
        return self._render("png", {"Title": self.heading, "Description": self.alt, "Software": None}, dpi)

    def svg(self) -> str:
        """The chart as SVG with title and description; the same text for the same rows."""
        text = self._render("svg", {"Date": None, "Creator": None}).decode()
        head, tag, body = text.partition("<svg ")
        attributes, end, body = body.partition(">")
        named = f"<title>{escape(self.heading)}</title>\n<desc>{escape(self.alt)}</desc>"
        return f'{head}{tag}role="img" {attributes}{end}\n{named}{body}'

    def _render(self, kind: str, metadata: dict[str, str | None], dpi: int = DPI) -> bytes:
        buffer = io.BytesIO()
        with _looks():  # ticks are made while drawing, so the style counts here too
            self.savefig(buffer, format=kind, dpi=dpi, metadata=metadata)
        return buffer.getvalue()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        width = round(100 * self.get_size_inches()[0])
        about = {"image/png": {"width": width, "alt": f"{self.heading}. {self.alt}"}}
        display(
            {"image/png": self.png(INLINE_DPI), "text/plain": f"{self.heading}. {self.alt}"},
            metadata=about,
            raw=True,
        )


def drawing(draw: Callable[P, Chart]) -> Callable[P, Chart]:
    """Decorate a chart function: drawn in the project's style, whatever the caller's settings."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Chart:
        with _looks():
            return draw(*args, **kwargs)

    return styled


def chart(
    name: str, rows: pd.DataFrame | None, height: float, lang: str, note: str = "", values: Iterable[object] = ()
) -> Chart:
    """An empty chart with the title and subtitle of `name` and the caption of `rows` under it.

    `height` is that of the drawing in inches; title and caption come on top and are kept clear. A chart of
    arithmetic has no rows: it is captioned by its `note` alone.
    """
    said = [] if rows is None else captions(rows, lang)
    lines = words.wrapped([*said, *([note] if note else [])], 165)
    top, bottom = 0.62, 0.16 + 0.155 * len(lines)
    full = height + top + bottom
    figure = Chart(figsize=(WIDTH, full), layout="constrained")
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0.005, bottom / full, 0.99, 1 - (top + bottom) / full), w_pad=0.06, h_pad=0.04)
    figure.heading = words.say(f"{name}.title", lang)
    subtitle = words.say(f"{name}.sub", lang, *values)
    fixed: dict[str, Any] = {"ha": "left", "in_layout": False}
    figure.text(0.012, 1 - 0.1 / full, figure.heading, va="top", size=13, weight="bold", **fixed)
    figure.text(0.012, 1 - 0.37 / full, subtitle, va="top", size=9.5, color=QUIET, **fixed)
    caption = "\n".join(lines)
    figure.text(0.012, 0.07 / full, caption, va="bottom", size=7.5, color=QUIET, linespacing=1.35, **fixed)
    figure.alt = subtitle + " " + "; ".join(lines)
    figure.drawn = pd.DataFrame()
    return figure


def finish(figure: Chart, drawn: pd.DataFrame) -> Chart:
    """Attach the numbers drawn to the chart, say the first of them in its alternative text, and settle
    the layout once: done anew at every rendering, it would depend on the renderings before."""
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    for axes in figure.axes:  # the solver's last bits differ from run to run, and with them the file's bytes
        axes.set_position([round(edge, 4) for edge in axes.get_position().bounds])
    figure.drawn = drawn.reset_index(drop=True)
    said = []
    for row in figure.drawn.head(16).to_dict("records"):
        said.append(", ".join(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    columns = ", ".join(map(str, drawn.columns))
    figure.alt += f" [{columns}: {'; '.join(said)}{' …' if len(drawn) > 16 else ''}]"
    return figure


def captions(rows: pd.DataFrame, lang: str) -> list[str]:
    """One line a source: where the rows are from, the model and its weights, dtype, kernels, samples."""
    lines = []
    for source in dict.fromkeys(source for source, _ in groups(rows)):
        part = rows[rows["source"] == source]
        if source == "published":
            machines = [group_name(s, m, lang) for s, m in groups(part)]
        else:
            machines = [f"{m} ({', '.join(_unique(p, 'device'))})" for m, p in part.groupby("machine")]
        weights = [words.say(w, lang) for w in _unique(part, "weights")]
        kernels = [k for k in _unique(part, "kernel") if k in ("article", "pdlib") and source != "published"]
        named = [words.say("article's loop", lang) if k == "article" else k for k in kernels]
        most = int(part["repeat"].nunique())
        parts = [
            ", ".join(machines),
            ", ".join(_unique(part, "model")) + ", " + " / ".join(weights),
            ", ".join(_unique(part, "dtype")),
            *([words.say("kernels", lang, ", ".join(named))] if named else []),
            words.say("sample" if most == 1 else "samples" if most > 5 else "few samples", lang, most),
            *timed_part(part, lang),
        ]
        lines.append(f"{words.say(source, lang)}: {' · '.join(parts)}")
    return lines or [words.say("no rows", lang)]


def _unique(rows: pd.DataFrame, column: str) -> list[str]:
    return [str(value) for value in rows[column].unique()]


def fill(source: str, colour: str) -> dict[str, Any]:
    """Face, edge and hatch of a bar or marker: published hollow, measured solid, everything else hatched."""
    if source == "published":
        return {"facecolor": "white", "edgecolor": colour, "linewidth": 1.3}
    if source == "measured":
        return {"facecolor": colour, "edgecolor": colour, "linewidth": 1.3}
    pale = tuple(0.72 + 0.28 * c for c in mpl.colors.to_rgb(colour))
    return {"facecolor": pale, "edgecolor": colour, "linewidth": 1.3, "hatch": "//////"}


def label(axes: Axes, text: str, xy: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """Text beside a point, `offset` in points away from it; small, and centred on the side it stands."""
    side = "left" if offset[0] > 0 else "right" if offset[0] < 0 else "center"
    level = "center" if offset[0] else "bottom" if offset[1] > 0 else "top"
    clear = {"facecolor": "white", "edgecolor": "none", "alpha": 0.92, "pad": 0.4}
    look = {"ha": side, "va": level, "size": 8.5, "bbox": clear, **look}
    axes.annotate(text, xy, offset, textcoords="offset points", zorder=6, **look)


def plain(value: float, _: Any = None) -> str:
    """A tick's number without an exponent."""
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"


def log_ticks(axis: Any) -> None:
    """Ticks of a log axis at 1, 2 and 5 where it spans little, at powers of ten else; no exponents."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 200 else (1,)))
    axis.set_major_formatter(plain)
    axis.set_minor_formatter(NullFormatter())


def whisker(axes: Axes, low: float, high: float, y: float) -> None:
    """A horizontal interval at height `y`; nothing where it has no width."""
    if high > low:
        axes.plot([low, high], [y, y], color=INK, linewidth=1.6, solid_capstyle="butt", zorder=4)
        axes.plot([low, high], [y, y], "|", color=INK, markersize=6, markeredgewidth=1.2, zorder=4)


def empty(figure: Chart, lang: str, columns: Iterable[str]) -> Chart:
    """The chart where no row is its own: says so, so that a blank never looks like a result."""
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.text(0.5, 0.5, words.say("no rows", lang), ha="center", va="center", color=QUIET, size=12)
    return finish(figure, pd.DataFrame(columns=list(columns)))


def checked(rows: pd.DataFrame, *experiments: str) -> pd.DataFrame:
    """The validated rows of the named experiments, published first."""
    found = validate(rows)
    found = found[found["experiment"].isin(experiments)]
    rank = {group: at for at, group in enumerate(groups(found))}
    at = [rank[s, m] for s, m in zip(found["source"], found["machine"], strict=True)]
    return found.assign(_at=at).sort_values("_at", kind="stable").drop(columns="_at").reset_index(drop=True)


def save(figure: Chart, name: str, data: pd.DataFrame | None | Literal["drawn"] = "drawn") -> Path:
    """Write figures/<name>.svg, .png and .csv, each whole or not at all; returns the path of the SVG.

    `data` is the frame of the CSV: the numbers drawn unless another one is given; None writes no CSV (where
    a table of the same name writes it). Raises InputError with the name of a file that was not written.
    """
    if "/" in name or not name:
        raise InputError(f"figure name {name!r}; give a plain file name without a folder or an ending")
    frame = figure.drawn if isinstance(data, str) else data
    contents: dict[str, str | bytes] = {"svg": figure.svg(), "png": figure.png()}
    if frame is not None:
        contents["csv"] = frame.to_csv(index=False, lineterminator="\n")
    for ending, content in contents.items():
        path = paths.write_atomic(paths.figures() / f"{name}.{ending}", content)
        if not path.stat().st_size:
            raise InputError(f"{path} is empty; draw it again, and report it if it stays so")
    return paths.figures() / f"{name}.svg"
