"""mistakes: each is really made in the mistaken arm, and really not in the honest one."""

import pytest
from tiny import Clock, counting, tiny

from pdlib import baseline, mistakes, results
from pdlib.mistakes import MISTAKES, Bench, measure_mistakes
from pdlib.spec import InputError, Workload

WORK = Workload(2, 12, 4)  # three decode steps
REPEATS = 3


def bench(log=None):
    model = tiny("gpt2")
    return Bench(model if log is None else counting(model, log), WORK, REPEATS, 0)


def named(reports, name):
    return [sample for kernel, sample, _ in reports if kernel == name]


@pytest.fixture(scope="module")
def rows():
    return results.frame(measure_mistakes(tiny("gpt2"), WORK, REPEATS, 0))


def test_six_mistakes_each_beside_the_honest_way(rows):
    names = ["no_warm_up", "no_synchronise", "fixed_order", "cache_left", "all_logits", "prefill_in_decode"]
    assert rows["scenario"].unique().tolist() == names == [mistake.__name__ for mistake in MISTAKES]
    for name in names:
        sizes = rows[rows["scenario"] == name].groupby("kernel").size().to_dict()
        arms = 2 if name == "fixed_order" else 1
        assert sizes == {"honest": REPEATS * arms, "mistaken": REPEATS * arms}
    assert set(rows["experiment"]) == {"mistakes"} and set(rows["source"]) == {"measured"}


def test_repeats_are_told_apart(rows):
    for _, part in rows.groupby(["scenario", "kernel", "placement"]):
        assert sorted(part["repeat"]) == list(range(REPEATS))


def test_only_the_fixed_order_has_two_placements(rows):
    places = rows.groupby("scenario")["placement"].unique().map(sorted).to_dict()
    assert places.pop("fixed_order") == ["first", "second"]
    assert all(place == ["-"] for place in places.values())


def test_pitfall_04_no_warm_up_is_the_first_call_and_honest_the_second_at_the_same_shape():
    log: list = []
    reports = mistakes.no_warm_up(bench(log))
    shapes = [shape for shape, _ in log]
    assert shapes[::2] == shapes[1::2] and len(set(shapes)) == REPEATS  # each length is new when it is timed
    assert [kernel for kernel, _, _ in reports] == ["mistaken", "honest"] * REPEATS
    assert [sample.order for _, sample, _ in reports] == [0, 1] * REPEATS
    assert [(work.requests, work.prompt_tokens) for _, _, work in reports] == shapes


def test_on_a_cpu_no_synchronise_is_the_first_decode_step():
    log: list = []
    reports = mistakes.no_synchronise(bench(log))
    assert {lengths[0] for _, lengths in log} == {12}  # the same context each time
    shapes = [shape for shape, _ in log]
    assert shapes[::2] == shapes[1::2] and len(set(shapes)) == REPEATS and all(s[1] == 1 for s in shapes)
    assert [kernel for kernel, _, _ in reports] == ["mistaken", "honest"] * REPEATS
    assert [work.requests for _, _, work in reports] == [requests for requests, _ in shapes]


def test_the_fixed_order_is_fixed_and_the_honest_one_shuffled():
    reports = mistakes.fixed_order(bench())
    hasty, honest = named(reports, "mistaken"), named(reports, "honest")
    assert [sample.arm for sample in hasty] == ["first", "second"] * REPEATS
    assert [sample.order for sample in hasty] == [0, 1] * REPEATS
    assert sorted(sample.order for sample in honest) == list(range(2 * REPEATS))
    log: list = []
    mistakes.fixed_order(bench(log))
    assert len(log) == 2 + 2 * REPEATS + 2 * REPEATS  # only the honest arms are warmed up


def test_pitfall_07_the_context_creeps_up_in_the_mistaken_arm_only(monkeypatch):
    contexts: dict = {}
    real = mistakes.decode

    def decode(model, first, cache, steps):
        contexts.setdefault(id(cache), []).append(cache.lengths[0])
        return real(model, first, cache, steps)

    monkeypatch.setattr(mistakes, "decode", decode)
    reports = mistakes.cache_left(bench())
    assert sorted(contexts.values()) == [[12, 12, 12, 12], [12, 15, 18, 21]]
    assert len(named(reports, "honest")) == len(named(reports, "mistaken")) == REPEATS


def test_all_logits_are_made_in_the_mistaken_arm_only(monkeypatch):
    made: list = []
    real = baseline.prefill

    def prefill(*arguments):
        started = real(*arguments)
        made.append((arguments[2], started.kept[0].shape[1]))
        return started

    monkeypatch.setattr(baseline, "prefill", prefill)
    mistakes.all_logits(bench())
    assert sorted(set(made)) == [(False, 1), (True, 12)] and len(made) == 2 * (REPEATS + 1)


def test_pitfall_05_the_mistaken_step_has_prefills_time_booked_on_it(monkeypatch):
    """With a clock by which a pass takes as many seconds as it has tokens: 1 a step, and 12 / 3 more."""
    clock, real = Clock(), mistakes.measure
    monkeypatch.setattr(mistakes, "measure", lambda *a, **k: real(*a, **k, clock=clock))
    whole = tiny("gpt2")

    def layers(tokens, cache):
        clock.wait(tokens.shape[1])
        return whole.layers(tokens, cache)

    model = type(whole)(whole.spec, "random", "float32", whole.device, whole.hf, layers, whole.head)
    reports = mistakes.prefill_in_decode(Bench(model, WORK, REPEATS, 0))
    assert [sample.seconds for sample in named(reports, "honest")] == pytest.approx([1.0] * REPEATS)
    assert [sample.seconds for sample in named(reports, "mistaken")] == pytest.approx([1.0 + 12 / 3] * REPEATS)


def test_seconds_are_those_of_one_step_or_one_call():
    """By the same clock, whatever is reported as decode is one step's, whatever as prefill one call's."""
    clock, real, whole = Clock(), mistakes.measure, tiny("gpt2")

    def layers(tokens, cache):
        clock.wait(tokens.shape[1])
        return whole.layers(tokens, cache)

    model = type(whole)(whole.spec, "random", "float32", whole.device, whole.hf, layers, whole.head)
    mistakes.measure = lambda *a, **k: real(*a, **k, clock=clock)
    try:
        for mistake in (mistakes.no_synchronise, mistakes.cache_left):
            assert {sample.seconds for _, sample, _ in mistake(Bench(model, WORK, REPEATS, 0))} == {1.0}
        assert {sample.seconds for _, sample, _ in mistakes.fixed_order(Bench(model, WORK, REPEATS, 0))} == {12.0}
    finally:
        mistakes.measure = real


def test_pitfall_13_what_creeps_past_the_models_positions_is_refused_before_any_work():
    log: list = []
    model = counting(tiny("gpt2"), log)
    with pytest.raises(InputError, match="64 positions"):
        measure_mistakes(model, Workload(2, 40, 9), 3, 0)
    assert log == []


def test_more_repeats_than_prompt_tokens_are_refused_before_any_work():
    with pytest.raises(InputError, match="12 repeats need prompts of more than 12 tokens"):
        measure_mistakes(counting(tiny("gpt2"), log := []), Workload(2, 12, 2), 12, 0)
    assert not log
