"""latency against published rows of A100s, where the folder with them is present; their numbers are not ours."""

import numpy as np
import pytest

from benchmarks import latency as bench
from pdlib import latency, presets

pytestmark = pytest.mark.skipif(
    not bench.SHARED.is_dir(), reason=f"{bench.SHARED} with the published rows is not here"
)


@pytest.fixture(scope="module")
def rows():
    return bench.splitwise()


def test_sizes_held_out(rows):
    for seed in range(3):
        found = latency.errors(latency.holdout(rows, bench.A100, "shape", seed=seed)).iloc[0]
        assert found["median"] < 0.12 and found["p90"] < 0.30
        assert 0.80 <= found["coverage"] <= 0.97


def test_one_model_predicts_the_other(rows):
    held = latency.holdout(rows, bench.A100, "model")
    assert set(held["fold"]) == {"fit on bloom-176b", "fit on llama-2-70b"}
    assert (latency.errors(held, ["fold"])["median"] < 0.25).all()


def test_the_stored_fit_is_the_fit_to_these_rows(rows):
    stored, made = latency.a100(), latency.fit(rows, bench.A100)
    assert stored.values == pytest.approx(made.values, rel=1e-3)
    assert (stored.device, stored.models, stored.rows) == (bench.A100, made.models, made.rows)
    for name, span in stored.ranges.items():
        assert span == pytest.approx(made.ranges[name])


def test_profiles_of_other_software_are_reproduced():
    for rows, limit in ((bench.distserve(), 0.08), (bench.sarathi(), 0.06)):
        assert latency.errors(bench.reproduced(rows)["fitted to it"])["median"].iloc[0] < limit
    chunks = latency.errors(bench.reproduced(bench.sarathi())["as fitted to Splitwise"]).iloc[0]
    assert chunks["median"] < 0.15  # another model, other software, the same device


def test_an_h100_is_twice_an_a100_in_prefill_and_follows_the_bandwidth_in_decode():
    """Patel et al. 2024, "Splitwise", on Llama-2-70B: H100 over A100 about 0.5 to the first token."""
    model, here = presets.model("llama-2-70b"), latency.a100()
    there = here.to(presets.device("h100-sxm", "float16"))
    for work, low, high in ((latency.prefill(1, 1500), 0.4, 0.6), (latency.decode(1, 1500), 0.55, 0.75)):
        ratio = there.seconds(work, model, 8)[0] / here.seconds(work, model, 8)[0]
        assert low < ratio < high
        assert np.isfinite(there.predict(work, model, 8)[["low", "high"]]).all(axis=None)
