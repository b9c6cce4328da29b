"""Tables of articles 000 and 001 and of the classic mistakes. The articles' digits stand as printed."""

from __future__ import annotations

import pandas as pd

from pdlib import metrics, published, words
from pdlib.results import validate
from pdlib.spec import one_of
from pdlib.summary import (
    ARTICLE_COLUMNS,
    GROUP,
    PLACEMENTS,
    digits,
    group_name,
    groups,
    interval,
    mistake_numbers,
    placed,
    split_gain,
    verdict,
    whole_seconds,
)
from pdlib.tables.base import done


def mistakes(rows: pd.DataFrame, lang: str = "en") -> pd.DataFrame:
    """The classic mistakes: honest, mistaken, and by which factor the verdict moves.

    Expects rows of the experiment 'mistakes' with kernels 'honest' and 'mistaken'; others are passed over.
    """
    one_of("language", lang, words.LANGUAGES)
    numbers = mistake_numbers(validate(rows))
    table = []
    for n in numbers.to_dict("records"):
        cells = {k: interval(n[k], n[f"{k}_low"], n[f"{k}_high"]) for k in ("honest", "mistaken", "factor")}
        if n["mistake"] == "fixed_order":
            cells |= {k: words.say("second ÷ first", lang, cells[k]) for k in ("honest", "mistaken")}
        place = group_name(n["source"], n["machine"], lang)
        table.append(
            {
                "machine": place,
                "mistake": words.name(n["mistake"], lang),
                **cells,
                "verdict": verdict(n, lang),
            }
        )
    columns = ["machine", "mistake", "honest", "mistaken", "factor", "verdict"]
    exact = numbers.drop(columns=[*GROUP, "mistake"]).add_suffix("_exact")
    return done(pd.DataFrame(table, columns=columns).join(exact), lang)


def figures(rows: pd.DataFrame, lang: str = "en") -> pd.DataFrame:
    """Article 001's numbers as printed and recomputed from one another, then the same of `rows`.

    `exact` follows from the other printed numbers, low_exact and high_exact are the ends of what their
    rounding allows. The further columns are the rows of the experiment 'phases' that are not published.
    """
    one_of("language", lang, words.LANGUAGES)
    live = {
        f"{source}:{machine}:{kernel}": _live_figures(part)
        for (source, machine, kernel), part in _live(rows, "phases").groupby([*GROUP, "kernel"], sort=False)
    }
    table = []
    for key, (claim, unit, value, low, high) in _recomputed().items():
        text = published.ARTICLE_001[key]
        near = _span(text, key)
        # Throughputs were computed from unrounded seconds, so equal digits are too much to ask: the printed
        # number, give or take its own rounding, has to lie within what the other printed digits allow.
        agrees = value > float(text) if key == "decode_share" else low <= near[1] and near[0] <= high
        cells = {
            "claim": claim,
            "quantity": words.say(key, lang),
            "unit": unit,
            "article": f">{text}" if key == "decode_share" else text,
            "exact": f"{value:.{_places(text) + (2 if unit == '%' else unit != 'tokens')}f}",
            "agrees": words.say("yes" if agrees else "no", lang),
            "value_exact": value,
            "low_exact": low,
            "high_exact": high,
        }
        table.append(cells | {header: values[key] for header, values in live.items()})
    return done(pd.DataFrame(table), lang)


