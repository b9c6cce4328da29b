"""kv_transfer: what arrives is what left, and decode goes on from it with the same tokens."""

import pytest
import torch
from tiny import NAMES, tiny

from pdlib import cost
from pdlib.decode import decode
from pdlib.kv_cache import KVCache
from pdlib.kv_transfer import transfer
from pdlib.prefill import prefill
from pdlib.spec import InputError


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("lengths", [[8, 8, 8], [3, 8, 1]])
@pytest.mark.parametrize("capacity", [13, 40])
def test_transferred_cache_is_the_source_and_decode_goes_on_with_the_same_tokens(kind, lengths, capacity):
    model = tiny(kind)
    source, target = model.new_cache(3, 13), model.new_cache(3, capacity)
    target.data.normal_()  # what an earlier batch left behind
    first = prefill(model, model.prompt(3, 8, seed=1), source, lengths).argmax(-1)
    moved = transfer(source, target)
    assert target.equals(source) and target.lengths == lengths
    assert moved == sum(lengths) * cost.kv_bytes_per_token(model.spec)
    assert torch.equal(decode(model, first, target, 5), decode(model, first, source, 5))


def test_the_target_holds_a_copy():
    model = tiny("gpt2")
    source, target = model.new_cache(1, 5), model.new_cache(1, 5)
    prefill(model, model.prompt(1, 5), source)
    transfer(source, target)
    kept = target.data.clone()
    source.data.zero_()
    assert torch.equal(target.data, kept) and kept.any()


def test_a_target_just_long_enough_takes_the_filled_part():
    model = tiny("gpt2")
    source, target = model.new_cache(2, 30), model.new_cache(2, 5)
    prefill(model, model.prompt(2, 5), source)
    transfer(source, target)
    assert target.equals(source)


def test_bytes_follow_the_dtype():
    half = tiny("gpt2", "bfloat16")
    source, target = half.new_cache(2, 6), half.new_cache(2, 6)
    prefill(half, half.prompt(2, 6), source)
    assert transfer(source, target) == 12 * cost.kv_bytes_per_token(half.spec, "bfloat16")


def test_an_empty_cache_moves_nothing():
    model = tiny("gpt2")
    target = model.new_cache(2, 6)
    target.rewind(3)
    assert transfer(model.new_cache(2, 6), target) == 0
    assert target.lengths == [0, 0]


def refused(source, target, match):
    before, lengths = target.data.clone(), list(target.lengths)
    with pytest.raises(InputError, match=match):
        transfer(source, target)
    assert torch.equal(target.data, before) and target.lengths == lengths


def test_caches_that_do_not_match_are_refused_before_any_byte_moves():
    model = tiny("gpt2")
    source = model.new_cache(2, 8)
    prefill(model, model.prompt(2, 8), source)
    refused(source, model.new_cache(3, 8), "cannot hand a cache of shape")
    refused(source, tiny("llama").new_cache(2, 8), "cannot hand a cache of shape")
    refused(source, KVCache(model.spec, 2, 8, "cpu", torch.bfloat16), "float32 to a cache of torch.bfloat16")
    refused(source, model.new_cache(2, 7), "8 filled positions do not fit a cache of capacity 7")


def test_chosen_requests_land_in_chosen_slots_and_the_others_stay():
    model = tiny("llama")
    source, target = model.new_cache(3, 8), model.new_cache(4, 20)
    prefill(model, model.prompt(3, 8), source, [3, 8, 1])
    target.data.normal_()
    target.rewind([7, 7, 7, 7])
    before = target.data.clone()
    moved = transfer(source, target, sources=[2, 1], slots=[3, 0])
    assert target.lengths == [8, 7, 7, 1] and moved == 9 * cost.kv_bytes_per_token(model.spec)
    assert torch.equal(target.data[:, :, 3, :, :1], source.data[:, :, 2, :, :1])
    assert torch.equal(target.data[:, :, 0, :, :8], source.data[:, :, 1, :, :8])
    before[:, :, 3, :, :1], before[:, :, 0, :, :8] = source.data[:, :, 2, :, :1], source.data[:, :, 1, :, :8]
    assert torch.equal(target.data, before)
    refused_slots = dict(sources=[0, 1], slots=[0, 0]), dict(sources=[0], slots=[4]), dict(sources=[0], slots=[0, 1])
    for wrong in refused_slots:
        with pytest.raises(InputError, match="slots"):
            transfer(source, target, **wrong)
    assert torch.equal(target.data, before)


def test_a_cast_rounds_on_the_way_and_counts_the_bytes_that_travel():
    model = tiny("gpt2")
    source, target = model.new_cache(2, 8), model.new_cache(2, 9)
    prefill(model, model.prompt(2, 8), source)
    assert transfer(source, target, cast="bfloat16") == 16 * cost.kv_bytes_per_token(model.spec, "bfloat16")
    assert torch.equal(target.data[..., :8, :], source.data.to(torch.bfloat16).float())
    half = KVCache(model.spec, 2, 8, "cpu", torch.bfloat16)
    transfer(source, half, cast="bfloat16")
    assert torch.equal(half.data, source.data.to(torch.bfloat16))


@pytest.mark.parametrize("kind", NAMES)
def test_the_hook_is_told_of_every_layer_once_its_keys_are_written(kind):
    model, told = tiny(kind), []
    cache = model.new_cache(2, 8)
    whole = model.new_cache(2, 8)
    prefill(model, model.prompt(2, 8), whole)

    def on_layer(layer):
        told.append(layer)
        stop = cache.lengths[0] + 4
        assert torch.allclose(cache.data[layer, :, :, :, :stop], whole.data[layer, :, :, :, :stop], atol=1e-4)

    cache.on_layer = on_layer
    prefill(model, model.prompt(2, 8), cache, chunk=4)
    assert told == [*range(model.spec.layers)] * 2


def test_a_cache_over_memory_that_is_there_copies_nothing():
    model = tiny("gpt2")
    source = model.new_cache(2, 8)
    prefill(model, model.prompt(2, 8), source)
    over = KVCache.over(source.data, [8, 5])
    assert over.data is source.data and over.lengths == [8, 5] and over.capacity == 8 and source.lengths == [8, 8]
    for wrong in (source.data[0], source.data[:, :1]):
        with pytest.raises(InputError, match="is no cache"):
            KVCache.over(wrong, [8, 8])
    with pytest.raises(InputError, match="lengths"):
        KVCache.over(source.data, [8, 9])
