"""`make record`: the articles' experiments on a GPU machine, as rows under results/recorded/<machine>/.

Needs torch ≥ 2.11, transformers ≥ 5.17 and pandas, from a plain checkout. Every notebook's rows are saved as soon
as they are measured, so a run that is cut off keeps what it has; what would start after the time limit is left out
and said.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import yaml

from pdlib import paths
from pdlib.spec import InputError

# experiment → its notebook and how its sizes follow from the notebook's parameters, cheapest first
EXPERIMENTS: dict[str, tuple[str, dict[str, str]]] = {
    "phases": (
        "01_two_phases",
        {name: name for name in ("requests", "prompt_tokens", "new_tokens", "timed_steps", "repeats")},
    ),
    "by_batch": (
        "01_two_phases",
        {"requests": "batches", "prompt_tokens": "batch_tokens", "steps": "batch_steps", "repeats": "repeats"},
    ),
    "extrapolation": (
        "01_two_phases",
        {
            "requests": "requests",
            "prompt_tokens": "check_tokens",
            "new_tokens": "check_tokens",
            "timed_steps": "batch_steps",
            "repeats": "repeats",
        },
    ),
    "roofline": (
        "00_measure_honestly",
        {"requests": "batches", "prompt_tokens": "prompt_tokens", "steps": "steps", "repeats": "repeats"},
    ),
    "mistakes": (
        "00_measure_honestly",
        {
            "requests": "mistake_requests",
            "prompt_tokens": "mistake_tokens",
            "steps": "mistake_steps",
            "repeats": "mistake_repeats",
        },
    ),
    "calibration": (
        "04_latency_model",
        {"models": "models", "repeats": "calibration_repeats", "limit_s": "calibration_limit"},
    ),
    "conflict": (
        "04_latency_model",
        {"requests": "batches", "prompt_tokens": "batch_tokens", "steps": "batch_steps", "repeats": "repeats"},
    ),
    "placements": (
        "02_placements",
        {name: name for name in ("requests", "scenarios", "timed_steps", "repeats")},
    ),
    "kv_bytes": (
        "03_kv_transfer",
        {"shapes": "shapes", "repeats": "repeats"},
    ),
    "bandwidth": (
        "03_kv_transfer",
        {"sizes": "sizes", "repeats": "repeats", "p": "fast", "d": "slow"},
    ),
    "timeline": (
        "03_kv_transfer",
        {"requests": "line_requests", "prompt_tokens": "line_tokens", "p": "fast", "d": "slow"},
    ),
    "hidden": (
        "03_kv_transfer",
        {"requests": "requests", "prompts": "prompts", "repeats": "repeats", "p": "fast", "d": "slow"},
    ),
    "busy": (
        "03_kv_transfer",
        {
            "requests": "busy_requests",
            "prompt_tokens": "busy_tokens",
            "new_tokens": "busy_new",
            "timed_steps": "busy_steps",
            "repeats": "repeats",
            "p": "fast",
            "d": "slow",
        },
    ),
    "slow_link": (
        "08_beyond_one_machine",
        {name: name for name in ("requests", "prompt_tokens", "small_tokens", "links", "repeats")},
    ),
    "puzzle": (
        "02_placements",
        {
            "model": "puzzle_model",
            "requests": "puzzle_requests",
            "context": "puzzle_context",
            "steps": "puzzle_steps",
            "repeats": "puzzle_repeats",
        },
    ),
}


def sizes(profile: str, notebook: str) -> dict[str, Any]:
    """A notebook's parameters: its own defaults, then the profile's."""
    from pdlib import parameters

    one = parameters.defaults(paths.ROOT / "notebooks" / f"{notebook}.ipynb")
    path = paths.ROOT / "notebooks" / "profiles" / f"{profile}.yaml"
    return one | (yaml.safe_load(path.read_text("utf-8"))[notebook] or {})


def main(argv: list[str] | None = None) -> int:
    """Record; returns 0 when everything was measured, 1 when something was left out or failed."""
    parser = argparse.ArgumentParser(prog="python -m pdlib.record", description=__doc__)
    parser.add_argument("--profile", default="article")
    parser.add_argument("--minutes", type=float, default=8.0, help="start nothing after so long")
    parser.add_argument("--only", nargs="*", default=list(EXPERIMENTS), help="experiments")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="other sizes, e.g. requests=20")
    parser.add_argument("--note", default="", help="what a reader of the rows has to know")
    parser.add_argument("--cpu", action="store_true", help="record this machine's CPU although it has no GPU")
    asked = parser.parse_args(argv)
    try:
        return _record(asked)
    except InputError as error:
        print(f"record: {error}", file=sys.stderr)
        return 2


def _record(asked: argparse.Namespace) -> int:
    from pdlib.devices import present
    from pdlib.lab import Lab
    from pdlib.spec import one_of

    for name in asked.only:
        one_of("experiment", name, EXPERIMENTS)
    if present()[0] == "cpu" and not asked.cpu:
        raise InputError("no accelerator here; run it on a GPU machine, or add --cpu to record this one")
    given = {k: yaml.safe_load(v) for k, _, v in (pair.partition("=") for pair in asked.set)}
    end, left_out = time.monotonic() + 60 * asked.minutes, []
    labs: dict[str, Lab] = {}
    for name in (e for e in EXPERIMENTS if e in asked.only):
        if time.monotonic() > end:
            left_out.append(f"{name} (time limit)")
            continue
        notebook, mapping = EXPERIMENTS[name]
        values = sizes(asked.profile, notebook) | given
        if notebook not in labs:
            pair = "auto" if notebook in ("02_placements", "08_beyond_one_machine") else ""
            labs[notebook] = Lab(
                notebook,
                model=values["model"],
                dtype=values["dtype"],
                slow=pair,
                seed=values["seed"],
                profile=asked.profile,
                keep="recorded",
                note=asked.note,
            )
            print(labs[notebook], flush=True)
        start = time.monotonic()
        try:
            rows = labs[notebook].rows(name, **{size: values[own] for size, own in mapping.items()})
        except (InputError, RuntimeError) as error:  # out of memory, say: the others are worth having
            left_out.append(f"{name} ({error})")
            continue
        print(f"{name}: {len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)
    for lab in labs.values():
        print(f"results/recorded/{lab.machine}/{lab.notebook}.csv")
    if left_out:
        print(f"left out: {'; '.join(left_out)}", file=sys.stderr)
    return 1 if left_out else 0


if __name__ == "__main__":
    sys.exit(main())
