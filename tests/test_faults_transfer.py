"""Faults on the way from P to D: what is damaged is made anew once, what is false is refused, waits have an end."""

import re
import time
from functools import partial

import faulty
import pytest
from pairs import check_finished, folder, pid, requests, settings

from pdlib import workers
from pdlib.spec import InputError
from pdlib.workers import Failed, Request


def meet_again(pair):
    """Ask until P and D, both alive, have found each other again."""
    end, asked = time.monotonic() + 20, Request([1, 2], 3)
    while isinstance((result := pair.run([asked], 20)[0]), Failed):
        assert "P: D is gone" in result.reason and time.monotonic() < end
        time.sleep(0.05)
    check_finished([result], [asked], folder())


@pytest.mark.parametrize("road", ["network", "memory"])
def test_a_flipped_bit_is_refused_and_the_request_redone_once(road):
    times = {2: 1, 4: 2, 6: 1}
    entry = partial(faulty.p_flips if road == "network" else faulty.p_flips_memory, times)
    asked = [Request([i + 1] * (30 if i == 4 else 5), 6) for i in range(10)]  # the damage of 4 reaches far behind 5
    with workers.pair(entries={"p": entry}, **settings(road=road, slots=1)) as pair:
        results = pair.run(asked)
    bad = results.pop(4)
    check_finished(results, asked[:4] + asked[5:], folder())
    assert [r.redone for r in results] == [0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert isinstance(bad, Failed)
    assert re.match(
        r"D refused the cache of this request, and the same cache made anew: .*layer 0.*checksum", bad.reason
    )


def test_a_truncated_part_is_refused_and_the_request_redone():
    asked = requests(5, seed=6)
    with workers.pair(entries={"p": partial(faulty.p_truncates, 2)}, **settings()) as pair:
        results = pair.run(asked)
    check_finished(results, asked, folder())
    assert [r.redone for r in results] == [0, 0, 1, 0, 0]


def test_a_stream_that_stops_ends_the_connection_and_both_meet_again():
    asked = requests(5, seed=7)
    entry = partial(faulty.p_stalls, 2, 3.0)
    with workers.pair(entries={"p": entry}, **settings(transfer_s=1.0)) as pair:
        numbers = [pair.submit(request) for request in asked[:3]]
        results = [pair.result(number, 20) for number in numbers]
        check_finished(results[:2], asked[:2], folder())
        assert isinstance(results[2], Failed) and "P: D is gone" in results[2].reason
        pids = [pid(pair, role) for role in "pd"]
        meet_again(pair)
        check_finished(pair.run(asked[3:]), asked[3:], folder())
        assert [pid(pair, role) for role in "pd"] == pids


def test_a_false_manifest_is_refused_before_any_cache_is_touched():
    changes = {
        1: dict(bytes=2**62),
        2: dict(model=dict(weights="0" * 32, name="another")),
        3: b'{"format": 1}',
        4: b"\xff" * 1000,
        5: dict(lengths=(2,), cuts=(2,), bytes=2 * 2 * 2 * 4 * 8 * 4),
    }
    asked = [Request([i + 1] * 5, 6) for i in range(8)]
    with workers.pair(entries={"p": partial(faulty.p_lies, changes)}, **settings()) as pair:
        results = pair.run(asked)
    failed = {r.id: r.reason for r in results if isinstance(r, Failed)}
    assert set(failed) == set(changes)
    assert "cannot be read" in failed[1] and str(2**62) in failed[1]
    assert "the cache comes from another" in failed[2] and "weights" in failed[2]
    assert "cannot be read" in failed[3] and "cannot be read" in failed[4]
    assert "5 were announced" in failed[5]
    good = [i for i in range(8) if i not in changes]
    check_finished([results[i] for i in good], [asked[i] for i in good], folder())


# slots


def test_more_requests_than_slots_wait_their_turn_and_too_long_a_wait_is_an_error():
    long, short = Request([1, 2], 60), Request([3, 4], 2)
    entry = partial(faulty.slow, 0.03)
    with workers.pair(entries={"d": entry}, **settings(slots=1, slot_s=0.5)) as pair:
        results = pair.run([long, *[short] * 9], 60)
        check_finished(results[:1], [long], folder())
        assert isinstance(results[1], Failed)
        assert {r.reason for r in results[1:] if isinstance(r, Failed)} == {
            "D refused the request: none of its 1 slots came free in 0.5 s; send fewer requests at a time or start D "
            "with more slots"
        }
        check_finished(pair.run([short]), [short], folder())


def test_a_d_with_less_capacity_says_so():
    entry = partial(faulty.other, dict(capacity=16))
    with workers.pair(entries={"d": entry}, **settings()) as pair:
        fits, too_long = pair.run([Request([1] * 10, 7), Request([1] * 10, 8)])
    check_finished([fits], [Request([1] * 10, 7)], folder())
    assert "D's slots hold 16 positions, this request needs 17: start D with more capacity" in too_long.reason


def test_a_d_without_memory_says_what_would_fit():
    with pytest.raises(
        InputError, match=r"D: a cache of 100000000 × 128 positions takes .* at most \d+ requests fit"
    ):
        workers.pair(**settings(slots=10**8))


def test_a_d_that_never_answers_is_left_alone():
    entry = partial(faulty.says, "go", b'{"kind":"pulse"}')
    with workers.pair(entries={"d": entry}, **settings(slot_s=0.5, silence_s=1.0)) as pair:
        result = pair.result(pair.submit(Request([1, 2], 3)), 30)
        assert isinstance(result, Failed)
        assert (
            result.reason
            == "P: D is gone (it did not answer within 1.5 s); start D again, then send the request again"
        )
        meet_again(pair)
