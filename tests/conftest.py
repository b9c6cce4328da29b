"""A checkout in miniature, with notebooks of a few lines, for whatever runs notebooks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest

# Notebooks run in this Python's kernel, also when pytest is called by hand.
os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
os.environ.pop("JUPYTER_PATH", None)

PARAMETERS = 'profile = "quick"\nsource = "measured"\nlabels = "en"\nrepeats = 3\nseed = 0\ndtype = "float32"'
WRITE = """import os, pathlib
out = pathlib.Path(os.environ["PDLIB_OUT"])
def write(name, text):
    path = out / "figures" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
"""


class Checkout:
    """A root folder with notebooks/, profiles and whatever the runner adds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "notebooks" / "profiles").mkdir(parents=True)
        for name in ("smoke", "quick", "article"):
            self.profile(name)

    def notebook(self, stem: str, *cells: str, parameters: str = PARAMETERS) -> Path:
        """Write a notebook: the parameters, a helper `write(name, text)` for figures, then `cells`."""
        made = [nbformat.v4.new_code_cell(source) for source in (parameters, WRITE, *cells)]
        made[0].metadata["tags"] = ["parameters"]
        path = self.root / "notebooks" / f"{stem}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=made), path)
        return path

    def profile(self, name: str, **notebooks: dict[str, Any]) -> None:
        (self.root / "notebooks" / "profiles" / f"{name}.yaml").write_text(json.dumps(notebooks))

    def start(self, *arguments: str, command: str = "figures", **environment: str) -> subprocess.Popen[str]:
        """Start the runner on this checkout, standard error in standard output."""
        return subprocess.Popen(
            [sys.executable, "-m", "pdlib.runner", command, "--root", str(self.root), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            # A test run started in the background inherits an ignored SIGINT; these calls are to be interrupted.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str, command: str = "figures", **environment: str) -> tuple[int, str]:
        """Exit status and output of one call of the runner."""
        process = self.start(*arguments, command=command, **environment)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def figures(self) -> dict[str, str]:
        """Name → content of everything in figures/, hidden files too."""
        return {path.name: path.read_text() for path in sorted((self.root / "figures").glob("*"))}

    def wait_for(self, name: str, seconds: float = 60) -> None:
        """Wait until a notebook has made the file `name` in the root."""
        deadline = time.monotonic() + seconds
        while not (self.root / name).exists():
            assert time.monotonic() < deadline, f"{name} did not come"
            time.sleep(0.05)

    def processes(self) -> list[str]:
        """Command lines of whatever works on this checkout."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if str(self.root) in line and process.pid != os.getpid():
                found.append(line)
        return found

    def wait_until_quiet(self, seconds: float = 10) -> None:
        """Wait until no process of this checkout is left; fail with their names after a while."""
        deadline = time.monotonic() + seconds
        while left := self.processes():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path / "checkout")
    yield made
    made.wait_until_quiet()
