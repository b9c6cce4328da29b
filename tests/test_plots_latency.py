"""Charts and tables of notebook 04, with published and modelled rows beside live ones."""

import math
import warnings

import pandas as pd
import pytest
import synthetic
from test_plots import assert_nothing_is_cut_off

from pdlib import audit, cost, forecast, latency, plots, presets, published, tables, words
from pdlib.spec import GPT2, InputError

LLAMA, A100 = presets.model("llama-2-70b"), presets.device("a100-80gb-sxm", "float16")
BATCHES = [1, 4, 16, 64, 256]
SWEEP = forecast.sweep(LLAMA, A100, BATCHES, 512, 128, cards=8)
SPLITWISE = audit.measured().query("machine == 'splitwise'")
LIVE = synthetic.rows()


def test_a_roofline_sweep_is_rows_of_the_schema():
    assert set(SWEEP["source"]) == {"modelled"} and set(SWEEP["machine"]) == {"8 × a100-80gb-sxm"}
    eight = audit.together(A100, 8)
    one = SWEEP[(SWEEP["requests"] == 4) & (SWEEP["phase"] == "prefill")].iloc[0]
    assert one["seconds"] == cost.roofline_s(cost.prefill(LLAMA, 4, 512, "float16"), eight) and one["tokens"] == 2048
    steps = SWEEP[(SWEEP["requests"] == 4) & (SWEEP["phase"] == "decode")].iloc[0]
    assert steps["seconds"] == 127 * cost.roofline_s(cost.decode_step(LLAMA, 4, 576, "float16"), eight)


def test_a_fitted_sweep_is_what_the_fit_predicts():
    fit = latency.a100()
    rows = forecast.sweep(LLAMA, A100, [1, 32], 512, 128, cards=8, fit=fit, machine="here")
    assert set(rows["machine"]) == {"here"} and set(rows["kernel"]) == {"fit"}
    step = fit.predict(latency.decode([1, 32], 576), LLAMA, tensor_parallel=8)["seconds"]
    assert rows.loc[rows["phase"] == "decode", "seconds"].tolist() == pytest.approx([127 * s for s in step], rel=1e-3)


