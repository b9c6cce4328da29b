"""Parameters: what profiles, PARAMS and the notebook's own cell may say, and what is refused before any work."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import PARAMETERS, Checkout

from pdlib import parameters, runner

OK = 'write("00_a.csv", f"{profile} {source} {labels} {repeats}")'


BAD = [
    (["--notebook", "99"], "unknown notebook '99'; choose one of: 00_a, 01_b"),
    (["--profile", "fast"], "unknown profile 'fast'; choose one of: article, quick, smoke"),
    (["--profile", "broken"], "unknown parameter 'repeat'; did you mean repeats?"),
    (["--profile", "stranger"], "unknown notebook in stranger.yaml '07_x'"),
    (["--profile", "not_yaml"], "not_yaml.yaml is not valid YAML"),
    (["--labels", "fr"], "labels = 'fr'; give one of: en, zh"),
    (["--source", "guessed"], "source = 'guessed'; give one of: measured, recorded"),
    (["--machine", "h200"], "add SOURCE=recorded"),
    (["--machine", "moon", "--source", "recorded"], "unknown machine 'moon'"),
    (["--params", "repeats=0"], "repeats = 0; give a whole number of at least 1"),
    (["--params", "repeats=-2"], "give a whole number of at least 1"),
    (["--params", "repeats=2.5"], "give a whole number of at least 1"),
    (["--params", "repeats=true"], "give a whole number of at least 1"),
    (["--params", "seed=-1"], "give a whole number of at least 0"),
    (["--params", "dtype=float8"], "give one of: float32, bfloat16, float16"),
    (["--params", "requests=1,0"], "give a whole number of at least 1"),
    (["--params", "requests=many"], "'many'; give a whole number"),
    (["--params", "rate=-1"], "give a number above 0"),
    (["--params", "warm=maybe"], "give true or false"),
    (["--params", "speed=3"], "no notebook to run has a parameter 'speed'"),
    (["--params", "repeats"], "'repeats' is not name=value"),
    (["--params", "labels=zh"], "call make with LABELS=zh"),
    (["--params", "prompt_tokens=1000"], "shorten one by 1"),
    (["--params", "scenarios='{LILO: [1000, 25]}'"], "shorten one by 1"),
    (["--params", "scenarios='{XIXO: [10, 10]}'"], "unknown scenario 'XIXO'"),
    (["--params", "device=cuda:99"], "cuda:99"),
    (["--params", "device=toaster"], "unknown device 'toaster'"),
]

MORE = """
requests = [1, 8]
rate = 0.5
warm = True
prompt_tokens = 512
new_tokens = 25
device = "auto"
scenarios = {"LILO": (512, 512)}"""


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_pitfall_16_bad_input_is_refused_before_anything_runs(
    checkout: Checkout, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    for stem in ("00_a", "01_b"):
        checkout.notebook(stem, OK, parameters=PARAMETERS + MORE)
    if "broken" in arguments:
        checkout.profile("broken", **{"00_a": {"repeat": 3}})
    if "stranger" in arguments:
        checkout.profile("stranger", **{"07_x": {}})
    if "not_yaml" in arguments:
        (checkout.root / "notebooks/profiles/not_yaml.yaml").write_text("a: [1")
    status = runner.main(["figures", "--root", str(checkout.root), *arguments])
    captured = capsys.readouterr()
    assert status == 2 and message in captured.err, captured.err
    assert captured.err.count("\n") == 1  # one paragraph
    assert not (checkout.root / "figures/00_a.csv").exists() and "done" not in captured.out


def test_the_longest_workload_fits(checkout: Checkout) -> None:
    lengths = "\nprompt_tokens = 512\nnew_tokens = 512"
    checkout.notebook("00_a", OK, parameters='profile = ""\nsource = ""\nlabels = ""' + lengths)
    assert runner.plan(checkout.root, params="prompt_tokens=512 new_tokens=512")


def test_only_literals_in_the_parameters_cell(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    checkout.notebook("00_a", OK, parameters="a = 1\nb = a * 2")
    assert runner.main(["figures", "--root", str(checkout.root)]) == 2
    assert "`b = a * 2`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("3", 1, 3),
        ("1,8,32", [1], [1, 8, 32]),
        ("[4]", [1], [4]),
        ("0.5", 1.0, 0.5),
        ("true", False, True),
        ("no", "en", "no"),  # a text stays one, whatever YAML makes of it
        ("{LILO: [8, 4]}", {"LILO": (512, 512)}, {"LILO": [8, 4]}),
    ],
)
def test_read(text: str, default: Any, value: Any) -> None:
    assert parameters.read(text, default) == value


def test_by_hand() -> None:
    assert parameters.by_hand("a=1 b='x y' c=") == {"a": "1", "b": "x y", "c": ""}
