"""Road 4, a file: what is read is what was written; anything else is refused and the cache untouched."""

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import NAMES, tiny

import pdlib.kv_transfer
from pdlib.decode import decode
from pdlib.kv_transfer import TransferError, file, load, load_manifest, save
from pdlib.prefill import prefill


def written(path, kind="gpt2", **more):
    model = tiny(kind)
    cache = model.new_cache(3, 13)
    first = prefill(model, model.prompt(3, 8, seed=1), cache, [3, 8, 1]).argmax(-1)
    return model, cache, first, save(path, model, cache, **more)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("capacity, slots", [(13, None), (30, [3, 0, 1])])
def test_decode_goes_on_from_a_file_with_the_same_tokens(tmp_path, kind, capacity, slots):
    path = tmp_path / "deep" / "cache.safetensors"
    model, cache, first, manifest = written(path, kind)
    target = model.new_cache(4, capacity)
    assert load(path, model, target, slots) == load_manifest(path) == manifest
    rows = slots or [0, 1, 2]
    assert [target.lengths[r] for r in rows] == cache.lengths
    whole = model.new_cache(3, 13)
    pdlib.kv_transfer.transfer(target, whole, sources=rows)
    assert whole.equals(cache)
    assert torch.equal(decode(model, first, whole, 5), decode(model, first, cache, 5))
    assert list(path.parent.iterdir()) == [path]  # no part of a file beside it


def test_a_cast_halves_the_bytes_and_is_recorded(tmp_path):
    model, cache, _, full = written(tmp_path / "full")
    _, _, _, half = written(tmp_path / "half", wire="bfloat16")
    assert half.wire == "bfloat16" and half.bytes * 2 == full.bytes
    target, rounded = model.new_cache(3, 13), model.new_cache(3, 13)
    load(tmp_path / "half", model, target)
    pdlib.kv_transfer.transfer(cache, rounded, cast="bfloat16")
    assert target.equals(rounded) and not target.equals(cache)


def refused(path, model, match):
    cache = model.new_cache(3, 13)
    cache.data.normal_()
    cache.rewind([1, 2, 3])
    before = cache.data.clone()
    with pytest.raises(TransferError, match=match):
        load(path, model, cache)
    assert torch.equal(cache.data, before) and cache.lengths == [1, 2, 3]


def test_a_file_that_is_not_what_was_written_is_refused(tmp_path):
    path = tmp_path / "cache"
    model, *_ = written(path)
    whole = path.read_bytes()
    for size in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, model, "no whole safetensors file|manifest")
    flipped = bytearray(whole)
    flipped[-5] ^= 1
    path.write_bytes(flipped)
    refused(path, model, "layer 1 is not what was written")
    refused(tmp_path / "none", model, "no whole safetensors file")
    path.write_bytes(b"\x80\x04\x95 a pickle, perhaps")
    refused(path, model, "no whole safetensors file")
    path.write_bytes(whole)
    refused(
        path, tiny("llama"), r"comes from gpt2-tiny, here runs llama-tiny; they differ in architecture gpt2 / llama"
    )
    small = model.new_cache(3, 7)
    with pytest.raises(TransferError, match="capacity of 7: make it with capacity ≥ 8"):
        load(path, model, small)


def test_foreign_safetensors_are_refused(tmp_path):
    import safetensors.torch

    model, _, _, manifest = written(tmp_path / "cache")
    foreign = {
        "no manifest": ({"0": torch.ones(3)}, None),
        "other layers": ({"x": torch.ones(3)}, {"manifest": manifest.to_json().decode()}),
        "other sizes": (
            {"0": torch.ones(3), "1": torch.ones(3)},
            {"manifest": manifest.to_json().decode(), "checksums": "00 00"},
        ),
        "no checksums": (
            {"0": torch.ones(3), "1": torch.ones(3)},
            {"manifest": manifest.to_json().decode()},
        ),
    }
    for name, (tensors, told) in foreign.items():
        safetensors.torch.save_file(tensors, tmp_path / name, told)
        refused(tmp_path / name, model, "manifest")


def test_nothing_received_can_be_executed():
    forbidden = re.compile(r"\bpickle\b|torch\.load|\beval\(|\bexec\(|_object_list|marshal|__import__")
    folder = Path(pdlib.kv_transfer.__file__).parent
    assert [path for path in folder.rglob("*.py") if forbidden.search(path.read_text("utf-8"))] == []


@pytest.mark.parametrize("lengths", [[8, 8, 8], [3, 8, 1]])
def test_a_file_takes_the_memory_of_one_layer_and_the_library_reads_it(tmp_path, monkeypatch, lengths):
    model, taken = tiny("gpt2"), []
    cache = model.new_cache(3, 13)
    prefill(model, model.prompt(3, 8, seed=1), cache, lengths)

    real = file.pack

    def pack(found, out):
        taken.append(out)
        return real(found, out)

    monkeypatch.setattr(file, "pack", pack)
    manifest = save(tmp_path / "cache", model, cache)
    assert len({out.data_ptr() for out in taken}) == 1  # the same memory for every layer
    assert all(out.nbytes * model.spec.layers == manifest.bytes for out in taken)
    read = load_file(tmp_path / "cache")
    assert list(read) == [str(layer) for layer in range(model.spec.layers)]
    keys = [cache.data[1, side, row, :, :n].flatten() for side in (0, 1) for row, n in enumerate(lengths)]
    assert read["1"].numel() == sum(map(len, keys))
    if lengths == [8, 8, 8]:
        assert torch.equal(read["1"], torch.cat(keys))
