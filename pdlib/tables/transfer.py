"""Tables of notebook 03: how many bytes a cache has, by arithmetic and as they travelled, and what link it takes."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from pdlib import cost, hand_over, links, words
from pdlib.spec import ModelSpec, one_of
from pdlib.summary import digits
from pdlib.tables.base import done

KIB = 1024
PROMPT = 4096  # tokens of the column per_prompt: the articles' "4K"


def kv_bytes(
    cases: Sequence[tuple[ModelSpec, str, int]], rows: pd.DataFrame | None = None, lang: str = "en"
) -> pd.DataFrame:
    """κ of each case (model, dtype, devices of tensor parallelism), beside what travelled in rows of 'kv_bytes'.

    `multi_head` is κ if every attention head had keys and values of its own, article 002's count. Without rows
    of a case its last two columns are empty.
    """
    one_of("language", lang, words.LANGUAGES)
    moved = _travelled(rows) if rows is not None else {}
    table = []
    for model, dtype, devices in cases:
        kappa = cost.kv_bytes_per_token(model, dtype, devices)
        seen = moved.get((model.name, dtype, devices))
        cells = {
            "model": model.name,
            "dtype": dtype,
            "shape": f"{model.layers} × {model.kv_heads} × {model.head_dim}",
            "devices": devices,
            "kappa": digits(kappa / KIB),
            "multi_head": digits(2 * model.layers * model.heads * model.head_dim * _size(model, dtype) / KIB),
            "per_prompt": digits(PROMPT * kappa / 1e9),
            "travelled": "" if seen is None else digits(seen / KIB),
            "travelled_ratio": "" if seen is None else f"{seen / kappa:.4f}",
            "kappa_exact": kappa,
            "travelled_exact": seen,
        }
        table.append(cells)
    return done(pd.DataFrame(table), lang)


def _size(model: ModelSpec, dtype: str) -> int:
    """Bytes of one element."""
    return cost.kv_bytes_per_token(model, dtype) // (2 * model.layers * model.kv_heads * model.head_dim)


def _travelled(rows: pd.DataFrame) -> dict[tuple[str, str, int], float]:
    """Bytes a token that left P, by (model, dtype, devices)."""
    found = hand_over.transfers(rows, "kv_bytes")
    devices = [int(hand_over.said(kernel).get("devices", 1)) for kernel in found["kernel"]]
    found = found.assign(devices=devices, each=found["bytes"] / (found["requests"] * found["prompt_tokens"]))
    return found.groupby(["model", "dtype", "devices"])["each"].median().to_dict()


def needed(demands: pd.DataFrame, lang: str = "en") -> pd.DataFrame:
    """links.demands to read: the cache, its prefill and whose time that is, the GB/s that hide it, the time a link.

    `enough` is the slowest link that hides the transfer. Times are of the whole transfer alone, in ms.
    """
    one_of("language", lang, words.LANGUAGES)
    presets, table = links.presets(), []
    for row in demands.to_dict("records"):
        fast = [one.name for one in presets.values() if one.bytes_per_s >= row["needed_bytes_per_s"]]
        cells = {
            "model": row["model"],
            "prompt": f"{row['prompt_tokens']:,}",
            "cache_gb": digits(row["bytes"] / 1e9),
            "prefill_ms": digits(1e3 * row["prefill_s"]),
            "origin": f"{words.say(row['source'], lang)}: {row['origin']}",
            "needed": digits(row["needed_bytes_per_s"] / 1e9),
            "enough": fast[0] if fast else words.say("none here", lang),
            **{f"{name} (ms)": digits(1e3 * row[f"on {name}"]) for name in presets},
            "bytes_exact": row["bytes"],
            "prefill_s_exact": row["prefill_s"],
            "needed_bytes_per_s_exact": row["needed_bytes_per_s"],
        }
        table.append(cells)
    columns = ["model", "prompt", "cache_gb", "prefill_ms", "origin", "needed", "enough"]
    columns += [f"{name} (ms)" for name in presets]
    exact = ["bytes_exact", "prefill_s_exact", "needed_bytes_per_s_exact"]
    return done(pd.DataFrame(table, columns=[*columns, *exact]), lang)
