"""What the rows of a KV transfer say: the words of their kernel, rates, shares hidden, how long P is busy. No torch.

The column `kernel` of such a row is a line of words, `road=network how=layers checksums=off pinned=off cast=none`,
then, where an experiment has parts, `part=…` or `hand-over=…`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from pdlib import links, metrics, words
from pdlib.results import validate
from pdlib.spec import InputError, ModelSpec, one_of
from pdlib.summary import GROUP, medians, whole_seconds

ROADS = ("device", "memory", "network", "file")
HOWS = ("whole", "layers", "chunks")
PARTS = ("alone", "streaming", "whole", "exposed", "first-token")
HAND_OVERS = ("synchronous", "streaming", "none")
SIZE = ["model", "dtype", "road", "requests", "prompt_tokens"]


def kernel(
    road: str, how: str = "whole", checksums: bool = False, pinned: bool = False, cast: str = "none", **more: str
) -> str:
    """The words of a transfer, in their order; `more` (part, hand_over) comes last."""
    one_of("road", road, ROADS)
    one_of("how", how, HOWS)
    switches = {"checksums": "on" if checksums else "off", "pinned": "on" if pinned else "off", "cast": cast}
    named = {"road": road, "how": how, **switches, **{key.replace("_", "-"): value for key, value in more.items()}}
    return " ".join(f"{key}={value}" for key, value in named.items())


def said(kernel: str) -> dict[str, str]:
    """The words of a kernel by their names; {} for a kernel that has none, such as 'article'."""
    pairs = (word.partition("=") for word in kernel.split(" "))
    return {key: value for key, equals, value in pairs if equals}


def transfers(rows: pd.DataFrame, *experiments: str) -> pd.DataFrame:
    """The validated rows of the experiments with the words of their kernel as columns; '' where a word is absent."""
    found = validate(rows)
    found = found[found["experiment"].isin(experiments)].reset_index(drop=True)
    words = [said(kernel) for kernel in found["kernel"]]
    for name in ("road", "how", "checksums", "pinned", "cast", "part", "hand-over"):
        found[name] = pd.Series([word.get(name, "") for word in words], index=found.index, dtype="str")
    # a published transfer that says no road is a road of its own, under the name of who published it
    return found.assign(road=found["road"].where(found["road"] != "", found["machine"]))


def road_name(row: pd.Series) -> str:
    """A road with what sets it apart: 'network', 'memory, checksums', 'device, pinned'."""
    named = [row["road"], *(name for name in ("checksums", "pinned") if row[name] == "on")]
    return ", ".join([*named, *([row["cast"]] if row["cast"] not in ("", "none") else [])])


def rates(rows: pd.DataFrame) -> pd.DataFrame:
    """GB/s of the experiment 'bandwidth' by road and bytes: source, machine, road, bytes, median, low, high, n."""
    found = transfers(rows, "bandwidth")
    found = found[(found["bytes"] > 0) & (found["seconds"] > 0)]
    found = found.assign(road=[road_name(row) for _, row in found.iterrows()])
    found = found.assign(rate=found["bytes"] / found["seconds"] / 1e9)
    return medians(found, [*GROUP, "road", "bytes"], "rate").sort_values([*GROUP, "road", "bytes"], ignore_index=True)


def fits(rows: pd.DataFrame) -> pd.DataFrame:
    """t = t0 + bytes / BW of every road of 'bandwidth' with three sizes or more.

    Columns source, machine, road, t0_us, t0_low, t0_high, GB_per_s, low, high, worst (share, see links.Fit), sizes.
    """
    found, made = transfers(rows, "bandwidth"), []
    found = found[(found["bytes"] > 0) & (found["seconds"] > 0)]
    found = found.assign(road=[road_name(row) for _, row in found.iterrows()])
    for key, part in found.groupby([*GROUP, "road"], sort=False):
        line = _fit(part) if part["bytes"].nunique() > 2 else None
        if line is not None:
            t0, rate = (1e6 * t for t in line.t0_s), (b / 1e9 for b in line.bytes_per_s)
            made.append([*key, *t0, *rate, line.worst, part["bytes"].nunique()])
    columns = [*GROUP, "road", "t0_us", "t0_low", "t0_high", "GB_per_s", "low", "high", "worst", "sizes"]
    return pd.DataFrame(made, columns=columns)


def _fit(rows: pd.DataFrame) -> links.Fit | None:
    """The line through these transfers; None where there is none in them: one size, or times that do not grow."""
    try:
        return links.fit(rows["bytes"], rows["seconds"])
    except InputError:
        return None


def hidden(rows: pd.DataFrame, model: ModelSpec) -> pd.DataFrame:
    """Of each workload of 'hidden': how much of the transfer hides behind prefill, and what that costs prefill.

    Columns: source, machine, model, dtype, road, requests, prompt_tokens; share, share_low, share_high
    (1 − exposed ÷ whole transfer alone); exposed_s, whole_s, prefill_s (alone), streaming_s (prefill while it
    streams); cost, cost_low, cost_high (streaming ÷ alone); total_whole_s = prefill alone + transfer;
    total_streamed_s = streaming + exposed; bound_share (links.hidden_share of `model`, whose
    keys and values leave before the rest of their layer is computed).
    """
    made = []
    for key, part in transfers(rows, "hidden").groupby([*GROUP, *SIZE], sort=False):
        times = {
            name: part.loc[part["part"] == name, "seconds"] for name in ("alone", "streaming", "whole", "exposed")
        }
        absent = [name for name, arm in times.items() if arm.empty]
        if absent:
            raise InputError(
                f"rows of 'hidden' on {key[1]}, prompt {key[-1]}: no part={', '.join(absent)}; measure again"
            )
        exposed, low, high = metrics.ratio_interval(times["exposed"], times["whole"])
        middle = {name: float(arm.median()) for name, arm in times.items()}
        total = middle["alone"] + middle["whole"], middle["streaming"] + middle["exposed"]
        ahead = links.layer_ahead(model)
        bound = float(links.hidden_share(middle["alone"], middle["whole"], model.layers, ahead))
        cost = metrics.ratio_interval(times["streaming"], times["alone"])
        seconds = [middle[name] for name in ("exposed", "whole", "alone", "streaming")]
        made.append([*key, 1 - exposed, 1 - high, 1 - low, *seconds, *cost, *total, bound, len(times["exposed"])])
    columns = ["share", "share_low", "share_high", "exposed_s", "whole_s", "prefill_s", "streaming_s"]
    columns += ["cost", "cost_low", "cost_high", "total_whole_s", "total_streamed_s", "bound_share", "n"]
    return pd.DataFrame(made, columns=[*GROUP, *SIZE, *columns]).sort_values([*GROUP, *SIZE], ignore_index=True)


def busy(rows: pd.DataFrame) -> pd.DataFrame:
    """Claim 0.12 on rows of 'busy': how long P is taken by one request under each kind of hand-over, in s.

    Columns source, machine, hand-over, requests, prompt_tokens, new_tokens, median, low, high, n; a sample is
    the sum of P's phases of one repeat, ÷ requests. 'none' is the whole job on P.
    """
    found = transfers(rows, "busy")
    found = found.assign(seconds=whole_seconds(found))
    key = [*GROUP, "hand-over", "requests", "prompt_tokens", "new_tokens"]
    each = found.groupby([*key, "repeat"], sort=False, as_index=False)["seconds"].sum()
    each["seconds"] /= each["requests"]
    return medians(each, key)


def first_tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of 'slow_link' by link and how: the time from the start of prefill to D's first token, in s.

    Columns source, machine, link, how, bytes, t0_s and GB_per_s (of the whole transfers alone: fitted where there
    are two sizes, else achieved), prefill_s (alone), median, low, high, n. how='none' is D doing the prefill
    itself, with no link in between.
    """
    found, made = transfers(rows, "slow_link"), []
    for (source, machine, link), part in found.groupby([*GROUP, "scenario"], sort=False):
        firsts, whole = part[part["part"] == "first-token"], part[part["part"] == "whole"]
        size, t0, rate = 0, 0.0, float("nan")
        if len(whole):
            size = int(whole["bytes"].max())  # smaller ones are there for the fit
            rate = size / float(whole.loc[whole["bytes"] == size, "seconds"].median())
            if line := _fit(whole):
                t0, rate = line.t0_s[0], line.bytes_per_s[0]
        prefill = float(part.loc[part["part"] == "alone", "seconds"].median())
        for how, arm in firsts.groupby("how", sort=False):
            interval = metrics.median_interval(arm["seconds"])
            made.append([source, machine, link, how or "none", size, t0, rate / 1e9, prefill, *interval, len(arm)])
    columns = [*GROUP, "link", "how", "bytes", "t0_s", "GB_per_s", "prefill_s", "median", "low", "high", "n"]
    return pd.DataFrame(made, columns=columns)


