"""Tables: the articles' digits to the last one, our exact values beside them, and whole files."""

import pandas as pd
import pytest
import synthetic

from pdlib import paths, published, results, summary, tables, words
from pdlib.spec import InputError

PAPER = published.rows()
LIVE = pd.concat([PAPER, synthetic.rows()], ignore_index=True)


def test_table1_is_the_article_s_digit_for_digit():
    table = tables.table1(PAPER)
    assert list(table)[:5] == ["scenario", "pd_gpu", "p_gpu_d_cpu", "pd_cpu", "saved"]
    assert table.iloc[:, 1:5].to_numpy().tolist() == [
        ["0.8322", "0.797", "5.3853", "4.5883"],
        ["0.8158", "0.8076", "6.3184", "5.5108"],
        ["0.1008", "0.1083", "0.6658", "0.5575"],
        ["0.1008", "0.1082", "0.8291", "0.7209"],
    ]
    for column in ("pd_gpu", "p_gpu_d_cpu", "pd_cpu", "saved"):
        assert (table[column].astype(float) == table[f"{column}_exact"]).all()
    assert set(table["check"]) == {"agrees"}


def test_table2_is_the_article_s_digit_for_digit_and_names_its_one_slip():
    table = tables.table2(PAPER)
    assert list(table)[:10] == [
        "scenario",
        "phase",
        "pd_gpu",
        "pd_gpu_total",
        "p_gpu_d_cpu",
        "p_gpu_d_cpu_total",
        "pd_cpu",
        "pd_cpu_total",
        "phase_ratio",
        "total_ratio",
    ]
    assert table["phase_ratio"].tolist() == ["6.76", "1.59", "7.82", "1.23", "6.15", "0.91", "7.66", "0.64"]
    assert table["total_ratio"].tolist()[::2] == ["1.61", "1.43", "0.92", "0.75"]
    assert table["p_gpu_d_cpu_total"].tolist()[::2] == ["100.57", "18.47", "59.94", "6.40"]
    assert table["kv_transfer_exact"].tolist()[::2] == [1.2511, 1.2678, 0.1785, 0.1229]
    # The article has 156.63 where 156.6371 rounds to 156.64: its 162.02 less its 5.39.
    slips = table[table["check"] != "agrees"]
    assert slips["check"].tolist() == ["PD-CPU (s): 156.6371 rounds to 156.64"]
    for column in list(table)[2:10]:
        off = (table[column].astype(float) - table[f"{column}_exact"]).abs()
        assert off.drop(slips.index).max() <= 0.005 + 1e-9 and off.max() < 0.0072


def test_article_001_s_numbers_agree_with_one_another():
    table = tables.figures(PAPER)
    assert set(table["agrees"]) == {"yes"}
    assert table["article"].tolist() == [
        *("1275", "1280", "1275", "0.2394", "5325.18", "32.8948", "38.76", "33.1343", ">99", "137", "140")
    ]
    exact = dict(zip(table["quantity"], table["exact"], strict=True))
    assert exact["Decode's share of the time"] == "99.28"
    assert exact["Prefill ÷ Decode throughput"] == "137.4"
    assert sorted(set(table["claim"])) == ["1.1", "1.2", "1.3", "1.4", "1.5"]


def test_a_wrong_digit_would_be_seen(monkeypatch):
    monkeypatch.setitem(published.ARTICLE_001, "prefill_tokens_per_s", "5335.18")
    table = tables.figures(PAPER).set_index("quantity")
    assert table.loc["Prefill throughput", "agrees"] == "no"


def test_live_rows_stand_beside_the_article_s():
    table = tables.table1(LIVE)
    assert table["pd_gpu"].tolist() == tables.table1(PAPER)["pd_gpu"].tolist()
    cells = table["measured:laptop:PD-fast (s)"]
    assert cells.str.fullmatch(r"[\d.]+ \[[\d.]+, [\d.]+\]").all()
    assert "this machine: PD-slow (s)" in tables.show(table)
    figures = tables.show(tables.figures(LIVE))
    assert figures["this machine: pdlib"].iloc[0] == "1275"
    alone = tables.table2(synthetic.rows(repeats=1, scenarios=("LISO",)))
    lines = alone["measured:laptop:PD-fast (s)"].tolist()
    assert lines[0] == "" and lines[2] and "[" not in lines[2]


def test_a_partly_timed_decode_counts_as_the_whole_one():
    """A quarter of the steps in a quarter of the time: the same seconds, total, share, rates and ratio."""
    whole = synthetic.rows()
    part = whole.copy()
    decodes = (part["experiment"] == "phases") & (part["phase"] == "decode")
    part.loc[decodes, ["tokens", "seconds"]] /= 4
    part["tokens"] = part["tokens"].astype(int)
    column = "measured:laptop:pdlib"
    one, other = (tables.figures(pd.concat([PAPER, rows], ignore_index=True)) for rows in (whole, part))
    assert one[column].tolist() == other[column].tolist()


