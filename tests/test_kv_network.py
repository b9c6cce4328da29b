"""Road 3, between two processes over gloo: same tokens whole and streamed, refusals, damage, memory on the way."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peers import both
from tiny import NAMES, tiny

from pdlib.decode import decode
from pdlib.kv_transfer import (
    Outgoing,
    TransferError,
    accept,
    await_offer,
    cuts_of,
    manifest_of,
    network,
    offer,
    receive,
    refuse,
    transfer,
)
from pdlib.prefill import prefill

LENGTHS = ([8, 8, 8], [3, 8, 1])
CASES = list(
    itertools.product(
        NAMES, LENGTHS, (None, 3, 1), ((13, None), (20, [4, 1, 0])), ("whole", "layers"), ("", "bfloat16")
    )
)


def prompts(model):
    return model.prompt(3, 8, seed=1)


def p_hands_over():
    for kind, lengths, chunk, _, how, wire in CASES:
        model = tiny(kind)
        cache = model.new_cache(3, 8)
        manifest = manifest_of(model, cache, lengths=lengths, cuts=cuts_of(8, chunk), wire=wire)
        offer(manifest, 1)
        outgoing = Outgoing(cache, manifest, 1)
        cache.on_layer = outgoing.on_layer if how == "layers" else None
        prefill(model, prompts(model), cache, lengths, chunk)
        cache.on_layer = None
        assert (how == "layers") == (not outgoing._to_send.left)  # all of it left while prefill ran, or none
        outgoing.finish()


def d_decodes():
    for kind, lengths, chunk, (capacity, slots), how, wire in CASES:
        model = tiny(kind)
        alone = model.new_cache(3, 13)
        first = prefill(model, prompts(model), alone, lengths, chunk).argmax(-1)
        cache = model.new_cache(5 if slots else 3, capacity)
        cache.data.normal_()  # what an earlier batch left behind
        manifest, seen = await_offer(0), []
        manifest.check(model, cache, slots)
        accept(0)
        receive(manifest, cache, 0, slots, on_part=seen.append)
        assert seen == list(range(len(manifest.parts)))
        arrived = model.new_cache(3, 13)
        transfer(cache, arrived, sources=slots or [0, 1, 2])
        if wire:
            rounded = model.new_cache(3, 13)
            transfer(alone, rounded, cast=wire)
            assert arrived.equals(rounded) and not arrived.equals(alone)
        else:
            assert arrived.equals(alone), (kind, lengths, chunk, slots, how)
            assert torch.equal(decode(model, first, arrived, 5), decode(model, first, alone, 5))


def test_decode_goes_on_with_the_same_tokens(tmp_path):
    both(p_hands_over, d_decodes, tmp_path)


# What is not taken, and what both sides know of it.


def filled(model, requests=2, capacity=8):
    cache = model.new_cache(requests, capacity)
    prefill(model, model.prompt(requests, 8), cache)
    return cache


def p_is_refused():
    model = tiny("gpt2")
    cache = filled(model)
    with pytest.raises(TransferError, match="rank 1 refuses: the cache comes from llama-tiny, here runs gpt2-tiny"):
        offer(manifest_of(tiny("llama"), filled(tiny("llama"))), 1)
    with pytest.raises(TransferError, match="rank 1 refuses: .* capacity of 7: make it with capacity ≥ 8"):
        offer(manifest_of(model, cache), 1)
    network._say(b"GET / HTTP/1.1", 1, 0, 10.0)
    with pytest.raises(TransferError, match="rank 1 refuses: the manifest of rank 0 cannot be read"):
        network._hear_consent(1, 0, 10.0)
    network._isend(torch.tensor([2**62]), 1, 0).wait()
    with pytest.raises(TransferError, match="rank 1 refuses: rank 0 announces 4611686018427387904 bytes"):
        network._hear_consent(1, 0, 10.0)
    manifest, sent = manifest_of(model, cache), []
    send, network._isend = network._isend, lambda flat, *where: send(flipped(flat, sent), *where)
    offer(manifest, 1)
    with pytest.raises(TransferError, match=r"rank 1 refuses: layer 1, positions 0 … 8, is not what rank 0 sent"):
        Outgoing(cache, manifest, 1).finish()
    network._isend = send
    offer(manifest, 1)
    Outgoing(cache, manifest, 1).finish()  # once more, undamaged


def flipped(flat, sent):
    """One bit of the keys of layer 1 altered on the way: messages 0, 1 are text, 2 and 4 the layers."""
    sent.append(flat.clone())
    if len(sent) == 5:
        sent[-1].view(torch.uint8)[17] ^= 4
    return sent[-1]


def d_refuses():
    model = tiny("gpt2")
    cache = model.new_cache(2, 9)
    cache.rewind([5, 4])
    for small in (cache, model.new_cache(2, 7)):
        manifest = await_offer(0)
        with pytest.raises(TransferError) as error:
            manifest.check(model, small)
        refuse(0, str(error.value))
    for _ in range(2):
        with pytest.raises(TransferError):
            await_offer(0)
    for damaged in (True, False):
        manifest = await_offer(0)
        manifest.check(model, cache)
        accept(0)
        if damaged:
            with pytest.raises(TransferError, match="checksum"):
                receive(manifest, cache, 0)
            assert cache.lengths == [5, 4]
        else:
            receive(manifest, cache, 0)
    assert cache.equals(filled(model))


def test_what_does_not_fit_or_arrives_damaged_is_refused_on_both_sides_and_the_next_one_works(tmp_path):
    both(p_is_refused, d_refuses, tmp_path)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any), st.integers(1, 20), st.integers(64, 4096))
def test_buffers_take_at_most_one_layer(lengths, chunk, most):
    model = tiny("gpt2")
    cache = model.new_cache(len(lengths), 20)
    manifest = manifest_of(model, cache, lengths=lengths, cuts=cuts_of(20, chunk))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network.dist, "get_backend", lambda: "gloo")
        patch.setattr(network, "pieces", lambda *part: list(PIECES(*part, most)))
        buffers = network._Buffers(manifest, cache)
        assert sum(buffer.nbytes for buffer in buffers.free) * model.spec.layers <= manifest.bytes
        sizes = [
            sum(v.numel() for v in network.views(cache, p, range(len(lengths)))) for p in all_pieces(manifest, most)
        ]
        assert max(sizes) <= buffers.free[0].numel()


PIECES = network.pieces


def all_pieces(manifest, most):
    return [piece for part in manifest.parts for piece in PIECES(manifest, *part, most)]


def test_a_cache_that_lies_in_one_run_needs_no_buffer():
    model = tiny("gpt2")
    cache = filled(model)
    manifest = manifest_of(model, cache)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network.dist, "get_backend", lambda: "gloo")
        buffers = network._Buffers(manifest, cache)
    found = [buffers.direct(network.views(cache, piece, [0, 1])) for piece in all_pieces(manifest, 10**6)]
    assert len(found) == model.spec.layers and torch.equal(torch.cat(found), cache.data.view(-1))
    assert buffers._free is None


def test_other_chunks_than_announced_are_an_error_not_a_wrong_cache():
    model = tiny("gpt2")
    cache = model.new_cache(2, 8)
    for announced, chunk in ((None, 4), (3, 4), (2, 4)):
        cache.rewind()
        to_send = network.ToSend(manifest_of(model, cache, lengths=[8, 8], cuts=cuts_of(8, announced)), cache)
        cache.on_layer = to_send.made
        with pytest.raises(TransferError, match="prefill in the chunks announced"):
            prefill(model, model.prompt(2, 8), cache, chunk=chunk)
