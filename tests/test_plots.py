"""Charts: every one in every mix of sources and both languages, no glyph missing, the same bytes again."""

import hashlib
import os
import re
import subprocess
import sys
import warnings
import xml.etree.ElementTree as ET

import matplotlib as mpl
import pandas as pd
import pytest
import synthetic
from matplotlib.ft2font import FT2Font

from pdlib import paths, plots, presets, published, results, words
from pdlib.plots import style
from pdlib.spec import GPT2, InputError

LLAMA, A100 = presets.model("llama-2-70b"), presets.device("a100-80gb-sxm", "float16")
CHARTS = {
    "00_roofline": lambda rows, **k: plots.roofline(rows, GPT2, synthetic.LAPTOP, **k),
    "00_mistakes": plots.mistakes,
    "01_two_phases": lambda rows, **k: plots.two_phases(rows, GPT2, synthetic.DEVICES, **k),
    "01_decomposition": lambda rows, **k: plots.decomposition(rows, GPT2, synthetic.DEVICES, **k),
    "01_ratio_by_batch": lambda rows, **k: plots.ratio_by_batch(rows, GPT2, synthetic.DEVICES, **k),
    "02_prefill": plots.prefill,
    "02_phases": plots.phases,
    "02_equal_decode": plots.equal_decode,
    "02_live_pair": plots.live_pair,
    "02_puzzle": plots.puzzle,
    "04_terms": lambda rows, **k: plots.terms(LLAMA, A100, **k),
    "04_inferred_hardware": lambda rows, **k: plots.inferred_hardware(LLAMA, A100, **k),
    "04_conflict": lambda rows, **k: plots.conflict(rows, {"gpt2": GPT2}, synthetic.DEVICES, **k),
    "04_ratio": plots.ratio,
    "04_heldout": lambda rows, **k: plots.heldout(synthetic.held(rows), rows, **k),
}
MIXES = synthetic.mixes()
# Both languages with the widest mix; the narrow ones once each.
CASES = [
    ("published only", "zh"),
    ("all three", "en"),
    ("all three", "zh"),
    ("one sample", "en"),
    ("none", "en"),
]


@pytest.mark.parametrize("name", CHARTS)
@pytest.mark.parametrize(("mix", "lang"), CASES)
def test_every_chart_draws_every_mix_without_a_warning(name, mix, lang):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing glyph is a warning of matplotlib
        chart = CHARTS[name](MIXES[mix], lang=lang)
        svg = chart.svg()
        assert_nothing_is_cut_off(chart)
    root = ET.fromstring(svg)
    assert root.get("role") == "img" and root[0].tag.endswith("title") and root[0].text == chart.heading
    assert chart.heading == words.say(f"{name[3:]}.title", lang)
    assert root[1].tag.endswith("desc") and len(root[1].text) > 40
    assert "<text" not in svg, "text is drawn as outlines"
    numbers = chart.drawn.select_dtypes("number")
    assert list(chart.drawn) and (numbers.fillna(1) < float("inf")).all().all()
    sources = set(MIXES[mix]["source"])
    if mix != "none" and len(chart.drawn) and "source" in chart.drawn:
        assert set(chart.drawn["source"]) <= sources | {"modelled"}


def assert_nothing_is_cut_off(chart):
    """Every drawn text lies inside the picture, and the drawing keeps clear of title and caption."""
    with style._looks():
        drawn = chart.get_tightbbox(chart.canvas.get_renderer())
        width, height = chart.get_size_inches()
        assert drawn.x0 > -0.02 and drawn.x1 < width + 0.02
        top = min(text.get_window_extent().y0 for text in chart.texts[:2]) / chart.dpi
        bottom = chart.texts[2].get_window_extent().y1 / chart.dpi
        assert bottom - 0.02 < drawn.y0 and drawn.y1 < top + 0.12, "title and caption are kept clear"
        assert all(text.get_window_extent().x1 < chart.bbox.x1 for text in chart.texts)


def test_pitfall_21_a_glyph_that_no_carried_font_has_is_noticed():
    with pytest.warns(UserWarning, match="Glyph"):
        plots.prefill(published.rows(), note="\U00013080").png()


@pytest.mark.parametrize("path", sorted((paths.DATA / "fonts").glob("*.otf")), ids=lambda p: p.name)
def test_the_carried_fonts_have_every_character_of_the_words(path):
    have = set(FT2Font(str(path)).get_charmap())
    need = {ord(c) for pair in words.WORDS.values() for text in pair for c in text if c != "\n"}
    missing = "".join(sorted(map(chr, need - have)))
    assert not missing, f"make the fonts anew with tools/font.py: {missing}"
    assert path.stat().st_size < 150_000 and (path.parent / "OFL.txt").is_file()


@pytest.mark.parametrize("key", words.WORDS)
def test_both_languages_take_the_same_values(key):
    en, zh = words.WORDS[key]
    assert en and zh and sorted(re.findall(r"{\d}", en)) == sorted(re.findall(r"{\d}", zh))