def link_model(points: pd.DataFrame, model: ModelSpec) -> pd.DataFrame:
    """`first_tokens` of one machine, modelled for links of any speed: columns how, GB_per_s, median (s).

    prefill + t0 + bytes / BW + D's step for 'whole', with links.exposed_s in place of the transfer for 'layers'.
    Prefill is the median over the links, t0 the fastest link's, D's step what D needs after a prefill of its own.
    """
    moved = points[points["how"] == "whole"]
    fastest = moved.loc[moved["GB_per_s"].idxmax()]
    prefill = float(moved["prefill_s"].median())
    step = _own_step(points)
    speeds = np.geomspace(moved["GB_per_s"].min() / 4, max(12.5, 4 * fastest["GB_per_s"]), 200)
    transfer = fastest["t0_s"] + fastest["bytes"] / speeds / 1e9
    late = {"whole": transfer, "layers": links.exposed_s(prefill, transfer, model.layers, links.layer_ahead(model))}
    made = [pd.DataFrame({"how": how, "GB_per_s": speeds, "median": prefill + x + step}) for how, x in late.items()]
    return pd.concat(made, ignore_index=True)


def break_even(line: pd.DataFrame, seconds: float) -> float | None:
    """The slowest link, in GB/s, at which a way of `link_model` is no later than `seconds`; None where none is."""
    soon = line[line["median"] <= seconds]
    return float(soon["GB_per_s"].min()) if len(soon) else None


