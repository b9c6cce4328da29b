"""`make calibrate`: time the shapes a latency model is fitted to, on this machine, and keep rows and fit.

A shape is one step of a server: prefill of a chunk or of whole prompts, a decode step, or both one after the other,
as pdlib's kernels run them. Shapes whose repeats differ too much are timed again and, if that does not help, named.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdlib import latency, models, paths, placement, presets, results
from pdlib.decode import decode
from pdlib.devices import Device
from pdlib.kv_cache import KVCache
from pdlib.lab import Lab
from pdlib.models import Model
from pdlib.prefill import prefill
from pdlib.spec import InputError, ModelSpec, one_of, whole_numbers
from pdlib.timers import Arm, Step, measure

Rows = list[dict[str, Any]]
STEPS = 4  # decode steps in one timing: one alone is near the clock's and the scheduler's noise


@dataclass(frozen=True)
class Shape:
    """`requests` prompts of `new` tokens behind `past`, `chunk` a pass (0 = whole); then `decodes` at `context`.

    Either part may be missing (requests 0 or decodes 0).
    """

    requests: int = 0
    new: int = 0
    past: int = 0
    chunk: int = 0
    decodes: int = 0
    context: int = 0

    @property
    def phase(self) -> str:
        return "prefill" if self.requests else "decode"

    @property
    def steps(self) -> int:
        """Decode steps in one timing: several, unless a prefill is timed with it."""
        return 1 if self.requests else STEPS

    @property
    def kernel(self) -> str:
        """The row's kernel: what was run, in words that latency reads."""
        words = {"chunk": self.chunk, "past": self.past}
        if self.requests and self.decodes:
            words |= {"decodes": self.decodes, "context": self.context}
        return " ".join(["pdlib", *(f"{word}={value}" for word, value in words.items() if value)])


def quick() -> list[Shape]:
    """Some fifteen shapes that pin every parameter: rows from 1 to 1024, contexts short and long, chunks."""
    whole = [(1, 16), (1, 64), (1, 256), (1, 768), (4, 32), (4, 192)]
    behind = [(64, 448, 0), (256, 512, 0), (384, 0, 96)]
    steps = [(1, 64), (1, 960), (4, 400), (8, 960), (16, 64), (32, 300)]
    return (
        [Shape(b, n) for b, n in whole]
        + [Shape(1, n, past, chunk) for n, past, chunk in behind]
        + [Shape(decodes=b, context=c) for b, c in steps]
    )


def full() -> list[Shape]:
    """The quick shapes and as many others, mixed steps among them, to hold out."""
    whole = [(1, 32), (1, 128), (1, 384), (1, 512), (1, 1000), (2, 48), (2, 300), (3, 100), (8, 64), (8, 128)]
    behind = [(32, 900, 0), (128, 256, 0), (200, 800, 0), (512, 0, 128), (640, 0, 160), (768, 128, 256)]
    steps = [(1, 500), (2, 128), (2, 900), (3, 300), (6, 640), (8, 200), (12, 512), (16, 700), (24, 100), (32, 500)]
    mixed = [
        (32, 0, 4, 256),
        (64, 256, 8, 512),
        (128, 512, 4, 900),
        (256, 0, 16, 300),
        (256, 600, 2, 100),
        (96, 100, 24, 400),
    ]
    return (
        quick()
        + [Shape(b, n) for b, n in whole]
        + [Shape(1, n, past, chunk) for n, past, chunk in behind]
        + [Shape(decodes=b, context=c) for b, c in steps]
        + [Shape(1, n, past, 0, b, c) for n, past, b, c in mixed]
    )


SIZES = {"quick": quick, "full": full}


