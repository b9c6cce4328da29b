"""What rows of hand-overs say: words of their kernel, rates, shares, busy time, first tokens; charts and tables."""

import warnings

import pandas as pd
import pytest
import synthetic
import synthetic_transfers
from test_plots import assert_nothing_is_cut_off

from pdlib import hand_over, links, plots, presets, published, tables, words
from pdlib.spec import GPT2, InputError

MIXES = synthetic_transfers.mixes()
LAPTOP = MIXES["measured only"]
DEMANDS = links.demands(
    [
        links.Demand("gpt2", 64, 64 * 73_728, 0.08, "measured", "laptop"),
        links.Demand("gpt2", 512, 512 * 73_728, 0.7, "measured", "laptop"),
        links.Demand("llama-2-70b", 4096, 1_342_177_280, 0.47, "modelled", "8 × A100 at 50 %"),
        links.Demand("qwen3-8b", 128, 18_874_368, 0.0456, "published", "mooncake-h800"),
    ]
)
CHARTS = {
    "bandwidth": lambda rows, **k: plots.bandwidth(rows, synthetic.DEVICES, **k),
    "timeline": plots.timeline,
    "hidden": lambda rows, **k: plots.hidden(rows, GPT2, **k),
    "links": lambda rows, **k: plots.needed(DEMANDS, rows, **k),
    "slow_link": lambda rows, **k: plots.slow_link(rows, GPT2, **k),
}
CASES = [("published only", "zh"), ("all three", "en"), ("all three", "zh"), ("one sample", "en"), ("none", "en")]


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize(("mix", "lang"), CASES)
def test_every_chart_draws_every_mix_without_a_warning(name, mix, lang):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chart = CHARTS[name](MIXES[mix], lang=lang)
        svg = chart.svg()
        assert_nothing_is_cut_off(chart)
    assert chart.heading == words.say(f"{name}.title", lang) and "<text" not in svg
    assert list(chart.drawn) and chart.svg() == svg


def test_words_of_a_kernel_come_back():
    name = hand_over.kernel("network", "layers", checksums=True, cast="bfloat16", part="exposed")
    assert name == "road=network how=layers checksums=on pinned=off cast=bfloat16 part=exposed"
    assert hand_over.said(name)["part"] == "exposed" and hand_over.said("article") == {}
    assert hand_over.kernel("device", hand_over="none").endswith("hand-over=none")
    for road, how in (("pigeon", "whole"), ("file", "bit by bit")):
        with pytest.raises(InputError, match="unknown"):
            hand_over.kernel(road, how)


def test_claim_0_6_the_article_moved_three_gigabytes_a_second():
    rates = hand_over.rates(published.transfers()).set_index("machine")
    article = rates.loc["article-000"]
    assert article["bytes"].tolist() == [471_859_200, 3_774_873_600]
    assert article["low"].min() == pytest.approx(2.64, abs=0.01) and article["high"].max() == pytest.approx(
        3.84, abs=0.01
    )
    assert article["median"].between(2.9, 3.3).all()


def test_mooncake_s_bytes_are_those_of_the_arithmetic():
    """Rate × time is what moved; from 8,192 tokens on it agrees with κ · n, replicated KV heads counted twice."""
    table = published.mooncake()
    unit = table["rate_unit"].map({"GB/s": 1e9, "GiB/s": 2**30})
    ratio = table["rate"] * unit * table["transfer_ms"] / 1e3 / table["bytes"]
    assert set(table["model"]) == {"qwen3-8b", "qwen3-235b-a22b"} and len(table) == 18
    assert ratio[table["prompt_tokens"] >= 8192].between(0.995, 1.005).all()
    rows = published.transfers()
    assert len(rows) == 22 and set(rows["source"]) == {"published"} and set(rows["phase"]) == {"transfer"}


def test_mooncake_s_digits_are_the_source_s():
    source = published.paths.ROOT.parent / "shared" / "calibration" / "mooncake_kv_transfer.csv"
    if not source.is_file():
        pytest.skip("the source of the published figures is not beside this checkout")
    theirs, ours = pd.read_csv(source, comment="#"), published.mooncake()
    for mine, other in (("prompt_tokens",) * 2, ("ttft_ms",) * 2, ("transfer_ms",) * 2, ("rate", "bw_GBps")):
        assert ours[mine].tolist() == theirs[other].tolist()


def test_rates_and_fits_are_what_was_put_in():
    fits = hand_over.fits(LAPTOP).set_index("road")
    for road, (t0, rate) in synthetic_transfers.ROADS.items():
        assert fits.loc[road, "GB_per_s"] == pytest.approx(rate / 1e9, rel=0.08)
        assert fits.loc[road, "t0_us"] == pytest.approx(1e6 * t0, rel=0.15)
    assert "memory, checksums" in fits.index and (fits["sizes"] == 4).all()
    assert hand_over.fits(published.transfers())["machine"].tolist() == ["mooncake-h800", "mooncake-h20"]


