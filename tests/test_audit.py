"""The audit of article 002: its formula term by term, and the machines inferred from published times."""

import math

import numpy as np
import pandas as pd
import pytest

from pdlib import audit, cost, paths, presets, published, results
from pdlib.spec import GPT2, DeviceSpec, InputError

LLAMA = presets.model("llama-2-70b")
A100 = presets.device("a100-80gb-sxm", "float16")


@pytest.mark.parametrize("prompt", [1, 255, *audit.PROMPTS])
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=lambda m: m.name)
def test_the_terms_add_up_to_both_formulas_exactly(prompt, model):
    frame = audit.terms(model, prompt)
    sizes = prompt, model.hidden, model.head_dim, model.layers
    article = cost.article_002_prefill_s(*sizes, flops_per_s=1, utilisation=1)
    assert frame.loc[frame["in_article"], "flops"].sum() == article
    assert frame["flops"].sum() == cost.prefill(model, 1, prompt).flops
    assert (frame["flops"] > 0).all()


def test_what_each_missing_term_is_worth():
    share = {}
    for prompt in audit.PROMPTS:
        frame = audit.terms(LLAMA, prompt).set_index("term")["flops"]
        share[prompt] = frame / frame.sum()
    assert share[4096]["mlp"] == pytest.approx(0.792, abs=5e-4)
    attention = {n: s[list(audit.SQUARE)].sum() for n, s in share.items()}
    assert attention[4096] == pytest.approx(0.0377, abs=5e-5)  # claim 2.1
    assert attention[32768] == pytest.approx(0.239, abs=5e-4)


@pytest.mark.parametrize(
    ("prompt", "cards", "article", "right"),
    [
        (4096, 1, 4.625e-3, 3.736),
        (4096, 8, 0.578e-3, 0.4669),
        (32768, 1, 98.7e-3, 37.78),
        (32768, 8, 12.33e-3, 4.722),
    ],
)
def test_claims_2_4_to_2_6(prompt, cards, article, right):
    assert audit.formulas(LLAMA, A100, prompt, cards) == pytest.approx((article, right), rel=1e-3)


def test_claim_2_8_an_eighth_of_the_article_s_cache():
    assert audit.article_kv_bytes(LLAMA) == 80 * 32 * 1024
    assert audit.article_kv_bytes(LLAMA) == 8 * cost.kv_bytes_per_token(LLAMA, "float16")


def test_claims_2_9_and_2_10_floors_on_eight_cards():
    eight = audit.together(A100, 8)
    floors = [cost.roofline_s(cost.decode_step(LLAMA, 1, n, "float16"), eight) for n in audit.PROMPTS]
    assert floors == pytest.approx([8.507e-3, 9.083e-3], rel=1e-3)


def test_cards_together_have_the_sum_of_the_peaks():
    eight = audit.together(A100, 8)
    assert eight.flops_per_s == 8 * A100.flops_per_s and eight.read_bytes_per_s == 8 * A100.read_bytes_per_s
    assert audit.together(A100, 1).name == A100.name and eight.name == "8 × a100-80gb-sxm"
    with pytest.raises(InputError, match="cards = 0"):
        audit.together(A100, 0)


def test_the_crossing_batch_is_where_compute_and_memory_take_as_long():
    batch = audit.crossing_batch(LLAMA, A100, 512)
    assert batch == pytest.approx(186.0, abs=0.05)
    one = cost.decode_step(LLAMA, 1, 512, "float16")
    compute = batch * one.flops / A100.flops_per_s
    memory = (one.weight_bytes + batch * one.kv_bytes) / A100.read_bytes_per_s
    assert compute == pytest.approx(memory, rel=1e-12)


def test_at_a_long_context_no_batch_makes_decode_compute_bound():
    limit = audit.crossing_context(LLAMA, A100)
    assert limit == pytest.approx(2891, abs=1)
    assert math.isfinite(audit.crossing_batch(LLAMA, A100, limit - 1))
    assert audit.crossing_batch(LLAMA, A100, limit + 1) == math.inf
    wide = DeviceSpec("all bandwidth", 1e12, 1e15, 1e15, "made up")  # reads faster than it can use
    assert audit.crossing_context(LLAMA, wide) == math.inf


def test_shares_of_the_peaks():
    work = cost.Cost(flops=6.0, weight_bytes=2.0, kv_bytes=1.0)
    device = DeviceSpec("unit", 12.0, 6.0, 6.0, "made up")
    assert audit.shares(work, 2.0, device) == (0.25, 0.25)
    with pytest.raises(InputError, match="above 0"):
        audit.shares(work, 0, device)


