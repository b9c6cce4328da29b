"""presets: sizes against the library's own models, built without memory; numbers with a source each."""

import pytest
import torch
import transformers

from pdlib import cost, presets
from pdlib.spec import GPT2, InputError, ModelSpec


def config_of(spec):
    """The library's config of a preset, by hand from its sizes."""
    common = dict(vocab_size=spec.vocab, hidden_size=spec.hidden, max_position_embeddings=spec.positions)
    common |= dict(num_hidden_layers=spec.layers, num_attention_heads=spec.heads, tie_word_embeddings=spec.tied_head)
    grouped = common | dict(num_key_value_heads=spec.kv_heads, intermediate_size=spec.mlp)
    family = spec.name.partition("-")[0]
    if family == "gpt2":
        sizes = dict(n_embd=spec.hidden, n_layer=spec.layers, n_head=spec.heads, vocab_size=spec.vocab)
        return transformers.GPT2Config(**sizes, n_positions=spec.positions)
    if family == "opt":
        return transformers.OPTConfig(**common, ffn_dim=spec.mlp, word_embed_proj_dim=spec.hidden)
    if family == "bloom":
        return transformers.BloomConfig(
            vocab_size=spec.vocab,
            hidden_size=spec.hidden,
            n_layer=spec.layers,
            n_head=spec.heads,
            seq_length=spec.positions,  # as its checkpoint says; the class does not
        )
    if family == "mixtral":
        experts = dict(num_local_experts=spec.experts, num_experts_per_tok=spec.experts_per_token)
        return transformers.MixtralConfig(**grouped | experts)
    if family == "deepseek":
        return transformers.DeepseekV3Config(
            **grouped,
            n_routed_experts=spec.experts,
            n_shared_experts=spec.shared_experts,
            num_experts_per_tok=spec.experts_per_token,
            moe_intermediate_size=spec.expert_mlp,
            first_k_dense_replace=spec.dense_layers,
            kv_lora_rank=spec.kv_rank,
            q_lora_rank=spec.q_rank,
            qk_nope_head_dim=spec.head_dim,
            qk_rope_head_dim=spec.rope_dim,
            v_head_dim=spec.head_dim,
        )
    if family == "qwen3" and spec.experts:
        experts = dict(num_experts=spec.experts, num_experts_per_tok=spec.experts_per_token)
        experts |= dict(moe_intermediate_size=spec.expert_mlp, decoder_sparse_step=1, mlp_only_layers=[])
        return transformers.Qwen3MoeConfig(**grouped | experts, head_dim=spec.head_dim)
    kind = transformers.Qwen3Config if family == "qwen3" else transformers.LlamaConfig
    return kind(**grouped, head_dim=spec.head_dim)


@pytest.mark.parametrize("name", presets.models()["name"])
def test_the_librarys_model_has_the_same_matrices(name):
    spec = presets.model(name)
    config = config_of(spec)
    assert ModelSpec.from_hf(name, config) == spec
    with torch.device("meta"):  # shapes without memory
        hf = transformers.AutoModelForCausalLM.from_config(config)
    sizes = [weight.numel() for weight in hf.parameters() if weight.dim() > 1]
    extra = 2 * spec.hidden if name.startswith("opt") else 0  # OPT's table of positions begins two rows early
    assert sum(sizes) == spec.parameters + extra
    everything = sum(weight.numel() for weight in hf.parameters())
    assert spec.parameters == pytest.approx(everything, rel=2e-3)  # norms and biases are the rest


@pytest.mark.parametrize(
    "name, total, active",
    # Published sizes in 10⁹: model cards; active ones by the same count without the token embedding
    [
        ("llama-2-7b", 6.74, None),
        ("llama-2-70b", 69.0, None),
        ("mixtral-8x7b", 46.7, 12.9),
        ("qwen3-235b-a22b", 235, 22),
        ("deepseek-v3", 671, 37),
        ("bloom-176b", 176, None),
    ],
)
def test_published_sizes(name, total, active):
    spec = presets.model(name)
    assert spec.parameters / 1e9 == pytest.approx(total, rel=0.005)
    if active:
        assert (spec.matmul_parameters + spec.head_parameters) / 1e9 == pytest.approx(active, rel=0.03)


def test_gpt2_is_the_one_of_spec():
    assert presets.model("gpt2") == GPT2


def test_every_number_of_a_device_has_a_source_and_is_plausible():
    table = presets.devices()
    assert table.notna().all().all() and (table["source"].str.len() > 10).all() and (table["value"] > 0).all()
    assert not table.duplicated(["name", "quantity"]).any()
    for name, own in table.groupby("name"):
        quantities = set(own["quantity"])
        assert {"read_bytes_per_s", "float32"} <= quantities, name
        for dtype in quantities & {"float32", "float16", "bfloat16", "float8"}:
            spec = presets.device(name, dtype)
            ridge = spec.flops_per_s / spec.read_bytes_per_s  # FLOP/B
            assert 5 < ridge < 1000, name
            assert spec.origin


def test_every_model_has_a_source():
    assert presets.models()["source"].str.contains("config.json|^ours:").all()


def test_the_data_sheet_is_read():
    a100 = presets.device("a100-80gb-sxm", "float16")
    assert (a100.flops_per_s, a100.read_bytes_per_s, a100.memory_bytes) == (312e12, 2039e9, 80e9)
    assert (a100.link_bytes_per_s, a100.power_w) == (300e9, 400)
    assert presets.device("m1", "float32").link_bytes_per_s == 0


def test_unknown_names_and_dtypes_are_refused():
    with pytest.raises(InputError, match="unknown model.*llama-2-70b"):
        presets.model("llama-9")
    with pytest.raises(InputError, match="unknown device.*h100-sxm"):
        presets.device("h900")
    with pytest.raises(InputError, match="epyc-7763 has no peak for 'float16'.*float32"):
        presets.device("epyc-7763", "float16")
    with pytest.raises(InputError, match="no peak for 'power_w'"):
        presets.device("a10", "power_w")


def test_kv_of_deepseek_is_compressed():
    spec = presets.model("deepseek-v3")
    assert cost.kv_bytes_per_token(spec, "bfloat16") == 61 * (512 + 64) * 2  # 70 KB
    assert cost.kv_bytes_per_token(spec, "bfloat16", tensor_parallel=8) == 8 * 61 * (512 + 64) * 2
