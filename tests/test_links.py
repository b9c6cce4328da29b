"""Links: sourced constants, the arithmetic of hiding, and a fit that finds what was put in."""

import numpy as np
import pytest

from pdlib import cost, links, presets
from pdlib.spec import GPT2, DeviceSpec, InputError

LLAMA = presets.model("llama-2-70b")


def test_every_link_has_a_source_and_an_address():
    known = links.presets()
    assert list(known) == sorted(known, key=lambda name: known[name].bytes_per_s)
    assert {"10 GbE", "25 GbE", "100 GbE", "200 Gb InfiniBand", "400 Gb InfiniBand", "NVLink 4"} <= set(known)
    for one in known.values():
        assert one.source and one.url.startswith("https://")
    for name in ("10 GbE", "100 GbE"):
        assert known[name].bytes_per_s == float(name.split()[0]) * 1e9 / 8
    for generation, name in ((16, "PCIe 4 x16"), (32, "PCIe 5 x16")):
        assert known[name].bytes_per_s == pytest.approx(generation * 16 * 128 / 130 / 8 * 1e9, rel=2e-3)
    with pytest.raises(InputError, match="unknown link '40 GbE'; choose one of: 1 GbE"):
        links.link("40 GbE")


def test_claim_2_20_in_numbers():
    """4K of Llama-2-70B: 27 ms at 50 GB/s, 1.1 s on 10 GbE, behind 0.47 s of prefill on eight A100 at 50 %."""
    size = 4096 * cost.kv_bytes_per_token(LLAMA, "float16", tensor_parallel=8)
    assert size / links.link("400 Gb InfiniBand").bytes_per_s == pytest.approx(0.027, abs=5e-4)
    assert size / links.link("10 GbE").bytes_per_s == pytest.approx(1.07, abs=0.01)
    prefill = links.prefill_s(LLAMA, 1, 4096, "float16", presets.device("a100-80gb-sxm", "float16"), 8, 0.5)
    assert prefill == pytest.approx(0.47, abs=0.01)
    assert links.needed_bytes_per_s(size, prefill) == pytest.approx(2.87e9, rel=0.01)


def test_a_model_s_prefill_time_is_the_roofline_over_the_utilisation():
    device = DeviceSpec("x", 1e12, 1e15, 1e15, "made up")
    whole = cost.prefill(GPT2, 2, 64).flops / 1e12
    assert links.prefill_s(GPT2, 2, 64, "float32", device, utilisation=1) == pytest.approx(whole)
    assert links.prefill_s(GPT2, 2, 64, "float32", device, devices=4, utilisation=0.25) == pytest.approx(whole)
    for utilisation in (0, 1.1, -1):
        with pytest.raises(InputError, match="utilisation"):
            links.prefill_s(GPT2, 2, 64, "float32", device, utilisation=utilisation)
    with pytest.raises(InputError, match="devices = 0"):
        links.prefill_s(GPT2, 2, 64, "float32", device, devices=0)


def simulated(prefill_s, transfer_s, layers, ahead):
    """The last byte after the end of prefill, layer by layer: each leaves when ready and when the road is free."""
    free = 0.0
    for layer in range(layers):
        ready = (layer + 1 - ahead) * prefill_s / layers
        free = max(free, ready) + transfer_s / layers
    return max(0.0, free - prefill_s)


@pytest.mark.parametrize("ahead", [0.0, 0.4, 0.75])
@pytest.mark.parametrize("ratio", [0.001, 0.3, 1.0, 1.7, 40.0])
def test_the_exposed_time_is_that_of_a_pipeline_of_layers(ratio, ahead):
    for layers in (1, 2, 12):
        expected = simulated(2.0, 2.0 * ratio, layers, ahead)
        assert float(links.exposed_s(2.0, 2.0 * ratio, layers, ahead)) == pytest.approx(expected)
        share = float(links.hidden_share(2.0, 2.0 * ratio, layers, ahead))
        assert share == pytest.approx(1 - expected / (2.0 * ratio)) and share <= 1


