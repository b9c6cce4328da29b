"""Road 2, between two processes through shared memory: same tokens, nothing copied by D, nothing left behind."""

import os
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from peers import SHARED, both, segments
from tiny import NAMES, tiny

from pdlib.decode import decode
from pdlib.kv_transfer import (
    Segment,
    Sharing,
    TransferError,
    cuts_of,
    manifest_of,
    memory,
    segment_bytes,
    share,
    sweep,
    transfer,
    view,
)
from pdlib.prefill import prefill

CASES = [
    (kind, lengths, chunk, capacity)
    for kind in NAMES
    for lengths in ([8, 8, 8], [3, 8, 1])
    for chunk in (None, 3)
    for capacity in (13, 40)
]


def tell(*what):
    dist.broadcast_object_list(list(what), 0)


def told(count):
    what = [None] * count
    dist.broadcast_object_list(what, 0)
    return what


def p_packs():
    for kind, lengths, chunk, capacity in CASES:
        model = tiny(kind)
        cache = model.new_cache(3, 8)
        manifest = manifest_of(model, cache, lengths=lengths, cuts=cuts_of(8, chunk))
        with Segment.create(segment_bytes(manifest, capacity)) as segment:
            sharing = Sharing(cache, manifest, segment, capacity)
            cache.on_layer = sharing.on_layer
            prefill(model, model.prompt(3, 8, seed=1), cache, lengths, chunk)
            assert len(sharing.checksums) == len(manifest.parts)  # every part packed while prefill ran
            tell(segment.name, segment.nbytes, manifest.to_json(), sharing.finish())
            dist.barrier()
        dist.barrier()


def d_views():
    from pdlib.kv_transfer import Manifest

    for kind, lengths, chunk, capacity in CASES:
        name, nbytes, text, sums = told(4)
        model = tiny(kind)
        manifest = Manifest.from_json(text)
        manifest.check(model)
        segment = Segment.attach(name, nbytes)
        assert segments() == []  # no name is left from here on, however the two end
        cache = view(manifest, segment, capacity, sums)
        dist.barrier()
        dist.barrier()  # P has given the segment up
        alone = model.new_cache(3, 13)
        first = prefill(model, model.prompt(3, 8, seed=1), alone, lengths, chunk).argmax(-1)
        assert cache.equals(alone)
        swapped = model.new_cache(4, 20)
        transfer(cache, swapped, sources=[2, 0], slots=[0, 3])
        assert swapped.lengths == [lengths[2], 0, 0, lengths[0]]
        assert torch.equal(decode(model, first, cache, 5), decode(model, first, alone, 5))
        segment.close()
        assert torch.isfinite(cache.data).all()  # a cache outlives the segment it lies in


def test_decode_goes_on_in_the_pages_that_p_packed(tmp_path):
    both(p_packs, d_views, tmp_path)
    assert segments() == []


def made(kind="gpt2", **more):
    model = tiny(kind)
    cache = model.new_cache(3, 13)
    prefill(model, model.prompt(3, 8, seed=1), cache, [3, 8, 1])
    return model, cache, manifest_of(model, cache, **more)


def test_d_sees_the_pages_themselves_and_a_flipped_bit_is_refused():
    model, cache, manifest = made()
    with Segment.create(segment_bytes(manifest, 13)) as segment:
        sums = share(cache, manifest, segment, 13)
        seen = view(manifest, segment, 13, sums)
        assert seen.equals(cache)
        seen.data[1, 1, 1].view(torch.uint8)[3, 5, 2] ^= 8
        with pytest.raises(TransferError, match="layer 1, positions 0 … 8, is not what P packed"):
            view(manifest, segment, 13, sums)
        assert not view(manifest, segment, 13).equals(cache)  # one memory, seen twice
        seen.data[1, 1, 0, 3, 5].zero_()  # behind request 0's length: not part of what was handed over
        seen.data[1, 1, 1].view(torch.uint8)[3, 5, 2] ^= 8
        view(manifest, segment, 13, sums)


def test_p_that_prefills_into_the_segment_copies_nothing():
    model = tiny("llama")
    whole = manifest_of(model, model.new_cache(2, 12), lengths=[12, 12])
    with Segment.create(segment_bytes(whole, 12)) as segment:
        cache = segment.new_cache(model, 2, 12)
        prefill(model, model.prompt(2, 8), cache)
        manifest, before = manifest_of(model, cache), cache.data.clone()
        seen = view(manifest, segment, 12, share(cache, manifest, segment, 12))
        assert seen.data.data_ptr() == cache.data.data_ptr() and torch.equal(seen.data, before)
        with pytest.raises(TransferError, match="handed over whole"):
            share(cache, manifest_of(model, cache, [1, 0]), segment, 12, [1, 0])


def test_slots_in_another_order_and_a_cast_that_is_not_for_this_road():
    model, cache, _ = made()
    manifest = manifest_of(model, cache, [2, 0])
    with Segment.create(segment_bytes(manifest, 9)) as segment:
        seen = view(manifest, segment, 9, share(cache, manifest, segment, 9, [2, 0]))
        assert seen.lengths == [1, 3]
        assert torch.equal(seen.data[:, :, 1, :, :3], cache.data[:, :, 0, :, :3])
        with pytest.raises(TransferError, match="leave the cast"):
            share(cache, manifest_of(model, cache, [2, 0], wire="bfloat16"), segment, 9, [2, 0])
        with pytest.raises(TransferError, match="do not fit a cache of capacity 2"):
            view(manifest, segment, 2)
        with pytest.raises(TransferError, match="larger segment"):
            view(manifest, segment, 10)


def test_shared_memory_that_the_host_has_not_is_refused_before_anything_is_written():
    with pytest.raises(TransferError, match="cannot be had in .* free there"):
        Segment.create(2**50)
    assert segments() == []


def test_names_and_sizes_are_checked_before_anything_is_mapped(tmp_path):
    with Segment.create(4096) as segment:
        for wrong in (4095, 8192, 2**62):
            with pytest.raises(TransferError, match="has 4096 bytes"):
                Segment.attach(segment.name, wrong)
        for name in ("../../etc/passwd", "psm_1234", "", None, segment.name + "/x"):
            with pytest.raises(TransferError, match="no name of a segment"):
                Segment.attach(name, 4096)
        other = Segment.attach(segment.name, 4096)
        with pytest.raises(TransferError, match="the side that made it has ended"):
            Segment.attach(segment.name, 4096)  # the name is gone once somebody has mapped it
        other.tensor((4,), torch.float32).fill_(3)
        assert segment.tensor((4,), torch.float32).tolist() == [3] * 4
        other.close()
        other.close()
        with pytest.raises(TransferError, match="is closed"):
            other.tensor((4,), torch.float32)


@pytest.mark.skipif(memory.fcntl is None, reason="names are swept where processes can lock files")
def test_a_killed_maker_leaves_nothing_after_the_next_look():
    code = (
        "import sys, time; from pdlib.kv_transfer import Segment\n"
        "segment = Segment.create(4096); print(segment.name, flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name = process.stdout.readline().strip()
    assert sweep() == [] and name in segments()  # its maker lives
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert sweep() == [name] and segments() == []


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    if SHARED.is_dir():
        assert segments() == []
