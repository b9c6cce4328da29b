"""The formula: seconds of a pass from its counts, a model's sizes, a device's peaks and nine parameters.

    pass  = ((kernels · overhead)^s + (FLOPs / peak / compute)^s + (weight bytes / bandwidth / stream)^s)^(1/s)
          + the same, without overhead, for the output head
          + activation bytes / bandwidth / activations
          + FLOPs of attention / peak / attention + KV bytes / bandwidth / kv     (its own kernels: nothing overlaps)
          + all-reduce bytes / link / link + decoding sequences · layers · sequence

s is the overlap: 1 adds work and traffic, large s takes the longest alone (the roofline), below 1 they get in each
other's way. Decode is linear in the context: n steps have a closed sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pdlib import cost
from pdlib.latency.work import Floats, Work
from pdlib.spec import DTYPE_BYTES, DeviceSpec, InputError, ModelSpec


@dataclass(frozen=True)
class Parameter:
    """`prior` is the guess before any row, `spread` the factor (e^spread) it may well be off by."""

    prior: float
    spread: float
    unit: str
    meaning: str


# The priors are wide and hold what rows leave open; rows that speak outweigh them.
PARAMETERS = {
    "overhead": Parameter(3e-5, 1.0, "s", "time a kernel takes when it does nothing: launch, latency"),
    "compute": Parameter(0.6, 0.5, "of peak FLOP/s", "matrix products at many rows"),
    "stream": Parameter(0.75, 0.3, "of bandwidth", "reading weights at few rows"),
    "overlap": Parameter(2.0, 0.3, "exponent", "1: work and traffic add; large: the longer one alone counts"),
    "activations": Parameter(0.5, 0.5, "of bandwidth", "moving inputs and outputs of the matrix products"),
    "attention": Parameter(0.4, 0.7, "of peak FLOP/s", "scores and values"),
    "kv": Parameter(0.5, 0.7, "of bandwidth", "reading keys and values of decoding sequences"),
    "link": Parameter(0.3, 0.7, "of link", "all-reduces of tensor parallelism"),
    "sequence": Parameter(5e-6, 1.5, "s", "what a decoding sequence adds in every layer, whatever its context"),
}
NAMES = tuple(PARAMETERS)
CPU_OVERLAP = 1.0  # prior on a CPU, which runs one kernel after the other; an accelerator's queue runs ahead
PARTS = ("layers", "head", "activations", "attention", "kv", "link", "sequences")


@dataclass(frozen=True)
class Sizes:
    """A model on one of `tensor_parallel` devices: seconds at the device's peaks for one unit of each count."""

    compute: float  # s a token: FLOPs of the layers' products
    weights: float  # s a pass: what every token needs
    expert: float  # s an expert touched, all layers together
    experts: int
    per_token: int
    head_compute: float  # s a row of logits
    head_weights: float  # s a pass that makes logits
    activations: float  # s a token
    pairs: float  # s a (query, key) pair of prefill
    context: float  # s a position read by decode: its FLOPs
    kv: float  # s a position read: its bytes
    link: float  # s a token
    kernels: int
    layers: int
    weight_bytes: float  # a device's, with all experts


def sizes(model: ModelSpec, device: DeviceSpec, dtype: str = "float32", tensor_parallel: int = 1) -> Sizes:
    """Work of `model` in seconds at the peaks of `device`. Heads, experts and matrices are split evenly."""
    cost.check_parallel(model, tensor_parallel)
    if tensor_parallel > 1 and not device.link_bytes_per_s:
        raise InputError(
            f"{device.name} has no link bandwidth and tensor_parallel = {tensor_parallel} needs one; "
            "give link_bytes_per_s in its DeviceSpec, or one device"
        )
    p, flops, bandwidth = tensor_parallel, device.flops_per_s, device.read_bytes_per_s
    stored, size = cost.STORED_BYTES[dtype], DTYPE_BYTES.get(dtype, 2)
    expert = model.expert_layers * model.expert_parameters
    shared_width = 4 * model.layers * model.hidden  # every device holds the whole width between the products
    a_pair = model.layers * model.heads
    latent = model.kv_rank or model.head_dim
    kv_dtype = dtype if dtype in DTYPE_BYTES else "bfloat16"
    return Sizes(
        compute=2 * model.matmul_parameters / p / flops,
        weights=(model.matmul_parameters - expert * model.experts_per_token) * stored / p / bandwidth,
        expert=expert * stored / p / bandwidth,
        experts=model.experts,
        per_token=model.experts_per_token,
        head_compute=2 * model.head_parameters / p / flops,
        head_weights=model.head_parameters * stored / p / bandwidth,
        activations=((cost.activations_per_token(model) - shared_width) / p + shared_width) * size / bandwidth,
        pairs=2 * a_pair * (2 * model.head_dim + model.rope_dim) / p / flops,
        context=2 * a_pair * (2 * latent + model.rope_dim) / p / flops,
        kv=cost.kv_bytes_per_token(model, kv_dtype, p) / p / bandwidth,
        link=4 * (1 - 1 / p) * model.layers * model.hidden * size / device.link_bytes_per_s if p > 1 else 0.0,
        kernels=cost.kernels(model),
        layers=model.layers,
        weight_bytes=(model.touched_parameters(model.experts) + model.head_parameters) * stored / p,
    )


