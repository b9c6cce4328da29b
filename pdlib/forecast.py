"""Predicted times as rows of the schema of every other row, so that the same charts draw them. No torch.

Source 'modelled'; the kernel says by what: 'roofline' (a data sheet's or measured peaks) or 'fit' (pdlib.latency).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from pdlib import audit, cost, results
from pdlib.spec import DeviceSpec, ModelSpec
from pdlib.summary import significant

if TYPE_CHECKING:
    from pdlib.latency import Fit


def sweep(
    model: ModelSpec,
    device: DeviceSpec,
    batches: Sequence[int],
    prompt_tokens: int,
    new_tokens: int = 2,
    dtype: str = "float16",
    cards: int = 1,
    fit: Fit | None = None,
    machine: str = "",
) -> pd.DataFrame:
    """Rows of prefill and decode at every batch: by `fit`, else by the roofline of `cards` devices together.

    Decode is new_tokens − 1 steps at their mean context. Experiment 'conflict'; `machine` is by default
    '<cards> × <device>'. A fit's times have four significant digits.
    """
    from pdlib import latency  # imported late: rooflines alone need no fit

    group, steps = audit.together(device, cards), new_tokens - 1
    context = prompt_tokens + (steps + 1) / 2
    if fit is None:
        times = {
            "prefill": [cost.roofline_s(cost.prefill(model, b, prompt_tokens, dtype), group) for b in batches],
            "decode": [steps * cost.roofline_s(cost.decode_step(model, b, context, dtype), group) for b in batches],
        }
    else:
        whole = fit.predict(latency.prefill(batches, prompt_tokens), model, tensor_parallel=cards)
        step = fit.predict(latency.decode(batches, context), model, tensor_parallel=cards)
        times = {"prefill": significant(whole["seconds"]), "decode": significant(steps * step["seconds"])}
    made: list[dict[str, Any]] = []
    for phase, seconds in times.items():
        for batch, s in zip(batches, seconds, strict=True):
            made.append(
                results.row(
                    experiment="conflict",
                    source="modelled",
                    machine=machine or group.name,
                    model=model.name,
                    weights="unknown",
                    dtype=dtype,
                    device=device.name,
                    kernel="roofline" if fit is None else "fit",
                    requests=batch,
                    prompt_tokens=prompt_tokens,
                    new_tokens=new_tokens,
                    phase=phase,
                    seconds=float(s),
                )
            )
    return results.frame(made)