def test_the_share_hidden_is_one_less_exposed_over_the_whole():
    table = hand_over.hidden(LAPTOP, GPT2)
    assert table["prompt_tokens"].tolist() == [64, 128, 256, 512] and (table["n"] == 5).all()
    for row in table.itertuples():
        assert row.share == pytest.approx(1 - row.exposed_s / row.whole_s)
        assert row.share_low <= row.share <= row.share_high
        assert row.total_whole_s == pytest.approx(row.prefill_s + row.whole_s)
        assert row.bound_share == pytest.approx(1.0), "a layer's tail is shorter than the rest of its compute"
    broken = LAPTOP[~LAPTOP["kernel"].str.contains("part=exposed")]
    with pytest.raises(InputError, match="no part=exposed"):
        hand_over.hidden(broken, GPT2)


def test_busy_time_is_p_s_phases_summed_and_a_part_of_the_decode_scaled():
    table = hand_over.busy(LAPTOP).set_index("hand-over")["median"]
    assert table["synchronous"] == pytest.approx((1.3 + 0.05) / 4, rel=0.1)
    assert table["streaming"] < table["none"] and table["none"] == pytest.approx((1.3 + 2.4) / 4, rel=0.1)
    rows = LAPTOP[LAPTOP["experiment"] == "busy"].copy()
    rows.loc[rows["phase"] == "decode", "tokens"] //= 3
    assert hand_over.busy(rows).set_index("hand-over")["median"]["none"] == pytest.approx((1.3 + 7.2) / 4, rel=0.1)


def test_first_tokens_over_a_link_and_where_separation_stops_paying():
    points = hand_over.first_tokens(LAPTOP)
    assert points.groupby("how").size().to_dict() == {"layers": 2, "none": 1, "whole": 2}
    gbit = points[(points["link"] == "1gbit") & (points["how"] == "whole")].iloc[0]
    assert gbit["GB_per_s"] == pytest.approx(0.117, rel=0.1) and gbit["bytes"] == 8 * 512 * 73_728
    line = hand_over.link_model(points, GPT2)
    own = points.loc[points["how"] == "none", "median"].iloc[0]
    even = {how: hand_over.break_even(part, own) for how, part in line.groupby("how")}
    assert even["whole"] == pytest.approx(0.302 / (5.4 - 3.1), rel=0.15)  # bytes ÷ the prefill time P saves
    assert even["layers"] < 0.6 * even["whole"]
    assert hand_over.break_even(line, 0.01) is None
    bound = hand_over.streamed_bound(LAPTOP, GPT2)
    assert bound["whole_ratio"].between(0.9, 1.1).all() and bound["over"].abs().max() < 0.1
    assert bound["share"].between(0.85, 1).all()


def test_a_caption_says_where_it_was_measured():
    asked = ["10gbit", "1gbit", "1gbit loss=1%"]
    said = hand_over.where_measured(LAPTOP, asked)
    assert "namespaces" in said and said.endswith("cannot make: 1 Gb/s, 1 % loss")
    rows = LAPTOP.assign(scenario=LAPTOP["scenario"].replace({"10gbit": "loopback", "1gbit": "loopback"}))
    assert "loopback" in hand_over.where_measured(rows, asked)


def test_kv_bytes_by_arithmetic_and_as_they_travelled():
    big = presets.model("llama-2-70b")
    cases = [(GPT2, "float32", 1), (big, "float16", 8), (big, "float16", 16)]
    table = tables.kv_bytes(cases, LAPTOP)
    assert table["kappa"].tolist() == ["72.0", "320", "640"]
    assert table["multi_head"].tolist() == ["72.0", "2,560", "2,560"]
    assert table["travelled_ratio"].tolist() == ["1.0000", "", "1.0000"]
    assert tables.kv_bytes(cases)["travelled"].tolist() == ["", "", ""]


@pytest.mark.parametrize("lang", words.LANGUAGES)
def test_the_table_of_links_names_the_slowest_that_hides(lang):
    table = tables.needed(DEMANDS, lang)
    assert table["enough"].tolist() == ["1 GbE", "1 GbE", "25 GbE", "10 GbE"]
    shown = tables.show(table)
    assert words.say("needed", lang) in shown and not [c for c in shown if c.endswith("_exact")]
    assert shown["10 GbE (ms)"].tolist()[2] == "1,070"
    faster = links.demands([links.Demand("m", 1, 10**12, 1.0, "modelled", "-")])
    assert tables.needed(faster, lang)["enough"].tolist() == [words.say("none here", lang)]


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="unknown language 'fr'"):
        tables.needed(DEMANDS, "fr")
    with pytest.raises(InputError, match="wrong columns"):
        hand_over.rates(LAPTOP.drop(columns="phase"))
