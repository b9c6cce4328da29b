"""cost of any batch: against the library's own count of FLOPs, and against prefill and decode_step."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import NAMES, library_model
from torch.utils.flop_counter import FlopCounterMode

from pdlib import cost, presets
from pdlib.spec import GPT2, InputError, ModelSpec

GROUPED = ModelSpec("grouped", 2, 8, 2, 8, 32, 48, 97, 64, gated_mlp=True)
EXPERTS = dataclasses.replace(GROUPED, experts=8, experts_per_token=2, expert_mlp=16, dense_layers=1)


@pytest.mark.parametrize("kind", NAMES)
def test_flops_are_the_librarys(kind):
    """Exact, once the library's waste is added: the masked half of the scores, and logits of every position."""
    requests, n = 2, 10
    hf = library_model(kind)
    hf.set_attn_implementation("eager")  # plain products, which the counter knows on every device
    spec = ModelSpec.from_hf(kind, hf.config)
    with torch.inference_mode(), FlopCounterMode(display=False) as counter:
        hf(input_ids=torch.zeros(requests, n, dtype=torch.long), use_cache=False)
    ours = cost.terms(spec, [n] * requests, logits=requests * n)
    whole = 2 * spec.layers * spec.heads * spec.head_dim * n * n * requests  # of scores, and again of values
    seen = whole * (n + 1) // (2 * n)
    assert (ours["scores"], ours["values"]) == (seen, seen)
    assert counter.get_total_flops() == sum(ours.values()) + 2 * (whole - seen)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 60))
def test_a_batch_of_equal_prompts_is_prefill_but_for_the_diagonal(requests, n):
    whole, known = cost.batch(GROUPED, [n] * requests), cost.prefill(GROUPED, requests, n)
    diagonal = 2 * GROUPED.layers * GROUPED.heads * GROUPED.head_dim * n * requests
    assert whole.flops == pytest.approx(known.flops + diagonal)
    assert (whole.weight_bytes, whole.kv_bytes) == (known.weight_bytes, known.kv_bytes)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 60))
def test_a_batch_of_single_tokens_is_a_decode_step_but_for_reading_them_back(requests, context):
    step, known = cost.batch(GROUPED, [1] * requests, context - 1), cost.decode_step(GROUPED, requests, context)
    assert step.flops == pytest.approx(known.flops)
    assert step.weight_bytes == known.weight_bytes
    assert step.kv_bytes + requests * cost.kv_bytes_per_token(GROUPED) == known.kv_bytes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=1, max_size=5), st.integers(1, 39))
def test_chunks_cost_the_flops_of_the_whole(sequences, cut):
    """Chunked, ragged, mixed: FLOPs add up; the weights are read once more and the past again."""
    new, past = [n for n, _ in sequences], [p for _, p in sequences]
    head = [min(cut, n) for n in new]
    rest = [(n - h, p + h) for n, h, p in zip(new, head, past, strict=True) if n > h]
    whole = cost.terms(GROUPED, new, past)
    first = cost.terms(GROUPED, head, past, logits=0)
    second = cost.terms(GROUPED, [n for n, _ in rest], [p for _, p in rest], logits=0) if rest else {}
    for name in ("qkv", "attention_out", "mlp", "scores", "values"):
        assert whole[name] == pytest.approx(first[name] + second.get(name, 0.0))


def test_tensor_parallelism_replicates_kv_heads_and_sends_two_messages_a_layer():
    assert [cost.kv_bytes_per_token(GROUPED, tensor_parallel=p) for p in (1, 2, 4, 8)] == [256, 256, 512, 1024]
    one, four = (cost.batch(GROUPED, [10], tensor_parallel=p) for p in (1, 4))
    assert (one.flops, one.link_bytes) == (four.flops, 0)
    assert four.link_bytes == 2 * GROUPED.layers * (10 * GROUPED.hidden * 4) * 2 * 3 / 4


@pytest.mark.parametrize("devices, allowed", [(3, "1, 2, 4, 8"), (16, "1, 2, 4, 8")])
def test_heads_that_do_not_spread_are_refused(devices, allowed):
    with pytest.raises(InputError, match=f"do not spread over {devices} devices.*one of: {allowed}"):
        cost.kv_bytes_per_token(GROUPED, tensor_parallel=devices)


def test_weights_and_kv_may_have_other_dtypes():
    mixed = cost.batch(GROUPED, [4], dtype="float8", kv_dtype="float16")
    full = cost.batch(GROUPED, [4], dtype="float32")
    assert (4 * mixed.weight_bytes, 2 * mixed.kv_bytes) == (full.weight_bytes, full.kv_bytes)
    with pytest.raises(InputError, match="unknown dtype"):
        cost.batch(GROUPED, [4], dtype="int3")


def test_experts_are_touched_as_tokens_come():
    assert cost.touched_experts(EXPERTS, 1) == pytest.approx(2)
    assert cost.touched_experts(EXPERTS, 1000) == pytest.approx(8)
    touched = [cost.touched_experts(EXPERTS, tokens) for tokens in (1, 2, 4, 8, 16)]
    assert touched == sorted(touched) and touched[1] == pytest.approx(8 * (1 - 0.75**2))
    assert cost.touched_experts(GROUPED, 5) == 0
    few, many = cost.weight_bytes(EXPERTS, tokens=1), cost.weight_bytes(EXPERTS, tokens=1000)
    expert = 3 * 32 * 16 * 4  # one, in bytes; in the one layer that has them
    assert (few, many) == (cost.weight_bytes(EXPERTS), few + 6 * expert)


def test_touched_experts_are_those_of_a_draw():
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(2000, 5, 8, generator=generator).topk(2).indices.flatten(1)  # 5 tokens take 2 of 8 each
    seen = sum(len(set(draw)) for draw in draws.tolist()) / 2000
    assert cost.touched_experts(EXPERTS, 5) == pytest.approx(seen, rel=0.02)


def test_a_latent_cache_is_read_without_unpacking_it():
    spec = presets.model("deepseek-v3")
    context = 4096
    decode = cost.terms(spec, [1], context - 1)
    assert decode["scores"] == 2 * 61 * 128 * (512 + 64) * context
    assert decode["values"] == 2 * 61 * 128 * 512 * context
    assert cost.decode_step(spec, 1, context).flops == pytest.approx(sum(decode.values()))
    whole = cost.terms(spec, [context])
    assert whole["scores"] == pytest.approx(2 * 61 * 128 * (128 + 64) * context * (context + 1) / 2)


def test_activations_and_kernels_are_counted_by_hand():
    per_layer = 768 + 3 * 768 + 768 + 768 + 768 + 3072 + 3072 + 768  # in and out of qkv, out, up, down
    assert cost.activations_per_token(GPT2) == 12 * per_layer
    assert cost.kernels(GPT2) == 12 * 11 + 3
    assert cost.kernels(GROUPED) == 2 * 12 + 3


@pytest.mark.parametrize("new, past", [([], 0), ([0], 0), ([1, 2], [3]), ([5], [-1]), ([float("nan")], 0)])
def test_sequences_are_checked(new, past):
    with pytest.raises(InputError, match="new tokens|one each"):
        cost.batch(GROUPED, new, past)
