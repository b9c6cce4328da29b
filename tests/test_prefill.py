"""prefill: whole, chunked, ragged and behind a past give what the library gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import NAMES, close, counting, library_logits, library_tokens, run, threads, tiny

from pdlib.prefill import prefill
from pdlib.spec import InputError

FEW = settings(max_examples=12, deadline=None, derandomize=True, database=None)
ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=4)


def padded(model, lengths, seed=3):
    """Prompts of these lengths, padded on the right with other random tokens: (B, longest)."""
    return model.prompt(len(lengths), max(lengths), seed)


def alone(model, tokens, lengths, new):
    """What each prompt gives by itself, unpadded: tokens (B, new), logits (B, new, V)."""
    made = [run(model, tokens[b : b + 1, :n], new) for b, n in enumerate(lengths)]
    return tuple(torch.cat(parts) for parts in zip(*made, strict=True))


@pytest.mark.parametrize("kind", NAMES)
def test_tokens_are_those_of_the_librarys_generate(kind):
    model = tiny(kind)
    tokens = model.prompt(3, 11, seed=1)
    made, logits = run(model, tokens, 12)
    assert torch.equal(made, library_tokens(model, tokens, 12))
    assert len(made.unique()) >= 4  # a model that repeats itself would prove nothing
    for step in range(12):
        assert close(logits[:, step], library_logits(model, torch.cat([tokens, made[:, :step]], 1)))


@pytest.mark.parametrize("kind", NAMES)
def test_the_cache_holds_the_prompt_and_no_more(kind):
    model = tiny(kind)
    cache = model.new_cache(2, 9)
    prefill(model, model.prompt(2, 5), cache)
    assert cache.lengths == [5, 5]
    assert cache.data[..., :5, :].abs().sum(-1).all() and not cache.data[..., 5:, :].any()


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("chunk", range(1, 12))
def test_pitfall_10_chunked_prefill_is_whole_prefill(kind, chunk):
    """Every chunk size from 1 to the prompt and over it, dividing it (1, 2, 5, 10) or not."""
    model = tiny(kind)
    tokens = model.prompt(2, 10, seed=2)
    whole, chunked = model.new_cache(2, 14), model.new_cache(2, 14)
    made, logits = run(model, tokens, 4, whole)
    again, those = run(model, tokens, 4, chunked, chunk=chunk)
    assert torch.equal(made, again) and close(logits, those)
    assert chunked.lengths == whole.lengths and close(chunked.data, whole.data)


@pytest.mark.parametrize("kind", NAMES)
@FEW
@given(lengths=ROWS, chunk=st.none() | st.integers(1, 10))
def test_pitfall_08_a_ragged_batch_is_one_by_one(kind, lengths, chunk):
    """Right-padded prompts with true lengths: first token, decoded tokens and logits of each prompt alone."""
    model = tiny(kind)
    tokens = padded(model, lengths)
    made, logits = run(model, tokens, 4, lengths=lengths, chunk=chunk)
    expected, those = alone(model, tokens, lengths, 4)
    assert torch.equal(made, expected) and close(logits, those)


@pytest.mark.parametrize("kind", NAMES)
def test_pitfall_08_padding_is_never_seen(kind):
    """Other tokens in the padding change nothing: not the logits, not what decode makes of them."""
    model, lengths = tiny(kind), [2, 7, 4]
    tokens = padded(model, lengths)
    other = tokens.clone()
    for b, n in enumerate(lengths):
        other[b, n:] = (other[b, n:] + 41) % 97
    assert not torch.equal(tokens, other)
    assert torch.equal(run(model, tokens, 5, lengths=lengths)[1], run(model, other, 5, lengths=lengths)[1])


def test_the_padding_is_not_counted():
    model, lengths = tiny("gpt2"), [2, 7, 4]
    cache = model.new_cache(3, 7)
    prefill(model, padded(model, lengths), cache, lengths)
    assert cache.lengths == lengths


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("past", [1, 4, 9])
@pytest.mark.parametrize("chunk", [None, 2])
def test_pitfall_09_causal_mask_with_a_past(kind, past, chunk):
    """A second prefill behind a first one sees the first one's keys, and its own only up to itself."""
    model = tiny(kind)
    tokens = model.prompt(2, 10, seed=4)
    cache = model.new_cache(2, 14)
    prefill(model, tokens[:, :past], cache)
    logits = prefill(model, tokens[:, past:], cache, chunk=chunk)
    assert cache.lengths == [10, 10]
    assert close(logits, library_logits(model, tokens))
    whole = model.new_cache(2, 14)
    prefill(model, tokens, whole)
    assert close(cache.data, whole.data)


@pytest.mark.parametrize("kind", NAMES)
def test_a_ragged_prefill_behind_a_past(kind):
    model, past, lengths = tiny(kind), 3, [1, 5, 2]
    start, rest = model.prompt(3, past, seed=5), padded(model, lengths)
    cache = model.new_cache(3, 12)
    prefill(model, start, cache)
    logits = prefill(model, rest, cache, lengths)
    assert cache.lengths == [past + n for n in lengths]
    for b, n in enumerate(lengths):
        both = torch.cat([start[b : b + 1], rest[b : b + 1, :n]], 1)
        assert close(logits[b : b + 1], library_logits(model, both))


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("capacity", [14, 15, 32, 64])
def test_pitfall_11_any_capacity_gives_the_same_tokens(kind, capacity):
    model = tiny(kind)
    tokens = model.prompt(2, 9, seed=6)
    made, logits = run(model, tokens, 6, model.new_cache(2, capacity))
    assert torch.equal(made, library_tokens(model, tokens, 6))
    assert torch.equal(logits, run(model, tokens, 6, model.new_cache(2, 64))[1])


