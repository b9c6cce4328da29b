"""Made-up rows of every experiment, near what such machines measure, for the tests of tables and charts."""

import numpy as np
import pandas as pd

from pdlib import results
from pdlib.spec import SCENARIOS, DeviceSpec

LAPTOP = DeviceSpec("laptop", 1.4e11, 2.1e10, 1.9e10, "measured")
H200 = DeviceSpec("h200", 5.1e13, 4.1e12, 3.8e12, "measured")
DEVICES = {"laptop": LAPTOP, "h200": H200}
SPEED = {"laptop": 1.0, "h200": 1 / 55}


def rows(machine="laptop", source="measured", repeats=5, scenarios=tuple(SCENARIOS)):
    """A frame with the experiments of the three notebooks; one repeat has no spread to show."""
    made = []
    rng = np.random.default_rng(len(machine))
    device = "cpu" if machine == "laptop" else "cuda"

    def add(experiment, phase, seconds, size, kernel="pdlib", **more):
        for repeat in range(repeats):
            noisy = seconds * SPEED[machine] * rng.lognormal(0.01, 0.03)
            faults = more.get("page_faults")
            made.append(
                results.row(
                    **{
                        "experiment": experiment,
                        "machine": machine,
                        "source": source,
                        "model": "gpt2",
                        "weights": "random",
                        "dtype": "float32",
                        "device": device,
                        "kernel": kernel,
                        "requests": size[0],
                        "prompt_tokens": size[1],
                        "new_tokens": size[2],
                        "phase": phase,
                        "repeat": repeat,
                        "order": len(made),
                        "seconds": float(noisy) if seconds else 0.0,
                        **more,
                        "page_faults": None if faults is None else int(faults * rng.lognormal(0, 0.1)),
                    }
                )
            )

    for requests, prefill, step in ((1, 0.78, 0.031), (8, 5.6, 0.054), (32, 22.9, 0.123), (100, 73.0, 0.324)):
        add("roofline", "prefill", prefill, (requests, 512, 9))
        add("roofline", "decode", 8 * step, (requests, 512, 9))
    for requests, step in ((1, 0.029), (2, 0.031), (5, 0.036), (16, 0.062), (32, 0.1)):
        add("by_batch", "prefill", 0.36 * requests, (requests, 255, 17))
        add("by_batch", "decode", 16 * step, (requests, 255, 17))
    for kernel, prefill, step in (("article", 2.9, 0.088), ("pdlib", 1.85, 0.036)):
        add("phases", "prefill", prefill, (5, 255, 33), kernel)
        add("phases", "decode", 32 * step, (5, 255, 33), kernel)
    factors = dict(no_warm_up=1.6, no_synchronise=0.04, cache_left=1.12, all_logits=1.9, prefill_in_decode=2.4)
    for mistake, factor in factors.items():
        add("mistakes", "decode", 0.05, (8, 512, 2), "honest", scenario=mistake)
        add("mistakes", "decode", 0.05 * factor, (8, 512, 2), "mistaken", scenario=mistake)
    for kernel, second in (("honest", 1.0), ("mistaken", 0.83)):
        add("mistakes", "decode", 0.05, (8, 512, 2), kernel, scenario="fixed_order", placement="first")
        add(
            "mistakes",
            "decode",
            0.05 * second,
            (8, 512, 2),
            kernel,
            scenario="fixed_order",
            placement="second",
        )
    pair = {
        "laptop": (("PD-fast", 1, 1), ("P-fast/D-slow", 1, 1.8), ("PD-slow", 1.9, 1.8)),
        "h200": (("PD-GPU", 1, 1), ("P-GPU/D-CPU", 1, 9), ("PD-CPU", 30, 9.2)),
    }[machine]
    for scenario in scenarios:
        prompt, new = SCENARIOS[scenario]
        for placement, prefill, decode in pair:
            size = (8, prompt // 2, new // 2)
            where = {"scenario": scenario, "placement": placement}
            split = "/" in placement
            add("placements", "prefill", 8 * prompt / 2 * prefill / 1300, size, **where)
            add(
                "placements",
                "transfer",
                prompt / 4000 if split else 0,
                size,
                bytes=10**6 * prompt * split,
                **where,
            )
            add("placements", "decode", new / 2 * 0.055 * decode, size, **where)
    for scenario, size in (("long", (20, 512, 33)), ("short", (20, 64, 65))):
        for logits in ("kept", "dropped"):
            for kv in ("views", "contiguous"):
                for malloc in ("default", "kept"):
                    slow = 1 + 0.45 * (logits == "kept" and malloc == "default") + 0.05 * (kv == "views")
                    faults = 2e6 * slow if malloc == "default" else 3e4
                    name = f"logits={logits} kv={kv} malloc={malloc}"
                    steps = size[2] - 1
                    add(
                        "puzzle",
                        "decode",
                        0.23 * steps * slow,
                        size,
                        name,
                        scenario=scenario,
                        page_faults=faults,
                    )
    return results.frame(made)


def held(rows):
    """A frame as latency.holdout's, with the columns a notebook adds: made-up predictions for medians of `rows`."""
    rng, made = np.random.default_rng(3), []
    live = rows[rows["experiment"].isin(["by_batch", "roofline"]) & (rows["source"] != "published")]
    key = ["source", "machine", "model", "phase", "kernel", "requests", "prompt_tokens", "new_tokens"]
    for values, part in live.groupby(key, sort=False):
        measured, off = float(part["seconds"].median()), float(rng.lognormal(0, 0.12))
        for split in ("shape", "mixed"):
            kernel = "pdlib past=64 decodes=4 context=100" if split == "mixed" else "pdlib"
            named = dict(zip(key, values, strict=True)) | {"kernel": kernel, "split": split, "fold": "first half"}
            low, high = measured * off / 1.2, measured * off * 1.2
            times = {"measured": measured, "predicted": measured * off, "low": low, "high": high, "warning": ""}
            made.append(named | times | {"error": off - 1, "inside": low <= measured <= high, "settled": off > 0.9})
    columns = [*key, "split", "fold", "measured", "predicted", "low", "high", "warning", "error", "inside", "settled"]
    return pd.DataFrame(made, columns=columns).astype({"error": float, "inside": bool, "settled": bool})


def mixes():
    """Name → rows: every mix of sources that a notebook can hand over."""
    from pdlib import published

    paper = published.rows()
    return {
        "published only": paper,
        "published and measured": pd.concat([paper, rows()], ignore_index=True),
        "all three": pd.concat([paper, rows("h200", "recorded"), rows()], ignore_index=True),
        "measured only": rows(),
        "one sample": pd.concat([paper, rows(repeats=1, scenarios=("LISO",))], ignore_index=True),
        "none": paper.iloc[:0],
    }
