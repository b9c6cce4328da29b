"""devices: names read once, each device waited for in its own way, peaks and a fingerprint of this machine."""

import json
import re

import pytest
import torch
from tiny import Clock, FakeDevice, threads

from pdlib import devices
from pdlib.devices import CORES, Device
from pdlib.spec import DeviceSpec, InputError

MPS, XPU = Device("mps", "mps", 0), Device("xpu", "xpu", 0)
CUDA = Device("cuda:1", "cuda:1", 0)


@pytest.fixture
def accelerators(monkeypatch):
    """A machine that has everything."""
    monkeypatch.setattr(devices, "present", lambda: ["cuda:0", "cuda:1", "mps", "xpu", "cpu"])


@pytest.fixture
def only_cpu(monkeypatch):
    monkeypatch.setattr(devices, "present", lambda: ["cpu"])


@pytest.mark.parametrize(
    "name, torch_name",
    [("cuda", "cuda:0"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("mps", "mps"), ("xpu", "xpu")],
)
def test_accelerators_are_read(accelerators, name, torch_name):
    assert devices.parse(name) == Device(name, torch_name, 0)
    assert devices.parse(name).torch == torch.device(torch_name) and not devices.parse(name).is_cpu


def test_the_cpu_is_read():
    assert devices.parse("cpu") == Device("cpu", "cpu", CORES)
    for count in range(1, CORES + 1):
        assert devices.parse(f"cpu@{count}") == Device(f"cpu@{count}", "cpu", count)
    assert devices.parse("cpu@1").is_cpu


@pytest.mark.parametrize(
    "name",
    ["", "gpu", "CPU", "cpu:0", "cpu@", "cpu@x", "cpu@-1", "cpu@1.5", "cuda@2", "cuda:", "cuda:x", "cuda:-1", "mps:0"]
    + ["xpu:1", "mps@2", " cpu", "cpu ", "cpu\n", "tpu", None, 0, ["cpu"]],
)
def test_a_name_that_is_none_is_refused(accelerators, name):
    with pytest.raises(InputError, match="unknown device .*; this machine has: cuda:0, cuda:1, mps, xpu, cpu"):
        devices.parse(name)


@pytest.mark.parametrize("threads", [0, CORES + 1, 10**6])
def test_threads_stay_within_the_cores(threads):
    with pytest.raises(InputError, match=rf"asks for {threads} threads; .*N = 1 … {CORES}"):
        devices.parse(f"cpu@{threads}")


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps", "xpu"])
def test_an_absent_device_is_refused_with_what_is_here(only_cpu, name):
    with pytest.raises(InputError, match=rf"device '{name}' is not here; this machine has: cpu; cpu@N"):
        devices.parse(name)


def test_an_index_too_high_is_absent(accelerators):
    with pytest.raises(InputError, match="device 'cuda:2' is not here; this machine has: cuda:0, cuda:1"):
        devices.parse("cuda:2")


def test_present_ends_with_the_cpu():
    assert devices.present()[-1] == "cpu"


def test_a_pair_by_name(accelerators):
    fast, slow = devices.pick_pair("cuda:1", "cpu@1")
    assert (fast.name, slow.name) == ("cuda:1", "cpu@1")


def test_a_pair_picked_on_an_accelerator(accelerators):
    assert [d.name for d in devices.pick_pair("auto", "auto")] == ["cuda:0", "cpu"]


def test_a_pair_picked_on_a_cpu(only_cpu):
    assert [d.name for d in devices.pick_pair("auto", "auto")] == ["cpu", "cpu@1"]


@pytest.mark.parametrize("name", ["cpu", "cpu@1"])
def test_a_pair_of_one_device_is_refused(only_cpu, name):
    with pytest.raises(InputError, match=f"fast and slow are both {name}"):
        devices.pick_pair(name, name)


@pytest.mark.parametrize("fast, slow", [("cuda", "cuda:0"), ("cpu", f"cpu@{CORES}")])
def test_a_pair_of_two_names_for_one_device_is_refused(accelerators, fast, slow):
    for pair in ((fast, slow), (slow, fast)):
        with pytest.raises(InputError, match=f"fast and slow are both {pair[0]} = {pair[1]}"):
            devices.pick_pair(*pair)


def test_one_core_is_a_pair_only_where_it_is_picked(only_cpu, monkeypatch):
    monkeypatch.setattr(devices, "CORES", 1)
    fast, slow = devices.pick_pair("auto", "auto")
    assert (fast.name, slow.name) == ("cpu", "cpu@1") and fast.same_as(slow)
    with pytest.raises(InputError, match="fast and slow are both cpu = cpu@1"):
        devices.pick_pair("cpu", "cpu@1")


def test_active_sets_and_restores_the_threads():
    one = Device("cpu@1", "cpu", 1)
    with threads(3):
        with one.active():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 3
        with pytest.raises(RuntimeError), one.active():
            raise RuntimeError
        assert torch.get_num_threads() == 3


def test_an_accelerator_leaves_the_threads_alone(monkeypatch):
    def refuse(count):
        raise AssertionError("threads were set")

    with threads(3), monkeypatch.context() as patch:
        patch.setattr(torch, "set_num_threads", refuse)
        with MPS.active():
            assert torch.get_num_threads() == 3


def refuse(*_):
    raise AssertionError("synchronised another device")


@pytest.mark.parametrize("device", [MPS, XPU, CUDA, Device("cpu@1", "cpu", 1)])
def test_pitfall_02_synchronise_waits_for_this_device_only(monkeypatch, device):
    """No cuda call on a Mac, none of anything on a CPU; cuda and xpu are told which one."""
    calls: list = []
    for kind in ("cuda", "mps", "xpu"):
        note = (lambda *args: calls.append(args)) if kind == device.torch.type else refuse
        monkeypatch.setattr(getattr(torch, kind), "synchronize", note)
    device.synchronize()
    assert calls == {"mps": [()], "xpu": [(torch.device("xpu"),)], "cuda": [(torch.device("cuda:1"),)]}.get(
        device.torch.type, []
    )


def test_pitfall_01_peaks_are_timed_with_a_synchronise_on_both_sides(monkeypatch):
    log: list = []

    def clock():
        log.append("clock")
        return float(len(log))

    monkeypatch.setattr(devices.time, "perf_counter", clock)
    devices._best_rate(1.0, lambda: log.append("run"), FakeDevice(log=log), seconds=0)
    assert log[0] == "run"  # the warm-up, untimed
    assert log[1:] == 3 * ["synchronise", "clock", "run", "synchronise", "clock"]


def test_the_best_of_several_calls_is_the_peak(monkeypatch):
    clock, took = Clock(), iter([9.0, 4.0, 2.0, 5.0])
    monkeypatch.setattr(devices.time, "perf_counter", clock)
    assert devices._best_rate(10.0, lambda: clock.wait(next(took)), FakeDevice(), seconds=0) == 5.0


def test_measured_peaks_are_positive_and_never_below_known_ones():
    device = devices.parse("cpu@1")
    peaks = devices.measure_peaks(device, "float32", megabytes=1)
    assert peaks.name == "cpu@1" and "measured" in peaks.origin and "float32" in peaks.origin
    assert min(peaks.flops_per_s, peaks.read_bytes_per_s, peaks.copy_bytes_per_s) > 0
    known = DeviceSpec("cpu@1", 1e15, 1e15, 1e15, "undisturbed")
    again = devices.measure_peaks(device, "float32", known, megabytes=1)
    assert (again.flops_per_s, again.read_bytes_per_s, again.copy_bytes_per_s) == (1e15, 1e15, 1e15)
    with pytest.raises(InputError, match="unknown dtype 'int8'"):
        devices.measure_peaks(device, "int8", megabytes=1)


def test_free_memory_is_some_and_not_more_than_there_is():
    assert 0 < devices.parse("cpu").free_bytes() <= devices.fingerprint()["memory_bytes"]


@pytest.mark.parametrize("device", [CUDA, XPU])
def test_free_memory_of_an_accelerator_is_its_own_and_what_the_allocator_keeps_unused(monkeypatch, device):
    kind = getattr(torch, device.torch.type)
    told = {device.torch: (17, 99)}
    monkeypatch.setattr(kind, "mem_get_info", lambda asked: told.get(asked, (0, 0)), raising=False)
    monkeypatch.setattr(kind, "memory_reserved", lambda asked: 50, raising=False)
    monkeypatch.setattr(kind, "memory_allocated", lambda asked: 20, raising=False)
    assert device.free_bytes() == 17 + 50 - 20


def test_free_memory_of_an_xpu_that_does_not_tell_is_the_machines(monkeypatch):
    monkeypatch.delattr(torch.xpu, "mem_get_info", raising=False)
    monkeypatch.setattr(devices, "_memory_bytes", lambda: (99, 42))
    assert XPU.free_bytes() == 42


def test_fingerprint_says_what_a_number_depends_on(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")
    facts = devices.fingerprint()
    assert {"cpu", "gpu", "cores", "memory_bytes", "os", "python", "torch", "transformers", "settings"} <= set(facts)
    assert facts["torch"] == torch.__version__ and facts["cores"] == CORES
    assert facts["settings"]["MALLOC_ARENA_MAX"] == "2"
    assert json.loads(json.dumps(facts)) == facts


@pytest.mark.parametrize(
    "cpu, gpu, name",
    [
        ("AMD EPYC™ 9B14 / 96-Core", "none", "amd-epyc-9b14-96-core-4c"),
        ("Intel(R) Xeon(R) @ 2.20GHz", "NVIDIA H200", "nvidia-h200-4c"),
        ("Apple M2", "mps", "apple-m2-4c"),
    ],
)
def test_a_machines_name_can_name_a_file(monkeypatch, cpu, gpu, name):
    monkeypatch.setattr(devices, "fingerprint", lambda: {"cpu": cpu, "gpu": gpu, "cores": 4})
    devices.machine_name.cache_clear()
    try:
        assert devices.machine_name() == name
    finally:
        devices.machine_name.cache_clear()


def test_this_machines_name_can_name_a_file():
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]*", devices.machine_name())


def test_self_check_passes_here_and_says_how_near():
    for dtype in ("float32", "bfloat16"):
        line = devices.self_check(devices.parse("cpu"), dtype)
        assert dtype in line and float(re.search(r"at most (\S+) from", line).group(1)) <= 3e-2


@pytest.mark.parametrize("wrong", [0.5, float("nan")])
@pytest.mark.parametrize("queries", ["causal", "one"])
@pytest.mark.parametrize("length", [31, 32, 33, 63, 64, 65])
def test_pitfall_14_self_check_refuses_attention_that_is_wrong_at_a_length(monkeypatch, length, queries, wrong):
    """Wrong only in half precision, only at one length, only causal or for one query: still found."""
    real = devices.attend

    def attend(q, k, v, mask, causal):
        out = real(q, k, v, mask, causal)
        broken = q.dtype == torch.bfloat16 and k.shape[2] == length and causal == (queries == "causal")
        return out + wrong if broken else out

    monkeypatch.setattr(devices, "attend", attend)
    with pytest.raises(InputError, match=rf"attention on cpu in bfloat16 is off by .* at length {length} \(allowed"):
        devices.self_check(devices.parse("cpu"), "bfloat16")


def test_pitfall_14_a_small_error_is_told_from_a_large_one(monkeypatch):
    real = devices.attend

    def attend(q, k, v, mask, causal):
        return real(q, k, v, mask, causal) + (0.01 if q.dtype == torch.bfloat16 else 0)

    monkeypatch.setattr(devices, "attend", attend)
    devices.self_check(devices.parse("cpu"), "bfloat16")
    with pytest.raises(InputError, match="allowed 0.001"):
        devices.self_check(devices.parse("cpu"), "bfloat16", tolerance=0.001)