@pytest.mark.parametrize("lang", words.LANGUAGES)
def test_conflict_and_ratio_with_every_source(lang):
    devices = dict.fromkeys(("8 × a100-80gb-sxm", "splitwise"), audit.together(A100, 8)) | synthetic.DEVICES
    rows = pd.concat([SWEEP, SPLITWISE, LIVE, published.rows()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for chart in (
            plots.conflict(rows, {"gpt2": GPT2, LLAMA.name: LLAMA}, devices, lang=lang),
            plots.ratio(rows, lang=lang),
        ):
            chart.svg()
            assert_nothing_is_cut_off(chart)
            assert set(chart.drawn["source"]) == {"modelled", "published", "measured"}


def test_conflict_draws_the_roofline_at_its_own_peak_and_measured_points_below():
    devices = dict.fromkeys(("8 × a100-80gb-sxm", "splitwise"), audit.together(A100, 8))
    drawn = plots.conflict(pd.concat([SWEEP, SPLITWISE]), {LLAMA.name: LLAMA}, devices).drawn
    ideal = drawn[drawn["source"] == "modelled"].pivot(
        index=["phase", "requests"], columns="resource", values="percent"
    )
    assert ideal.max(axis=1).tolist() == pytest.approx([100] * len(ideal))
    decode = ideal.loc["decode"]
    crossing = audit.crossing_batch(LLAMA, A100, 576)
    assert ((decode["compute"] > 99.9) == (decode.index >= crossing)).all()
    seen = drawn[drawn["source"] == "published"]
    assert set(seen["prompt_tokens"]) == {512}, "a series is at least three batch sizes"
    assert seen["percent"].max() < 45


def test_ratio_is_the_article_s_and_falls_with_the_batch():
    drawn = plots.ratio(pd.concat([SWEEP, published.rows()])).drawn
    article = drawn[drawn["machine"] == "article-001"]["ratio"].item()
    assert article == pytest.approx(137.4, abs=0.05)
    modelled = drawn[drawn["source"] == "modelled"]["ratio"]
    assert (modelled.diff().dropna() < 0).all()


def test_a_decode_that_is_never_bound_by_compute_is_said():
    long = forecast.sweep(LLAMA, A100, BATCHES, 4096, 2, cards=8)
    devices = {"8 × a100-80gb-sxm": audit.together(A100, 8)}
    chart = plots.conflict(long, {LLAMA.name: LLAMA}, devices)
    said = [text.get_text() for text in chart.axes[0].texts]
    assert words.say("conflict.never", "en", "4,097") in said
    assert chart.drawn[chart.drawn["phase"] == "decode"]["percent"].min() > 0


def test_the_audit_says_what_holds_without_any_fit():
    table = tables.audit(LLAMA, A100)
    assert table["claim"].tolist() == [
        *("2.1", "2.1", "2.2", "2.5", "2.5", "2.6", "2.6", "2.7", "2.8"),
        *("2.9", "2.9", "2.10", "2.10", "2.11", "2.11", "2.11"),
    ]
    at = table.set_index(["claim", "cards"])
    assert at.loc[("2.5", "1"), ["article_formula", "right_formula"]].tolist() == ["4.63 ms", "3.74 s"]
    assert at.loc[("2.5", "8"), ["article_formula", "right_formula"]].tolist() == ["0.578 ms", "0.467 s"]
    assert (
        at.loc[("2.9", "8"), "right_formula"] == "≥ 8.51 ms" and at.loc[("2.10", "8"), "right_formula"] == "≥ 9.08 ms"
    )
    fits = {
        key: at.loc[key, "verdict"] == "fits" for key in [("2.5", "8"), ("2.6", "8"), ("2.9", "8"), ("2.10", "8")]
    }
    assert list(fits.values()) == [True, True, True, False]
    assert "and the weights do not fit" in at.loc[("2.5", "1"), "verdict"]
    assert "0.661 s at 4,096 tokens on 8 (Splitwise)" in at.loc[("2.5", "8"), "published_near"]
    cache = table[table["claim"] == "2.8"].iloc[0]
    assert cache[["article", "right_formula", "verdict"]].tolist() == ["2.5 MB", "320 KiB", "8.00× too large"]
    assert set(table["model_says"]) == {""} and table["model_s_exact"].isna().all()


def test_the_audit_s_model_column_is_the_fit_s_prediction_where_the_weights_fit():
    fit = latency.fit(SPLITWISE[SPLITWISE["prompt_tokens"] != 4096], A100)
    table = tables.audit(LLAMA, A100, fit).set_index(["claim", "cards"])
    assert table.loc[("2.5", "1"), "model_says"] == ""
    row = fit.predict(latency.prefill(1, 4096), LLAMA, tensor_parallel=8).iloc[0]
    held = table.loc[("2.5", "8")]
    assert [held[f"model_{end}_exact"] for end in ("s", "low", "high")] == pytest.approx(
        [row["seconds"], row["low"], row["high"]], rel=1e-3
    )
    assert held["model_low_exact"] < 0.661222 < held["model_high_exact"], "the measured time, which it has not seen"


def test_errors_are_the_held_out_rows_s():
    held = synthetic.held(LIVE)
    table = tables.errors(held)
    whole = table[(table["phase"] == "total") & (table["split"] == "shapes held out")].iloc[0]
    own = held[held["split"] == "shape"]["error"].abs()
    assert whole["median_exact"] == pytest.approx(100 * own.median(), rel=1e-3)
    assert whole["p90_exact"] == pytest.approx(100 * own.quantile(0.9), rel=1e-3) and whole["asked"] == "10 / 25"
    assert whole["met"] == ("yes" if own.median() <= 0.10 and own.quantile(0.9) <= 0.25 else "no")
    worse = tables.errors(held.assign(error=held["error"] + 1))
    assert set(worse["met"]) == {"no", ""}


@pytest.mark.parametrize("lang", words.LANGUAGES)
def test_tables_of_04_are_saved_whole(lang, tmp_path, monkeypatch):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    for name, table in (
        ("04_audit", tables.audit(LLAMA, A100, lang=lang)),
        ("04_errors", tables.errors(synthetic.held(LIVE), lang=lang)),
    ):
        seen = tables.save(table, name)
        back = pd.read_csv(tmp_path / f"figures/{name}.csv", dtype="str", keep_default_na=False)
        assert list(back) == list(table) and len(back) == len(seen)
    with pytest.raises(InputError, match="unknown language"):
        tables.audit(LLAMA, A100, lang="fr")
    assert math.isnan(tables.audit(LLAMA, A100)["model_s_exact"].iloc[0])