def load(name: str, device: Device, dtype: str = "float32", seed: int = 0) -> Model:
    """A model to time: as models.load, or a Llama shape of the presets at random weights."""
    if name in models.CONFIGS or name not in set(presets.models()["name"]):
        return models.load(name, device, dtype, seed)
    import transformers

    spec = presets.model(name)
    config = transformers.LlamaConfig(
        hidden_size=spec.hidden,
        intermediate_size=spec.mlp,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab,
        max_position_embeddings=spec.positions,
        tie_word_embeddings=spec.tied_head,
    )
    return models.from_library(models.random_model(config, seed), name, "random", device, dtype)


def calibration(
    model: Model, shapes: Iterable[Shape], repeats: int, seed: int = 0, rounds: int = 6, limit_s: float = 600.0
) -> Rows:
    """Rows of every shape, `repeats` each, all interleaved; experiment 'calibration'.

    Shapes that are not settled then are timed again, once a round, for at most `rounds` rounds and until `limit_s`
    seconds have passed: a disturbance passes, and what it slowed is measured when it is gone. All samples are kept.
    """
    shapes = list(shapes)
    whole_numbers(repeats=repeats, shapes=len(shapes))
    end, bench = time.monotonic() + limit_s, _Bench(model, shapes)
    again, rows = shapes, list[dict[str, Any]]()
    for turn in range(rounds + 1):
        by_name = {repr(shape): shape for shape in again}
        samples = measure(
            [bench.arm(shape) for shape in again],
            1 if turn else repeats,
            seed + turn,
            warm_up=0 if turn else 1,
        )
        before = 0 if not turn else repeats + turn - 1
        for sample in samples:
            columns = placement.columns(model, sample) | {"repeat": sample.repeat + before}
            rows.append(_row(by_name[sample.arm], columns))
        open_ = set(unsettled(rows))
        again = [shape for shape in shapes if _key(_row(shape, rows[0])) in open_]
        if not again or time.monotonic() > end:
            break
    return rows


def unsettled(rows: Rows) -> list[tuple[Any, ...]]:
    """Shapes (values of latency.SHAPE) whose two least times differ by more than latency.APART: not to be trusted."""
    times: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        times.setdefault(_key(row), []).append(row["seconds"])
    return [
        key for key, every in times.items() if len(every) < 2 or sorted(every)[1] > (1 + latency.APART) * min(every)
    ]


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in latency.SHAPE)


