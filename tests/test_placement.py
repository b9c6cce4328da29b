"""placement and experiments: what is run, at which context, and what the rows say of it."""

import weakref

import pytest
import torch
from tiny import counting, tiny

from pdlib import baseline, cost, devices, experiments, kv_cache, models, placement, results
from pdlib.devices import Device, machine_name
from pdlib.experiments import Here
from pdlib.placement import Runner, article_case, filled, middle, to_rows
from pdlib.spec import InputError, Placement, Workload
from pdlib.timers import measure

WORK = Workload(3, 8, 6)  # five decode steps
LABELS = {"experiment": "test"}
MEAN = Placement("-", "cpu", "cpu")


@pytest.fixture(scope="module")
def here():
    """gpt2-tiny on a pair of CPU devices, both with one thread."""
    model = models.load("gpt2-tiny", Device("cpu", "cpu", 1))
    return Here(model, model.on(devices.parse("cpu@1")), 0)


def rows_of(case, model, repeats=2):
    names = {phase: model.device.name for phase in results.PHASES}
    return results.frame(to_rows(measure([case.arm], repeats), [case], model, names))


def colocated(model, work=WORK, steps=5):
    runner = Runner(model, model, work.requests, work.prompt_tokens, work.cache_tokens)
    return runner.case(work, MEAN, LABELS, steps)


@pytest.mark.parametrize("prompt, new, steps, start", [(8, 6, 5, 8), (8, 6, 1, 10), (8, 6, 3, 9), (512, 513, 8, 764)])
def test_middle_is_where_the_steps_see_the_mean_context(prompt, new, steps, start):
    work = Workload(1, prompt, new)
    assert middle(work, steps) == start
    whole = sum(range(prompt + 1, prompt + work.decode_steps + 1)) / work.decode_steps
    part = sum(range(start + 1, start + steps + 1)) / steps
    assert abs(whole - part) <= 0.5


def test_timed_steps_run_around_the_middle():
    log: list = []
    case = colocated(counting(tiny("gpt2"), log), steps=3)
    measure([case.arm], 1, warm_up=0)
    assert log == [((3, 8), [0] * 3)] + [((3, 1), [9 + i] * 3) for i in range(3)]


