"""`python -m benchmarks.latency`: what the latency model misses on rows it has not seen, and how fast it is.

Rows of this machine: `make calibrate` (or --rows). Published rows of A100s: ../shared/calibration, where present.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from pdlib import latency, paths, presets, results
from pdlib.spec import DeviceSpec, InputError

SHARED = paths.ROOT.parent / "shared" / "calibration"
A100 = presets.device("a100-80gb-sxm", "float16")
# |predicted / measured − 1|: median and 90th percentile that must be reached, median to aim at
GOALS = {
    "this machine: sizes held out": (0.10, 0.25, 0.06),
    "this machine: fit on gpt2, others held out": (0.20, 0.40, 0.12),
    "this machine: mixed steps from pure ones": (0.15, 0.30, 0.10),
    "published A100: sizes held out": (0.12, 0.30, 0.08),
    "published A100: one model held out": (0.25, float("nan"), 0.15),
}


def splitwise() -> pd.DataFrame:
    """A100-80GB rows of Splitwise (Mutinifni/splitwise-sim, data/perf_model.csv, MIT): prompt and token times.

    A row whose prompt of 64 × 512 tokens takes an eighth of that of 32 × 512 is left out: it was not all computed.
    """
    names = {"bloom-176b": "bloom-176b", "llama2-70b": "llama-2-70b"}
    rows = []
    for r in _csv("splitwise_a100.csv").itertuples():
        if r.model == "llama2-70b" and r.tensor_parallel == 2 and r.batch_size == 64:
            continue
        labels = (names[r.model], f"published tp={r.tensor_parallel}", r.batch_size, r.prompt_tokens)
        rows.append(_row(*labels, "prefill", 1, r.prompt_ms / 1e3))
        rows.append(_row(*labels, "decode", r.new_tokens, r.token_ms / 1e3 * (r.new_tokens - 1)))
    return pd.DataFrame(rows)


def distserve() -> pd.DataFrame:
    """DistServe's profile (LLMServe/DistServe, profile_data, Apache-2.0) of A100s, evaluated on a grid of batches.

    Prefill a + b · Σn + c · Σn² ms; decode a + b · Σ context + c · batch ms, one line below and one above a batch.
    """
    profile = json.loads((SHARED / "distserve_a100_profile.json").read_text("utf-8"))
    rows = []
    for name, by_devices in profile.items():
        for devices, p in by_devices.items():
            labels = (name.partition("/")[2], f"published tp={devices}")
            for requests in (1, 2, 4, 8):
                for n in (128, 256, 512, 1024, 2048):
                    a, b, c = p["prefill"]
                    rows.append(_row(*labels, requests, n, "prefill", 1, (a + requests * (b * n + c * n * n)) / 1e3))
            for requests in (1, 8, 32, 64, 128):
                few = requests < p["decoding_large_small_bs_threshold"]
                a, b, c = p["decoding_smallbs" if few else "decoding_largebs"]
                for n in (128, 512, 1024):
                    # one step at a context of n: new_tokens 2, so n − 1 before it
                    rows.append(
                        _row(*labels, requests, n - 1, "decode", 2, (a + b * requests * n + c * requests) / 1e3)
                    )
    return pd.DataFrame(rows)


def sarathi() -> pd.DataFrame:
    """Sarathi-Serve's chunking table (microsoft/sarathi-serve, osdi-experiments, Apache-2.0): Yi-34B on two A100s."""
    rows = []
    for r in _csv("sarathi_fig9_chunking_overhead.csv").itertuples():
        kernel = f"published tp=2 chunk={r.chunk_size}"
        rows.append(_row("yi-34b", kernel, 1, r.prefill_length, "prefill", 1, r.prefill_execution_time / 1e3))
    return pd.DataFrame(rows)


def _csv(name: str) -> pd.DataFrame:
    path = SHARED / name
    if not path.is_file():
        raise InputError(f"{path} is not here; the published rows are read where they are present")
    return pd.read_csv(path, comment="#")


def _row(
    model: str, kernel: str, requests: int, tokens: int, phase: str, new: int, seconds: float
) -> dict[str, object]:
    where = {"machine": "a100-80gb", "device": "cuda", "dtype": "float16"}
    sizes = {"requests": requests, "prompt_tokens": tokens, "new_tokens": new}
    return where | {"model": model, "kernel": kernel, "phase": phase, "seconds": seconds} | sizes


