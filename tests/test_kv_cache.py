"""kv_cache: layout, masks and bookkeeping counted out by hand; the adapter to the library's cache."""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import NAMES, close, library_tokens, run, tiny

import pdlib
from pdlib import kv_cache
from pdlib.kv_cache import KVCache
from pdlib.prefill import prefill
from pdlib.spec import InputError, ModelSpec

SPEC = ModelSpec("tiny", 2, 4, 2, 8, 32, 48, 97, 64)
LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=4)


def make(requests=3, capacity=10, dtype=torch.float32):
    return KVCache(SPEC, requests, capacity, "cpu", dtype)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_it_is_one_zeroed_block():
    cache = make()
    assert cache.data.shape == (2, 2, 3, 2, 10, 8)  # (L, 2, B, KV, C, D)
    assert cache.data.is_contiguous() and not cache.data.any()
    assert cache.lengths == [0, 0, 0] and cache.requests == 3 and cache.uniform


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_counted(dtype, size):
    cache = make(dtype=dtype)
    assert cache.bytes == 2 * 2 * 3 * 2 * 10 * 8 * size
    assert cache.filled_bytes == 0
    cache.rewind([1, 0, 7])
    assert cache.filled_bytes == 8 * (2 * 2 * 2 * 8 * size)


def test_more_positions_than_the_model_has_are_refused():
    make(capacity=64)
    with pytest.raises(InputError, match="65 positions for tiny, which has 64"):
        make(capacity=65)


@pytest.mark.parametrize("sizes", [dict(requests=0), dict(requests=-1), dict(capacity=0), dict(capacity=2.0)])
def test_a_cache_of_nothing_is_refused(sizes):
    with pytest.raises(InputError, match="whole number"):
        make(**sizes)


def test_rewind_takes_one_length_or_one_a_request():
    cache = make()
    cache.rewind(4)
    assert cache.lengths == [4, 4, 4] and cache.uniform
    cache.rewind([1, 10, 0])
    assert cache.lengths == [1, 10, 0] and not cache.uniform
    cache.rewind()
    assert cache.lengths == [0, 0, 0]


@pytest.mark.parametrize("bad", [11, -1, [1, 2], [1, 2, 3, 4], [0, 0, 11], [0, -1, 0]])
def test_a_rewind_out_of_range_is_refused_and_changes_nothing(bad):
    cache = make()
    cache.rewind([1, 2, 3])
    with pytest.raises(InputError, match="for 3 requests of at most 10 positions"):
        cache.rewind(bad)
    assert cache.lengths == [1, 2, 3]


def test_rewind_does_not_alias_the_list_it_is_given():
    cache, wanted = make(), [1, 2, 3]
    cache.rewind(wanted)
    wanted[0] = 9
    assert cache.lengths == [1, 2, 3]


def test_room_is_that_of_the_longest_request():
    cache = make()
    cache.rewind([1, 7, 2])
    cache.check_room(3)
    with pytest.raises(InputError, match=r"7 positions filled \+ 4 new > capacity 10; make it with capacity ≥ 11"):
        cache.check_room(4)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4))
def test_mask_shows_each_query_the_keys_up_to_its_own_position(lengths, new):
    cache = make(len(lengths))
    cache.rewind(lengths)
    mask, causal = cache.mask(new)
    total = max(lengths) + new
    wanted = torch.tensor([[[key <= n + i for key in range(total)] for i in range(new)] for n in lengths])
    if mask is None:  # nothing to hide, or the plain triangle
        plain = torch.ones(new, total, dtype=torch.bool)
        assert not causal or total == new
        given = (plain.tril() if causal else plain).expand(len(lengths), new, total)
    else:
        assert not causal
        given = mask[:, 0].expand(len(lengths), new, total)
    assert torch.equal(given, wanted)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4))
def test_positions_go_on_from_each_length(lengths, new):
    cache = make(len(lengths))
    cache.rewind(lengths)
    wanted = torch.tensor([[n + i for i in range(new)] for n in lengths])
    assert torch.equal(cache.positions(new).expand(len(lengths), new), wanted)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(0, 1))
def test_append_writes_behind_each_length_and_nowhere_else(lengths, new, layer):
    cache = make(len(lengths))
    cache.data.copy_(noise(*cache.data.shape))
    before = cache.data.clone()
    cache.rewind(lengths)
    k, v = noise(2, len(lengths), 2, new, 8, seed=1)
    keys, values = cache.append(layer, k, v)
    for b, n in enumerate(lengths):
        before[layer, 0, b, :, n : n + new] = k[b]
        before[layer, 1, b, :, n : n + new] = v[b]
    assert torch.equal(cache.data, before)
    total = max(lengths) + new
    assert torch.equal(keys, before[layer, 0, :, :, :total]) and torch.equal(values, before[layer, 1, :, :, :total])
    assert keys.untyped_storage().data_ptr() == cache.data.untyped_storage().data_ptr()  # a view, never a copy
    assert cache.lengths == lengths  # every layer of a pass writes to the same positions
    cache.advance(new)
    assert cache.lengths == [n + new for n in lengths]


def test_equality_is_bit_for_bit_of_the_filled_positions():
    a, b = make(2, 5), make(2, 9)
    a.data.copy_(noise(*a.data.shape))
    b.data[..., :5, :] = a.data
    a.rewind([2, 4])
    b.rewind([2, 4])
    assert a.equals(b) and b.equals(a)
    b.data[1, 1, 0, 1, 2, 7] += 1  # behind request 0's length: padding
    assert a.equals(b)
    b.data[1, 1, 1, 1, 3, 7] += 1e-6  # the last filled position of request 1
    assert not a.equals(b)
    b.data[1, 1, 1, 1, 3, 7] = a.data[1, 1, 1, 1, 3, 7]
    b.rewind([2, 3])
    assert not a.equals(b)


