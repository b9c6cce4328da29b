"""A notebook's bench: rows measured here and now, or the same rows as recorded; no torch until it measures."""

from __future__ import annotations

import datetime
import subprocess
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from pdlib import paths, results
from pdlib.spec import DTYPE_BYTES, GPT2, DeviceSpec, InputError, ModelSpec, one_of

if TYPE_CHECKING:
    from pdlib.experiments import Here


class Lab:
    """Where a notebook gets its rows from. `print(lab)` says on what machine and with which weights."""

    def __init__(
        self,
        notebook: str,
        source: str = "measured",
        machine: str = "",
        *,
        model: str = "gpt2",
        dtype: str = "float32",
        fast: str = "auto",
        slow: str = "auto",
        seed: int = 0,
        profile: str = "",
        keep: str = "measured",
        note: str = "",
    ) -> None:
        """`fast` is the notebook's device, `slow` the second one of a pair ("" where there is none).

        `machine` names recorded rows (default: the reference machine). `keep` is the folder measured rows are
        saved to. Devices and folders are checked here, before any work.
        """
        one_of("source", source, ("measured", "recorded"))
        one_of("keep", keep, ("measured", "recorded"))
        one_of("dtype", dtype, DTYPE_BYTES)
        self.notebook, self.source, self.model_name, self.dtype = notebook, source, model, dtype
        self.fast, self.slow, self.seed, self.keep = fast, slow, seed, keep
        self._parameters: dict[str, Any] = {}
        self._rows: list[pd.DataFrame] = []
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._profile, self._note = profile, note
        if source == "recorded":
            self.machine = machine or paths.REFERENCE
            self._recorded, self.facts = results.load(notebook, self.machine, "recorded")
        else:
            from pdlib import devices

            self.machine = devices.machine_name()
            root = paths.measured if keep == "measured" else paths.recorded
            paths.check_writable(root(self.machine))
            self.facts = {"machine": devices.fingerprint(), "peaks": {}}
            _ = self.here

    @cached_property
    def here(self) -> Here:
        """The model on this machine's devices, made once; accelerators pass a self-check first."""
        from pdlib import devices, models
        from pdlib.experiments import Here

        if self.slow:
            fast, slow = devices.pick_pair(self.fast, self.slow)
        else:
            fast = slow = devices.parse(devices.present()[0] if self.fast == "auto" else self.fast)
        for device in (fast, slow):
            if not device.is_cpu:
                devices.self_check(device, self.dtype)
        model = models.load(self.model_name, fast, self.dtype, self.seed)
        self.facts["weights"] = model.weights
        here = Here(model, model if slow == fast else model.on(slow), self.seed)
        self._measure_peaks(here)
        return here

    def _measure_peaks(self, here: Here) -> None:
        """Measure the devices' peaks, again after each experiment, and keep the best: a peak is undisturbed."""
        from pdlib.devices import measure_peaks

        for device in dict.fromkeys((here.model.device, here.slow.device)):
            known = self.facts["peaks"].get(device.name)
            best = measure_peaks(device, self.dtype, DeviceSpec(**known) if known else None)
            self.facts["peaks"][device.name] = asdict(best)

    @property
    def spec(self) -> ModelSpec:
        """Sizes of the model: read from it when it is loaded, GPT-2's for recorded rows."""
        if self.source == "measured":
            return self.here.model.spec
        if self.model_name != GPT2.name:
            raise InputError(f"recorded rows are of {GPT2.name}, not {self.model_name!r}; leave model as it is")
        return GPT2

    @property
    def peaks(self) -> dict[str, DeviceSpec]:
        """Measured peaks of the rows' machine, of its fast device, by machine name as the charts want them."""
        return {self.machine: DeviceSpec(**next(iter(self.facts["peaks"].values())))}

    @property
    def device(self) -> DeviceSpec:
        """Measured peaks of the (fast) device."""
        return self.peaks[self.machine]

    @property
    def note(self) -> str:
        """What a reader of recorded rows has to know, for captions."""
        return str(self.facts.get("note", ""))

    def rows(self, experiment: str, **sizes: Any) -> pd.DataFrame:
        """Rows of an experiment of pdlib.experiments: measured now with `sizes` and saved, or as recorded."""
        if self.source == "recorded":
            found = self._recorded[self._recorded["experiment"] == experiment].reset_index(drop=True)
            if found.empty:
                raise InputError(f"{self.machine} has no recorded rows of {experiment!r} in {self.notebook}")
            if self.dtype not in set(found["dtype"]):
                there = ", ".join(found["dtype"].unique())
                raise InputError(
                    f"rows of {experiment!r} recorded on {self.machine} are of {there}, not {self.dtype}; "
                    f"ask for that dtype, or measure"
                )
            return found
        from pdlib import experiments

        frame = results.frame(getattr(experiments, experiment)(self.here, **sizes))
        self._rows.append(frame)
        self._parameters[experiment] = sizes
        rows, parameters = self._kept()
        self.save(pd.concat([*rows, *self._rows]), parameters | self._parameters)
        return frame

    def _kept(self) -> tuple[list[pd.DataFrame], dict[str, Any]]:
        """Rows and parameters recorded earlier of experiments that were not measured now: `--only` loses none."""
        if self.keep == "measured" or not (paths.recorded(self.machine) / f"{self.notebook}.csv").exists():
            return [], {}
        rows, facts = results.load(self.notebook, self.machine, "recorded")
        others = rows[~rows["experiment"].isin(self._parameters)].assign(source="measured")
        return [others] if len(others) else [], {
            name: sizes for name, sizes in facts["parameters"].items() if name not in self._parameters
        }

    def save(self, frame: pd.DataFrame, parameters: dict[str, Any]) -> Path:
        """Write rows measured here, with where they come from; returns the CSV."""
        self._measure_peaks(self.here)
        provenance = {
            "machine": self.facts["machine"],
            "peaks": self.facts["peaks"],
            "parameters": parameters,
            "profile": self._profile,
            "seed": self.seed,
            "started": self._started,
            "commit": _commit(),
            "note": self._note,
            "weights": self.facts["weights"],
        }
        return results.save(frame, provenance, self.notebook, self.machine, self.keep)

    def __str__(self) -> str:
        facts, peak = self.facts["machine"], self.device
        gpu = "" if facts["gpu"] == "none" else f", {facts['gpu']}"
        return (
            f"{self.source} on {self.machine} ({facts['cpu']}, {facts['cores']} cores{gpu}, torch {facts['torch']}): "
            f"{peak.flops_per_s / 1e9:.0f} GFLOP/s, {peak.read_bytes_per_s / 1e9:.1f} GB/s read on {peak.name}; "
            f"{self.model_name}, {self.facts['weights']} weights, {self.dtype}{self._pair()}"
        )

    def _pair(self) -> str:
        """What the pair of devices is, where rows are measured on one: '' where there is none."""
        if self.source == "recorded" or not self.slow:
            return ""
        fast, slow = self.here.model.device, self.here.slow.device
        alike = ", which are the same one core: expect no difference" if fast.same_as(slow) else ""
        return f"; fast is {fast.name}, slow is {slow.name}{alike}"


def _commit() -> str:
    """The checkout's commit, '+' behind it when files differ; 'unknown' outside a checkout or without git."""
    command = [
        "git",
        "-C",
        str(paths.ROOT),
        "describe",
        "--always",
        "--dirty=+",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