def test_pitfall_05_the_first_token_is_prefills_and_not_in_the_decode_rows():
    """new_tokens − 1 passes are timed as decode, and as many tokens a request are counted."""
    log: list = []
    model = counting(tiny("gpt2"), log)
    case = colocated(model)
    rows = rows_of(case, model, repeats=1)
    passes = log[len(log) // 2 :]  # behind the warm-up
    assert [shape for shape, _ in passes] == [(3, 8)] + [(3, 1)] * 5
    assert rows.set_index("phase")["tokens"].to_dict() == {"prefill": 3 * 8, "decode": 3 * 5}
    assert set(rows["new_tokens"]) == {6}
    step = case.arm.steps[1]
    log.clear()
    case.arm.steps[0].run()
    step.before()
    log.clear()
    step.run()
    assert [shape for shape, _ in log] == [(3, 1)] * 5  # no prefill inside what is timed as decode


def test_pitfall_06_decode_rows_count_the_steps_really_run():
    for steps in (1, 2, 5, 50):
        log: list = []
        model = counting(tiny("gpt2"), log)
        rows = rows_of(colocated(model, steps=steps), model, repeats=1)
        run = [shape for shape, _ in log[len(log) // 2 :] if shape == (3, 1)]
        assert len(run) == min(steps, 5)
        assert rows.loc[rows["phase"] == "decode", "tokens"].tolist() == [3 * len(run)]


def test_pitfall_04_the_warm_up_runs_both_phases_at_the_shapes_measured():
    log: list = []
    case = colocated(counting(tiny("gpt2"), log))
    measure([case.arm], 1, warm_up=0)
    cold, log[:] = list(log), []
    measure([case.arm], 1)
    assert log == cold * 2


def test_pitfall_07_every_repeat_runs_at_the_same_context():
    log: list = []
    case = colocated(counting(tiny("gpt2"), log))
    measure([case.arm], 3)
    turns = [log[i : i + 6] for i in range(0, len(log), 6)]
    assert len(turns) == 4 and all(turn == turns[0] for turn in turns)
    assert turns[0] == [((3, 8), [0] * 3)] + [((3, 1), [8 + i] * 3) for i in range(5)]


def test_pitfall_07_the_articles_growing_cache_is_fresh_for_every_repeat(monkeypatch):
    contexts: list = []
    real = baseline.decode

    def decode(model, started, steps):
        contexts.append((steps, started.cache.get_seq_length()))
        return real(model, started, steps)

    monkeypatch.setattr(baseline, "decode", decode)
    case = article_case(tiny("gpt2"), WORK, LABELS, 3)
    measure([case.arm], 3)
    assert contexts == [(3, 9)] * 4


def test_the_article_is_timed_in_its_own_way():
    model = tiny("gpt2")
    rows = rows_of(article_case(model, WORK, LABELS, 5), model)
    assert set(rows["kernel"]) == {"article"} and rows["phase"].tolist() == ["prefill", "decode"] * 2
    assert rows["tokens"].tolist() == [24, 15] * 2


@pytest.mark.parametrize("make", [colocated, lambda model, work: article_case(model, work, LABELS, 5)])
def test_pitfall_13_positions_are_checked_before_any_work(make):
    log: list = []
    model = counting(tiny("gpt2"), log)
    rows_of(make(model, Workload(1, 58, 6)), model, 1)
    log.clear()
    with pytest.raises(InputError, match=r"59 prompt tokens \+ 6 new tokens = 65, but gpt2-tiny has 64 positions"):
        make(model, Workload(1, 59, 6))
    assert log == []


def test_a_filled_cache_has_a_context_and_room():
    cache = filled(tiny("gpt2"), 2, 5, 3)
    assert cache.lengths == [5, 5] and cache.capacity == 8 and cache.data.std() > 0.9


def test_one_new_token_has_no_decode(here):
    rows = rows_of(colocated(here.model, Workload(2, 8, 1)), here.model)
    assert set(rows["phase"]) == {"prefill"}


def test_placements_are_three_and_only_the_split_moves_a_cache(here):
    scenarios = {"LISO": (24, 4), "SISO": (8, 4)}
    rows = results.frame(experiments.placements(here, 2, scenarios, 3, 2))
    names = ["PD-fast", "P-fast/D-slow", "PD-slow"]
    assert set(rows["placement"]) == set(names) and set(rows["experiment"]) == {"placements"}
    for (scenario, place, repeat), part in rows.groupby(["scenario", "placement", "repeat"]):
        split = place == "P-fast/D-slow"
        phases = ["prefill", "transfer", "decode"] if split else ["prefill", "decode"]
        assert part["phase"].tolist() == phases, (scenario, place, repeat)
        p, d = {"PD-fast": ("cpu",) * 2, "PD-slow": ("cpu@1",) * 2}.get(place, ("cpu", "cpu@1"))
        assert part["device"].tolist() == ([p, p, d] if split else [p, d])
    moves = rows[rows["phase"] == "transfer"]
    kappa = cost.kv_bytes_per_token(here.model.spec)
    moved = moves.groupby("scenario")["bytes"].unique().to_dict()
    assert {k: list(v) for k, v in moved.items()} == {"LISO": [kappa * 24 * 2], "SISO": [kappa * 8 * 2]}
    assert (moves["tokens"] == 2 * moves["prompt_tokens"]).all()
    assert set(rows["repeat"]) == {0, 1} and (rows["machine"] == machine_name()).all()
    for _, part in rows.groupby("scenario"):  # arms are interleaved: each repeat has each placement once
        places = part.drop_duplicates("order").sort_values("order")["placement"].tolist()
        assert sorted(places[:3]) == sorted(places[3:]) == sorted(names)


def test_the_caches_of_a_scenario_are_freed_before_the_next(here, monkeypatch):
    alive, made = [], []
    real = models.Model.new_cache

    def new_cache(model, requests, capacity):
        alive.append(sum(there() is not None for there in made))
        cache = real(model, requests, capacity)
        made.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(models.Model, "new_cache", new_cache)
    experiments.placements(here, 1, {"LISO": (12, 3), "SISO": (6, 3)}, 2, 1)
    assert alive == [0, 1, 2, 3] * 2


def test_pitfall_02_a_transfer_ends_when_the_receiver_is_done(here, monkeypatch):
    waited: list = []
    case = Runner(here.model, here.slow, 2, 9, 15).case(Workload(2, 9, 7), Placement("-", "a", "b"), LABELS, 6)
    case.arm.steps[0].run()
    monkeypatch.setattr(Device, "synchronize", lambda device: waited.append(device.name))
    (hand_over,) = [step for step in case.arm.steps if step.phase == "transfer"]
    hand_over.run()
    assert waited[-1] == "cpu@1"


def test_the_split_goes_on_with_the_tokens_of_the_colocated(here):
    made: list = []
    real = placement.decode

    def decode(*arguments):
        made.append(real(*arguments))
        return made[-1]

    work = Workload(2, 9, 7)
    for p, d in ((here.model, here.model), (here.model, here.slow)):
        case = Runner(p, d, 2, 9, work.cache_tokens).case(work, Placement("-", "a", "b"), LABELS, 6)
        try:
            placement.decode = decode
            measure([case.arm], 1, warm_up=0)
        finally:
            placement.decode = real
    assert torch.equal(made[0], made[1])


def test_placements_on_an_accelerator_have_the_articles_names(here):
    model = tiny("gpt2")
    gpu = models.Model(model.spec, "random", "float32", Device("mps", "mps", 0), model.hf, model.layers, model.head)
    assert Here(gpu, here.model, 0).placements == ("PD-GPU", "P-GPU/D-CPU", "PD-CPU")
    for fast, slow in ((gpu, gpu), (here.model, gpu), (here.model, here.slow)):
        assert Here(fast, slow, 0).placements == ("PD-fast", "P-fast/D-slow", "PD-slow")


@pytest.mark.parametrize("name", ["roofline", "by_batch"])
def test_batches_are_measured_in_both_phases(here, name):
    rows = results.frame(getattr(experiments, name)(here, [1, 3], 8, 2, 2))
    assert set(rows["experiment"]) == {name} and set(rows["kernel"]) == {"pdlib"}
    assert rows.groupby(["requests", "phase"]).size().to_dict() == {
        (b, phase): 2 for b in (1, 3) for phase in ("prefill", "decode")
    }
    decode = rows[rows["phase"] == "decode"]
    assert (decode["tokens"] == decode["requests"] * 2).all() and set(decode["new_tokens"]) == {3}
    for b in (1, 3):
        part = rows[rows["requests"] == b].set_index("phase")["bytes"]
        assert set(part["prefill"]) == {int(cost.prefill(here.model.spec, b, 8).bytes)}
        assert set(part["decode"]) == {int(cost.decode(here.model.spec, b, 8, 2).bytes)}


def test_phases_holds_the_article_beside_pdlib(here):
    rows = results.frame(experiments.phases(here, 2, 8, 20, 3, 2))
    assert set(rows["kernel"]) == {"article", "pdlib"} and set(rows["experiment"]) == {"phases"}
    assert (rows.loc[rows["phase"] == "decode", "tokens"] == 2 * 3).all()  # three steps timed of nineteen
    assert set(rows["new_tokens"]) == {20}


def test_extrapolation_times_the_whole_and_its_middle(here):
    rows = results.frame(experiments.extrapolation(here, 2, 8, 20, 3, 2))
    tokens = rows[rows["phase"] == "decode"].groupby("scenario")["tokens"].unique()
    assert {k: list(v) for k, v in tokens.items()} == {"whole": [2 * 19], "middle": [2 * 3]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pitfall_23_rows_say_dtype_kernel_and_weights(dtype):
    model = tiny("gpt2", dtype)
    cases = [colocated(model), article_case(model, WORK, LABELS, 5)]
    names = {phase: "cpu" for phase in results.PHASES}
    rows = results.frame(to_rows(measure([case.arm for case in cases], 1), cases, model, names))
    assert set(rows["dtype"]) == {dtype} and set(rows["weights"]) == {"random"}
    assert set(rows["kernel"]) == {"pdlib", "article"} and set(rows["model"]) == {"gpt2-tiny"}


def test_the_puzzle_is_about_the_cpu_of_a_pair(here, monkeypatch):
    asked: list = []
    monkeypatch.setattr(experiments, "measure_puzzle", lambda *a: asked.append(a) or [])
    model = here.model
    gpu = models.Model(model.spec, "random", "float32", Device("mps", "mps", 0), model.hf, model.layers, model.head)
    for pair in (Here(gpu, model, 7), here, Here(here.slow, here.slow, 7)):
        experiments.puzzle(pair, "gpt2-4-layers", 20, 512, 4, 5)
    assert [a[2] for a in asked] == ["cpu", "cpu", "cpu@1"]
    assert asked[0][0] == "gpt2-4-layers" and asked[0][3] == {"long": Workload(20, 512, 5)}


def test_lengthening_keeps_what_is_there():
    started = baseline.prefill(tiny("gpt2"), tiny("gpt2").prompt(2, 5))
    before = [(k.clone(), v.clone()) for k, v in kv_cache.growing_tensors(started.cache)]
    kv_cache.lengthen_growing(started.cache, 9)
    for (k, v), (k2, v2) in zip(before, kv_cache.growing_tensors(started.cache), strict=True):
        assert torch.equal(k2[:, :, :5], k) and torch.equal(v2[:, :, :5], v) and k2.shape[2] == 9
