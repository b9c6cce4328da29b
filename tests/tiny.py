"""Five architectures made tiny and random, and what the library itself makes of them: shared by the tests."""

import contextlib
import functools
from dataclasses import dataclass, field

import torch
import transformers

from pdlib import devices, models
from pdlib.decode import decode_step
from pdlib.devices import Device
from pdlib.prefill import prefill

# Threads of a parallel product wait for each other: on a machine with other work to do, that costs these tests,
# whose products are tiny, minutes instead of seconds.
torch.set_num_threads(1)

_COMMON = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=97,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
CONFIGS = {
    "gpt2": dict(
        n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64, bos_token_id=0, eos_token_id=0, pad_token_id=0
    ),
    "llama": _COMMON | dict(num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "qwen3": _COMMON | dict(num_key_value_heads=2, head_dim=16),  # heads · head_dim is not the width
    "gpt_neox": _COMMON,
    "mistral": _COMMON | dict(num_key_value_heads=1, sliding_window=None),
}
NAMES = tuple(CONFIGS)
OURS = ("gpt2", "llama")  # run by our own layers, the others by the library's
CLOSE = 1e-4  # of logits in fp32


def library_model(kind, seed=6, **changes):
    """A library model whose every weight, biases and norms too, is random: five times the usual width.

    With the seed given, greedy tokens vary in all of CONFIGS; with many others they soon repeat.
    """
    config = transformers.AutoConfig.for_model(kind, **CONFIGS.get(kind, _COMMON) | changes)
    hf = models.random_model(config, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            noise = 0.1 * torch.randn(weight.shape, generator=generator)
            weight.copy_(noise if weight.dim() > 1 or name.endswith("bias") else 1 + noise)
    hf.generation_config.eos_token_id = None  # no early stop: counts decide
    return hf


@functools.cache
def tiny(kind, dtype="float32", device="cpu@1"):
    """The Model of an architecture of CONFIGS, made once a process."""
    return models.from_library(library_model(kind), f"{kind}-tiny", "random", devices.parse(device), dtype)


def library_tokens(model, tokens, new):
    """New tokens (B, new) by the library's own generate: greedy, never stopped by an end-of-text token."""
    made = model.hf.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False, use_cache=True
    )
    assert made.shape[1] == tokens.shape[1] + new
    return made[:, tokens.shape[1] :]


def library_logits(model, tokens):
    """Logits (B, V) of the last position by the library, without any cache."""
    with torch.inference_mode():
        return model.hf(input_ids=tokens, use_cache=False).logits[:, -1]


def run(model, tokens, new, cache=None, lengths=None, chunk=None):
    """Prefill and new − 1 decode steps: tokens (B, new) and the logits of each, (B, new, V)."""
    cache = cache or model.new_cache(tokens.shape[0], tokens.shape[1] + new)
    logits = [prefill(model, tokens, cache, lengths, chunk)]
    for _ in range(new - 1):
        logits.append(decode_step(model, logits[-1].argmax(-1), cache))
    stacked = torch.stack(logits, dim=1)
    return stacked.argmax(-1), stacked


def close(a, b):
    """Whether two sets of logits agree to CLOSE."""
    return a.shape == b.shape and (a - b).abs().max().item() <= CLOSE


def counting(model, log):
    """The same model with (tokens' shape, lengths before) of every pass through the layers noted in `log`."""

    def layers(tokens, cache):
        log.append((tuple(tokens.shape), list(cache.lengths)))
        return model.layers(tokens, cache)

    return models.Model(model.spec, model.weights, model.dtype, model.device, model.hf, layers, model.head)


@contextlib.contextmanager
def threads(count):
    """`count` threads inside, whatever the machine has."""
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(1)


class Clock:
    """Seconds that pass only when told to, or one a look."""

    def __init__(self, tick=0.0):
        self.now, self.tick = 0.0, tick

    def __call__(self):
        self.now += self.tick
        return self.now

    def wait(self, seconds):
        self.now += seconds


@dataclass(frozen=True)
class FakeDevice(Device):
    """A CPU that notes in `log` when it is waited for."""

    name: str = "fake"
    torch_name: str = "cpu"
    threads: int = 1
    log: list = field(default_factory=list, compare=False)

    def synchronize(self):
        self.log.append("synchronise")
