"""How a table is shown and written."""

from __future__ import annotations

import html

import pandas as pd

from pdlib import paths, words
from pdlib.spec import InputError
from pdlib.summary import group_name


def done(table: pd.DataFrame, lang: str) -> pd.DataFrame:
    """`table` with the language that `show` and `save` put its headers in."""
    table.attrs["lang"] = lang
    return table


def show(table: pd.DataFrame) -> pd.DataFrame:
    """What a reader sees of a table of this module: without the exact columns, headers in its language."""
    lang = table.attrs.get("lang", "en")
    seen = table[[c for c in table if not c.endswith("_exact")]]
    return seen.rename(columns={c: _header(c, lang) for c in seen})


def _header(column: str, lang: str) -> str:
    """'measured:laptop:PD-fast (s)' → 'this machine: PD-fast (s)'; any other key by its words."""
    if column.count(":") != 2:
        return words.name(column, lang)
    source, machine, what = column.split(":")
    return f"{group_name(source, machine, lang)}: {words.name(what, lang)}"


def save(table: pd.DataFrame, name: str) -> pd.DataFrame:
    """Write figures/<name>.csv (every column), .md and .html (what `show` shows), each whole or not at
    all; returns what `show` shows, so that a cell can end in it."""
    seen = show(table)
    if "/" in name or not name:
        raise InputError(f"table name {name!r}; give a plain file name without a folder or an ending")
    lines = [seen.columns, ["---"] * seen.shape[1], *seen.to_numpy()]
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in lines]
    marked = "".join("| " + " | ".join(line) + " |\n" for line in cells)
    head = f'<!doctype html>\n<meta charset="utf-8">\n<title>{html.escape(name)}</title>\n'
    contents = {
        "csv": table.to_csv(index=False, lineterminator="\n"),
        "md": marked,
        "html": head + seen.to_html(index=False, border=0) + "\n",
    }
    for ending, content in contents.items():
        paths.write_atomic(paths.figures() / f"{name}.{ending}", content)
    return seen