@pytest.mark.parametrize("filled, new, capacity", [(0, 11, 10), (5, 6, 10), (10, 1, 10)])
def test_pitfall_11_overflow_is_refused_before_any_work(filled, new, capacity):
    log: list = []
    model = counting(tiny("gpt2"), log)
    cache = model.new_cache(2, capacity)
    cache.data.normal_()
    cache.rewind(filled)
    before = cache.data.clone()
    with pytest.raises(InputError, match=rf"{filled} positions filled \+ {new} new > capacity {capacity}"):
        prefill(model, model.prompt(2, new), cache)
    assert log == [] and cache.lengths == [filled] * 2 and torch.equal(cache.data, before)


def test_pitfall_13_prompt_and_new_tokens_fill_the_models_positions():
    for kind in NAMES:
        model = tiny(kind)
        tokens = model.prompt(2, 52, seed=7)
        cache = model.new_cache(2, 64)
        assert torch.equal(run(model, tokens, 12, cache)[0], library_tokens(model, tokens, 12))
        assert cache.lengths == [63, 63]  # the last new token is not fed back


def test_pitfall_13_a_prompt_of_all_positions_works_and_one_more_does_not():
    model = tiny("gpt2")
    tokens = model.prompt(1, 64)
    assert close(prefill(model, tokens, model.new_cache(1, 64)), library_logits(model, tokens))
    with pytest.raises(InputError, match="65 positions for gpt2-tiny, which has 64"):
        model.new_cache(1, 65)
    with pytest.raises(InputError, match=r"0 positions filled \+ 65 new > capacity 64"):
        prefill(model, model.prompt(1, 65), model.new_cache(1, 64))


@pytest.mark.parametrize("kind", NAMES)
def test_pitfall_07_a_rewound_cache_gives_the_same_bits(kind):
    """After another, longer prompt the rewound cache starts equal: nothing of it is seen."""
    model = tiny(kind)
    tokens = model.prompt(2, 6, seed=8)
    cache = model.new_cache(2, 20)
    _, logits = run(model, tokens, 5, cache)
    for _ in range(2):
        cache.rewind()
        run(model, model.prompt(2, 13, seed=9), 7, cache)
        cache.rewind()
        assert torch.equal(run(model, tokens, 5, cache)[1], logits)


@pytest.mark.parametrize("lengths", [[0, 3], [1, 4], [3], [3, 3, 3], [-1, 2]])
def test_lengths_that_do_not_fit_are_refused_before_any_work(lengths):
    log: list = []
    model = counting(tiny("gpt2"), log)
    with pytest.raises(InputError, match="for 2 prompts padded to 3"):
        prefill(model, model.prompt(2, 3), model.new_cache(2, 5), lengths)
    assert log == []


@pytest.mark.parametrize("chunk", [0, -1, 1.5])
def test_a_chunk_is_a_whole_number(chunk):
    with pytest.raises(InputError, match="chunk"):
        prefill(tiny("gpt2"), tiny("gpt2").prompt(1, 3), tiny("gpt2").new_cache(1, 3), chunk=chunk)


def test_a_cache_of_another_batch_or_with_ragged_pasts_is_refused():
    model = tiny("gpt2")
    ragged = model.new_cache(2, 9)
    ragged.rewind([1, 2])
    for cache in (model.new_cache(3, 9), ragged):
        with pytest.raises(InputError, match="2 prompts needs a cache of 2 equally long requests"):
            prefill(model, model.prompt(2, 3), cache)


def test_only_the_last_tokens_logits_are_made():
    sizes: list = []
    whole = tiny("gpt2")

    def head(hidden):
        sizes.append(tuple(hidden.shape))
        return whole.head(hidden)

    model = type(whole)(whole.spec, "random", "float32", whole.device, whole.hf, whole.layers, head)
    assert prefill(model, model.prompt(3, 8), model.new_cache(3, 8), chunk=3).shape == (3, 97)
    assert sizes == [(3, 32)]


def test_prefill_runs_with_the_devices_threads():
    seen: list = []
    whole = tiny("gpt2")

    def layers(tokens, cache):
        seen.append(torch.get_num_threads())
        return whole.layers(tokens, cache)

    model = type(whole)(whole.spec, "random", "float32", whole.device, whole.hf, layers, whole.head)
    with threads(3):
        prefill(model, model.prompt(1, 4), model.new_cache(1, 4))
        assert seen == [1] and torch.get_num_threads() == 3


@pytest.mark.parametrize("kind", NAMES)
def test_bfloat16_stays_near_float32(kind):
    half, whole = tiny(kind, "bfloat16"), tiny(kind)
    tokens = whole.prompt(2, 8)
    logits = prefill(half, tokens, half.new_cache(2, 8))
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - library_logits(whole, tokens)).abs().max() / library_logits(whole, tokens).abs().max()
    assert error < 0.1