def test_published_measurements_are_rows_with_origin_and_licence():
    facts, rows = audit.facts(), audit.measured()
    assert facts["origin"].str.len().min() > 20 and facts["licence"].str.len().min() > 2
    assert list(rows) == results.COLUMNS and set(rows["source"]) == {"published"} and len(rows) == len(facts)
    decode = rows[(rows["machine"] == "splitwise") & (rows["phase"] == "decode") & (rows["prompt_tokens"] == 4096)]
    assert (decode["seconds"] / (decode["new_tokens"] - 1)).tolist() == pytest.approx([46.482e-3])
    assert set(rows["kernel"]) >= {"splitwise tp=8", "tensorrt-llm tp=4", "gpt-fast tp=2"}


def test_the_shared_file_says_what_we_quote():
    path = paths.ROOT.parent / "shared" / "calibration" / "splitwise_a100.csv"
    if not path.is_file():
        pytest.skip("the published file is not beside this checkout")
    there = pd.read_csv(path)
    there = there[(there["model"] == "llama2-70b") & (there["tensor_parallel"] == 8) & (there["new_tokens"] == 128)]
    for phase, column in (("prefill", "prompt_ms"), ("decode", "token_ms")):
        ours = audit.facts()
        ours = ours[(ours["who"] == "splitwise") & (ours["phase"] == phase)]
        key = ["prompt_tokens", "batch_size"]
        theirs = there.set_index(key)[column].sort_index()
        mine = ours.rename(columns={"requests": "batch_size"}).set_index(key)["ms"].sort_index()
        assert mine.to_dict() == theirs.to_dict()


def test_claim_2_2_measured_prefills_reach_a_third_to_two_thirds_of_the_peak():
    assert audit.utilisation("prefill") == pytest.approx((0.313, 0.608), abs=5e-4)
    assert audit.utilisation("decode") == pytest.approx((0.183, 0.719), abs=5e-4)
    seen = audit.reached()
    assert seen[["compute", "bandwidth"]].max(axis=None) < 1  # nobody beats a data sheet


def test_the_article_s_prefill_times_agree_on_a_machine_and_its_decode_times_do_not():
    cards = audit.inferred_cards(LLAMA, A100).set_index(["phase", "prompt_tokens"])
    short, long = cards.loc[("prefill", 4096)], cards.loc[("prefill", 32768)]
    assert (short["low"], short["high"]) == pytest.approx((3.736, 9.339), rel=1e-3)
    assert (long["low"], long["high"]) == pytest.approx((3.778, 9.445), rel=1e-3)
    assert (short["gpus_low"], short["gpus_high"]) == pytest.approx((6.15, 29.9), rel=2e-3)
    decode = cards.loc["decode"]
    assert decode.loc[32768, "high"] < decode.loc[4096, "low"]  # no bandwidth fits both
    assert cards.loc[("weights", 0), "low"] > cards.loc[("article_cache", 28672), "high"]
    cache = cards.loc["cache"].iloc[0]
    assert cards.loc[("article_cache", 28672), "low"] == pytest.approx(8 * cache["low"])


def test_machines_of_articles_000_and_001():
    found = audit.machines().set_index(["machine", "experiment", "device", "phase"])
    generate = found.loc[("article-001", "phases", "mps", "decode")]
    assert generate["high"] < published.APPLE_M[0].read_bytes_per_s / 9  # no Mac's memory is that slow
    over = generate["overhead_ms_low"], generate["overhead_ms_high"]
    assert over == pytest.approx((119.7, 125.8), abs=0.1)
    hand = found.loc[("author-mps", "decode_device", "mps", "decode")]
    assert 0 < hand["overhead_ms_low"] < hand["overhead_ms_high"] < 7
    card = found.loc[("article-000", "placements", "cuda", "decode")]
    assert card["rows"] == 4 and card["low"] < card["high"] and card["miss"] > 0.2  # a line fits badly
    prefill = found.xs("prefill", level="phase")
    assert (prefill["low"] < prefill["high"]).all() and prefill["overhead_ms_low"].isna().all()
    assert prefill.loc[("article-001", "phases", "mps"), "low"] == pytest.approx(
        cost.prefill(GPT2, 5, 255).flops / 0.2394
    )


def test_the_line_finds_bandwidth_and_overhead_that_made_the_times():
    size = np.array([1e9, 2e9, 4e9, 8e9])
    for start in (0.0, 0.005):
        for bandwidth, overhead_ms, miss in audit._lines(size, start + size / 2e11):
            assert bandwidth == pytest.approx(2e11) and overhead_ms == pytest.approx(1e3 * start, abs=1e-9)
            assert miss < 1e-9


def test_only_a_dense_transformer_can_be_audited():
    with pytest.raises(InputError, match="not a dense transformer"):
        audit.terms(presets.model("mixtral-8x7b"), 4096)
    with pytest.raises(InputError, match="prompt_tokens = 0"):
        audit.terms(LLAMA, 0)
