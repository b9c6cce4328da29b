"""latency: what was put into made-up rows comes out of the fit; nothing held out leaks in; bad rows are refused."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from pdlib import latency, presets
from pdlib.latency import form
from pdlib.spec import GPT2, DeviceSpec, InputError, ModelSpec

CPU = DeviceSpec("cpu", 130e9, 24e9, 24e9, "made up")
SMOL = presets.model("smollm2-135m")
LLAMA = presets.model("llama-2-70b")
TRUE = {
    "overhead": 5e-5,
    "compute": 0.85,
    "stream": 0.6,
    "overlap": 1.1,
    "activations": 0.5,
    "attention": 0.5,
    "kv": 0.4,
    "link": 0.3,
    "sequence": 3e-5,
}


def made(models=(GPT2, SMOL), noise=0.0, seed=0, chunks=True, mixed=True):
    """Rows that follow the formula with TRUE, times a random factor of e^noise."""
    sizes = [("prefill", b, n, 1, "pdlib") for b, n in [(1, 16), (1, 64), (1, 256), (1, 1000), (4, 32), (8, 128)]]
    sizes += [("decode", b, c, 5, "pdlib") for b, c in [(1, 60), (1, 900), (2, 300), (8, 500), (16, 60), (32, 700)]]
    if chunks:
        sizes += [("prefill", 1, 500, 1, "pdlib chunk=96"), ("prefill", 1, 64, 1, "pdlib past=448")]
        sizes += [("prefill", 1, 200, 1, "pdlib chunk=128 past=64")]
    if mixed:
        sizes += [("prefill", 1, 64, 1, "pdlib past=256 decodes=8 context=512")]
    rows = []
    for model in models:
        for phase, requests, tokens, new, kernel in sizes:
            row = {"model": model.name, "phase": phase, "requests": requests, "prompt_tokens": tokens}
            row |= {"new_tokens": new, "kernel": kernel, "machine": "m", "device": "cpu", "dtype": "float32"}
            rows.append(row)
    table = pd.DataFrame(rows)
    generator = np.random.default_rng(seed)
    for model in models:
        own = table.index[table["model"] == model.name]
        work = latency.of_rows(table.loc[own])
        step = form.seconds(TRUE, form.sizes(model, CPU), work)
        steps = np.maximum(table.loc[own, "new_tokens"] - 1, 1)
        table.loc[own, "seconds"] = step * steps * np.exp(noise * generator.standard_normal(len(own)))
    return table


def test_what_was_put_in_comes_out():
    rows = made()
    fit = latency.fit(rows, CPU)
    held = latency.predicted(fit, latency.shapes(rows))
    assert held["error"].abs().max() < 0.03  # the priors pull a little where rows say little
    found = fit.parameters().set_index("name")
    for name in ("compute", "stream", "kv", "attention"):
        assert found.loc[name, "value"] == pytest.approx(TRUE[name], rel=0.25)
        assert found.loc[name, "low"] < TRUE[name] < found.loc[name, "high"]
    assert (found["unit"].str.len() > 0).all() and (found["meaning"].str.len() > 10).all()


def test_one_disturbed_sample_or_shape_does_not_move_the_fit():
    rows = made(noise=0.02)
    clean = latency.fit(rows, CPU)
    late = rows.assign(seconds=rows["seconds"] * 3)
    assert latency.fit(pd.concat([rows, rows, late]), CPU).values == pytest.approx(clean.values, rel=1e-6)
    one = rows.copy()
    one.loc[3, "seconds"] *= 4
    moved = latency.predicted(latency.fit(one, CPU), latency.shapes(rows.drop(index=3)))
    assert moved["error"].abs().median() < 0.06


def test_the_interval_holds_nine_in_ten():
    inside = []
    for seed in range(6):
        inside += list(latency.holdout(made(noise=0.08, seed=seed), CPU, "shape", seed=seed)["inside"])
    assert 0.80 <= np.mean(inside) <= 0.99


@pytest.mark.parametrize("by", ["shape", "model", "mixed"])
def test_a_fit_does_not_see_what_it_holds_out(by):
    """Held-out rows made a thousand times slower change no prediction."""
    rows = made(noise=0.05)
    before = latency.holdout(rows, CPU, by)
    assert len(before)
    first = before[before["fold"] == before["fold"].iloc[0]]
    key = [*latency.SHAPE]
    touched = rows.merge(first[key].assign(held=True), on=key, how="left")["held"].notna().to_numpy()
    assert touched.any() and not touched.all()
    slow = rows.assign(seconds=np.where(touched, rows["seconds"] * 1000, rows["seconds"]))
    after = latency.holdout(slow, CPU, by)
    after = after[after["fold"] == before["fold"].iloc[0]]
    assert list(after["predicted"]) == list(first["predicted"])
    assert (after["measured"] > 900 * first["measured"]).all()


def test_the_split_follows_the_seed_and_covers_every_size_once():
    rows = made()
    one, same, other = (latency.holdout(rows, CPU, "shape", seed=s) for s in (0, 0, 1))
    assert one.equals(same) and not one["prompt_tokens"].equals(other["prompt_tokens"])
    assert not one.duplicated(latency.SHAPE).any() and len(one) == len(latency.shapes(rows))


def test_twins_stay_on_one_side():
    twin = made()
    twin = pd.concat([twin, twin.assign(new_tokens=np.where(twin["phase"] == "decode", 6, 1))])
    held = latency.holdout(twin, CPU, "shape")
    sides = held.groupby(["model", "phase", "kernel", "requests", "prompt_tokens"])["fold"].nunique()
    assert (sides == 1).all()


def test_errors_are_medians_and_shares():
    held = pd.DataFrame({"error": [0.1, -0.2, 0.3], "inside": [True, False, True], "fold": ["a", "a", "b"]})
    found = latency.errors(held).iloc[0]
    assert (found["median"], found["shapes"]) == (0.2, 3) and found["coverage"] == pytest.approx(2 / 3)
    assert list(latency.errors(held, ["fold"])["shapes"]) == [2, 1]


def test_rows_of_one_batch_size_name_what_they_leave_open():
    wide = latency.fit(made(), CPU)
    rows = made(models=(GPT2,), chunks=False, mixed=False)
    one = rows[(rows["requests"] == 1)]
    more = [
        one.assign(prompt_tokens=one["prompt_tokens"] + i, seconds=one["seconds"] * (1 + i / 1e4)) for i in range(3)
    ]
    narrow = latency.fit(pd.concat(more), CPU)
    assert "sequence" in narrow.unidentified and "sequence" not in wide.unidentified
    said = narrow.parameters().set_index("name")["identified"]
    assert not said["sequence"] and said["compute"]
    far = narrow.predict(latency.decode([1, 64], 500), GPT2)
    assert far["warning"].iloc[0] == "" and "decoding sequences" in far["warning"].iloc[1]


def test_far_outside_the_rows_is_said_and_widens():
    fit = latency.fit(made(noise=0.05), CPU)
    near, far = (fit.predict(latency.prefill(1, n), GPT2).iloc[0] for n in (512, 30_000))
    assert near["warning"] == "" and "far outside the rows" in far["warning"]
    assert np.log(far["high"] / far["low"]) > 1.3 * np.log(near["high"] / near["low"])


def test_another_model_and_another_device_widen():
    fit = latency.fit(made(models=(GPT2,), noise=0.05), CPU)
    work = latency.decode(8, 300)
    own, other = fit.predict(work, GPT2).iloc[0], fit.predict(work, SMOL).iloc[0]
    there = fit.to(dataclasses.replace(CPU, name="twice", flops_per_s=260e9, read_bytes_per_s=48e9)).predict(
        work, GPT2
    )
    assert "smollm2-135m is not among the rows" in other["warning"]
    assert "twice is known by its data sheet alone" in there["warning"].iloc[0]

    def width(row):
        return np.log(row["high"] / row["low"])

    assert width(other) > width(own) and width(there.iloc[0]) > width(own)
    assert there["seconds"].iloc[0] == pytest.approx(own["seconds"] / 2)  # everything twice as fast


@pytest.mark.parametrize("name, devices", [("gpt2", 1), ("llama-2-70b", 8), ("mixtral-8x7b", 2), ("deepseek-v3", 16)])
def test_the_fast_form_is_the_plain_form(name, devices):
    model = presets.model(name)
    fit = latency.a100().to(presets.device("h100-sxm", "float16"))
    fast = fit.specialise(model, devices)

    def plain(work):
        return fit.seconds(work, model, devices)[0]

    for requests, n, past in [(1, 1, 0), (1, 500, 0), (3, 40, 7), (16, 700, 100)]:
        assert fast.prefill(requests, n, past) == pytest.approx(plain(latency.prefill(requests, n, past)), rel=1e-12)
        assert fast.decode(requests, requests * n) == pytest.approx(plain(latency.decode(requests, n)), rel=1e-12)
        both = plain(latency.mixed(n, past, requests, 77))
        assert fast.mixed(n, past, requests, requests * 77) == pytest.approx(both, rel=1e-12)
    steps = [plain(latency.decode(5, 100 + i)) for i in range(64)]
    assert fast.decode_sum(5, 500, 64) == pytest.approx(sum(steps), rel=1e-12)
    assert fast.decode_sum(5, 500, 1) == pytest.approx(fast.decode(5, 500), rel=1e-12)
    chunks = latency.prefill(1, 1000, chunk=256)
    passes = [fast.prefill(1, min(256, 1000 - s), s, logits=s + 256 >= 1000) for s in range(0, 1000, 256)]
    assert plain(chunks) == pytest.approx(sum(passes), rel=1e-12)


def test_many_batches_are_predicted_as_one_by_one():
    fit = latency.a100()
    new, decodes = np.array([1, 64, 500, 2000]), np.array([1, 3, 9, 64])
    whole = fit.seconds(latency.mixed(new, 100, decodes, 300), LLAMA, 4)
    singly = [fit.seconds(latency.mixed(n, 100, b, 300), LLAMA, 4)[0] for n, b in zip(new, decodes, strict=True)]
    assert list(whole) == pytest.approx(singly)
    assert fit.parts(latency.mixed(new, 100, decodes, 300), LLAMA, 4).sum(axis=1).tolist() == pytest.approx(singly)
    chunked = latency.prefill([1, 2, 3], [500, 300, 100], chunk=128)
    singly = [fit.seconds(latency.prefill(b, n, chunk=128), LLAMA, 4)[0] for b, n in [(1, 500), (2, 300), (3, 100)]]
    assert list(fit.seconds(chunked, LLAMA, 4)) == pytest.approx(singly)


def test_time_grows_with_the_work_and_never_undercuts_the_roofline():
    fit = latency.a100()
    by_tokens = fit.seconds(latency.prefill(1, np.arange(1, 4000, 37)), LLAMA, 8)
    by_context = fit.seconds(latency.decode(16, np.arange(1, 4000, 37)), LLAMA, 8)
    assert (np.diff(by_tokens) > 0).all() and (np.diff(by_context) > 0).all()
    parts = fit.parts(latency.decode(1, 100), LLAMA, 8).iloc[0]
    assert parts["link"] > 0 and (fit.parts(latency.decode(1, 100), LLAMA, 8) >= 0).all(axis=None)
    weights = 2 * (LLAMA.matmul_parameters + LLAMA.head_parameters) / 8 / 2039e9
    assert parts["layers"] + parts["head"] > weights


def test_a_fused_step_reads_the_weights_once():
    fit = latency.a100()
    fused, apart = (fit.seconds(latency.mixed(64, 0, 8, 500, fused=f), LLAMA, 8)[0] for f in (True, False))
    assert fused < apart


def test_a_fit_goes_through_a_file():
    fit = latency.fit(made(noise=0.05), CPU)
    assert latency.Fit.from_json(fit.to_json()) == fit
    for bad in ("", "{}", "[1]", fit.to_json().replace("compute", "computer")):
        with pytest.raises(InputError, match="not a fit"):
            latency.Fit.from_json(bad)


def test_bad_rows_are_refused():
    rows = made()
    two = pd.concat([rows, rows.assign(machine="other")])
    for bad, said in [
        (two, "several machines: m, other"),
        (pd.concat([rows, rows.assign(device="cpu@1")]), "several devices"),
        (pd.concat([rows, rows.assign(dtype="bfloat16")]), "several dtypes"),
        (rows.head(5), "5 shapes for 8 parameters"),
        (pd.concat([rows.head(5)] * 9), "5 shapes for 8 parameters"),
        (rows.assign(seconds=0.0), "no seconds above 0"),
        (rows.assign(seconds=np.nan), "no seconds above 0"),
        (rows.head(0), "no seconds above 0"),
        (rows.drop(columns="kernel"), "lack the column 'kernel'"),
        (rows.assign(phase="transfer"), "knows prefill and decode"),
        (rows.assign(model="nobody"), "unknown model 'nobody'"),
    ]:
        with pytest.raises(InputError, match=said):
            latency.fit(bad, CPU)
    with pytest.raises(InputError, match="sizes are not given"):
        latency.fit(rows, CPU, {"gpt2": GPT2})
    with pytest.raises(InputError, match="unknown rule"):
        latency.holdout(rows, CPU, "luck")
    with pytest.raises(InputError, match="nothing to hold out"):
        latency.holdout(made(mixed=False), CPU, "mixed")


def test_bad_questions_are_refused():
    fit = latency.a100()
    work = latency.decode(1, 100)
    for call, said in [
        (lambda: fit.predict(work, LLAMA, 3), "do not spread over 3 devices"),
        (lambda: fit.predict(work, LLAMA, 8, level=1.5), "level"),
        (lambda: fit.to(CPU, "float32").predict(work, LLAMA, 8), "no link bandwidth"),
        (lambda: latency.decode(0, 100), "requests"),
        (lambda: latency.prefill(1, [5, -1]), "new"),
        (lambda: latency.prefill(1, 5, past=-1), "past"),
        (lambda: latency.prefill(1, 5, chunk=-1), "chunk"),
        (lambda: latency.prefill(1, [[5]]), "flat lists"),
        (lambda: latency.decode(1, float("inf")), "context"),
        (lambda: latency.decode(1, [1, 2]) + latency.decode(1, 5), "do not pair up"),
        (lambda: ModelSpec("m", 1, 3, 2, 8, 32, 48, 97, 64), "multiple of kv_heads"),
        (lambda: DeviceSpec("d", 1e12, 0.0, 1e9, "-"), "read_bytes_per_s"),
        (lambda: latency.calibrated("nowhere"), "make calibrate"),
    ]:
        with pytest.raises(InputError, match=said):
            call()
