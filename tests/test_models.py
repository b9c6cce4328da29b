"""models: which weights, made how, wrapped how; and what is refused before anything is measured."""

import json
import os
import subprocess
import sys

import pytest
import torch
import transformers
from tiny import NAMES, OURS, close, library_logits, library_model, run, tiny

from pdlib import cost, devices, models
from pdlib.devices import Device
from pdlib.gpt2 import GPT2Layers
from pdlib.kv_cache import KVCache
from pdlib.llama import LlamaLayers
from pdlib.spec import InputError

CPU = devices.parse("cpu@1")


@pytest.fixture(autouse=True)
def nothing_local(monkeypatch, tmp_path):
    """No weights of this machine's owner: an empty library cache, no PDLIB_MODELS."""
    import huggingface_hub.constants

    monkeypatch.delenv("PDLIB_MODELS", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def weights(hf):
    return [weight.clone() for weight in hf.state_dict().values()]


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_random_weights_are_those_of_their_seed():
    a, b, c = (models.load("gpt2-tiny", CPU, seed=seed) for seed in (0, 0, 1))
    assert a.weights == "random" and a.spec.name == "gpt2-tiny" and a.dtype == "float32"
    assert same(weights(a.hf), weights(b.hf)) and not same(weights(a.hf), weights(c.hf))


def test_random_weights_do_not_hang_on_what_was_drawn_before():
    torch.manual_seed(1)
    a = models.load("gpt2-tiny", CPU)
    torch.manual_seed(2)
    torch.rand(5)
    assert same(weights(a.hf), weights(models.load("gpt2-tiny", CPU).hf))


def test_gpt2_of_its_real_size_is_the_same_each_time():
    config = transformers.GPT2Config()
    sums = []
    for _ in range(2):
        hf = models.random_model(config, 0)
        assert sum(w.numel() for w in hf.parameters()) == 124_439_808
        sums.append([w.double().sum().item() for w in hf.state_dict().values()])
        matrix, norm = hf.transformer.h[3].mlp.c_fc, hf.transformer.h[3].ln_1
        assert matrix.weight.std().item() == pytest.approx(0.02, rel=0.01) and not matrix.bias.any()
        assert (norm.weight == 1).all() and not norm.bias.any()
        assert hf.lm_head.weight is hf.transformer.wte.weight
        del hf
    assert sums[0] == sums[1]


@pytest.mark.parametrize("name", models.CONFIGS)
def test_every_name_has_a_config_of_its_kind(name):
    kind, sizes = models.CONFIGS[name]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    assert models.ModelSpec.from_hf(name, config).name == name
    assert all(getattr(config, key) == value for key, value in sizes.items())


@pytest.mark.parametrize("kind", NAMES)
def test_the_two_shapes_run_on_layers_of_ours(kind):
    wanted = {"gpt2": GPT2Layers, "llama": LlamaLayers}.get(kind, models._LibraryLayers)
    assert type(tiny(kind).layers) is wanted and (kind in OURS) == (wanted is not models._LibraryLayers)


@pytest.mark.parametrize("kind", OURS)
def test_layers_of_ours_and_the_librarys_agree(kind):
    """The same model through either path over our cache: tokens and logits, prefill, ragged and decode."""
    model = tiny(kind)
    other = models.Model(model.spec, "random", "float32", CPU, model.hf, models._LibraryLayers(model.hf), model.head)
    tokens = model.prompt(3, 9, seed=1)
    for lengths in (None, [2, 9, 5]):
        ours, theirs = run(model, tokens, 8, lengths=lengths), run(other, tokens, 8, lengths=lengths)
        assert torch.equal(ours[0], theirs[0]) and close(ours[1], theirs[1])


def saved(kind, folder):
    hf = library_model(kind)
    hf.save_pretrained(folder)
    return hf


@pytest.mark.parametrize("kind", NAMES)
def test_a_local_folder_under_pdlib_models_is_pretrained(monkeypatch, tmp_path, kind):
    hf = saved(kind, tmp_path / "shelf" / "mine")
    monkeypatch.setenv("PDLIB_MODELS", str(tmp_path / "shelf"))
    model = models.load("mine", CPU)
    assert model.weights == "pretrained" and model.spec.name == "mine"
    tokens = model.prompt(2, 6)
    with torch.inference_mode():
        assert close(library_logits(model, tokens), hf.eval()(input_ids=tokens, use_cache=False).logits[:, -1])


def test_local_weights_go_before_random_ones(monkeypatch, tmp_path):
    saved("gpt2", tmp_path / "shelf" / "gpt2-tiny")
    assert models.load("gpt2-tiny", CPU).weights == "random"
    monkeypatch.setenv("PDLIB_MODELS", str(tmp_path / "shelf"))
    model = models.load("gpt2-tiny", CPU)
    assert model.weights == "pretrained" and model.spec.vocab == 97


def test_a_path_is_taken_as_it_is(tmp_path):
    saved("gpt2", tmp_path / "here")
    assert models.load(str(tmp_path / "here"), CPU).weights == "pretrained"


def test_the_librarys_own_cache_is_local_too(tmp_path):
    hub = tmp_path / "hub" / "models--openai-community--gpt2-tiny"
    saved("gpt2", hub / "snapshots" / "abc")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    assert models.load("gpt2-tiny", CPU).weights == "pretrained"


@pytest.mark.parametrize("name", ["gpt5", "", "nobody/nothing"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(InputError, match=f"model '{name}' is not here.*PDLIB_MODELS.*gpt2, .*smollm2-135m"):
        models.load(name, CPU)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(InputError, match="unknown dtype 'int8'; choose one of: float32, bfloat16, float16"):
        models.load("gpt2-tiny", CPU, "int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pitfall_23_the_dtype_asked_for_is_the_one_used_and_kept(dtype):
    model = models.load("gpt2-tiny", CPU, dtype)
    assert model.dtype == dtype and model.hf.dtype == getattr(torch, dtype)
    assert model.new_cache(1, 4).data.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("kind, window", [("mistral", 16), ("mistral", 63)])
def test_a_sliding_window_is_refused(kind, window):
    with pytest.raises(InputError, match=f"wide attends through a window of {window} tokens"):
        models.from_library(library_model(kind, sliding_window=window), "wide", "random", CPU, "float32")


def test_a_window_as_wide_as_the_model_is_none():
    hf = library_model("mistral", sliding_window=64)
    assert models.from_library(hf, "wide", "random", CPU, "float32").spec.positions == 64


@pytest.mark.parametrize(
    "kind, changes",
    [
        ("cohere", {}),  # logits × logit_scale
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"head_dim": 8, "sliding_window": 64, "final_logit_softcapping": 1.0}),
        ("llama", {"hidden_act": "gelu"}),  # our layers would run it as SiLU
        ("gpt2", {"activation_function": "relu"}),
        ("gpt2", {"scale_attn_weights": False}),
    ],
)
def test_an_architecture_that_our_layers_or_head_do_not_reproduce_is_refused(kind, changes):
    with pytest.raises(InputError, match="odd: logits differ from the library's by"):
        models.from_library(library_model(kind, **changes), "odd", "random", CPU, "float32")


def test_a_model_with_matrices_that_are_not_counted_is_refused():
    """OPT with narrow embeddings has two more products, in and out of its width: 2 · 16 · 32."""
    narrow = dict(ffn_dim=48, word_embed_proj_dim=16, do_layer_norm_before=False)
    counted = 2 * (4 * 32 * 32 + 2 * 32 * 48)
    with pytest.raises(InputError, match=f"odd: {counted} weights .* by its config, {counted + 1024} in its layers"):
        models.from_library(library_model("opt", **narrow), "odd", "random", CPU, "float32")


def test_opt_with_norms_behind_runs_as_in_the_library():
    hf = library_model("opt", ffn_dim=48, word_embed_proj_dim=32, do_layer_norm_before=False)
    model = models.from_library(hf, "opt-tiny", "random", CPU, "float32")
    tokens = model.prompt(2, 5)
    assert close(run(model, tokens, 1)[1][:, 0], library_logits(model, tokens))


def test_a_batch_that_does_not_fit_the_free_memory_is_refused_with_what_would(monkeypatch):
    model = tiny("gpt2")
    one = 50 * cost.kv_bytes_per_token(model.spec)
    monkeypatch.setattr(Device, "free_bytes", lambda self: 3 * one + one // 2)
    assert model.new_cache(3, 50).requests == 3
    made: list = []
    monkeypatch.setattr(models, "KVCache", lambda *_: made.append(1))
    with pytest.raises(
        InputError, match=r"4 × 50 positions takes .* GB, cpu@1 has .* GB free: at most 3 requests fit"
    ):
        model.new_cache(4, 50)
    assert made == []


def test_a_cache_has_the_models_layout():
    model = tiny("qwen3")
    cache = model.new_cache(2, 9)
    assert isinstance(cache, KVCache) and cache.data.shape == (2, 2, 2, 2, 9, 16)


def test_prompts_are_tokens_of_the_model_and_of_their_seed():
    model = tiny("gpt2")
    tokens = model.prompt(7, 60)
    assert tokens.shape == (7, 60) and tokens.dtype == torch.long
    assert 0 <= tokens.min() and tokens.max() < 97 and len(tokens.unique()) > 50
    assert torch.equal(tokens, model.prompt(7, 60)) and not torch.equal(tokens, model.prompt(7, 60, seed=1))


def test_cpu_devices_share_the_weights():
    model = tiny("gpt2")
    other = model.on(devices.parse("cpu"))
    assert other.device.name == "cpu" and other.hf is model.hf and other.layers is model.layers
    assert (other.weights, other.dtype, other.spec) == (model.weights, model.dtype, model.spec)


def test_another_kind_of_device_gets_a_copy(monkeypatch):
    model, asked = tiny("gpt2"), []
    monkeypatch.setattr(models, "from_library", lambda hf, *rest: asked.append((hf, rest)) or "copied")
    mps = Device("mps", "mps", 0)
    assert model.on(mps) == "copied"
    hf, rest = asked[0]
    assert hf is not model.hf and same(weights(hf), weights(model.hf))
    assert rest == ("gpt2-tiny", "random", mps, "float32")


BLOCKED = """
import json, os, socket, sys
def refuse(*a, **k):
    tried.append(str(a))
    raise OSError("no network here")
tried = []
socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse
from pdlib import devices, models
made = [models.load(name, devices.parse("cpu")).weights for name in ("gpt2-tiny", "mine")]
try:
    models.load("nobody/nothing", devices.parse("cpu"))
except Exception as error:
    made.append(type(error).__name__)
import huggingface_hub.constants
print(json.dumps({"tried": tried, "made": made, "offline": huggingface_hub.constants.HF_HUB_OFFLINE}))
"""


def test_pitfall_22_loading_asks_no_network(tmp_path):
    """In a fresh process, from random weights, from a folder and by an unknown name: no socket is opened."""
    saved("gpt2", tmp_path / "shelf" / "mine")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        env=clean | {"HF_HOME": str(tmp_path / "home"), "PDLIB_MODELS": str(tmp_path / "shelf")},
        cwd=os.path.dirname(os.path.dirname(models.__file__)),
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == {"tried": [], "made": ["random", "pretrained", "InputError"], "offline": True}