def reproduced(rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Published times of other software on A100s: by the fit to Splitwise's rows, and by a fit of its own."""
    own = latency.fit(rows, A100)
    table = latency.shapes(rows)
    return {
        "as fitted to Splitwise": latency.predicted(latency.a100(), table),
        "fitted to it": latency.predicted(own, table),
    }


def machine_lines(rows: pd.DataFrame, device: DeviceSpec) -> Iterator[tuple[str, pd.DataFrame]]:
    """The held-out predictions of a machine's calibration rows, by name of GOALS."""
    yield "this machine: sizes held out", latency.holdout(_pure(rows), device, "shape")
    if {"gpt2"} < set(rows["model"]):
        by_model = latency.holdout(_pure(rows), device, "model")
        yield "this machine: fit on gpt2, others held out", by_model[by_model["fold"] == "fit on gpt2"]
    if rows["kernel"].str.contains("decodes=").any():
        yield "this machine: mixed steps from pure ones", latency.holdout(rows, device, "mixed")


def published_lines() -> Iterator[tuple[str, pd.DataFrame]]:
    """The held-out predictions of the published A100 rows, by name of GOALS."""
    rows = splitwise()
    yield "published A100: sizes held out", latency.holdout(rows, A100, "shape")
    yield "published A100: one model held out", latency.holdout(rows, A100, "model")
    yield "published A100: one number of devices held out", latency.holdout(rows, A100, "tp")
    for name, other in (("DistServe's profile", distserve()), ("Sarathi's chunks", sarathi())):
        for how, found in reproduced(other).items():
            yield f"{name}, {how}", found


def _pure(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[~rows["kernel"].str.contains("decodes=")]


def line(name: str, held: pd.DataFrame) -> dict[str, object]:
    """One line of the printed table."""
    found = latency.errors(held).iloc[0]
    must, tail, goal = GOALS.get(name, (float("nan"),) * 3)
    errors = {
        "median": f"{found['median']:.1%}",
        "P90": f"{found['p90']:.1%}",
        "inside 90 %": f"{found['coverage']:.0%}",
    }
    limits = "" if np.isnan(must) else f"{must:.0%}" + ("" if np.isnan(tail) else f" / {tail:.0%}")
    return {"held out": name, "shapes": int(found["shapes"]), **errors, "must": limits, "goal": _percent(goal)}


def _percent(share: float) -> str:
    return "" if np.isnan(share) else f"{share:.0%}"


def speed() -> dict[str, str]:
    """Import, fit, vectorised and single predictions, timed here and now: the best of some repeats."""
    command = "import time; t = time.perf_counter(); import pdlib.latency, pdlib.cost; print(time.perf_counter() - t)"
    run = [sys.executable, "-c", command]
    imports = min(float(subprocess.run(run, capture_output=True, text=True, check=True).stdout) for _ in range(5))
    model, fit = presets.model("llama-2-70b"), latency.a100()
    rng = np.random.default_rng(0)
    work = latency.mixed(rng.integers(1, 2048, 200_000), rng.integers(0, 2048, 200_000), 16, 512)
    vector = _best(lambda: fit.seconds(work, model, 8))
    fast = fit.specialise(model, 8)
    many = range(100_000)
    single = _best(lambda: [fast.decode(32, 16384.0) for _ in many]) / len(many)
    summed = _best(lambda: [fast.decode_sum(32, 16384.0, 100) for _ in many]) / len(many)
    table = _fitting_time()
    return {
        "import pdlib.latency and pdlib.cost": f"{imports:.2f} s",
        "predictions, vectorised": f"{200_000 / vector:,.0f} batches/s",
        "one decode step, specialised": f"{single * 1e6:.2f} µs",
        "n decode steps as a sum": f"{summed * 1e6:.2f} µs",
        **({"fit to 128 rows": f"{table:.2f} s"} if table else {}),
    }


def _fitting_time() -> float:
    try:
        rows = splitwise()
    except InputError:
        return 0.0
    return _best(lambda: latency.fit(rows, A100))


def _best(run) -> float:  # type: ignore[no-untyped-def]
    times = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def machine_rows(path: Path) -> tuple[pd.DataFrame, DeviceSpec]:
    """Calibration rows saved by the project, and the peaks of their device."""
    source = "measured" if path.parent.parent.name == "measured" else "recorded"
    rows, facts = results.load(path.stem, path.parent.name, source)
    rows = rows[rows["experiment"] == "calibration"]
    return rows, DeviceSpec(**facts["peaks"][rows["device"].iloc[0]])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latency", description=__doc__)
    parser.add_argument("--rows", type=Path, help="a CSV of calibration rows under results/")
    parser.add_argument("--write", action="store_true", help="write the fit to the published rows to pdlib/data/")
    asked = parser.parse_args()
    if asked.write:
        fit = latency.fit(splitwise(), A100)
        print(paths.write_atomic(paths.DATA / "latency_a100.json", fit.to_json()))
        return
    default = paths.recorded() / "04_latency_model.csv"
    chosen = asked.rows or (default if default.is_file() else None)
    lines = []
    for name, held in machine_lines(*machine_rows(chosen)) if chosen else ():
        lines.append(line(name, held))
        if not held["settled"].all():  # something else ran: what a quiet machine would show
            lines.append(line(name, held[held["settled"]]) | {"held out": f"{name}, undisturbed"})
    try:
        lines += [line(*found) for found in published_lines()]
    except InputError as error:
        print(error)
    if lines:
        print(pd.DataFrame(lines).to_string(index=False))
    for name, value in speed().items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
