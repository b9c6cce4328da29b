"""Tables of notebook 04: article 002's figures beside what follows and what others measured; held-out errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pandas as pd

from pdlib import audit as audits
from pdlib import cost, words
from pdlib.spec import DeviceSpec, ModelSpec, one_of
from pdlib.summary import GROUP, digits, group_name, significant
from pdlib.tables.base import done

if TYPE_CHECKING:
    from pdlib.latency import Fit

COLUMNS = ["claim", "quantity", "cards", "article", "article_formula", "right_formula", "at_measured", "model_says"]


def audit(model: ModelSpec, device: DeviceSpec, fit: Fit | None = None, lang: str = "en") -> pd.DataFrame:
    """Article 002's figures: as printed, by its own formula, by the right one, at the utilisation that others
    measured, by the calibrated model, and the nearest published measurement. One line a figure and number of cards.

    `fit` predicts for `device` (without it the model's column is empty). The verdict compares the article's interval
    with that at measured utilisation. Times in s in the columns *_exact.
    """
    one_of("language", lang, words.LANGUAGES)
    lines = []
    for quoted in audits.article_002().to_dict("records"):
        if quoted["quantity"] in ("prefill", "decode"):
            lines += [_time(quoted, model, device, cards, fit, lang) for cards in audits.CARDS]
    lines += _shares(model, device, fit, lang)
    table = pd.DataFrame(lines, columns=[*COLUMNS, "published_near", "verdict", *EXACT])
    return done(table.sort_values("claim", key=_order, kind="stable").reset_index(drop=True), lang)


EXACT = [
    f"{name}_exact" for name in ("low", "high", "article_formula", "right_formula", "measured_low", "measured_high")
]
EXACT += [f"model_{name}_exact" for name in ("s", "low", "high")]


# What the model is asked for: |predicted / measured − 1| in %, median and 90th percentile (None: not asked).
ASKED: dict[str, tuple[float, float | None]] = {
    "shape": (10, 25),
    "model": (20, 40),
    "mixed": (15, 30),
    "a100": (12, 30),
}


def errors(held: pd.DataFrame, lang: str = "en") -> pd.DataFrame:
    """Held-out errors by split, machine and phase ('total': the whole split), beside what was asked for.

    `held`: latency.holdout's frames with the columns split, source and machine. Numbers in % and, unrounded, in the
    columns *_exact; `settled`: median and 90th percentile without the shapes whose repeats differ too much.
    """
    one_of("language", lang, words.LANGUAGES)
    from pdlib import latency  # imported late: the other notebooks' tables do without

    lines = []
    for (split, source, machine), part in held.groupby(["split", *GROUP], sort=False):
        for phase, own in [("total", part), *part.groupby("phase", sort=False)]:
            found = latency.errors(own).iloc[0]
            cells = {"split": words.name(f"split {split}", lang), "machine": group_name(source, machine, lang)}
            cells |= {"phase": words.say(str(phase), lang), "shapes": str(len(own))}
            keys = ("median", "p90", "coverage")
            numbers = dict(zip(keys, significant(100 * found[list(keys)]), strict=True))
            cells |= {key: digits(value) for key, value in numbers.items()}
            calm = own[own["settled"].to_numpy(bool)]
            if len(calm):
                best = latency.errors(calm).iloc[0]
                cells["settled"] = f"{digits(100 * best['median'])} / {digits(100 * best['p90'])} (n = {len(calm)})"
            asked = ASKED.get(str(split)) if phase == "total" else None
            if asked:
                worst = math.inf if asked[1] is None else asked[1]
                met = numbers["median"] <= asked[0] and numbers["p90"] <= worst
                cells["asked"] = " / ".join("–" if limit is None else f"{limit:g}" for limit in asked)
                cells["met"] = words.say("yes" if met else "no", lang)
            lines.append(
                {"settled": "", "asked": "", "met": ""} | cells | {f"{key}_exact": v for key, v in numbers.items()}
            )
    columns = ["split", "machine", "phase", "shapes", "median", "p90", "coverage", "settled", "asked", "met"]
    return done(pd.DataFrame(lines, columns=[*columns, *(f"{key}_exact" for key in columns[4:7])]), lang)


def _order(claims: pd.Series) -> pd.Series:
    return claims.map(lambda claim: [int(part) for part in claim.split(".")])


def _time(
    quoted: dict[str, Any], model: ModelSpec, device: DeviceSpec, cards: int, fit: Fit | None, lang: str
) -> dict[str, Any]:
    phase, prompt = quoted["quantity"], int(quoted["prompt_tokens"])
    group = audits.together(device, cards)
    fits = cost.weight_bytes(model, audits.DTYPE) <= cards * device.memory_bytes
    low_share, high_share = audits.utilisation(phase)
    if phase == "prefill":
        name, ideal = "prefill of", cost.prefill(model, 1, prompt, audits.DTYPE).flops / group.flops_per_s
        article, right = audits.formulas(model, device, prompt, cards)
        cells = {"article_formula": _s(article), "right_formula": _s(right)}
    else:
        name, ideal = "decode at", cost.roofline_s(cost.decode_step(model, 1, prompt, audits.DTYPE), group)
        article, right = math.nan, ideal
        cells = {"article_formula": "", "right_formula": words.say("roofline at least", lang, _s(ideal))}
    ends = ideal / high_share, ideal / low_share
    predicted = _predict(fit, model, phase, prompt, cards) if fit is not None and fits else (math.nan,) * 3
    says = predicted[0] == predicted[0]
    verdict = _verdict((quoted["low"], quoted["high"]), ends, lang) + ("" if fits else words.say("no fit", lang))
    return cells | {
        "claim": quoted["claim"],
        "quantity": words.say(name, lang, f"{prompt:,}"),
        "cards": str(cards),
        "article": _s(quoted["low"], quoted["high"]),
        "at_measured": _s(*ends),
        "model_says": f"{_s(predicted[0])} [{_s(*predicted[1:])}]" if says else "",
        "published_near": "; ".join(_near(phase, prompt, cards, lang)),
        "verdict": verdict,
        **dict(zip(EXACT, (quoted["low"], quoted["high"], article, right, *ends, *predicted), strict=True)),
    }


def _predict(fit: Fit, model: ModelSpec, phase: str, prompt: int, cards: int) -> tuple[float, float, float]:
    from pdlib import latency  # imported late: the other notebooks' tables do without

    work = latency.prefill(1, prompt) if phase == "prefill" else latency.decode(1, prompt)
    row = fit.predict(work, model, tensor_parallel=cards).iloc[0]
    seconds, low, high = significant(row[["seconds", "low", "high"]])
    return seconds, low, high


def _near(phase: str, prompt: int, cards: int, lang: str) -> list[str]:
    """The two measurements nearest in size and number of cards, of two who measured."""
    facts = audits.facts()
    facts = facts[(facts["phase"] == phase) & (facts["requests"] == 1)]
    far = [
        abs(math.log(n / prompt)) + abs(math.log(k / cards))
        for n, k in zip(facts["prompt_tokens"], facts["cards"], strict=True)
    ]
    near = facts.assign(far=far).sort_values("far", kind="stable").drop_duplicates("who").head(2)
    return [
        words.say("near", lang, _s(f["ms"] / 1e3), f"{f['prompt_tokens']:,}", f["cards"], words.name(f["who"], lang))
        for f in near.to_dict("records")
    ]


def _shares(model: ModelSpec, device: DeviceSpec, fit: Fit | None, lang: str) -> list[dict[str, Any]]:
    """The claims that are shares or sizes: 2.1, 2.2, 2.7, 2.8 and 2.11; formula and model for 4K on eight cards."""
    lines, say = [], {c: "" for c in (*COLUMNS, "published_near", "verdict")}
    for prompt in audits.PROMPTS:
        frame = audits.terms(model, prompt)
        square = frame["term"].isin(audits.SQUARE)
        share = float(frame.loc[square, "flops"].sum() / frame["flops"].sum())
        cells = {"claim": "2.1", "quantity": words.say("attention share", lang, f"{prompt:,}")}
        cells |= {"article": words.say("dominant", lang), "right_formula": _percent(share)}
        lines.append(say | cells | {"verdict": words.say("too large", lang, digits(1 / share))})
    seen, prompt, cards = audits.reached(), audits.PROMPTS[0], audits.CARDS[-1]
    group = audits.together(device, cards)
    step = cost.decode_step(model, 1, prompt, audits.DTYPE)
    works = {"prefill": cost.prefill(model, 1, prompt, audits.DTYPE), "decode": step}
    right = {"prefill": audits.formulas(model, device, prompt, cards)[1], "decode": cost.roofline_s(step, group)}
    kinds = (
        ("2.2", "prefill", "compute", words.say("high utilisation", lang), 0.9, 1.0),
        ("2.7", "decode", "compute", "≈ 0 %", 0.0, 0.01),
        ("2.11", "prefill", "bandwidth", "< 30 %", 0.0, 0.3),
        ("2.11", "decode", "compute", "< 10 %", 0.0, 0.1),
        ("2.11", "decode", "bandwidth", words.say("high utilisation", lang), 0.9, 1.0),
    )
    for claim, phase, what, article, low, high in kinds:
        mine = seen[(seen["phase"] == phase) & ((seen["requests"] == 1) | (claim == "2.11"))]
        if phase == "prefill":
            mine = mine[mine["prompt_tokens"] >= 512]
        ends = float(mine[what].min()), float(mine[what].max())
        holds = _verdict((low, high), ends, lang)
        at = ("compute", "bandwidth").index(what)
        cells = {"claim": claim, "quantity": words.say(f"{what} share {phase}", lang), "article": article}
        cells |= {
            "cards": str(cards),
            "right_formula": _percent(audits.shares(works[phase], right[phase], group)[at]),
        }
        if fit is not None:
            times = _predict(fit, model, phase, prompt, cards)
            middle, high, low = (audits.shares(works[phase], t, group)[at] for t in times)
            cells["model_says"] = f"{_percent(middle)} [{_percent(low, high)}]"
        lines.append(say | cells | {"published_near": _percent(*ends), "verdict": holds})
    needed, stated = cost.kv_bytes_per_token(model, audits.DTYPE), audits.article_kv_bytes(model)
    cells = {"claim": "2.8", "quantity": words.say("kv of token", lang), "article": "2.5 MB"}
    cells |= {"article_formula": f"{stated / 1e6:.2f} MB", "right_formula": f"{needed // 1024} KiB"}
    cells |= {"published_near": words.say("config says", lang)}
    return [*lines, say | cells | {"verdict": words.say("too large", lang, digits(stated / needed))}]


def _verdict(article: tuple[float, float], ends: tuple[float, float], lang: str) -> str:
    if article[0] <= ends[1] and ends[0] <= article[1]:
        return words.say("fits", lang)
    if article[1] < ends[0]:
        return words.say("too small", lang, digits(ends[0] / article[1]))
    return words.say("too large", lang, digits(article[0] / ends[1]))


def _s(*seconds: float) -> str:
    """'3.74 s', '12.3–46.5 ms': seconds, or ms where those read better."""
    unit, scale = ("s", 1.0) if max(seconds) > 0.4 else ("ms", 1e3)
    return "–".join(digits(scale * value) for value in seconds) + f" {unit}"


def _percent(*shares: float) -> str:
    return "–".join(digits(100 * share) for share in shares) + " %"