PROBE = """
import hashlib, sys
sys.path.insert(0, "tests")
import matplotlib as mpl
mpl.rcParams.update({"font.size": 20, "xtick.direction": "in", "svg.hashsalt": None})
from pdlib import plots, tables
import synthetic
rows = synthetic.mixes()["all three"]
for chart in (plots.phases(rows, lang="zh"), plots.puzzle(rows)):
    print(hashlib.sha256(chart.svg().encode()).hexdigest(), hashlib.sha256(chart.png()).hexdigest())
"""


def test_the_same_rows_give_the_same_bytes_in_another_process_and_under_other_settings():
    rows = MIXES["all three"]
    charts = plots.phases(rows, lang="zh"), plots.puzzle(rows)
    here = [hashlib.sha256(data).hexdigest() for c in charts for data in (c.svg().encode(), c.png())]
    odd = {"LC_ALL": "de_DE.UTF-8", "TZ": "Asia/Tokyo", "PYTHONHASHSEED": "7", "MPLBACKEND": "svg"}
    command = [sys.executable, "-c", PROBE]
    there = subprocess.run(
        command, cwd=paths.ROOT, env={**os.environ, **odd}, capture_output=True, text=True, check=True
    )
    assert here == there.stdout.split()


def test_the_caller_s_settings_are_left_alone():
    with mpl.rc_context({"font.size": 17}):
        plots.prefill(published.rows()).svg()
        assert mpl.rcParams["font.size"] == 17


def test_sources_look_apart():
    looks = {s: style.fill(s, "#0072B2") for s in results.SOURCES}
    assert looks["published"]["facecolor"] == "white" and "hatch" not in looks["published"]
    assert looks["measured"]["facecolor"] == "#0072B2" and "hatch" not in looks["measured"]
    assert all(looks[s]["hatch"] for s in ("recorded", "modelled", "simulated"))


def test_the_caption_says_source_machine_model_weights_dtype_kernel_and_samples():
    lines = style.captions(MIXES["published and measured"], "en")
    assert len(lines) == 2 and lines[0].startswith("published: ") and lines[1].startswith("measured: ")
    for said in ("laptop (cpu)", "gpt2", "random weights", "float32", "pdlib", "n = 5"):
        assert said in lines[1]
    assert "pretrained weights" in lines[0] and "one sample each" in lines[0]
    chart = plots.prefill(MIXES["measured only"], note="LILO recorded in part")
    assert any("LILO recorded in part" in text.get_text() for text in chart.texts)
    long = words.wrapped(["word " * 60, "长" * 20 + " " + "长" * 20], 60)
    assert all(words._columns(line) <= 64 for line in long) and len(long) > 6


def test_saving_writes_three_whole_files_or_names_what_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    chart = plots.equal_decode(published.rows())
    path = plots.save(chart, "02_equal_decode")
    folder = tmp_path / "figures"
    assert path == folder / "02_equal_decode.svg" and path.is_file()
    names = {f"02_equal_decode.{ending}" for ending in ("svg", "png", "csv")}
    assert {p.name for p in folder.iterdir()} == names
    assert (folder / "02_equal_decode.png").read_bytes().startswith(b"\x89PNG")
    drawn = pd.read_csv(folder / "02_equal_decode.csv")
    assert [f"{v:.2f}" for v in drawn["equal"]] == ["1.03", "1.21", "1.01", "1.11"]
    plots.save(chart, "other", data=drawn.head(1))
    assert len(pd.read_csv(folder / "other.csv")) == 1
    plots.save(chart, "00_mistakes", data=None)
    assert not (folder / "00_mistakes.csv").exists()

    def full(*_):
        raise OSError(28, "No space left on device")

    before = {p: p.read_bytes() for p in folder.iterdir()}
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="02_equal_decode.svg could not be written"):
        plots.save(chart, "02_equal_decode")
    assert before == {p: p.read_bytes() for p in folder.iterdir()}


def test_pitfall_26_a_picture_that_cannot_be_rendered_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    monkeypatch.setattr(style.Chart, "png", lambda self: b"")
    with pytest.raises(InputError, match="x.png is empty"):
        plots.save(plots.prefill(published.rows()), "x")


def test_bad_input_is_refused():
    with pytest.raises(InputError, match="unknown language 'fr'"):
        plots.prefill(published.rows(), lang="fr")
    with pytest.raises(InputError, match="plain file name"):
        plots.save(plots.prefill(published.rows()), "../x")
    with pytest.raises(InputError, match="wrong columns"):
        plots.phases(published.rows().drop(columns="phase"))
    with pytest.raises(AttributeError, match="no attribute 'pie'"):
        plots.pie  # noqa: B018


def test_a_notebook_shows_the_chart_with_its_alternative_text(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, **about: shown.append((data, about)))
    chart = plots.prefill(published.rows())
    chart._ipython_display_()
    ((data, about),) = shown
    assert data["image/png"].startswith(b"\x89PNG") and about["raw"]
    picture = about["metadata"]["image/png"]
    assert picture["width"] == 900 and chart.heading in picture["alt"]


def test_importing_the_drawing_half_loads_no_torch_and_no_matplotlib():
    code = (
        "import sys, pdlib.results, pdlib.tables, pdlib.metrics, pdlib.published, pdlib.spec, pdlib.cost, "
        "pdlib.plots; print({'torch', 'transformers', 'matplotlib', 'seaborn'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=paths.ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
