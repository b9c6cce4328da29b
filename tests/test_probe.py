"""The probe's two processes: timestamps in order, rows that are valid, an error that names the side, nothing left."""

import os
import time

import psutil
import pytest
import torch

from pdlib import devices, experiments, hand_over, links, models, namespaces, probe, results, transfers
from pdlib.experiments import Here
from pdlib.spec import InputError

SHARED = "/dev/shm"


@pytest.fixture(scope="module")
def pair():
    with probe.Pair("gpt2-tiny", "float32", 0, "cpu@1", "cpu@1") as made:
        yield made


@pytest.fixture
def here():
    model = models.load("gpt2-tiny", devices.parse("cpu@1"))
    yield Here(model, model, 0)
    transfers._end_kept()


@pytest.mark.parametrize("road, how", [("network", "whole"), ("network", "layers"), ("memory", "whole")])
def test_times_of_a_hand_over_are_in_order(pair, road, how):
    times = pair.hand_over(2, 24, how, road=road, decode=True)
    assert times.offered_s <= times.prefill_start_s < times.prefill_end_s
    assert times.prefill_start_s <= times.usable_s <= times.first_token_s
    assert times.bytes == 2 * 24 * 512 and len(times.layers) == 2
    assert times.layers == sorted(times.layers) and times.layers[-1] <= times.prefill_end_s
    assert times.exposed_s == max(0.0, times.usable_s - times.prefill_end_s)
    if road == "network":
        assert len(times.parts) == 2 and times.parts == sorted(times.parts)
        assert all(there > ready for there, ready in zip(times.parts, times.layers, strict=True))


def test_without_prefill_the_transfer_stands_alone(pair):
    times = pair.hand_over(1, 16, prefill=False, checksums=False)
    assert times.prefill_s == 0 and times.exposed_s == times.usable_s - times.prefill_start_s > 0


def test_a_job_on_either_side(pair):
    for side in "pd":
        job = pair.job(1, 8, 2, skip=3, side=side)
        assert job["prefill_s"] > 0 and job["decode_s"] > 0


def test_a_side_that_dies_is_named_and_the_other_is_ended():
    made = probe.Pair("gpt2-tiny", "float32", 0, "cpu@1", "cpu@1")
    children = [process.pid for process in made._sides.values()]
    made._sides["p"].kill()
    start = time.monotonic()
    with pytest.raises(InputError, match="P's process"):
        made.job(1, 8, 1)
    assert time.monotonic() - start < 20
    assert not any(psutil.pid_exists(child) for child in children)


def test_a_side_that_cannot_start_says_why():
    with pytest.raises(InputError, match="P's process ended.*model 'no-such-model' is not here"):
        probe.Pair("no-such-model", "float32", 0, "cpu@1", "cpu@1")


def test_rows_of_every_experiment_are_valid_and_say_what_was_asked(here):
    before = set(os.listdir(SHARED)) if os.path.isdir(SHARED) else set()
    made = {
        "kv_bytes": transfers.kv_bytes(here, ["gpt2 float32 1", "llama-2-70b float16 16"], 1, 2),
        "bandwidth": transfers.bandwidth(here, [[1, 4], [2, 32]], 2),
        "hidden": transfers.hidden(here, 2, [8, 16], 2),
        "timeline": transfers.timeline(here, 2, 16),
        "busy": transfers.busy(here, 2, 16, 8, 2, 2),
    }
    assert len(transfers._kept) == 1, "one pair for all of them"
    frames = {name: results.frame(rows) for name, rows in made.items()}
    assert all(set(frame["experiment"]) == {name} for name, frame in frames.items())
    assert all(hasattr(experiments, name) for name in made)
    kappa = dict(zip(frames["kv_bytes"]["model"], frames["kv_bytes"]["bytes"], strict=True))
    assert kappa == {"gpt2": 2 * 73_728, "llama-2-70b": 2 * 655_360}
    moved = frames["bandwidth"]
    assert moved.groupby(["kernel", "bytes"]).size().eq(2).all() and set(moved["bytes"]) == {4 * 512, 64 * 512}
    assert hand_over.hidden(frames["hidden"], here.model.spec)["n"].eq(2).all()
    line = frames["timeline"]
    assert line.groupby(["kernel", "phase"]).size().tolist() == [2, 2, 2, 2] and line["start_s"].notna().all()
    assert set(hand_over.busy(frames["busy"])["hand-over"]) == set(hand_over.HAND_OVERS)
    transfers._end_kept()
    left = set(os.listdir(SHARED)) - before if os.path.isdir(SHARED) else set()
    assert not [name for name in left if "pdlib" in name]


