"""`make bench`: the article's loop, the library's static cache and pdlib, arms interleaved in one process.

Prints milliseconds, ratios, and the achieved rate against the measured peaks; keeps every sample as a row.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pandas as pd
import torch
from torch import Tensor

from pdlib import baseline, cost, kv_cache, metrics, placement, results
from pdlib.decode import decode
from pdlib.lab import Lab
from pdlib.models import Model
from pdlib.ops import Linear
from pdlib.prefill import prefill
from pdlib.spec import Workload
from pdlib.timers import Arm, Step, measure

KERNELS = ("article", "library", "pdlib")


def decode_arms(model: Model, requests: int, context: int, steps: int) -> list[Arm]:
    """`steps` decode steps at `context`: growing cache, the library's static cache, ours."""
    cache = placement.filled(model, requests, context, steps)
    tokens = model.prompt(requests, 1)  # (B, 1)
    library = kv_cache.static_cache(model.hf.config, context + steps)
    started: list[baseline.Started] = []

    def grow() -> None:
        growing = kv_cache.growing_cache()
        kv_cache.fill_library(growing, cache, context)
        started[:] = [baseline.Started(tokens, growing, [])]

    def reset() -> None:
        library.reset()
        kv_cache.fill_library(library, cache, context)

    def run_library() -> Tensor:
        return baseline.decode(model, baseline.Started(tokens, library, []), steps)

    def run_article() -> None:
        baseline.decode(model, started[0], steps)
        started.clear()

    return [
        Arm("article", [Step("decode", run_article, model.device, grow)]),
        Arm("library", [Step("decode", run_library, model.device, reset)]),
        Arm(
            "pdlib",
            [
                Step(
                    "decode",
                    lambda: decode(model, tokens[:, 0], cache, steps),
                    model.device,
                    lambda: cache.rewind(context),
                )
            ],
        ),
    ]


def prefill_arms(model: Model, requests: int, prompt_tokens: int) -> list[Arm]:
    """Prefill: logits of every position (article), of the last (library), ours."""
    tokens = model.prompt(requests, prompt_tokens)
    cache = model.new_cache(requests, prompt_tokens)
    return [
        Arm("article", [Step("prefill", lambda: baseline.prefill(model, tokens), model.device)]),
        Arm("library", [Step("prefill", lambda: baseline.prefill(model, tokens, False), model.device)]),
        Arm("pdlib", [Step("prefill", lambda: prefill(model, tokens, cache), model.device, cache.rewind)]),
    ]


def peak_arm(model: Model, dtype: str) -> tuple[Arm, float, float]:
    """The machine's own rates as one more arm: (arm, FLOPs of its product, bytes of its read).

    A peak measured once, before a drifting machine slows down, makes every kernel after it look worse.
    """
    n = 2048 if model.device.is_cpu else 8192
    x = torch.randn(n, n, device=model.device.torch, dtype=getattr(torch, dtype))
    product, block = Linear(x, None), torch.ones(2**26, device=model.device.torch)  # 256 MiB
    steps = [Step("product", lambda: product(x), model.device), Step("read", block.sum, model.device)]
    return Arm("peaks", steps), 2 * n**3, block.nbytes


def run(lab: Lab, arms: Sequence[Arm], work: Workload, repeats: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Measure the arms of one workload, the peaks among them: rows (a kernel an arm), peaks a repeat."""
    model = lab.here.model
    steps = work.decode_steps
    cases = [placement.Case(arm, work, steps, {"experiment": "bench", "kernel": arm.name}) for arm in arms]
    arm, flops, read = peak_arm(model, lab.dtype)
    with torch.inference_mode():
        samples = measure([*arms, arm], repeats, lab.seed)
    rates = {"product": flops, "read": read}
    peaks = pd.DataFrame(
        [(s.repeat, s.phase, rates[s.phase] / s.seconds) for s in samples if s.arm == "peaks"],
        columns=["repeat", "of", "rate"],
    ).pivot(index="repeat", columns="of", values="rate")
    devices = dict.fromkeys(("prefill", "decode"), model.device.name)
    kept = [sample for sample in samples if sample.arm != "peaks"]
    return results.frame(placement.to_rows(kept, cases, model, devices)), peaks


def line(lab: Lab, rows: pd.DataFrame, peaks: pd.DataFrame, work: Workload) -> dict[str, str]:
    """One line of the printed table: medians, ratios with intervals, achieved rates."""
    phase, model = rows["phase"].iloc[0], lab.spec
    product, read = peaks["product"].median(), peaks["read"].median()
    per = work.decode_steps if phase == "decode" else 1
    seconds = {k: rows.loc[rows["kernel"] == k, "seconds"] / per for k in KERNELS}
    work_done = cost.of_phase(model, phase, work.requests, work.prompt_tokens, work.new_tokens, lab.dtype)
    ours = float(seconds["pdlib"].median())

    def ratio(kernel: str) -> str:
        return "{:.2f} [{:.2f}, {:.2f}]".format(*metrics.ratio_interval(seconds[kernel], seconds["pdlib"]))

    floor = work_done.bytes / peaks["read"] + work_done.flops / peaks["product"]  # s, a repeat
    share = metrics.ratio_interval(floor, seconds["pdlib"])

    return {
        "phase": f"{phase} {work.requests} × {work.prompt_tokens}",
        **{f"{k} ms": f"{1e3 * seconds[k].median():.1f}" for k in KERNELS},
        "article ÷ pdlib": ratio("article"),
        "library ÷ pdlib": ratio("library"),
        "GB/s": f"{work_done.bytes / ours / 1e9:.1f} ({work_done.bytes / ours / read:.0%})",
        "GFLOP/s": f"{work_done.flops / ours / 1e9:.0f} ({work_done.flops / ours / product:.0%})",
        "roofline sum ÷ pdlib": "{:.0%} [{:.0%}, {:.0%}]".format(*share),
    }


def main() -> None:
    """Run the benchmarks and print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 100])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prefills", nargs="*", default=["1x512", "5x255", "8x512"], help="requests x tokens")
    asked = parser.parse_args()
    torch.manual_seed(0)
    lab = Lab("bench", dtype=asked.dtype, fast=asked.device, slow="")
    print(lab, flush=True)
    done: list[tuple[pd.DataFrame, pd.DataFrame, Workload]] = []
    jobs = [(asked.context, b, "decode") for b in asked.batches]
    jobs += [(int(n), int(b), "prefill") for b, n in (text.split("x") for text in asked.prefills)]
    for tokens, requests, phase in jobs:
        work = Workload(requests, tokens, asked.steps + 1 if phase == "decode" else 1)
        work.check_fits(lab.spec)
        model = lab.here.model
        arms = (
            decode_arms(model, requests, tokens, asked.steps)
            if phase == "decode"
            else prefill_arms(model, requests, tokens)
        )
        done.append((*run(lab, arms, work, asked.repeats), work))
        print(f"{phase} {requests} × {tokens}: measured", flush=True)
    path = lab.save(pd.concat([rows for rows, _, _ in done]), vars(asked))
    print(pd.DataFrame([line(lab, *each) for each in done]).to_string(index=False))
    print(path)


if __name__ == "__main__":
    main()
