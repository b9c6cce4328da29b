"""Arms of a two-phase experiment: throughput of both phases, measured and on the roofline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from pdlib import cost, metrics, published, words
from pdlib.spec import DeviceSpec, ModelSpec
from pdlib.summary import GROUP, group_name

PAIR = ("decode", "prefill")


def arms_of(rows: pd.DataFrame, model: ModelSpec, devices: Mapping[str, DeviceSpec]) -> list[dict[str, Any]]:
    """Every arm that has both phases, with tokens/s of all samples and of the roofline."""
    key = [
        *GROUP,
        "experiment",
        "model",
        "kernel",
        "scenario",
        "placement",
        "dtype",
        "requests",
        "prompt_tokens",
    ]
    arms: list[dict[str, Any]] = []
    for values, part in rows.groupby(key, sort=False):
        arm: dict[str, Any] = dict(zip(key, values, strict=True))
        arm["steps"] = int(part["new_tokens"].max()) - 1
        for phase in PAIR:
            mine = part[part["phase"] == phase]
            if mine.empty:
                break
            rates = metrics.throughput(mine["tokens"], mine["seconds"]).to_numpy(float)
            peaks = peaks_of(arm["source"], arm["machine"], devices) if arm["model"] == model.name else []
            arm[phase] = {
                "rates": rates,
                "rate": metrics.median_interval(rates),
                "seconds": mine["seconds"].to_numpy(float),
                "roof": [ideal(arm, phase, model, device) for device in peaks],
            }
        else:
            arms.append(arm)
    return arms


def peaks_of(source: str, machine: str, devices: Mapping[str, DeviceSpec]) -> list[DeviceSpec]:
    """The peaks of a machine: one, or for the articles' unnamed Mac the slowest and fastest it may be."""
    if source == "published":
        return list(published.APPLE_M) if machine in ("article-001", "author-mps") else []
    return [devices[machine]] if machine in devices else []


def ideal(arm: dict[str, Any], phase: str, model: ModelSpec, device: DeviceSpec) -> float:
    """Tokens per second of a phase on the roofline."""
    size = arm["requests"], arm["prompt_tokens"]
    seconds = cost.roofline_s(cost.of_phase(model, phase, *size, arm["steps"] + 1, arm["dtype"]), device)
    return size[0] * (size[1] if phase == "prefill" else 1) / seconds


def arm_label(arm: dict[str, Any], lang: str) -> str:
    first = group_name(arm["source"], arm["machine"], lang)
    if arm["source"] == "published":
        hand = arm["experiment"] == "decode_device"
        second = words.say("hand loop", lang) if hand else words.say("article's generate", lang)
    else:
        second = words.say("article's loop", lang) if arm["kernel"] == "article" else words.name(arm["kernel"], lang)
    model = "" if arm["model"] == "gpt2" else f", {arm['model']}"
    return f"{first}: {second}\n{arm['requests']} × {arm['prompt_tokens']} → {arm['steps'] + 1}{model}"