def test_layers_of_a_timeline_follow_one_another(here):
    rows = results.frame(transfers.timeline(here, 1, 16))
    for _, part in rows[rows["phase"] == "prefill"].groupby("kernel"):
        ends = (part["start_s"] + part["seconds"]).tolist()
        assert part["start_s"].tolist()[1:] == pytest.approx(ends[:-1]) and part["start_s"].iloc[0] == 0


def test_what_fails_ends_the_kept_pair(here):
    with pytest.raises(InputError), transfers._pair(here, "cpu@1", "cpu@1") as pair:
        children = [process.pid for process in pair._sides.values()]
        raise InputError("something else went wrong")
    assert not transfers._kept and not any(psutil.pid_exists(child) for child in children)


def test_bad_input_is_refused_before_a_process_is_started(here, monkeypatch):
    monkeypatch.setattr(probe, "Pair", None)
    with pytest.raises(InputError, match="unknown road 'pigeon'"):
        transfers.bandwidth(here, [[1, 4]], 1, roads=["pigeon"])
    with pytest.raises(InputError, match="unknown link '2gbit'"):
        transfers.slow_link(here, 1, 8, 4, ["2gbit"], 1)
    with pytest.raises(InputError, match="unknown device 'tpu'"):
        transfers.hidden(here, 1, [8], 1, p="tpu")
    with pytest.raises(InputError, match="positions"):
        transfers.busy(here, 1, 1024, 8, 2, 1)


needs_root = pytest.mark.skipif(bool(namespaces.why_not()), reason=f"no two hosts here: {namespaces.why_not()}")


@needs_root
def test_two_hosts_see_each_other_and_leave_nothing():
    with namespaces.hosts() as made:
        assert {made.p.address, made.d.address} == {"10.77.0.1", "10.77.0.2"}
        names = made.names
        assert all(name in namespaces.listed() for name in names)
        with pytest.raises(namespaces.Unavailable, match="not possible here"):
            namespaces._run("ip", "-n", names[0], "link", "set", "no-such-link", "up")
    assert not set(names) & set(namespaces.listed())
    with pytest.raises(RuntimeError), namespaces.hosts() as made:
        raise RuntimeError
    assert not set(made.names) & set(namespaces.listed())


@needs_root
def test_namespaces_of_a_killed_process_are_swept():
    dead = f"{namespaces.PREFIX}p-{2**22 - 7}"
    namespaces._run("ip", "netns", "add", dead)
    assert dead in namespaces.sweep() and dead not in namespaces.listed()


@needs_root
def test_a_shaped_link_carries_what_it_should(here):
    """1 MB over 1 Gb/s: no transfer, on any machine, is faster than the rate and the 256 kB in the bucket allow."""
    rows = results.frame(transfers.slow_link(here, 4, 512, 8, ["veth", "1gbit"], 2))
    assert set(hand_over.first_tokens(rows)["link"]) == {"veth", "1gbit", "none"}
    whole = rows[rows["kernel"].str.contains("part=whole") & (rows["requests"] == 4) & (rows["scenario"] == "1gbit")]
    assert ((whole["bytes"] - 256_000) / whole["seconds"]).max() < 1.05 * links.link("1 GbE").bytes_per_s
    assert not transfers._kept


def test_without_namespaces_p_and_d_meet_on_the_loopback(here, monkeypatch):
    def refused():
        raise namespaces.Unavailable("not here")

    monkeypatch.setattr(namespaces, "hosts", refused)
    rows = results.frame(transfers.slow_link(here, 1, 16, 4, ["10gbit", "1gbit"], 1))
    assert set(rows["scenario"]) == {"loopback", "none"}
    assert namespaces.about(["1gbit"]) == "P and D meet on the loopback: not here."
    assert torch.is_inference_mode_enabled() is False