def test_the_condition_needed_is_where_the_bound_bends():
    layers, size, prefill = 12, 3e8, 1.5
    needed = links.needed_bytes_per_s(size, prefill)
    for faster in (1.0, 2.0, 100.0):
        assert float(links.hidden_share(prefill, size / (needed * faster), layers)) == pytest.approx(1 - 1 / layers)
    assert float(links.hidden_share(prefill, size / (needed * 0.8), layers)) < 1 - 1 / layers - 0.1


def test_keys_and_values_come_before_the_rest_of_their_layer():
    assert links.layer_ahead(GPT2) == pytest.approx(9 / 12)  # 3 d² of 12 d² come first
    assert 0.85 < links.layer_ahead(LLAMA) < 1


def test_the_fit_finds_what_was_put_in_and_its_interval_holds_it():
    generator = np.random.default_rng(5)
    sizes = np.repeat([6.5e4, 1e6, 1.6e7, 3e8, 1e9], 7)
    seconds = (2.5e-4 + sizes / 3.4e9) * generator.lognormal(0, 0.05, len(sizes))
    line = links.fit(sizes, seconds)
    assert line.t0_s[1] <= 2.5e-4 <= line.t0_s[2] and line.bytes_per_s[1] <= 3.4e9 <= line.bytes_per_s[2]
    assert line.t0_s[0] == pytest.approx(2.5e-4, rel=0.1) and line.worst < 0.1
    assert line == links.fit(sizes, seconds), "the same on every call"
    assert line.seconds(1e8) == pytest.approx(line.t0_s[0] + 1e8 / line.bytes_per_s[0])
    exact = links.fit([1e6, 2e6], [1e-3, 2e-3])
    assert exact.t0_s[0] == pytest.approx(0, abs=1e-12) and exact.bytes_per_s[0] == pytest.approx(1e9)


def test_outliers_in_one_size_do_not_move_the_fit():
    sizes = np.repeat([1e5, 1e7, 1e9], 5)
    seconds = 1e-4 + sizes / 1e9
    seconds[-2:] *= 1.5
    line = links.fit(sizes, seconds)
    assert line.bytes_per_s[0] == pytest.approx(1e9) and line.t0_s[0] == pytest.approx(1e-4)
    assert line.bytes_per_s[1] < 0.9e9, "but the interval shows it"


@pytest.mark.parametrize(
    "sizes, seconds, says",
    [
        ([1e6, 1e6], [1.0, 1.0], "1 different"),
        ([1e6, 2e6], [1.0], "a time above 0 for each sample"),
        ([1e6, 2e6], [1.0, 0.0], "a time above 0"),
        ([0, 2e6], [1.0, 1.0], "two sizes or more"),
        ([1e6, 1e9], [1.0, 1e-9], "do not grow with the bytes"),
    ],
)
def test_samples_that_hold_no_line_are_refused(sizes, seconds, says):
    with pytest.raises(InputError, match=says):
        links.fit(sizes, seconds)


def test_lossy_links_follow_mathis():
    """Half the round trip or a quarter of the loss: twice the rate."""
    rate = links.lossy_bytes_per_s(0.01, 1e-3)
    assert rate == pytest.approx(1448 / 1e-3 * (3 / 0.02) ** 0.5)
    assert links.lossy_bytes_per_s(0.01, 5e-4) == pytest.approx(2 * rate)
    assert links.lossy_bytes_per_s(0.0025, 1e-3) == pytest.approx(2 * rate)
    for loss, trip in ((0, 1e-3), (1, 1e-3), (0.01, 0)):
        with pytest.raises(InputError, match="loss"):
            links.lossy_bytes_per_s(loss, trip)


def test_demands_say_the_link_and_the_time_on_each():
    table = links.demands([links.Demand("m", 10, 5_000_000_000, 2.0, "measured", "here")])
    (row,) = table.to_dict("records")
    assert (
        row["needed_bytes_per_s"] == 2.5e9 and row["on 10 GbE"] == 4.0 and row["on NVLink 4"] == pytest.approx(1 / 90)
    )
    assert list(links.demands([])) == list(table)
