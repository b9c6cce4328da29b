"""The published figures: the same as the sources', consistent with themselves, and rows like any others."""

import pandas as pd
import pytest

from pdlib import metrics, paths, published, results

SOURCES = paths.ROOT.parent / "shared" / "published"


@pytest.mark.parametrize("name", ["two_phases", "decode_device", "placements"])
def test_the_carried_figures_are_those_of_the_sources(name):
    if not SOURCES.is_dir():
        pytest.skip("the sources of the published figures are not beside this checkout")
    theirs = pd.read_csv(SOURCES / f"{name}.csv").rename(
        columns={
            "prompt_tokens_per_request": "prompt_tokens",
            "new_tokens_per_request": "new_tokens" if name == "two_phases" else "decode_steps",
            "prefill_over_decode": "ratio",
        }
    )
    ours = getattr(published, name)()
    shared = [c for c in theirs if c in ours and c != "origin"]
    assert len(shared) >= len(theirs.columns) - 3
    pd.testing.assert_frame_equal(ours[shared], theirs[shared], check_dtype=False)


def test_rows_are_valid_and_handed_out_as_copies():
    rows = published.rows()
    pd.testing.assert_frame_equal(results.validate(rows), rows)
    assert set(rows["source"]) == {"published"}
    assert rows.groupby("experiment").size().to_dict() == {
        "phases": 6,
        "decode_device": 10,
        "placements": 28,
    }
    rows["seconds"] = 0.0
    assert (published.rows()["seconds"] > 0).all()


def test_tokens_over_seconds_are_the_printed_throughputs():
    rows = published.rows().set_index(["experiment", "machine", "scenario", "placement", "phase"]).sort_index()
    rates = metrics.throughput(rows["tokens"], rows["seconds"])
    for run in published.placements().itertuples():
        key = ("placements", "article-000", run.scenario, run.placement)
        # Seconds are printed with four decimals: half a unit of the last one is the tolerance.
        assert rates[*key, "prefill"] == pytest.approx(run.prefill_tokens_per_s, rel=0.6e-4 / run.prefill_s)
        assert rates[*key, "decode"] == pytest.approx(run.decode_tokens_per_s, rel=0.6e-4 / run.decode_s, abs=0.0051)
    article = rates["phases", "article-001"].droplevel([0, 1])
    assert article["prefill"] == pytest.approx(5325.18, rel=0.6e-4 / 0.2394)
    assert round(article["decode"], 2) == 38.76


def test_transfers_move_three_to_six_gigabytes_a_second():
    rows = published.rows()
    moved = rows[rows["phase"] == "transfer"]
    assert moved.iloc[2]["bytes"] == 100 * 512 * 73_728
    assert (moved["bytes"] / moved["seconds"] / 1e9).between(2.6, 10).all()


def test_the_totals_are_the_sum_of_the_phases():
    raw = published.placements()
    total = raw[["prefill_s", "transfer_s", "decode_s"]].sum(axis=1)
    assert (total - raw["total_s"]).abs().max() < 1.01e-4
    for run in published.two_phases().itertuples():
        assert abs(run.prefill_s + run.decode_s - run.total_s) < 1.51e-4
