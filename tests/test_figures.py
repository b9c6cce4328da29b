"""The committed figures are the recorded rows drawn again, byte for byte."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdlib import paths, runner

EXPECTED = sorted(
    f"{name}.{ending}" for outputs in runner.OUTPUTS.values() for name, ends in outputs.items() for ending in ends
)


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """figures/ of a copy of the checkout, drawn with SOURCE=recorded."""
    root = tmp_path_factory.mktemp("recorded")
    for name in ("notebooks", "pdlib", "requirements.lock", "results"):
        (root / name).symlink_to(paths.ROOT / name)
    command = [sys.executable, "-m", "pdlib.runner", "figures", "--profile", "article", "--source", "recorded"]
    done = subprocess.run([*command, "--root", str(root)], capture_output=True, text=True, cwd=paths.ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "figures"


def committed() -> dict[str, bytes]:
    """Names and bytes of figures/ at HEAD: what the working tree holds may be the reader's own."""
    listed = subprocess.run(
        ["git", "-C", str(paths.ROOT), "ls-files", "figures"], capture_output=True, text=True
    ).stdout.split()
    if not listed:
        pytest.skip("not a git checkout with figures: there is nothing to compare with")
    show = ["git", "-C", str(paths.ROOT), "show"]
    return {
        Path(name).name: subprocess.run([*show, f"HEAD:{name}"], capture_output=True, check=True).stdout
        for name in listed
    }


def test_every_figure_is_committed_and_no_other() -> None:
    assert sorted(committed()) == EXPECTED


@pytest.mark.parametrize("name", EXPECTED)
def test_recorded_rows_draw_the_committed_bytes(drawn: Path, name: str) -> None:
    assert (drawn / name).read_bytes() == committed()[name]