def test_equal_decode_and_gains_of_the_article():
    numbers = summary.equal_decode(PAPER)
    assert [f"{v:.2f}" for v in numbers["ratio"]] == ["1.61", "1.43", "0.92", "0.75"]
    assert [f"{v:.2f}" for v in numbers["equal"]] == ["1.03", "1.21", "1.01", "1.11"]
    assert ((numbers["equal_low"] <= numbers["equal"]) & (numbers["equal"] <= numbers["equal_high"])).all()
    gain = summary.split_gain(PAPER).set_index(["scenario", "phase"])["ratio"]
    assert gain.loc[("LISO", "prefill")] == pytest.approx(6.3184 / 0.8076)


def test_mistakes_move_the_verdict_by_their_factor():
    table = tables.mistakes(LIVE)
    assert table["mistake"].tolist() == [words.say(m, "en") for m in summary.MISTAKES]
    factor = dict(zip(table["mistake"], table["factor_exact"], strict=True))
    assert factor["no synchronise (CPU: first step)"] == pytest.approx(0.04, rel=0.1)
    assert factor["one run, fixed order"] == pytest.approx(0.83, rel=0.1)
    assert "second ÷ first" in table["honest"][2] and "faster" in table["verdict"][1]
    same = synthetic.rows()
    same = same[(same["experiment"] == "mistakes") & (same["scenario"] == "all_logits")]
    same = pd.concat([same[same["kernel"] == "honest"].assign(kernel=k) for k in ("honest", "mistaken")])
    assert tables.mistakes(same)["verdict"].tolist() == ["no difference seen"]


@pytest.mark.parametrize("make", [tables.table1, tables.table2, tables.figures, tables.mistakes])
@pytest.mark.parametrize("lang", words.LANGUAGES)
def test_every_table_of_every_mix_is_saved_whole(make, lang, tmp_path, monkeypatch):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    for name, rows in synthetic.mixes().items():
        table = make(rows, lang=lang)
        seen = tables.save(table, "t")
        back = pd.read_csv(tmp_path / "figures/t.csv", dtype="str", keep_default_na=False)
        assert list(back) == list(table), name
        assert len(back) == len(table) == len(seen)
        assert not [c for c in seen if c.endswith("_exact")]
        marked = (tmp_path / "figures/t.md").read_text(encoding="utf-8").splitlines()
        assert len(marked) == len(table) + 2 and len({line.count(" | ") for line in marked}) == 1
        html = (tmp_path / "figures/t.html").read_text(encoding="utf-8")
        assert html.count("<tr") == len(table) + 1 and 'charset="utf-8"' in html
    first = {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()}
    assert set(first) == {"t.csv", "t.md", "t.html"}
    tables.save(make(rows, lang=lang), "t")
    assert first == {p.name: p.read_bytes() for p in (tmp_path / "figures").iterdir()}


def test_headers_are_in_the_language_and_the_csv_s_are_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PDLIB_OUT", str(tmp_path))
    seen = tables.save(tables.table1(PAPER, lang="zh"), "02_table1")
    assert "P阶段在GPU比在CPU上节省的时间（秒）" in seen
    head = (paths.figures() / "02_table1.csv").read_text(encoding="utf-8").partition("\n")[0]
    assert head.startswith("scenario,pd_gpu,p_gpu_d_cpu,pd_cpu,saved,")


def test_bad_input_is_refused():
    for make in (tables.table1, tables.table2, tables.figures, tables.mistakes):
        with pytest.raises(InputError, match="unknown language 'fr'"):
            make(PAPER, lang="fr")
        with pytest.raises(InputError, match="wrong columns"):
            make(PAPER.drop(columns="phase"))
    with pytest.raises(InputError, match="plain file name"):
        tables.save(tables.table1(PAPER), "a/b")
    with pytest.raises(InputError, match="column seconds"):
        tables.table1(PAPER.assign(seconds=-1.0))
    assert list(results.COLUMNS) == list(PAPER)


def test_digits_are_three_and_never_an_exponent():
    shown = [summary.digits(v) for v in (0, 0.012345, 1.2345, 12.345, 123.45, 12345.6, 9.996)]
    assert shown == ["0", "0.0123", "1.23", "12.3", "123", "12,300", "10.00"]


def test_significant_digits_are_four_whatever_the_size():
    assert summary.significant([123456.0, 0.00123456, -1.00004, 0.0]) == [123500.0, 0.001235, -1.0, 0.0]
