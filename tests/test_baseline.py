"""baseline: the article's loop gives the same tokens, and each of its habits can be switched."""

import pytest
import torch
from tiny import NAMES, library_tokens, run, tiny

from pdlib import baseline, kv_cache
from pdlib.spec import InputError


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("all_logits", [True, False])
def test_tokens_are_pdlibs_and_the_librarys(kind, all_logits):
    model = tiny(kind)
    tokens = model.prompt(3, 9, seed=1)
    started = baseline.prefill(model, tokens, all_logits)
    made = torch.cat([started.tokens, baseline.decode(model, started, 7)], 1)
    assert torch.equal(made, run(model, tokens, 8)[0]) and torch.equal(made, library_tokens(model, tokens, 8))


@pytest.mark.parametrize("all_logits, rows", [(True, 9), (False, 1)])
def test_logits_of_all_positions_are_a_switch(all_logits, rows):
    started = baseline.prefill(tiny("gpt2"), tiny("gpt2").prompt(3, 9), all_logits)
    assert [tuple(t.shape) for t in started.kept] == [(3, rows, 97)]
    assert started.tokens.shape == (3, 1)


def test_the_cache_grows_by_one_a_step():
    model = tiny("gpt2")
    started = baseline.prefill(model, model.prompt(2, 5))
    assert baseline.decode(model, started, 3).shape == (2, 3)
    assert [k.shape for k, _ in kv_cache.growing_tensors(started.cache)] == [(2, 4, 8, 8)] * 2


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_pitfall_06_steps_are_a_whole_number(steps):
    model = tiny("gpt2")
    with pytest.raises(InputError, match="steps"):
        baseline.decode(model, baseline.prefill(model, model.prompt(1, 3)), steps)


def bytes_of(tensors):
    """Bytes of the memory behind tensors, each block counted once."""
    blocks = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(blocks.values())


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_if_prefilled_leaves_what_a_real_prefill_leaves(kind, dtype):
    """Same shapes, strides, dtypes and bytes of keys, values and logits, with nothing computed."""
    model = tiny(kind, dtype)
    real = baseline.prefill(model, model.prompt(3, 9))
    made = baseline.as_if_prefilled(model, 3, 9, keep_logits=True, kv_views=False)
    for (k, v), (k2, v2) in zip(*(kv_cache.growing_tensors(s.cache) for s in (real, made)), strict=True):
        assert k.shape == k2.shape and v.shape == v2.shape and k.dtype == k2.dtype and v.dtype == v2.dtype
        assert k.is_contiguous() == k2.is_contiguous() and v.is_contiguous() == v2.is_contiguous()
        assert bytes_of([k, v]) == bytes_of([k2, v2])
    assert [(t.shape, t.dtype, t.nbytes) for t in real.kept] == [(t.shape, t.dtype, t.nbytes) for t in made.kept]
    assert (real.tokens.shape, real.tokens.dtype) == (made.tokens.shape, made.tokens.dtype)


def test_as_if_prefilled_without_logits_keeps_none():
    made = baseline.as_if_prefilled(tiny("gpt2"), 3, 9, keep_logits=False, kv_views=False)
    assert made.kept == []


@pytest.mark.parametrize("keep_logits", [True, False])
def test_views_keep_the_packed_qkv_alive(keep_logits):
    """Keys and values of a layer are two thirds of one block, laid out as QKV comes out of the product."""
    model = tiny("gpt2")
    made = baseline.as_if_prefilled(model, 3, 9, keep_logits, kv_views=True)
    for k, v in kv_cache.growing_tensors(made.cache):
        assert k.shape == v.shape == (3, 4, 9, 8) and not k.is_contiguous()
        assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        assert k.untyped_storage().nbytes() == 3 * k.nbytes
        assert k.stride() == (9 * 3 * 32, 8, 3 * 32, 1)  # of (B, T, 3, H, D)
    packed = [t for t in made.kept if t.dim() == 5]
    assert [tuple(t.shape) for t in packed] == [(3, 9, 3, 4, 8)] * 2
    assert [tuple(t.shape) for t in made.kept if t.dim() == 3] == ([(3, 9, 97)] if keep_logits else [])


@pytest.mark.parametrize("kv_views", [True, False])
def test_decode_goes_on_from_it(kv_views):
    model = tiny("llama")
    made = baseline.as_if_prefilled(model, 2, 5, True, kv_views)
    assert baseline.decode(model, made, 3).shape == (2, 3)
    assert made.cache.get_seq_length() == 8
