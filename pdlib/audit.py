"""The audit of article 002 §4.1.1: its formula beside the right one, and the machines that its figures would need.

Arithmetic only, no torch. `article_002()` has the article's figures, `measured()` what others measured with
Llama-2-70B, each with its origin. The articles name no hardware, so a machine is inferred from its figures: work
divided by time is what a peak must at least be. Everything inferred is an interval, never one number.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd

from pdlib import cost, paths, presets, published, results
from pdlib.spec import DTYPE_BYTES, DeviceSpec, InputError, ModelSpec, whole_numbers

PROMPTS = (4096, 32768)  # the article's 4K and 32K, in tokens
CARDS = (1, 8)
SQUARE = ("one_head", "all_heads", "both_products")  # the terms that grow with the prompt's square: attention
UTILISATION = 0.5  # share of the peak at which both formulas are evaluated; see `utilisation` for what was measured
DTYPE = "float16"  # 2 bytes a value, as in the article's KV sizes


@cache
def _read(name: str) -> pd.DataFrame:
    return pd.read_csv(paths.DATA / f"{name}.csv", dtype={"claim": "str"})


def article_002() -> pd.DataFrame:
    """The article's figures, one row each: claim, quantity, prompt_tokens, low, high, unit."""
    return _read("article_002").copy()


def facts() -> pd.DataFrame:
    """Published measurements of 70B Llamas: who, model, device, dtype, cards, sizes, ms, origin, licence."""
    return _read("llama2_70b").copy()


def measured() -> pd.DataFrame:
    """`facts` in the schema of every other row: experiment 'a100', machine = who, kernel '<who> tp=<cards>'."""
    made = []
    for fact in facts().to_dict("records"):
        steps = fact["new_tokens"] - 1 if fact["phase"] == "decode" else 1
        sizes = {k: fact[k] for k in ("model", "dtype", "requests", "prompt_tokens", "new_tokens", "phase")}
        made.append(
            results.row(
                experiment="a100",
                machine=fact["who"],
                source="published",
                weights="pretrained",
                device=fact["device"],
                kernel=f"{fact['who']} tp={fact['cards']}",
                seconds=fact["ms"] / 1e3 * steps,
                **sizes,
            )
        )
    return results.frame(made)


def together(device: DeviceSpec, cards: int) -> DeviceSpec:
    """`cards` devices as one with the sum of their peaks: what tensor parallelism reaches at best."""
    whole_numbers(cards=cards)
    peaks = {k: cards * getattr(device, k) for k in ("flops_per_s", "read_bytes_per_s", "copy_bytes_per_s")}
    name = device.name if cards == 1 else f"{cards} × {device.name}"
    return replace(device, name=name, **peaks)


def terms(model: ModelSpec, prompt_tokens: int) -> pd.DataFrame:
    """Prefill of one prompt, from the article's formula to the right one: term, flops, in_article.

    The first two are what the article counts, 2·n·d² and n²·d_head·layers; their sum is its formula's
    numerator. The others are missing there. All together are `cost.prefill`, exactly.
    """
    whole_numbers(prompt_tokens=prompt_tokens)
    n, layers, width = prompt_tokens, model.layers, model.heads * model.head_dim
    square = model.hidden**2
    projections = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
    mlp = (3 if model.gated_mlp else 2) * model.hidden * model.mlp
    if layers * (projections + mlp) != model.matmul_parameters:
        raise InputError(f"{model.name} is not a dense transformer; the article's formula is about one that is")
    made = [
        ("one_matrix", 2 * n * square, True),
        ("one_head", n**2 * model.head_dim * layers, True),
        ("all_layers", 2 * n * square * (layers - 1), False),
        ("projections", 2 * n * layers * (projections - square), False),
        ("mlp", 2 * n * layers * mlp, False),
        ("all_heads", n**2 * layers * (width - model.head_dim), False),
        ("both_products", n**2 * layers * width, False),
        ("output_head", 2 * model.head_parameters, False),
    ]
    return pd.DataFrame(made, columns=["term", "flops", "in_article"])


def formulas(
    model: ModelSpec, device: DeviceSpec, prompt_tokens: int, cards: int, utilisation: float = UTILISATION
) -> tuple[float, float]:
    """Prefill seconds of one prompt: (article 002's formula, the right one), both at `utilisation` of the peak."""
    peak = together(device, cards).flops_per_s
    sizes = prompt_tokens, model.hidden, model.head_dim, model.layers
    right = cost.prefill(model, 1, prompt_tokens, DTYPE).flops / (peak * utilisation)
    return cost.article_002_prefill_s(*sizes, flops_per_s=peak, utilisation=utilisation), right


