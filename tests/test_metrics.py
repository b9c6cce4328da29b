"""The metrics against their definitions, on times small enough to check by hand."""

import numpy as np
import pytest

from pdlib import metrics
from pdlib.spec import InputError

ARRIVALS = [0.0, 1.0, 2.0]
TIMES = [[0.5, 0.7, 1.1], [3.0], [2.25, 2.5]]


def test_latencies_by_hand():
    assert metrics.ttft(ARRIVALS, TIMES).tolist() == [0.5, 2.0, 0.25]
    assert metrics.e2e(ARRIVALS, TIMES).tolist() == [1.1, 2.0, 0.5]
    assert metrics.itl(TIMES) == pytest.approx([0.2, 0.4, 0.25])
    per_token = metrics.tpot(TIMES)
    assert per_token[[0, 2]] == pytest.approx([0.3, 0.25])
    assert np.isnan(per_token[1]), "one token has no time per output token, least of all 0"


def test_gaps_are_pooled_over_requests_and_not_averaged_first():
    times = [[0, 1, 2, 3, 4], [0, 10]]
    assert np.percentile(metrics.itl(times), 50) == 1
    assert np.percentile(metrics.tpot(times), 50) == 5.5


def test_attainment_asks_for_both_targets():
    assert metrics.attainment(ARRIVALS, TIMES, 2.0, 0.3001) == 1.0
    assert metrics.attainment(ARRIVALS, TIMES, 1.0, 0.3001) == pytest.approx(2 / 3)
    assert metrics.attainment(ARRIVALS, TIMES, 2.0, 0.26) == pytest.approx(2 / 3)
    assert metrics.attainment(ARRIVALS, TIMES, 0.1, 9) == 0


def test_goodput_is_the_highest_rate_that_reaches_the_target_per_device():
    assert metrics.goodput([1, 2, 4, 8], [1, 0.95, 0.9, 0.4], devices=2) == 2
    assert metrics.goodput([1, 2], [0.5, 0.1]) == 0
    with pytest.raises(InputError, match="one attainment"):
        metrics.goodput([1, 2], [0.5])


def test_throughput_and_overhead():
    assert metrics.throughput(1275, 32.8948) == pytest.approx(38.76, abs=0.005)
    assert metrics.overhead(0.129, 0.01) == pytest.approx((0.119, 12.9))


@pytest.mark.parametrize(
    ("arrivals", "times", "message"),
    [
        ([], [], "no requests"),
        ([0], [[]], "request 0"),
        ([0, 0], [[1.0], [2.0, 1.0]], "request 1"),
        ([0], [[float("nan")]], "request 0"),
        ([0, 1], [[1.0]], "one a request"),
        ([0, 2], [[1.0], [1.5]], "before it arrives"),
    ],
)
def test_bad_times_are_refused(arrivals, times, message):
    with pytest.raises(InputError, match=message):
        metrics.ttft(arrivals, times)


def test_an_interval_holds_the_median_and_repeats_itself():
    samples = np.random.default_rng(3).lognormal(size=25)
    middle, low, high = metrics.median_interval(samples)
    assert samples.min() <= low < middle < high <= samples.max() and middle == np.median(samples)
    assert metrics.median_interval(samples) == (middle, low, high)
    wide = metrics.median_interval(samples, level=0.99)
    assert wide[1] <= low and high <= wide[2]
    assert metrics.median_interval([3.0]) == (3.0, 3.0, 3.0)


def test_the_interval_covers_the_true_median_about_as_often_as_it_says():
    rng = np.random.default_rng(1)
    hits = [low <= 0 <= high for _, low, high in (metrics.median_interval(rng.normal(size=15)) for _ in range(200))]
    assert 0.88 <= np.mean(hits) <= 0.99


def test_no_difference_is_seen_between_equals_and_is_seen_between_others():
    rng = np.random.default_rng(0)
    a, b = rng.normal(1, 0.05, 15), rng.normal(1, 0.05, 15)
    assert metrics.no_difference(metrics.ratio_interval(a, b))
    ratio = metrics.ratio_interval(2 * a, b)
    assert not metrics.no_difference(ratio) and ratio[1] < 2 < ratio[2]
    assert metrics.ratio_interval([2.0], [4.0]) == (0.5, 0.5, 0.5)


def test_bad_samples_are_refused():
    for bad in ([], [1.0, np.nan], [[1.0]]):
        with pytest.raises(InputError, match="samples"):
            metrics.median_interval(bad)
    with pytest.raises(InputError, match="above 0"):
        metrics.ratio_interval([1.0], [0.0])
    with pytest.raises(InputError, match="level"):
        metrics.median_interval([1.0, 2.0], level=95)