# The adapter to the library's cache.


class Renamed:
    """A model of a later release, whose forward takes `cache`."""

    def forward(self, input_ids, cache=None, use_cache=True):
        pass


class Present:
    def forward(self, input_ids, past_key_values=None, use_cache=True):
        pass


def test_pitfall_12_the_cache_argument_is_found_by_either_name():
    assert kv_cache.cache_argument(Renamed()) == "cache"
    assert kv_cache.cache_argument(Present()) == "past_key_values"


@pytest.mark.parametrize("kind", NAMES)
def test_pitfall_12_the_installed_version_takes_our_cache(kind):
    """The argument is one that this version's forward really has, and the cache behind it is read and written."""
    import inspect

    model, tokens = tiny(kind), tiny(kind).prompt(2, 5)
    assert kv_cache.cache_argument(model.hf) in inspect.signature(model.hf.forward).parameters
    cache = model.new_cache(2, 8)
    argument = {kv_cache.cache_argument(model.hf): kv_cache.as_library(cache)}
    with torch.inference_mode():
        first = model.hf(input_ids=tokens[:, :3], use_cache=True, **argument).logits
        cache.advance(3)
        last = model.hf(input_ids=tokens[:, 3:4], use_cache=True, **argument).logits
        whole = model.hf(input_ids=tokens[:, :4], use_cache=False).logits
    assert close(torch.cat([first, last], 1), whole)
    assert cache.data[..., :4, :].abs().sum(-1).all() and not cache.data[..., 4:, :].any()


def test_pitfall_12_a_length_that_comes_as_a_tensor():
    cache = kv_cache.growing_cache()
    cache.update(noise(1, 2, 3, 8), noise(1, 2, 3, 8), 0)
    cache.get_seq_length = lambda *_: torch.tensor(3)
    kv_cache.lengthen_growing(cache, 5)
    assert [t.shape[2] for t in kv_cache.growing_tensors(cache)[0]] == [5, 5]


def test_pitfall_12_no_other_module_knows_the_librarys_cache():
    words = re.compile(r"past_key_values?\b|(Dynamic|Static|Encoder\w*|Quantized)Cache\b|get_seq_length|legacy_cache")
    folder = Path(pdlib.__file__).parent
    found = [path for path in sorted(folder.rglob("*.py")) if words.search(path.read_text(encoding="utf-8"))]
    assert found == [folder / "kv_cache.py"]


def test_the_librarys_cache_sees_capacity_and_lengths():
    cache = make()
    cache.rewind([2, 5, 3])
    layer = kv_cache.as_library(cache).layers[0]
    assert layer.get_seq_length() == 5 and layer.get_mask_sizes(2) == (7, 0) and layer.get_max_length() == 10
    assert len(kv_cache.as_library(cache).layers) == 2


def test_a_growing_cache_can_be_read_replaced_and_lengthened():
    cache = kv_cache.growing_cache()
    for layer in range(2):
        cache.update(noise(1, 2, 3, 8, seed=layer), noise(1, 2, 3, 8, seed=9), layer)
    kv_cache.lengthen_growing(cache, 5)
    keys, values = kv_cache.growing_tensors(cache)[1]
    assert keys.shape == values.shape == (1, 2, 5, 8) and cache.get_seq_length() == 5
    assert torch.equal(keys[:, :, :3], noise(1, 2, 3, 8, seed=1)) and not keys[:, :, 3:].any()
    kv_cache.lengthen_growing(cache, 4)  # never shorter
    assert cache.get_seq_length() == 5
    kv_cache.replace_growing(cache, [(keys * 2, values), (keys, values)])
    assert torch.equal(kv_cache.growing_tensors(cache)[0][0], keys * 2)
    with pytest.raises(ValueError):
        kv_cache.replace_growing(cache, [(keys, values)])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("static", [True, False])
def test_the_librarys_caches_can_be_filled_from_ours(kind, static):
    model = tiny(kind)
    tokens = model.prompt(2, 6)
    ours = model.new_cache(2, 9)
    first = prefill(model, tokens, ours).argmax(-1)
    theirs = kv_cache.static_cache(model.hf.config, 16) if static else kv_cache.growing_cache()
    with torch.inference_mode():
        kv_cache.fill_library(theirs, ours, 6)
        argument = {kv_cache.cache_argument(model.hf): theirs}
        made, current = [first], first
        for _ in range(3):
            current = model.hf(input_ids=current[:, None], use_cache=True, **argument).logits[:, -1].argmax(-1)
            made.append(current)
    assert torch.equal(torch.stack(made, 1), library_tokens(model, tokens, 4))
    assert torch.equal(torch.stack(made, 1), run(model, tokens, 4)[0])


@pytest.mark.parametrize("requests, heads", [(2, 1), (1, 2)])
def test_keys_of_another_model_are_not_spread_over_all_heads(requests, heads):
    cache = make(2)
    one = torch.ones(requests, heads, 1, 8)
    with pytest.raises(InputError, match=f"keys of {requests} requests and {heads} KV heads for a cache of 2 and 2"):
        cache.append(0, one, one)
    assert not cache.data.any()
