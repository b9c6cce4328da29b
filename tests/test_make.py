"""The Makefile: its targets, its help, and what each would run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TARGETS = ["help", "figures", "test", "lab", "bench", "calibrate", "record", "lock", "newest", "execute", "clean"]


def make(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One call of make, not as a part of the make that runs the tests."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
    for name in ("PYTHON", "VENV", "TORCH"):
        clean.pop(name, None)
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True
    )


@pytest.mark.parametrize("arguments", [(), ("help",)])
def test_help_lists_every_target_with_one_line(arguments: tuple[str, ...]) -> None:
    lines = make(*arguments).stdout.splitlines()
    listed = [line.split() for line in lines if line.startswith("  make ")]
    assert [words[1] for words in listed] == TARGETS and all(len(words) > 3 for words in listed)
    assert "PROFILE=smoke|quick|article NOTEBOOK=01 SOURCE=measured|recorded LABELS=en|zh" in "\n".join(lines)


def test_test_is_what_ci_calls_and_holds_every_check() -> None:
    assert "make test" in (ROOT / ".ci/run").read_text()
    assert os.access(ROOT / ".ci/run", os.X_OK)
    planned = make("-n", "test").stdout
    checks = ["tools/setup.py", "ruff check .", "ruff format --check .", "mypy pdlib", "pytest"]
    places = [planned.index(check) for check in checks]
    assert places == sorted(places)


def test_figures_passes_every_variable_on() -> None:
    planned = make("-n", "figures", "PROFILE=smoke", "NOTEBOOK=01", "SOURCE=recorded", "LABELS=zh").stdout
    for part in ("--profile 'smoke'", "--notebook '01'", "--source 'recorded'", "--labels 'zh'"):
        assert part in planned
    assert "--params 'repeats=3 dtype=bfloat16'" in make("-n", "figures", "PARAMS=repeats=3 dtype=bfloat16").stdout


def test_a_shell_s_own_variables_are_not_ours() -> None:
    planned = make("-n", "figures", MACHINE="x86_64-linux", PROFILE="work", SOURCE="x").stdout
    assert "--machine ''" in planned and "--profile 'quick'" in planned and "--source 'measured'" in planned


def test_record_needs_no_environment() -> None:
    assert make("-n", "record", "VENV=nowhere").stdout.strip() == "python3 -m pdlib.record"
    assert make("-n", "record", "VENV=nowhere", "PYTHON=py").stdout.strip() == "py -m pdlib.record"
    assert make("-n", "record", f"VENV={sys.prefix}").stdout.strip() == f"{sys.prefix}/bin/python -m pdlib.record"
    assert make("-n", "record", f"VENV={sys.prefix}", "PYTHON=py").stdout.strip() == "py -m pdlib.record"


def test_no_python_at_all_is_said_clearly() -> None:
    done = make("figures", "VENV=nowhere", "PYTHON=python-that-is-not-here")
    assert done.returncode and "python-that-is-not-here is not here: install Python 3.11" in done.stderr


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("NOTEBOOK=99", "unknown notebook '99'"),
        ("PROFILE=fast", "unknown profile 'fast'; choose one of: article, quick, smoke"),
        ("LABELS=fr", "give one of: en, zh"),
        ("PARAMS=new_tokens=1025", "shorten one by"),
    ],
)
def test_bad_input_through_make(variable: str, message: str) -> None:
    found = importlib.util.spec_from_file_location("tools_setup", ROOT / "tools/setup.py")
    assert found and found.loader
    setup = importlib.util.module_from_spec(found)
    found.loader.exec_module(setup)
    if not setup.is_ready(sys.prefix, str(ROOT)):
        pytest.skip("this environment was not made by `make`")
    done = make("figures", f"VENV={sys.prefix}", variable)
    assert done.returncode and message in done.stderr and "Traceback" not in done.stderr
