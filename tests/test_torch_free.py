"""Half of the package opens without torch: rows, tables, charts and the arithmetic, on any laptop."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pdlib

PACKAGE = Path(pdlib.__file__).parent
# What computes. Everything else has to open where torch and transformers are not installed.
NEED_TORCH = {
    "ops",
    "devices",
    "timers",
    "models",
    "gpt2",
    "llama",
    "kv_cache",
    "prefill",
    "decode",
    "kv_transfer",
    "baseline",
    "placement",
    "transfers",
    "transfer_rows",
    "probe.side",
    "workers",
    "experiments",
    "mistakes",
    "puzzle",
    "calibrate",
}
NAMED = {"spec", "cost", "metrics", "published", "results", "tables", "plots", "paths", "lab", "words", "summary"}
NAMED |= {"presets", "latency", "machine"}
BLOCK = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
sys.modules["torch"] = sys.modules["transformers"] = None
"""


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", BLOCK + code, str(PACKAGE.parent), *arguments],
        env=os.environ | {"MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def modules():
    """Dotted names of the package's modules, without those that need torch and those that only run."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if parts[-1] != "__main__" and name != "__init__" and not {parts[0], name} & (NEED_TORCH | {"record"}):
            found.append(name)
    return found


def test_the_half_without_torch_opens():
    names = modules()
    assert set(names) >= NAMED
    code = (
        "opened = [importlib.import_module('pdlib.' + name).__name__ for name in sys.argv[2:]]\n"
        "print(json.dumps([opened, sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers'))]))"
    )
    opened, loaded = run(code, *names)
    assert opened == ["pdlib." + name for name in names]
    assert loaded == ["torch", "transformers"]  # the two blocks themselves, nothing under them


def test_the_block_blocks():
    """The same process cannot open what needs torch: so the test above can fail."""
    code = """
closed = []
for name in sys.argv[2:]:
    try:
        importlib.import_module("pdlib." + name)
    except ImportError:
        closed.append(name)
print(json.dumps(closed))
"""
    assert set(run(code, *sorted(NEED_TORCH))) == NEED_TORCH


def test_a_chart_and_a_table_are_drawn_without_torch(tmp_path):
    code = """
import os
os.environ["PDLIB_OUT"] = sys.argv[2]
from pathlib import Path
from pdlib import plots, published, tables
rows = published.rows()
chart = plots.prefill(rows)
plots.save(chart, "02_prefill")
tables.save(tables.table1(rows), "02_table1")
print(json.dumps(sorted(path.name for path in Path(sys.argv[2]).rglob("*") if path.is_file())))
"""
    made = run(code, str(tmp_path))
    assert made == ["02_prefill.csv", "02_prefill.png", "02_prefill.svg"] + [
        "02_table1.csv",
        "02_table1.html",
        "02_table1.md",
    ]
    assert all(path.stat().st_size for path in tmp_path.rglob("*.*"))
