"""P and D as two processes that do one thing, hand a cache over, and say when each part of it was where.

`pdlib.probe.side` is either process; `Pair` starts both and asks them, one line of JSON a question. Bytes go over
gloo (`torch.distributed`) or through shared memory. All times are of one clock: `time.perf_counter` is the system's
monotonic one, the same in every process of a machine, also across network namespaces.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlib import paths
from pdlib.namespaces import LOOPBACK, Host
from pdlib.spec import InputError

PATIENCE_S = 120.0  # for an answer: a prefill of an article's size on one thread is done in half of it


@dataclass(frozen=True)
class Times:
    """When what happened, in s on the machine's clock. `layers[i]`: P's keys and values of layer i are written;
    `parts[i]`: part i is in D's cache. A hand-over without a prefill has prefill_start_s = prefill_end_s."""

    offered_s: float  # P says what is coming
    prefill_start_s: float
    prefill_end_s: float
    left_s: float  # P is told that all has arrived
    usable_s: float  # D's cache is complete
    first_token_s: float  # D has made a token from it, where asked
    bytes: int
    layers: list[float] = field(default_factory=list)
    parts: list[float] = field(default_factory=list)

    @property
    def prefill_s(self) -> float:
        return self.prefill_end_s - self.prefill_start_s

    @property
    def exposed_s(self) -> float:
        """From the end of prefill to the last byte usable at D."""
        return max(0.0, self.usable_s - self.prefill_end_s)


class Pair:
    """Both processes, from start to `close`; a context manager. InputError with what it said when one fails."""

    def __init__(
        self,
        model: str,
        dtype: str,
        seed: int,
        p_device: str,
        d_device: str,
        p_host: Host = LOOPBACK,
        d_host: Host = LOOPBACK,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pdlib-probe-")
        self._sides: dict[str, subprocess.Popen[str]] = {}
        self.devices = p_device, d_device
        try:
            for side, device, host in (("p", p_device, p_host), ("d", d_device, d_host)):
                settings = {"model": model, "dtype": dtype, "seed": seed, "device": device}
                settings |= {"store": f"{self._folder.name}/store", "interface": host.interface}
                self._sides[side] = self._start(side, settings, host)
            for side in "pd":
                self._answer(side)  # the model is there
        except BaseException:
            self.close()
            raise

    def _start(self, side: str, settings: dict[str, Any], host: Host) -> subprocess.Popen[str]:
        command = [*host.prefix, sys.executable, "-m", "pdlib.probe.side", side, json.dumps(settings)]
        path = os.pathsep.join([str(paths.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(Path(self._folder.name) / f"{side}.log", "w", encoding="utf-8") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                bufsize=1,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # a Ctrl-C is for the notebook, which then ends both
            )

    def hand_over(
        self,
        requests: int,
        prompt_tokens: int,
        how: str = "whole",
        prefill: bool = True,
        road: str = "network",
        checksums: bool = True,
        decode: bool = False,
    ) -> Times:
        """One hand-over of `requests` prompts: whole after prefill or layer by layer while it runs; without prefill
        the cache is handed over as an earlier one left it. `decode`: D makes a token from it."""
        size = {"requests": requests, "prompt_tokens": prompt_tokens, "road": road, "decode": decode}
        self._ask("p", do="hand_over", how=how, prefill=prefill, checksums=checksums, **size)
        segment = self._answer("p")["segment"] if road == "memory" else ""
        self._ask("d", do="receive", segment=segment, **size)
        there = self._answer("d")
        return Times(**self._answer("p"), **there)

    def job(self, requests: int, prompt_tokens: int, steps: int, skip: int = 0, side: str = "p") -> dict[str, float]:
        """The whole job on one side: s of its prefill and of `steps` decode steps, `skip` steps further on."""
        self._ask(side, do="job", requests=requests, prompt_tokens=prompt_tokens, steps=steps, skip=skip)
        return self._answer(side)

    def _ask(self, side: str, **question: Any) -> None:
        pipe = self._sides[side].stdin
        assert pipe is not None
        try:
            pipe.write(json.dumps(question) + "\n")
        except OSError:
            self._fail(side, "is gone")

    def _answer(self, side: str) -> dict[str, Any]:
        pipe = self._sides[side].stdout
        assert pipe is not None
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(PATIENCE_S):
                self._fail(side, f"did not answer within {PATIENCE_S:g} s")
        line = pipe.readline()
        if not line:
            self._fail(side, "ended")
        return dict(json.loads(line))

    def _fail(self, side: str, what: str) -> None:
        logs = [Path(self._folder.name) / f"{name}.log" for name in self._sides]
        said = "; ".join(
            f"{log.stem.upper()}: {lines[-1]}" for log in logs if (lines := log.read_text("utf-8").splitlines())
        )
        self.close()
        raise InputError(f"{side.upper()}'s process {what}; it will not be started again by itself. {said}")

    def close(self) -> None:
        """End both processes; nothing of them stays."""
        for process in self._sides.values():
            process.kill()
        for process in self._sides.values():
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._sides = {}
        self._folder.cleanup()

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