def _recomputed() -> dict[str, tuple[str, str, float, float, float]]:
    """Every number of article 001 from its others: claim, unit, value, lowest and highest it can be."""
    printed = {key: float(text) for key, text in published.ARTICLE_001.items()}
    near = {key: _span(text, key) for key, text in published.ARTICLE_001.items()}
    (p0, p1), (d0, d1), (t0, t1) = near["prefill_s"], near["decode_s"], near["total_s"]
    prefill, decode, total = (printed[key] for key in ("prefill_s", "decode_s", "total_s"))
    tokens, rate = 5 * 255, near["prefill_tokens_per_s"]
    ratio = (decode / prefill, d0 / p1, d1 / p0)
    return {
        "prompt_tokens": ("1.1", "tokens", tokens, tokens, tokens),
        "new_tokens": ("1.1", "tokens", 5 * 256, 5 * 256, 5 * 256),
        "decode_tokens": ("1.1", "tokens", 5 * 256 - 5, 5 * 256 - 5, 5 * 256 - 5),
        "prefill_s": (
            "1.2",
            "s",
            tokens / printed["prefill_tokens_per_s"],
            tokens / rate[1],
            tokens / rate[0],
        ),
        "prefill_tokens_per_s": ("1.2", "tokens/s", tokens / prefill, tokens / p1, tokens / p0),
        "decode_s": ("1.3", "s", total - prefill, t0 - p1, t1 - p0),
        "decode_tokens_per_s": ("1.3", "tokens/s", tokens / decode, tokens / d1, tokens / d0),
        "total_s": ("1.4", "s", prefill + decode, p0 + d0, p1 + d1),
        "decode_share": ("1.4", "%", 100 * decode / total, 100 * d0 / t1, 100 * d1 / t0),
        "ratio": ("1.5", "×", *ratio),
        "ratio_title": ("1.5", "×", *ratio),
    }


def _live_figures(part: pd.DataFrame) -> dict[str, str]:
    """The numbers of article 001 for the samples of one kernel, as texts; '' where a phase is absent."""
    made = dict.fromkeys(published.ARTICLE_001, "")
    first = part.iloc[0]
    made["prompt_tokens"] = str(first["requests"] * first["prompt_tokens"])
    made["new_tokens"] = str(first["requests"] * first["new_tokens"])
    made["decode_tokens"] = str(first["requests"] * (first["new_tokens"] - 1))
    arms = {phase: part[part["phase"] == phase] for phase in ("prefill", "decode")}
    for phase, arm in arms.items():
        if len(arm):
            made[f"{phase}_s"] = interval(*metrics.median_interval(whole_seconds(arm)))
            rate = metrics.throughput(arm["tokens"], arm["seconds"])
            made[f"{phase}_tokens_per_s"] = interval(*metrics.median_interval(rate))
    if all(map(len, arms.values())):
        prefill, decode = (whole_seconds(arm).median() for arm in arms.values())
        made["total_s"] = digits(prefill + decode)
        made["decode_share"] = f"{100 * decode / (prefill + decode):.2f}"
        rates = (metrics.throughput(a["tokens"], a["seconds"]) for a in arms.values())
        made["ratio"] = interval(*metrics.ratio_interval(*rates))
    return made


def table1(rows: pd.DataFrame, lang: str = "en") -> pd.DataFrame:
    """Article 000's table 1: prefill seconds of four scenarios in three places, and what the GPU saves.

    The article's digits, whether they agree with the exact values (*_exact), then the rows of the
    experiment 'placements' that are not published, under the names of their own placements.
    """
    one_of("language", lang, words.LANGUAGES)
    table = published.table1()
    seconds = _article_seconds()
    exact = pd.DataFrame(
        {ARTICLE_COLUMNS[role]: [seconds[s, role, "prefill"] for s in table["scenario"]] for role in ARTICLE_COLUMNS}
    )
    exact["saved"] = exact["pd_cpu"] - exact["p_gpu_d_cpu"]
    return _with_exact(table, exact.round(4), 4, rows, lang)


