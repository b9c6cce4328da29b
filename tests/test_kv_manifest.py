"""The manifest: it says what travels, and nothing that is not one is believed."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import library_model, tiny

from pdlib import devices, models
from pdlib.kv_transfer import Manifest, TransferError, cuts_of, fingerprint, manifest_of
from pdlib.kv_transfer.parts import pieces, views
from pdlib.spec import InputError


def one(lengths=(3, 8, 1), cuts=None, wire=""):
    model = tiny("llama")
    cache = model.new_cache(len(lengths), 20)
    return manifest_of(model, cache, lengths=list(lengths), cuts=cuts, wire=wire)


def test_it_says_what_travels():
    manifest = one()
    assert manifest.bytes == 12 * 2 * 2 * 2 * 8 * 4  # positions · sides · layers · KV heads · head_dim · float32
    assert one(wire="bfloat16").bytes * 2 == manifest.bytes
    assert manifest.cuts == (8,) and manifest.parts == [(0, 0, 8), (1, 0, 8)]
    chunked = one(cuts=cuts_of(10, 3))  # padded to 10: what lies behind the longest does not travel
    assert chunked.cuts == (3, 6, 8)
    assert chunked.parts[2:4] == [(0, 3, 6), (1, 3, 6)] and chunked.counts(3, 6) == [0, 3, 0]
    assert one((0, 0)).parts == [] and one((0, 0)).bytes == 0


@pytest.mark.parametrize("args, cuts", [((8,), (8,)), ((8, 3), (3, 6, 8)), ((8, 3, 5), (8, 11, 13)), ((8, 20), (8,))])
def test_cuts(args, cuts):
    assert cuts_of(*args) == cuts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 21), st.integers(1, 5000), st.randoms())
def test_pieces_hold_every_filled_position_once(lengths, chunk, most, random):
    manifest = one(lengths, cuts_of(20, chunk))
    assert Manifest.from_json(manifest.to_json()) == manifest
    cache, slots = tiny("llama").new_cache(7, 20), random.sample(range(7), len(lengths))
    count = 0
    for part in manifest.parts:
        for piece in pieces(manifest, *part, most):
            for view in views(cache, piece, slots):
                view += 1
                count += view.numel()
    for row, slot in enumerate(slots):
        assert (cache.data[:, :, slot, :, : lengths[row]] == 1).all()
    assert cache.data.sum() == count == manifest.bytes // 4


def test_the_same_weights_have_the_same_fingerprint_and_others_have_not():
    device = devices.parse("cpu@1")

    def made(**changes):
        return fingerprint(models.from_library(library_model("llama", **changes), "x", "random", device, "float32"))

    assert made() == made() and made().differences(made()) == ""
    assert made().differences(made(seed=7)).startswith("weights ")
    scaled = {"rope_type": "default", "rope_theta": 500.0}
    assert made().differences(made(rope_parameters=scaled)).startswith("config ")  # no weight tells of it
    assert fingerprint(tiny("gpt2")) is fingerprint(tiny("gpt2").on(devices.parse("cpu")))


def test_both_sides_are_named():
    manifest = one()
    with pytest.raises(
        TransferError, match="comes from llama-tiny, here runs gpt2-tiny.*layers|architecture llama / gpt2"
    ):
        manifest.check(tiny("gpt2"))
    with pytest.raises(TransferError, match="dtype float32 / bfloat16"):
        manifest.check(tiny("llama", "bfloat16"))
    cache = tiny("llama").new_cache(3, 8)
    manifest.check(tiny("llama"), cache, [2, 0, 1])
    for slots in ([0, 1], [0, 1, 1], [0, 1, 3], [-1, 0, 1]):
        with pytest.raises(TransferError, match="give 3 different ones of 0 … 2"):
            manifest.check(tiny("llama"), cache, slots)
    with pytest.raises(TransferError, match="capacity of 7"):
        manifest.check(tiny("llama"), tiny("llama").new_cache(3, 7))
    with pytest.raises(TransferError, match="new_cache"):
        manifest.check(tiny("llama"), tiny("gpt2").new_cache(3, 8))


def altered(**changes):
    told = json.loads(one().to_json())
    for name, value in changes.items():
        holder = told["model"] if name in told["model"] else told
        holder[name] = value
    return json.dumps(told).encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x80\x04K\x01.",
        b"[1, 2]",
        b"{}",
        b"null",
        b'{"format": 1}',
        b"[" * 100_000,
        b" " * (2**20 + 1),
        altered(format=2),
        altered(bytes=2**62),
        altered(bytes=-1),
        altered(bytes=True),
        altered(layers=2**62),
        altered(layers=0),
        altered(head_dim="8"),
        altered(lengths=[]),
        altered(lengths=[3, 8, 2]),
        altered(lengths=[3, 8, -1]),
        altered(lengths=[3, 8, 2**62]),
        altered(lengths=[3.0, 8, 1]),
        altered(lengths="381"),
        altered(cuts=[]),
        altered(cuts=[5]),
        altered(cuts=[9]),
        altered(cuts=[5, 5, 8]),
        altered(cuts=[0, 8]),
        altered(cuts=[8, 5, 8]),
        altered(wire="int8"),
        altered(dtype="object"),
        altered(checksums=1),
        altered(surprise=1),
        altered()[:-9],
    ],
)
def test_what_is_no_manifest_is_refused(text):
    assert Manifest.from_json(altered()) == one()
    with pytest.raises(TransferError, match="the manifest of D cannot be read"):
        Manifest.from_json(text, "D")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=80), st.integers(0, 2000))
def test_bytes_changed_anywhere_are_refused_or_still_a_manifest(noise, at):
    text = one().to_json()
    at %= len(text)
    try:
        found = Manifest.from_json(text[:at] + noise + text[at + len(noise) :])
    except TransferError:
        return
    assert replace(found, model=one().model).bytes == found.bytes == found._expected_bytes()


def test_what_cannot_be_handed_over_is_refused_on_ps_side():
    model = tiny("llama")
    cache = model.new_cache(2, 8)
    for lengths in ([9, 1], [1], [-1, 2]):
        with pytest.raises(InputError, match="lengths"):
            manifest_of(model, cache, lengths=lengths)
    with pytest.raises(InputError, match="slots"):
        manifest_of(model, cache, [])
    with pytest.raises(InputError, match="dtype on the way"):
        manifest_of(model, cache, wire="int4")
    assert torch.equal(cache.data, torch.zeros_like(cache.data))