def article_kv_bytes(model: ModelSpec) -> int:
    """Article 002's KV bytes of a token: 2 · d_model · 2 B a layer, as if every attention head kept its own."""
    return 2 * model.hidden * DTYPE_BYTES[DTYPE] * model.layers


def shares(work: cost.Cost, seconds: float, device: DeviceSpec) -> tuple[float, float]:
    """(FLOP/s, B/s) reached, each as a share of the device's peak."""
    if not seconds > 0:
        raise InputError(f"seconds = {seconds!r}: give a time above 0")
    return work.flops / seconds / device.flops_per_s, work.bytes / seconds / device.read_bytes_per_s


def reached() -> pd.DataFrame:
    """`facts` as shares of the data sheet's peaks: who, cards, phase, requests, prompt_tokens, compute, bandwidth."""
    made = []
    for fact in facts().to_dict("records"):
        spec, size = presets.model(fact["model"]), (fact["requests"], fact["prompt_tokens"])
        device = together(presets.device(fact["device"], fact["dtype"]), fact["cards"])
        work = cost.of_phase(spec, fact["phase"], *size, fact["new_tokens"], fact["dtype"])
        named = [fact[k] for k in ("who", "cards", "phase", "requests", "prompt_tokens")]
        made.append((*named, *shares(work, fact["ms"] / 1e3, device)))
    columns = ["who", "cards", "phase", "requests", "prompt_tokens", "compute", "bandwidth"]
    return pd.DataFrame(made, columns=columns)


def utilisation(phase: str) -> tuple[float, float]:
    """(low, high) of what one request reached of the peak that matters: FLOP/s of prefill from 2,048 tokens on
    (shorter prompts leave a GPU idle), B/s of decode."""
    rows = reached()
    rows = rows[(rows["phase"] == phase) & (rows["requests"] == 1)]
    share = rows.loc[rows["prompt_tokens"] >= 2048, "compute"] if phase == "prefill" else rows["bandwidth"]
    return float(share.min()), float(share.max())


def crossing_batch(model: ModelSpec, device: DeviceSpec, context: float, dtype: str = DTYPE) -> float:
    """Batch from which a decode step is bound by compute and no longer by memory; inf where it never is.

    Weights are read once for the batch, the cache once a request: B · (2N + 4·layers·width·c) / peak =
    (W + B · c · κ) / bandwidth. Where a request's own cache takes longer to read than its FLOPs to compute,
    more requests never help.
    """
    one = cost.decode_step(model, 1, context, dtype)
    each = one.flops / device.flops_per_s - one.kv_bytes / device.read_bytes_per_s
    return one.weight_bytes / device.read_bytes_per_s / each if each > 0 else math.inf


def crossing_context(model: ModelSpec, device: DeviceSpec, dtype: str = DTYPE) -> float:
    """Context in tokens beyond which no batch makes decode compute-bound; inf where there is none."""
    at = [cost.decode_step(model, 1, c, dtype) for c in (0, 1)]
    gain = [w.flops / device.flops_per_s - w.kv_bytes / device.read_bytes_per_s for w in at]
    return gain[0] / (gain[0] - gain[1]) if gain[1] < gain[0] else math.inf


def inferred_cards(model: ModelSpec, device: DeviceSpec) -> pd.DataFrame:
    """How many cards at their full peak the article's four times need: claim, phase, prompt_tokens, low, high.

    For prefill that is utilisation × number of GPUs, for decode the same of the bandwidth; gpus_low and gpus_high
    are the number of GPUs at the shares of the peak that others measured (`utilisation`). The last three rows take
    the two decode times as one line over the context: its growth is the cache, its start the weights.
    """
    made: list[tuple[str, str, int, float, float]] = []
    times = article_002().set_index("quantity")
    for phase, peak in (("prefill", device.flops_per_s), ("decode", device.read_bytes_per_s)):
        for row in times.loc[phase].to_dict("records"):
            n = int(row["prompt_tokens"])
            whole, step = cost.prefill(model, 1, n, DTYPE), cost.decode_step(model, 1, n, DTYPE)
            work = whole.flops if phase == "prefill" else step.bytes
            made.append((row["claim"], phase, n, work / row["high"] / peak, work / row["low"] / peak))
    short, long = times.loc["decode"].sort_values("prompt_tokens").to_dict("records")
    span = int(long["prompt_tokens"]) - int(short["prompt_tokens"])
    growth = [(long[a] - short[b]) / span for a, b in (("low", "high"), ("high", "low"))]  # s a token
    start = short["high"] - growth[0] * int(short["prompt_tokens"])  # s, the most that the weights may take
    pair, bandwidth = f"{short['claim']}, {long['claim']}", device.read_bytes_per_s
    for name, size in (
        ("cache", cost.kv_bytes_per_token(model, DTYPE)),
        ("article_cache", article_kv_bytes(model)),
    ):
        made.append((pair, name, span, size / growth[1] / bandwidth, size / growth[0] / bandwidth))
    made.append((pair, "weights", 0, cost.weight_bytes(model, DTYPE) / start / bandwidth, math.inf))
    frame = pd.DataFrame(made, columns=["claim", "phase", "prompt_tokens", "low", "high"])
    seen = {phase: utilisation(phase) for phase in ("prefill", "decode")}
    ends = [seen.get(phase, (math.nan, math.nan)) for phase in frame["phase"]]
    return frame.assign(
        gpus_low=[low / most for low, (_, most) in zip(frame["low"], ends, strict=True)],
        gpus_high=[high / least for high, (least, _) in zip(frame["high"], ends, strict=True)],
    )


