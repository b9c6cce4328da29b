"""The set-up's decisions, with an environment and a pip that only note what they were asked."""

from __future__ import annotations

import fcntl
import importlib.util
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SOURCE = Path(__file__).resolve().parent.parent


class Fake:
    """A checkout whose set-up runs no program: `steps` notes them, `here` is what the venv's Python says."""

    def __init__(self, setup: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.setup, self.root, self.venv = setup, root, root / ".venv"
        self.steps: list[str] = []
        self.torch: str | None = None
        self.fails = ""
        (root / "tools").mkdir()
        shutil.copy(SOURCE / "tools/setup.py", root / "tools")
        for name in ("requirements.lock", "pyproject.toml"):
            (root / name).write_text(name)
        monkeypatch.setattr(setup, "ROOT", str(root))
        monkeypatch.setattr(setup, "answers", self.answers)
        monkeypatch.setattr(setup.subprocess, "call", self.call)

    def answers(self, venv: str, code: str) -> str | None:
        if not (self.venv / "bin/python").exists():
            return None
        if "torch" in code:
            return self.torch
        return str(self.venv / "site-packages") if "purelib" in code else "3 12"

    def call(self, command: list[str], **_: Any) -> int:
        step = " ".join(map(str, command[1:]))
        self.steps.append(step)
        if self.fails and self.fails in step:
            return 1
        if step.startswith("-m venv"):
            (self.venv / "bin").mkdir()
            (self.venv / "site-packages").mkdir()
            for name in ("bin/python", "pyvenv.cfg"):
                (self.venv / name).write_text("")
        if "torch==" in step:
            self.torch = "2.13.0"
        return 0

    def __call__(self, *arguments: str) -> int:
        """Exit status of one call; `steps` holds what that call did."""
        self.steps = []
        return int(self.setup.main(["--venv", str(self.venv), *arguments]))

    def installed(self) -> list[str]:
        return [step.split("install ", 1)[1] for step in self.steps if " install " in step]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = importlib.util.spec_from_file_location("tools_setup", SOURCE / "tools/setup.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return Fake(module, tmp_path, monkeypatch)


def test_torch_alone_then_the_lock_then_pdlib_offline(setup: Fake) -> None:
    assert setup() == 0
    assert setup.steps[0] == f"-m venv {setup.venv}"
    torch, lock, pdlib = setup.installed()
    assert torch == "--no-compile torch==2.13.0"
    assert "--require-hashes -r" in lock and lock.endswith("requirements.lock")
    assert "--no-deps --no-build-isolation --no-index -e" in pdlib


def test_a_second_call_does_nothing_until_a_source_changes(setup: Fake) -> None:
    assert setup() == 0 and setup.steps
    assert setup() == 0 and setup.steps == []
    for name in ("requirements.lock", "pyproject.toml"):
        (setup.root / name).write_text("changed")
        assert setup() == 0 and setup.steps
        assert setup() == 0 and setup.steps == []


def test_the_real_second_call_is_quick(tmp_path: Path) -> None:
    if not (Path(sys.prefix) / ".pdlib-ready").exists():
        pytest.skip("this environment was not made by tools/setup.py")
    command = [sys.executable, "-I", "-S", SOURCE / "tools/setup.py", "--venv", sys.prefix]
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds.append(time.monotonic() - started)
        assert done.returncode == 0
    assert min(seconds) < 0.2


def test_own_torch_is_kept_and_reported(setup: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    setup.torch = "2.12.1+rocm7"
    assert setup() == 0
    assert len(setup.installed()) == 2 and "torch 2.12.1+rocm7 is here and is kept" in capsys.readouterr().out


def test_an_old_torch_is_replaced(setup: Fake) -> None:
    setup.torch = "2.9.1"
    assert setup() == 0
    assert setup.installed()[0].endswith("torch==2.13.0")


def test_skipped_torch_is_asked_for_until_it_is_there(setup: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert setup("--torch", "skip") == 0
        assert len(setup.installed()) == 2 and "-m pip install" in capsys.readouterr().out
    setup.torch = "2.11.0+cu130"
    assert setup("--torch", "skip") == 0 and setup.steps
    assert setup("--torch", "skip") == 0 and setup.steps == []


@pytest.mark.parametrize("step", ["-m venv", "torch==", "--require-hashes", "-e "])
def test_a_step_that_failed_or_was_cut_is_repeated(
    setup: Fake, capsys: pytest.CaptureFixture[str], step: str
) -> None:
    setup.fails = step
    assert setup() == 2
    assert "make the same call again" in capsys.readouterr().err
    setup.fails = ""
    assert setup() == 0 and any(step in done for done in setup.steps)
    assert setup() == 0 and setup.steps == []


def test_an_old_stamp_does_not_vouch_for_a_half_changed_environment(setup: Fake) -> None:
    assert setup() == 0
    (setup.root / "requirements.lock").write_text("new")
    setup.fails = "--require-hashes"
    assert setup() == 2
    setup.fails = ""
    (setup.root / "requirements.lock").write_text("requirements.lock")  # as it was when the stamp was written
    assert setup() == 0 and setup.steps


def test_what_an_interrupted_pip_left_is_removed(setup: Fake) -> None:
    assert setup() == 0
    packages = setup.venv / "site-packages"
    for name in ("whole-1.dist-info", "half-1.dist-info", "~umpy"):
        (packages / name).mkdir()
    (packages / "whole-1.dist-info/INSTALLER").write_text("pip")
    (packages / "half-1.dist-info/METADATA").write_text("")
    (setup.venv / ".pdlib-ready").unlink()
    assert setup() == 0
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_an_environment_without_its_python_is_made_anew(setup: Fake) -> None:
    assert setup() == 0
    (setup.venv / "bin/python").unlink()  # as after an upgrade of the system's Python
    (setup.venv / "left").write_text("")
    assert setup() == 0
    assert setup.steps[0].startswith("-m venv") and not (setup.venv / "left").exists()


def test_a_foreign_folder_is_left_alone(setup: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    setup.venv.mkdir()
    (setup.venv / "thesis.tex").write_text("dear")
    assert setup() == 2
    assert "choose another VENV=" in capsys.readouterr().err and (setup.venv / "thesis.tex").exists()


def test_an_old_python_is_refused_clearly(
    setup: Fake, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup.setup.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(setup.setup, "works", lambda name: name == "python3.12")
    assert setup() == 2
    message = capsys.readouterr().err
    assert "is Python 3.9.1, but 3.11 or newer is needed" in message and "PYTHON=python3.12" in message
    monkeypatch.setattr(setup.setup, "works", lambda name: False)
    assert setup() == 2
    assert "install one and call make with PYTHON=" in capsys.readouterr().err


def test_two_calls_at_once_make_one_environment(setup: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    setup.venv.mkdir()
    results: list[int] = []
    with open(setup.venv / ".pdlib-lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=lambda: results.append(setup()))
        second.start()
        time.sleep(0.2)
        assert not results and setup.steps == []
        (setup.venv / "bin").mkdir()
        (setup.venv / "bin/python").write_text("")
        (setup.venv / ".pdlib-ready").write_text(setup.setup.stamp_text(str(setup.root)))
    second.join(timeout=10)
    assert results == [0] and setup.steps == [] and "another call is at it" in capsys.readouterr().out