class _Bench:
    """One cache a batch size, shared by the shapes: filled once, rewound before every timing."""

    def __init__(self, model: Model, shapes: Sequence[Shape]) -> None:
        self.model = model
        room: dict[int, int] = {}
        for shape in shapes:
            for requests, tokens in (
                (shape.requests, shape.past + shape.new),
                (shape.decodes, shape.context + STEPS),
            ):
                if requests:
                    room[requests] = max(room.get(requests, 0), tokens)
        self.caches = {requests: self._filled(requests, capacity) for requests, capacity in room.items()}
        self.second = self._filled(1, room[1]) if 1 in room else None  # a mixed step's prompt beside one decode

    def _filled(self, requests: int, capacity: int) -> KVCache:
        cache = self.model.new_cache(requests, capacity)
        cache.data.fill_(0.01)  # written, so that every page is a page of its own
        return cache

    def arm(self, shape: Shape) -> Arm:
        """The shape as one timed step."""
        model, parts = self.model, []
        rewinds: list[tuple[KVCache, int]] = []
        if shape.requests:
            cache = self.second if shape.decodes == shape.requests else self.caches[shape.requests]
            assert cache is not None
            tokens = model.prompt(shape.requests, shape.new)
            rewinds.append((cache, shape.past))
            parts.append(lambda: prefill(model, tokens, cache, chunk=shape.chunk or None))
        if shape.decodes:
            running = self.caches[shape.decodes]
            last = model.prompt(shape.decodes, 1)[:, 0]
            # the timed steps lie around the context asked for, which counts the new token
            rewinds.append((running, shape.context - (shape.steps + 1) // 2))
            parts.append(lambda: decode(model, last, running, shape.steps))

        def before() -> None:
            for cache, length in rewinds:
                cache.rewind(length)

        def run() -> None:
            for part in parts:
                part()

        return Arm(repr(shape), [Step(shape.phase, run, model.device, before)])


def _row(shape: Shape, columns: dict[str, Any]) -> dict[str, Any]:
    """A row of the shape; `columns` says the model and the sample."""
    decoding = not shape.requests
    start = shape.context - (shape.steps + 1) // 2
    own: dict[str, Any] = {
        "experiment": "calibration",
        "kernel": shape.kernel,
        "phase": shape.phase,
        "requests": shape.decodes if decoding else shape.requests,
        "prompt_tokens": start if decoding else shape.new,
        "new_tokens": shape.steps + 1 if decoding else 1,
    }
    given = "machine model weights dtype device repeat order seconds page_faults peak_bytes".split()
    return results.row(**own, **{name: columns[name] for name in given})


def several(model: Model, names: Sequence[str], size: str, repeats: int, seed: int, limit_s: float) -> Rows:
    """Calibration rows of `model` (where it is among `names`) and of the others on its device; `limit_s` each."""
    one_of("size", size, SIZES)
    rows: Rows = []
    for name in names:
        one = model if name == model.spec.name else load(name, model.device, model.dtype, seed)
        rows += calibration(one, SIZES[size](), repeats, seed, limit_s=limit_s)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Measure, fit, store both, print parameters, held-out error and shapes that stayed disturbed."""
    parser = argparse.ArgumentParser(prog="python -m pdlib.calibrate", description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--models", nargs="+", default=["gpt2", "smollm2-135m"])
    parser.add_argument("--size", default="quick", help=f"one of: {', '.join(SIZES)}")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=25.0, help="a model: no further repeats after so long")
    asked = parser.parse_args(argv)
    try:
        return _calibrate(asked)
    except InputError as error:
        print(f"calibrate: {error}", file=sys.stderr)
        return 2


def _calibrate(asked: argparse.Namespace) -> int:
    lab = Lab("calibration", model=asked.models[0], dtype=asked.dtype, fast=asked.device, slow="")
    print(lab, flush=True)
    rows = several(lab.here.model, asked.models, asked.size, asked.repeats, lab.seed, asked.seconds)
    frame = results.frame(rows)
    print(lab.save(frame, vars(asked)))
    specs = _specs(asked.models, lab.here.model)
    fit = latency.fit(frame, lab.device, specs)
    print(paths.write_atomic(latency.calibrated_path(lab.machine), fit.to_json()))
    print(fit.parameters().to_string(index=False, float_format=lambda value: f"{value:.3g}"))
    if fit.unidentified:
        print(f"not identified by these rows: {', '.join(fit.unidentified)}")
    try:
        held = latency.errors(latency.holdout(frame, lab.device, "shape", specs)).iloc[0]
        print(f"sizes held out: median error {held['median']:.1%}, P90 {held['p90']:.1%} of {held['shapes']:.0f}")
    except InputError as error:  # the fit stands; a half of its shapes is too few for a second one
        print(f"no sizes held out: {error}")
    if disturbed := unsettled(rows):
        print(
            f"disturbed: repeats of {len(disturbed)} of {len(latency.shapes(frame))} shapes stayed more than "
            f"{latency.APART:.0%} apart and weigh less in the fit; with nothing else running, call again"
        )
        for model, phase, kernel, requests, prompt_tokens, _ in disturbed:  # latency.SHAPE
            print(f"  {model}, {kernel}: {phase} of {requests} × {prompt_tokens}")
    return 0


def _specs(names: Sequence[str], first: Model) -> dict[str, ModelSpec]:
    """Sizes by name: of the model at hand, else the presets'."""
    known = set(presets.models()["name"])
    return {name: presets.model(name) if name in known else first.spec for name in names}


if __name__ == "__main__":
    sys.exit(main())
