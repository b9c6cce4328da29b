"""decode: as many tokens as asked for, each request at its own position, no end but the count."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import NAMES, close, counting, library_logits, library_tokens, run, tiny

from pdlib import baseline
from pdlib.decode import decode, decode_step
from pdlib.prefill import prefill
from pdlib.spec import InputError


@pytest.mark.parametrize("kind", NAMES)
def test_n_steps_are_n_times_one_step(kind):
    model = tiny(kind)
    tokens = model.prompt(3, 7, seed=1)
    cache = model.new_cache(3, 16)
    first = prefill(model, tokens, cache).argmax(-1)
    made = decode(model, first, cache, 9)
    assert cache.lengths == [16] * 3
    assert torch.equal(torch.cat([first[:, None], made], 1), library_tokens(model, tokens, 10))
    assert torch.equal(torch.cat([first[:, None], made], 1), run(model, tokens, 10)[0])


@pytest.mark.parametrize("kind", NAMES)
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4), steps=st.integers(1, 5))
def test_pitfall_08_ragged_decode_keeps_each_requests_position(kind, lengths, steps):
    model = tiny(kind)
    tokens = model.prompt(len(lengths), max(lengths), seed=2)
    cache = model.new_cache(len(lengths), max(lengths) + steps)
    first = prefill(model, tokens, cache, lengths).argmax(-1)
    made = torch.cat([first[:, None], decode(model, first, cache, steps)], 1)
    assert cache.lengths == [n + steps for n in lengths]
    for b, n in enumerate(lengths):
        prompt = tokens[b : b + 1, :n]
        for step in range(steps + 1):
            logits = library_logits(model, torch.cat([prompt, made[b : b + 1, :step]], 1))
            assert logits.argmax(-1).item() == made[b, step].item()


@pytest.mark.parametrize("kind", NAMES)
def test_ragged_logits_are_those_of_each_request_alone(kind):
    model, lengths = tiny(kind), [6, 1, 4]
    tokens = model.prompt(3, 6, seed=3)
    _, logits = run(model, tokens, 5, lengths=lengths)
    for b, n in enumerate(lengths):
        assert close(logits[b : b + 1], run(model, tokens[b : b + 1, :n], 5)[1])


def test_pitfall_09_a_decode_step_sees_every_key_and_not_the_first_alone():
    """Another token anywhere in the past changes the next logits: no key is out of sight."""
    for kind in NAMES:
        model = tiny(kind)
        tokens = model.prompt(1, 6, seed=4)
        for place in range(6):
            other = tokens.clone()
            other[0, place] = (other[0, place] + 13) % 97
            seen = []
            for prompt in (tokens, other):
                cache = model.new_cache(1, 7)
                prefill(model, prompt, cache)
                seen.append(decode_step(model, torch.tensor([5]), cache))
            assert (seen[0] - seen[1]).abs().max() > 1e-3, (kind, place)


@pytest.mark.parametrize("prompt, steps", [(20, 3), (3, 20), (8, 8), (8, 1)])
def test_pitfall_06_the_number_of_new_tokens_is_counted(prompt, steps):
    """As many as asked for, however long the prompt; one pass through the layers each, at contexts one apart."""
    log: list = []
    model = counting(tiny("gpt2"), log)
    cache = model.new_cache(2, prompt + steps)
    cache.rewind(prompt)
    made = decode(model, torch.tensor([3, 5]), cache, steps)
    assert made.shape == (2, steps)
    assert log == [((2, 1), [prompt + i] * 2) for i in range(steps)]


@pytest.mark.parametrize("steps", [0, -1, 2.0, True])
def test_steps_are_a_whole_number(steps):
    log: list = []
    model = counting(tiny("gpt2"), log)
    with pytest.raises(InputError, match="steps"):
        decode(model, torch.tensor([3]), model.new_cache(1, 9), steps)
    assert log == []


@pytest.mark.parametrize("lengths", [[6, 6], [1, 6]])
def test_pitfall_11_overflow_is_refused_before_the_first_step(lengths):
    """Not after the steps that still fit."""
    log: list = []
    model = counting(tiny("gpt2"), log)
    cache = model.new_cache(2, 10)
    cache.rewind(lengths)
    before = cache.data.clone()
    with pytest.raises(InputError, match=r"6 positions filled \+ 5 new > capacity 10; make it with capacity ≥ 11"):
        decode(model, torch.tensor([3, 5]), cache, 5)
    assert log == [] and cache.lengths == lengths and torch.equal(cache.data, before)
    decode(model, torch.tensor([3, 5]), cache, 4)
    assert len(log) == 4
    with pytest.raises(InputError, match=r"10 positions filled \+ 1 new > capacity 10"):
        decode_step(model, torch.tensor([3, 5]), cache)
    assert len(log) == 4


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 1)])
def test_one_token_a_request(shape):
    model = tiny("gpt2")
    with pytest.raises(InputError, match="tokens for 2 requests: give one token each"):
        decode_step(model, torch.zeros(shape, dtype=torch.long), model.new_cache(2, 9))


@pytest.mark.parametrize("kind", NAMES)
def test_pitfall_15_an_end_of_text_token_ends_nothing(kind):
    """Every token the model makes is called end-of-text in turn: the counts stay, in both loops."""
    model = tiny(kind)
    tokens = model.prompt(2, 6, seed=5)
    expected = run(model, tokens, 9)[0]
    known = model.hf.config.eos_token_id
    try:
        for token in expected.unique().tolist():
            model.hf.config.eos_token_id = model.hf.generation_config.eos_token_id = token
            cache = model.new_cache(2, 16)
            first = prefill(model, tokens, cache).argmax(-1)
            assert torch.equal(decode(model, first, cache, 8), expected[:, 1:])
            assert torch.equal(baseline.decode(model, baseline.prefill(model, tokens), 8), expected[:, 1:])
    finally:
        model.hf.config.eos_token_id, model.hf.generation_config.eos_token_id = known, None


@pytest.mark.parametrize("kind", NAMES)
def test_pitfall_07_repeats_of_decode_start_at_the_same_context(kind):
    model = tiny(kind)
    cache = model.new_cache(2, 20)
    first = prefill(model, model.prompt(2, 9, seed=6), cache).argmax(-1)
    made = []
    for _ in range(3):
        cache.rewind(9)
        made.append(decode(model, first, cache, 6))
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])
