"""The figures of articles 000 and 001 and of their author's run logs, as frames.

`rows()` has them in the schema of every other row (source 'published'), the other functions as they were
printed; `transfers()` adds Mooncake's to the articles' transfers. Facts only: the texts stay their author's.
Logs: github.com/chen-ace/LLM-Prefill-Decode-Benchmark.

The author's scripts load the pretrained weights in the library's default dtype, float32. Article 001
gets decode by subtraction: `generate` with 256 new tokens less `generate` with one. Article 000's loop
makes 512 (64) tokens after prefill's own, so its rows say 513 (65) new tokens; the arms ran once each, in
the order PD-GPU, P-GPU/D-CPU, PD-CPU, kept in the column `order`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd

from pdlib import cost, paths, presets, results
from pdlib.spec import GPT2, DeviceSpec

# Article 001 names no chip ("Apple M"). Its memory is at least as fast as the first and, in a laptop
# without Max in its name, hardly faster than the second; FLOP/s are float32.
APPLE_M = (
    DeviceSpec("Apple M1", 2.6e12, 68.25e9, 68.25e9, "Apple, introduction of M1, 2020"),
    DeviceSpec("Apple M1 Pro", 5.2e12, 200e9, 200e9, "Apple, introduction of M1 Pro, 2021"),
)

# Article 001 as printed, text for digits; the keys are those of tables.figures.
ARTICLE_001 = {
    "prompt_tokens": "1275",
    "new_tokens": "1280",
    "decode_tokens": "1275",
    "prefill_s": "0.2394",
    "prefill_tokens_per_s": "5325.18",
    "decode_s": "32.8948",
    "decode_tokens_per_s": "38.76",
    "total_s": "33.1343",
    "decode_share": "99",
    "ratio": "137",
    "ratio_title": "140",
}


@cache
def _read(name: str, text: bool = False) -> pd.DataFrame:
    return pd.read_csv(paths.DATA / f"{name}.csv", dtype="str" if text else None, comment="#")


def two_phases() -> pd.DataFrame:
    """Article 001's run and two logs, one row a run: seconds, tokens per second and their ratio."""
    return _read("two_phases").copy()


def decode_device() -> pd.DataFrame:
    """Logs of decode on the GPU and on the CPU after the same prefill, one row a run."""
    return _read("decode_device").copy()


def placements() -> pd.DataFrame:
    """Article 000's twelve runs, scenario × placement, in seconds with four decimals."""
    return _read("placements").copy()


def table1() -> pd.DataFrame:
    """Article 000's table 1 as printed, every cell a text."""
    return _read("printed_table1", text=True).copy()


def table2() -> pd.DataFrame:
    """Article 000's table 2 as printed, every cell a text; its merged cells are repeated."""
    return _read("printed_table2", text=True).copy()


def rows() -> pd.DataFrame:
    """Every published figure as a row of the results schema, source 'published'.

    experiment 'phases' (two_phases), 'placements' and 'decode_device'; kernel 'article' throughout.
    """
    return _rows().copy()


def mooncake() -> pd.DataFrame:
    """Mooncake's transfers over RDMA (data/mooncake.csv says where from), one row a prompt length.

    Added: `bytes` that left the prefill node, κ · n times the copies that tensor parallelism keeps of a KV head,
    and `prefill_s`, the time to the first token less the transfer.
    """
    table = _read("mooncake").copy()
    kappa = [
        cost.kv_bytes_per_token(presets.model(run.model), "bfloat16", run.tensor_parallel)
        for run in table.itertuples()
    ]
    table["bytes"] = kappa * table["prompt_tokens"]
    table["prefill_s"] = (table["ttft_ms"] - table["transfer_ms"]) / 1e3
    return table


def transfers() -> pd.DataFrame:
    """Published transfers as rows of the experiment 'bandwidth': article 000's four and Mooncake's."""
    article = rows()
    article = article[(article["experiment"] == "placements") & (article["phase"] == "transfer")]
    made = [
        results.row(
            experiment="bandwidth",
            machine=run["machine"],
            source="published",
            model=run["model"],
            weights="unknown",
            dtype="bfloat16",
            device="cuda->cuda",
            kernel="road=rdma",
            requests=1,
            prompt_tokens=run["prompt_tokens"],
            new_tokens=1,
            phase="transfer",
            seconds=run["transfer_ms"] / 1e3,
            bytes=run["bytes"],
        )
        for run in mooncake().to_dict("records")
    ]
    return pd.concat([article.assign(experiment="bandwidth"), results.frame(made)], ignore_index=True)


@cache
def _rows() -> pd.DataFrame:
    made: list[dict[str, Any]] = []
    for run in _read("two_phases").to_dict("records"):
        machine = "article-001" if run["run"] == "article" else f"author-{run['device']}"
        size = {k: run[k] for k in ("requests", "prompt_tokens", "new_tokens")}
        for phase in ("prefill", "decode"):
            made.append(_row("phases", machine, run, phase, run["device"], **size))
    for run in _read("decode_device").to_dict("records"):
        gpu, where = run["prefill_device"], run["decode_device"]
        placement = "PD-GPU" if gpu == where else "P-GPU/D-CPU"
        made += _placed("decode_device", f"author-{gpu}", run, gpu, where, "LILO", placement)
    devices = {"PD-GPU": ("cuda", "cuda"), "P-GPU/D-CPU": ("cuda", "cpu"), "PD-CPU": ("cpu", "cpu")}
    for run in _read("placements").to_dict("records"):
        where = devices[run["placement"]]
        made += _placed("placements", "article-000", run, *where, run["scenario"], run["placement"])
    return results.frame(made)


def _placed(
    experiment: str,
    machine: str,
    run: dict[str, Any],
    fast: str,
    slow: str,
    scenario: str,
    placement: str,
) -> list[dict[str, Any]]:
    size = {k: run[k] for k in ("requests", "prompt_tokens")} | {"new_tokens": run["decode_steps"] + 1}
    order = ("PD-GPU", "P-GPU/D-CPU", "PD-CPU").index(placement)
    more = {"scenario": scenario, "placement": placement, "order": order, **size}
    made = [_row(experiment, machine, run, "prefill", fast, **more)]
    if fast != slow:
        moved = size["requests"] * size["prompt_tokens"] * cost.kv_bytes_per_token(GPT2)
        made.append(_row(experiment, machine, run, "transfer", f"{fast}->{slow}", bytes=moved, **more))
    made.append(_row(experiment, machine, run, "decode", slow, **more))
    return made


def _row(experiment: str, machine: str, run: dict[str, Any], phase: str, device: str, **more: Any) -> dict[str, Any]:
    return results.row(
        experiment=experiment,
        machine=machine,
        source="published",
        model=run["model"],
        weights="pretrained",
        dtype="float32",
        device=device,
        kernel="article",
        phase=phase,
        seconds=run[f"{phase}_s"],
        **more,
    )
