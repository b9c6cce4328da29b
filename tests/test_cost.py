"""cost: counts checked against counting one by one, and against the numbers of articles 001 and 002."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlib import cost
from pdlib.spec import GPT2, DeviceSpec, InputError, ModelSpec

# Touvron et al. 2023, "Llama 2", and huggingface.co/meta-llama/Llama-2-70b-hf, config.json.
LLAMA_2_70B = ModelSpec("llama-2-70b", 80, 64, 8, 128, 8192, 28672, 32000, 4096, gated_mlp=True)
A100_FLOPS = 312e12  # NVIDIA A100 datasheet, fp16 tensor cores, dense
TINY = ModelSpec("tiny", 2, 4, 2, 8, 32, 48, 97, 64)


def test_kv_bytes_per_token():
    assert cost.kv_bytes_per_token(GPT2) == 2 * 12 * 12 * 64 * 4
    assert cost.kv_bytes_per_token(GPT2, "bfloat16") == cost.kv_bytes_per_token(GPT2) // 2
    assert cost.kv_bytes_per_token(LLAMA_2_70B, "float16") == 320 * 1024  # KV heads, not attention heads


def test_gpt2_reads_half_a_gigabyte_of_weights_a_step():
    assert cost.weight_bytes(GPT2) == (12 * 12 * 768 * 768 + 768 * 50257) * 4
    assert cost.weight_bytes(GPT2) / 1e9 == pytest.approx(0.494, abs=0.001)


@pytest.mark.parametrize("dtype", ["int8", "", "fp32"])
def test_an_unknown_dtype_is_refused(dtype):
    for count in (cost.kv_bytes_per_token, cost.weight_bytes):
        with pytest.raises(InputError, match="unknown dtype"):
            count(GPT2, dtype)


def test_prefill_counts_each_matrix_and_half_the_scores():
    requests, n = 3, 10
    work = cost.prefill(TINY, requests, n)
    scores = TINY.layers * TINY.heads * 2 * (2 * TINY.head_dim * n * n) / 2  # QKᵀ and PV, halved by causality
    linear = 2 * TINY.matmul_parameters * n + 2 * TINY.hidden * TINY.vocab  # logits of the last token only
    assert work.flops == requests * (linear + scores)
    assert work.weight_bytes == 4 * (TINY.matmul_parameters + TINY.head_parameters)  # once, whatever the batch
    assert work.kv_bytes == requests * n * 2 * 2 * 2 * 8 * 4
    assert work.bytes == work.weight_bytes + work.kv_bytes
    assert work.intensity == work.flops / work.bytes


def test_a_decode_step_reads_every_weight_and_every_key_once():
    step = cost.decode_step(TINY, 3, 10)
    linear = 2 * (TINY.matmul_parameters + TINY.head_parameters)
    assert step.flops == 3 * (linear + TINY.layers * TINY.heads * 2 * 2 * TINY.head_dim * 10)
    assert step.weight_bytes == cost.weight_bytes(TINY)
    assert step.kv_bytes == 3 * (10 + 1) * cost.kv_bytes_per_token(TINY)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 40), st.integers(1, 200), st.integers(1, 60))
def test_decode_is_the_sum_of_its_steps(requests, prompt, steps):
    whole = cost.decode(TINY, requests, prompt, steps)
    parts = [cost.decode_step(TINY, requests, prompt + i) for i in range(1, steps + 1)]
    for field in ("flops", "weight_bytes", "kv_bytes"):
        assert getattr(whole, field) == pytest.approx(sum(getattr(part, field) for part in parts))


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 30), st.integers(1, 100))
def test_prefill_grows_with_every_token_and_request(requests, n):
    less, more = cost.prefill(TINY, requests, n), cost.prefill(TINY, requests, n + 1)
    assert more.flops > less.flops and more.kv_bytes > less.kv_bytes and more.weight_bytes == less.weight_bytes
    assert cost.prefill(TINY, requests + 1, n).flops == pytest.approx(less.flops * (requests + 1) / requests)


@pytest.mark.parametrize("bad", [0, -1, 2.5])
def test_counts_are_checked(bad):
    for call in (
        lambda: cost.prefill(TINY, bad, 5),
        lambda: cost.prefill(TINY, 1, bad),
        lambda: cost.decode_step(TINY, bad, 5),
        lambda: cost.decode(TINY, 1, 5, bad),
        lambda: cost.phase_ratio_limit(DeviceSpec("d", 1.0, 1.0, 1.0, "-"), bad),
        lambda: cost.article_002_prefill_s(bad, 1, 1, 1, 1.0, 1.0),
    ):
        with pytest.raises(InputError, match="whole number"):
            call()


def test_roofline_takes_the_longer_and_the_sum_takes_both():
    device = DeviceSpec("d", flops_per_s=100.0, read_bytes_per_s=10.0, copy_bytes_per_s=5.0, origin="-")
    slow_memory = cost.Cost(flops=100.0, weight_bytes=15.0, kv_bytes=5.0)
    assert (cost.roofline_s(slow_memory, device), cost.sum_s(slow_memory, device)) == (2.0, 3.0)
    slow_compute = dataclasses.replace(slow_memory, flops=700.0)
    assert (cost.roofline_s(slow_compute, device), cost.sum_s(slow_compute, device)) == (7.0, 9.0)


def test_claim_1_7_gpt2_at_batch_5_needs_nine_milliseconds_at_68_gb_per_s():
    mac = DeviceSpec("mac", 2.6e12, 68e9, 68e9, "-")
    step = cost.decode(GPT2, 5, 255, 255)
    assert cost.roofline_s(step, mac) / 255 == pytest.approx(9.4e-3, abs=0.2e-3)


def test_claim_1_13_the_ratio_falls_with_the_batch():
    device = DeviceSpec("d", 2.6e12, 68e9, 68e9, "-")
    assert cost.phase_ratio_limit(device, 1) == pytest.approx(2.6e12 * 4 / (2 * 68e9))
    assert cost.phase_ratio_limit(device, 5) == pytest.approx(cost.phase_ratio_limit(device, 1) / 5)
    assert cost.phase_ratio_limit(device, 1, "bfloat16") == pytest.approx(cost.phase_ratio_limit(device, 1) / 2)


def test_claim_2_5_article_002s_formula_is_eight_hundred_times_too_small():
    printed = cost.article_002_prefill_s(4096, 8192, 128, 80, A100_FLOPS, 0.5)
    right = cost.prefill(LLAMA_2_70B, 1, 4096, "float16").flops / (A100_FLOPS * 0.5)
    assert printed == pytest.approx(4.6e-3, abs=0.05e-3)
    assert right == pytest.approx(3.7, abs=0.1)
    assert right / printed == pytest.approx(800, rel=0.02)


def test_claim_2_1_attention_is_a_small_part_of_prefill():
    def share(n):
        without = 2 * LLAMA_2_70B.matmul_parameters * n + 2 * LLAMA_2_70B.head_parameters
        flops = cost.prefill(LLAMA_2_70B, 1, n).flops
        return (flops - without) / flops

    assert share(4096) == pytest.approx(0.038, abs=0.001)
    assert share(32768) == pytest.approx(0.24, abs=0.005)


def test_a_phase_is_the_prefill_or_the_mean_decode_step():
    steps = cost.decode(TINY, 3, 10, 4, "float16")
    step = cost.of_phase(TINY, "decode", 3, 10, 5, "float16")
    assert (4 * step.flops, 4 * step.bytes) == pytest.approx((steps.flops, steps.bytes))
    assert cost.of_phase(TINY, "prefill", 3, 10, 5, "float16") == cost.prefill(TINY, 3, 10, "float16")
    with pytest.raises(InputError, match="unknown phase 'transfer'; choose one of: prefill, decode"):
        cost.of_phase(TINY, "transfer", 3, 10, 5)