def streamed_bound(rows: pd.DataFrame, model: ModelSpec) -> pd.DataFrame:
    """Each link of 'slow_link' against what prefill, transfer and D's step alone allow.

    Columns source, machine, link, whole_ratio (prefill + transfer + step, ÷ measured), bound_s (max(prefill,
    transfer) + one layer of the other + step), streamed_s, over (streamed ÷ bound − 1), share (hidden, of the
    transfer alone), whole_s.
    """
    found, points, made = transfers(rows, "slow_link"), first_tokens(rows), []
    for (source, machine, link), part in points[points["how"] != "none"].groupby([*GROUP, "link"], sort=False):
        mine = found[(found["machine"] == machine) & (found["source"] == source) & (found["scenario"] == link)]
        mine = mine[mine["bytes"].isin([0, part["bytes"].iloc[0]])]
        middle = mine.groupby("part")["seconds"].median()
        first = part.set_index("how")["median"]
        step = _own_step(points[(points["machine"] == machine) & (points["source"] == source)])
        late = float(links.exposed_s(middle["alone"], middle["whole"], model.layers))
        whole, bound = middle["alone"] + middle["whole"] + step, middle["alone"] + late + step
        share, over = 1 - middle["exposed"] / middle["whole"], first["layers"] / bound - 1
        made.append(
            [source, machine, link, whole / first["whole"], bound, first["layers"], over, share, first["whole"]]
        )
    columns = [*GROUP, "link", "whole_ratio", "bound_s", "streamed_s", "over", "share", "whole_s"]
    return pd.DataFrame(made, columns=columns)


def _own_step(points: pd.DataFrame) -> float:
    """What D needs for a token after a prefill of its own, in s; 0 where it did none."""
    own = points[points["how"] == "none"]
    return max(0.0, float((own["median"] - own["prefill_s"]).iloc[0])) if len(own) else 0.0


def where_measured(rows: pd.DataFrame, asked: Sequence[str], lang: str = "en") -> str:
    """For a caption: over which links 'slow_link' was measured, and which of those `asked` for could not be made."""
    there = [link for link in transfers(rows, "slow_link")["scenario"].unique() if link != "none"]
    if there == ["loopback"]:
        return words.say("on loopback", lang)
    absent = [words.name(link, lang) for link in asked if link not in there]
    said = words.say("in namespaces", lang, ", ".join(words.name(link, lang) for link in there))
    return said + (words.say("not made", lang, ", ".join(absent)) if absent else "")
