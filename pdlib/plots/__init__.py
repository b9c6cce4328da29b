"""Charts: one function a chart, rows in, Chart (a matplotlib Figure) out; and `save`.

Importing this package loads no matplotlib: the first chart does. Every function takes rows of the results
schema from any mix of sources and passes over experiments that are not its own; `lang` is 'en' or 'zh',
`note` is added to the caption. The numbers drawn are in the chart's attribute `drawn`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdlib.plots.article_000 import equal_decode, live_pair, phases, prefill
    from pdlib.plots.article_001 import decomposition, two_phases
    from pdlib.plots.audit import inferred_hardware, terms
    from pdlib.plots.clock import timeline
    from pdlib.plots.honest import mistakes, puzzle
    from pdlib.plots.latency import conflict, heldout, ratio
    from pdlib.plots.links import needed, slow_link
    from pdlib.plots.roofs import ratio_by_batch, roofline
    from pdlib.plots.style import Chart, save
    from pdlib.plots.transfer import bandwidth, hidden

_HOMES = {
    "article_000": ("equal_decode", "live_pair", "phases", "prefill"),
    "article_001": ("decomposition", "two_phases"),
    "audit": ("inferred_hardware", "terms"),
    "clock": ("timeline",),
    "honest": ("mistakes", "puzzle"),
    "latency": ("conflict", "heldout", "ratio"),
    "links": ("needed", "slow_link"),
    "roofs": ("ratio_by_batch", "roofline"),
    "style": ("Chart", "save"),
    "transfer": ("bandwidth", "hidden"),
}
__all__ = [
    "Chart",
    "bandwidth",
    "conflict",
    "decomposition",
    "equal_decode",
    "heldout",
    "hidden",
    "inferred_hardware",
    "live_pair",
    "mistakes",
    "needed",
    "phases",
    "prefill",
    "puzzle",
    "ratio",
    "ratio_by_batch",
    "roofline",
    "save",
    "slow_link",
    "terms",
    "timeline",
    "two_phases",
]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"pdlib.plots.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