def machines() -> pd.DataFrame:
    """What articles 000's and 001's machines must at least be able to do: one row a machine, loop and phase.

    Columns: machine, experiment, device, model, phase, rows; low and high of what was reached over the published
    rows, in FLOP/s (prefill) or B/s (decode); overhead_ms_low and _high of a decode step, and `miss`, the worst
    |fit ÷ published − 1|. What the author's scripts did is not known to the last byte, so work has two ends:
    logits of the last position or of all of them, a cache read once or also copied (torch.cat reads and writes it).
    Overhead: of the line step = overhead + bytes / bandwidth where there are four rows (low and high are then its
    bandwidth); for a Mac, of which only bounds are known, what published.APPLE_M's rooflines leave.
    """
    rows, made = published.rows(), []
    key = ["machine", "experiment", "device", "model", "phase"]
    for values, part in rows[rows["phase"] != "transfer"].groupby(key, sort=False):
        _, _, device, name, phase = values
        spec = presets.model(str(name).lower())
        if phase == "prefill":
            work = [_prefill_ends(spec, r.requests, r.prompt_tokens) for r in part.itertuples()]
            reached = np.array(work).T / part["seconds"].to_numpy(float)
            ends: tuple[float, ...] = (reached[0].min(), reached[1].max(), math.nan, math.nan, math.nan)
        else:
            ends = _decode_ends(spec, part, device == "mps")
        made.append((*values, len(part), *ends))
    columns = [*key, "rows", "low", "high", "overhead_ms_low", "overhead_ms_high", "miss"]
    return pd.DataFrame(made, columns=columns)


def _prefill_ends(spec: ModelSpec, requests: int, prompt_tokens: int) -> tuple[float, float]:
    least = cost.prefill(spec, requests, prompt_tokens).flops
    return least, least + 2 * spec.head_parameters * requests * (prompt_tokens - 1)


def _decode_ends(spec: ModelSpec, part: pd.DataFrame, mac: bool) -> tuple[float, ...]:
    steps = (part["tokens"] / part["requests"]).to_numpy(float)
    each = part["seconds"].to_numpy(float) / steps
    contexts = part["prompt_tokens"].to_numpy(float) + (steps + 1) / 2
    work = [cost.decode_step(spec, int(b), float(c)) for b, c in zip(part["requests"], contexts, strict=True)]
    once = np.array([w.bytes for w in work])
    copied = np.array([w.bytes + 2 * w.kv_bytes for w in work])
    if len(part) >= 4:  # a line through fewer points has no spread to show
        fits = [fit for size in (once, copied) for fit in _lines(size, each)]
        bandwidth, overhead, miss = (np.array(column) for column in zip(*fits, strict=True))
        return bandwidth.min(), bandwidth.max(), overhead.min(), overhead.max(), miss.max()
    left = [1e3 * (t - cost.roofline_s(w, d)) for d in published.APPLE_M for t, w in zip(each, work, strict=True)]
    over = (min(left), max(left)) if mac else (math.nan, math.nan)
    return (once / each).min(), (copied / each).max(), *over, math.nan


def _lines(size: np.ndarray, seconds: np.ndarray) -> list[tuple[float, float, float]]:
    """(bandwidth in B/s, overhead in ms, worst miss) of the fit to all rows and of those without one row each.

    Least squares of the relative error, both terms at least 0.
    """
    from scipy.optimize import nnls  # imported late: tables and charts of other notebooks do without

    made = []
    for kept in [np.arange(len(size)), *(np.delete(np.arange(len(size)), at) for at in range(len(size)))]:
        x, y = size[kept], seconds[kept]
        (start, slope), _ = nnls(np.column_stack([1 / y, x / x.max() / y]), np.ones(len(kept)))
        fitted = start + slope * x / x.max()
        bandwidth = x.max() / slope if slope > 0 else math.inf
        made.append((float(bandwidth), 1e3 * float(start), float(np.abs(fitted / y - 1).max())))
    return made