def parts(values: dict[str, float], size: Sizes, work: Work) -> dict[str, Floats]:
    """Seconds of every pass, part by part (PARTS)."""
    s = values["overlap"]
    weights: float | Floats = size.weights
    if size.experts:
        weights = size.weights + size.expert * size.experts * (1 - (1 - size.per_token / size.experts) ** work.tokens)
    fixed = (size.kernels * values["overhead"]) ** s + (weights / values["stream"]) ** s
    head = (size.head_compute / values["compute"] * work.logits) ** s + (size.head_weights / values["stream"]) ** s
    return {
        "layers": (fixed + (size.compute / values["compute"] * work.tokens) ** s) ** (1 / s),
        "head": np.where(work.logits > 0, head ** (1 / s), 0.0),
        "activations": size.activations / values["activations"] * work.tokens,
        "attention": (size.pairs * work.pairs + size.context * work.context) / values["attention"],
        "kv": size.kv / values["kv"] * work.context,
        "link": size.link / values["link"] * work.tokens,
        "sequences": size.layers * values["sequence"] * work.decodes,
    }


def seconds(values: dict[str, float], size: Sizes, work: Work) -> Floats:
    """Seconds of every batch, shape (work.batches,)."""
    every = np.sum(list(parts(values, size, work).values()), axis=0)
    if work.batches == len(work.batch) and (np.diff(work.batch) == 1).all():
        return np.asarray(every, float)
    return np.bincount(work.batch, every, minlength=work.batches).astype(float)


class Fast:
    """The formula made ready for one model on one device: plain floats in and out, a microsecond a step.

    `context` is the positions read, the new ones included, summed over the sequences (not their mean).
    """

    def __init__(self, values: dict[str, float], size: Sizes) -> None:
        s = values["overlap"]
        self._s, self._inverse = s, 1 / s
        self._overhead = (size.kernels * values["overhead"]) ** s
        self._stream = values["stream"]
        self._weights, self._expert, self._experts = size.weights, size.expert, size.experts
        self._miss = 1 - size.per_token / size.experts if size.experts else 1.0
        self._dense = self._overhead + (size.weights / values["stream"]) ** s
        self._compute = size.compute / values["compute"]
        self._head = size.head_compute / values["compute"]
        self._head_weights = (size.head_weights / values["stream"]) ** s
        self._token = size.activations / values["activations"] + size.link / values["link"]
        self._pair = size.pairs / values["attention"]
        self._position = size.context / values["attention"] + size.kv / values["kv"]
        self._sequence = size.layers * values["sequence"]

    def _products(self, tokens: float, logits: float) -> float:
        s = self._s
        fixed = self._dense
        if self._experts:
            touched = self._experts * (1 - self._miss**tokens)
            fixed = self._overhead + ((self._weights + self._expert * touched) / self._stream) ** s
        head = ((self._head * logits) ** s + self._head_weights) ** self._inverse if logits else 0.0
        return (fixed + (self._compute * tokens) ** s) ** self._inverse + head + self._token * tokens

    def prefill(self, requests: float, new: float, past: float = 0, logits: bool = True) -> float:
        """Seconds of one pass over `requests` prompts or chunks of `new` tokens behind `past`."""
        pairs = requests * (new * past + new * (new + 1) / 2)
        return self._products(requests * new, requests if logits else 0) + self._pair * pairs

    def decode(self, requests: float, context: float) -> float:
        """Seconds of one decode step."""
        return self._products(requests, requests) + self._sequence * requests + self._position * context

    def decode_sum(self, requests: float, context: float, steps: int) -> float:
        """Seconds of `steps` decode steps, `context` at the first; every sequence grows by one a step."""
        grown = requests * steps * (steps - 1) / 2
        return steps * self.decode(requests, context) + self._position * grown

    def mixed(self, new: float, past: float, decodes: float, context: float, logits: bool = True) -> float:
        """Seconds of one fused pass: a prompt's chunk of `new` tokens behind `past`, and `decodes` sequences."""
        pairs = new * past + new * (new + 1) / 2
        products = self._products(new + decodes, decodes + (1 if logits else 0))
        return products + self._pair * pairs + self._sequence * decodes + self._position * context