def table2(rows: pd.DataFrame, lang: str = "en") -> pd.DataFrame:
    """Article 000's table 2: seconds of both phases and in total, and the ratios PD-CPU ÷ P-GPU/D-CPU.

    Columns as in table1; kv_transfer_exact is part of the split's total. Totals and total ratios stand
    in both rows of a scenario, which the article merges.
    """
    one_of("language", lang, words.LANGUAGES)
    table = published.table2()
    seconds = _article_seconds()
    totals = published.placements().set_index(["scenario", "placement"])["total_s"]  # of unrounded phases
    exact = pd.DataFrame(index=table.index)
    for role, column in ARTICLE_COLUMNS.items():
        keys = list(zip(table["scenario"], table["phase"], strict=True))
        exact[column] = [seconds[s, role, phase] for s, phase in keys]
        exact[f"{column}_total"] = [totals[s, PLACEMENTS[role]] for s, _ in keys]
    exact["phase_ratio"] = exact["pd_cpu"] / exact["p_gpu_d_cpu"]
    exact["total_ratio"] = exact["pd_cpu_total"] / exact["p_gpu_d_cpu_total"]
    exact["kv_transfer"] = [seconds[s, "split", "transfer"] for s in table["scenario"]]
    shown = _with_exact(table, exact, 2, rows, lang)
    shown["phase"] = [words.say(phase, lang) for phase in table["phase"]]
    return shown


def _article_seconds() -> pd.Series:
    """Article 000's seconds by (scenario, role, phase); phase 'total' too."""
    return placed(published.rows()).set_index(["scenario", "role", "phase"])["seconds"]


def _with_exact(table: pd.DataFrame, exact: pd.DataFrame, places: int, rows: pd.DataFrame, lang: str) -> pd.DataFrame:
    """`table` as printed, then: where rounding `exact` gives other digits; the live rows; `exact` itself."""
    checks = []
    for at in table.index:
        other = [
            words.say(
                "check.bad",
                lang,
                words.name(c, lang),
                f"{exact.at[at, c]:.4f}",
                f"{exact.at[at, c]:.{places}f}",
            )
            for c in table
            if c in exact and abs(round(exact.at[at, c], places) - float(table.at[at, c])) > 1e-9
        ]
        checks.append("; ".join(other) or words.say("check.ok", lang))
    live = _live_cells(rows, table)
    return done(pd.concat([table.assign(check=checks), live, exact.add_suffix("_exact")], axis=1), lang)


def _live_cells(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """For each line of `table` the medians of the rows that are not published, one column a placement.

    Table 1 (no column 'phase') is about prefill and ends in slow − split, table 2 in the ratio of both.
    """
    live = _live(rows, "placements")
    times, gains = placed(live), split_gain(live).set_index([*GROUP, "scenario", "phase"])
    phases = table["phase"] if "phase" in table else pd.Series("prefill", index=table.index)
    made = {}
    for source, machine in groups(times):
        mine = times[(times["source"] == source) & (times["machine"] == machine)]
        for placement in mine["placement"].unique():
            cells = []
            for scenario, phase in zip(table["scenario"], phases, strict=True):
                pick = (mine["scenario"] == scenario) & (mine["placement"] == placement) & (mine["phase"] == phase)
                sample = mine.loc[pick, "seconds"]
                cells.append(interval(*metrics.median_interval(sample)) if len(sample) else "")
            made[f"{source}:{machine}:{placement} (s)"] = cells
        for phase_of, header in ((list(phases), "phase_ratio"), (["total"] * len(table), "total_ratio")):
            if "phase" in table or header == "phase_ratio":
                made[f"{source}:{machine}:{header}"] = [
                    interval(*gains.loc[key, ["ratio", "low", "high"]])
                    if (key := (source, machine, s, p)) in gains.index
                    else ""
                    for s, p in zip(table["scenario"], phase_of, strict=True)
                ]
    return pd.DataFrame(made, index=table.index)


def _live(rows: pd.DataFrame, experiment: str) -> pd.DataFrame:
    checked = validate(rows)
    return checked[(checked["experiment"] == experiment) & (checked["source"] != "published")]


def _places(text: str) -> int:
    return len(text.partition(".")[2])


def _span(text: str, key: str) -> tuple[float, float]:
    """What a printed number may have been before it was rounded to its last digit (the title's: to tens)."""
    half = 5 if key == "ratio_title" else 0.5 * 10.0 ** -_places(text)
    return float(text) - half, float(text) + half
