"""What the tests of workers share: a tiny model in a folder, requests, and what one process makes of them."""

import atexit
import functools
import random
import shutil
import signal
import tempfile

import torch
from tiny import library_model

from pdlib import devices, models
from pdlib.decode import decode
from pdlib.prefill import prefill
from pdlib.workers import Finished, Request


@functools.cache
def folder(kind="gpt2", seed=6):
    """A local folder with a tiny model whose greedy tokens vary, made once."""
    made = tempfile.mkdtemp(prefix="pdlib-tests-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    positions = {"n_positions" if kind == "gpt2" else "max_position_embeddings": 256}
    library_model(kind, seed=seed, **positions).save_pretrained(made)
    return made


@functools.cache
def reference(name):
    return models.load(name, devices.parse("cpu@1"))


def expected(request, name):
    """The tokens that one process makes of a request."""
    model = reference(name)
    cache = model.new_cache(1, request.positions)
    first = prefill(model, torch.tensor([request.prompt]), cache).argmax(-1)
    if request.new_tokens == 1:
        return (int(first),)
    return (int(first), *decode(model, first, cache, request.new_tokens - 1)[0].tolist())


def requests(count, seed=0, longest=40, most=12):
    """Random requests, each of its own length."""
    draw = random.Random(seed)
    return [
        Request([draw.randrange(97) for _ in range(draw.randint(1, longest))], draw.randint(2, most))
        for _ in range(count)
    ]


def check_finished(results, asked, name):
    """Every result is there, with the tokens of one process."""
    for result, request in zip(results, asked, strict=True):
        assert isinstance(result, Finished), result
        assert result.tokens == expected(request, name)


def settings(**changes):
    return dict(model=folder(), slots=4, capacity=128, start_s=30.0) | changes


def pid(both, role):
    return both.workers[role].process.pid


def killed(both, role):
    """Wait until a side is dead by SIGKILL."""
    assert both.workers[role].ended(60) == -signal.SIGKILL
