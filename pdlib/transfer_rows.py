"""Rows of hand-overs: what a probe's timestamps become in the results schema."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdlib import hand_over, results
from pdlib.devices import machine_name
from pdlib.models import Model
from pdlib.probe import Times

Size = tuple[int, int]  # requests, prompt tokens


@dataclass
class Sheet:
    """The rows of one experiment on one model, P and D on the devices named; `order` counts them as they come."""

    experiment: str
    model: Model
    p: str
    d: str
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def between(self) -> str:
        """What the column `device` says of a transfer."""
        return f"{self.p}->{self.d}"

    def add(self, words: str, size: Size, phase: str, seconds: float, **said: Any) -> None:
        """One sample; `said` goes before what follows from the model and the phase."""
        fixed = {"experiment": self.experiment, "machine": machine_name(), "kernel": words, "phase": phase}
        of = self.model
        known: dict[str, Any] = {"model": of.spec.name, "weights": of.weights, "dtype": of.dtype}
        known |= {"device": self.between if phase == "transfer" else self.p, "new_tokens": 2, "order": len(self.rows)}
        sample = {"requests": size[0], "prompt_tokens": size[1], "seconds": seconds}
        self.rows.append(results.row(**known | fixed | sample | said))

    def parts(self, times: Times, how: str, size: Size, **said: Any) -> None:
        """The prefill and the transfer of one hand-over: alone and whole, or streaming and exposed."""
        names = ("alone", "whole") if how == "whole" else ("streaming", "exposed")
        words = [hand_over.kernel("network", how, checksums=True, part=part) for part in names]
        self.add(words[0], size, "prefill", times.prefill_s, **said)
        self.add(words[1], size, "transfer", times.exposed_s, bytes=times.bytes, **said)

    def layers(self, times: Times, how: str, size: Size) -> None:
        """A row a layer of prefill and a part of the transfer, with when it began.

        P tells when a layer's keys and values are written: a layer lasts from there to the next one's. A part
        begins to leave then, or when the one before it is there; it ends when it is in D's cache.
        """
        words, zero = hand_over.kernel("network", how, checksums=True), times.prefill_start_s
        began = zero
        for layer, end in enumerate([*times.layers[1:], times.prefill_end_s]):
            said = {"scenario": f"layer={layer}", "start_s": began - zero}
            self.add(words, size, "prefill", end - began, **said)
            began = end
        there = zero
        for layer, end in enumerate(times.parts):
            ready = times.layers[layer] if how == "layers" else times.prefill_end_s
            began, there = max(ready, there), end
            said = {"scenario": f"layer={layer}", "start_s": began - zero, "bytes": times.bytes // len(times.parts)}
            self.add(words, size, "transfer", end - began, **said)
