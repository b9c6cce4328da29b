"""spec: the nouns refuse bad input by name, and a model's sizes are the library model's."""

import dataclasses

import pytest
from tiny import NAMES, tiny

from pdlib.spec import (
    GPT2,
    SCENARIOS,
    DeviceSpec,
    InputError,
    ModelSpec,
    Placement,
    Workload,
    one_of,
    whole_numbers,
)


@pytest.mark.parametrize("bad", [0, -1, 1.0, True, "3", None])
def test_a_count_is_a_whole_number_above_zero(bad):
    with pytest.raises(InputError, match=r"requests = .*at least 1"):
        whole_numbers(prompt_tokens=1, requests=bad)


def test_good_counts_pass():
    whole_numbers(requests=1, prompt_tokens=10**9)


def test_one_of_names_what_was_given_and_what_is_allowed():
    one_of("dtype", "float32", ("float32", "bfloat16"))
    with pytest.raises(InputError, match=r"unknown dtype 'int8'; choose one of: float32, bfloat16"):
        one_of("dtype", "int8", ("float32", "bfloat16"))


def test_input_error_is_a_value_error():
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize("kind", NAMES)
def test_sizes_are_the_library_models(kind):
    model = tiny(kind)
    matrices = {
        name: weight.numel()
        for name, weight in model.hf.named_parameters()
        if weight.dim() == 2 and not any(part in name for part in ("wte", "wpe", "embed", "lm_head"))
    }
    head = model.hf.get_output_embeddings().weight
    spec = model.spec
    gated = kind in ("llama", "qwen3", "mistral")
    assert spec.gated_mlp == gated
    assert spec.matmul_parameters == sum(matrices.values())
    assert spec.head_parameters == head.numel()
    assert spec.learned_positions == (kind == "gpt2")
    assert (spec.layers, spec.heads, spec.vocab, spec.positions) == (2, 4, 97, 64)
    assert spec.kv_heads == {"llama": 2, "qwen3": 2, "mistral": 1}.get(kind, 4)
    assert spec.head_dim == (16 if kind == "qwen3" else 8)


def test_gpt2_is_the_librarys_gpt2():
    import transformers

    assert ModelSpec.from_hf("gpt2", transformers.GPT2Config()) == GPT2


def config(kind, **changes):
    import transformers

    return transformers.AutoConfig.for_model(kind, **changes)


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_whether_an_mlp_is_gated_does_not_hang_on_its_activation(act):
    assert ModelSpec.from_hf("x", config("llama", hidden_act=act)).gated_mlp
    assert not ModelSpec.from_hf("x", config("gpt_neox", hidden_act=act)).gated_mlp


def test_a_model_type_that_is_not_known_is_refused():
    with pytest.raises(InputError, match="unknown model type 'mamba'; choose one of: .*gpt2.*llama"):
        ModelSpec.from_hf("x", config("mamba"))


def test_a_config_without_a_longest_sequence_is_refused():
    with pytest.raises(InputError, match="config of x does not say its longest sequence; .*max_position_embeddings"):
        ModelSpec.from_hf("x", config("bloom"))


def test_opts_mlp_has_its_own_name():
    spec = ModelSpec.from_hf("x", config("opt", hidden_size=32, ffn_dim=40, num_attention_heads=4))
    assert spec.mlp == 40 and spec.learned_positions and not spec.gated_mlp


def test_heads_must_share_kv_heads_evenly():
    with pytest.raises(InputError, match="12 heads cannot share 5 KV heads"):
        dataclasses.replace(GPT2, kv_heads=5)


@pytest.mark.parametrize("field", ["layers", "heads", "kv_heads", "head_dim", "hidden", "mlp", "vocab", "positions"])
def test_a_model_has_no_size_of_zero(field):
    with pytest.raises(InputError, match=field):
        dataclasses.replace(GPT2, **{field: 0})


def test_nouns_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        GPT2.layers = 13


@pytest.mark.parametrize("field", ["flops_per_s", "read_bytes_per_s", "copy_bytes_per_s"])
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan")])
def test_a_device_has_rates_above_zero(field, bad):
    rates = {"flops_per_s": 1.0, "read_bytes_per_s": 1.0, "copy_bytes_per_s": 1.0}
    with pytest.raises(InputError, match=field):
        DeviceSpec("d", **rates | {field: bad}, origin="measured")


@pytest.mark.parametrize("field", ["requests", "prompt_tokens", "new_tokens"])
def test_a_workload_has_counts_above_zero(field):
    with pytest.raises(InputError, match=field):
        Workload(**{"requests": 1, "prompt_tokens": 2, "new_tokens": 3} | {field: 0})


def test_the_first_new_token_is_prefills():
    work = Workload(5, 255, 256)
    assert work.decode_steps == 255
    assert work.cache_tokens == 510  # the last new token is never fed back


def test_prompt_and_new_tokens_may_fill_the_model_but_no_more():
    Workload(1, 1000, 24).check_fits(GPT2)
    with pytest.raises(InputError, match=r"1000 prompt tokens \+ 25 new tokens = 1025.*1024 positions.* by 1$"):
        Workload(1, 1000, 25).check_fits(GPT2)


def test_article_000_long_is_512_and_short_64():
    assert SCENARIOS == {"LILO": (512, 512), "LISO": (512, 64), "SILO": (64, 512), "SISO": (64, 64)}


def test_a_placement_is_separated_when_the_devices_differ():
    assert Placement("P-GPU/D-CPU", "cuda", "cpu").separated
    assert not Placement("PD-CPU", "cpu", "cpu").separated
