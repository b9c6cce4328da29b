"""Nothing is lost or half-written: interrupted calls, full disks, two at once; and what makes a run stale."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import Checkout

from pdlib import staging

OK = 'write("00_a.csv", f"{profile} {source} {labels} {repeats} {dtype}")'


def test_what_makes_a_notebook_run_again(checkout: Checkout) -> None:
    root = checkout.root
    path = checkout.notebook("00_a", OK)
    figure, module, rows = root / "figures/00_a.csv", root / "pdlib/x.py", root / "results/recorded/m/r.csv"
    values = {"source": "measured"}

    def why(**changed: str) -> str:
        return staging.out_of_date(root, "00_a", staging.inputs(root, path, {**values, **changed}))

    def succeed() -> None:
        folder = staging.fresh(root, "00_a")
        (folder / "out/figures").mkdir()
        (folder / "out/figures/00_a.csv").write_text("1")
        staging.publish(root, folder, "00_a", staging.inputs(root, path, values))
        assert why() == ""

    for file in (module, rows):
        file.parent.mkdir(parents=True)
        file.write_text("1")
    assert why() == "not run yet"
    succeed()
    # its own stored outputs are no source: opening it in JupyterLab and running it changes nothing
    content = json.loads(path.read_text())
    content["cells"][1]["execution_count"] = 9
    path.write_text(json.dumps(content))
    assert why() == ""
    figure.write_text("drawn from recorded rows")
    assert why() == "figures/00_a.csv is gone or was overwritten"
    succeed()
    figure.unlink()
    assert "is gone" in why()
    succeed()
    module.write_text("2")
    assert why() == "pdlib changed"
    succeed()
    assert why(seed="1") == "parameters changed"
    rows.write_text("2")
    assert why() == ""
    values["source"] = "recorded"
    succeed()
    rows.write_text("3")
    assert why() == "recorded rows changed"
    succeed()
    content["cells"][2]["source"] += "\n"
    path.write_text(json.dumps(content))
    assert why() == "notebook changed"


def test_another_machine_measures_again(monkeypatch: pytest.MonkeyPatch) -> None:
    here = staging.machine()
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    assert staging.machine() != here


SLOW = """import time
if not (out / "../../../../go").exists():
    (out / "../../../../in").touch()
    time.sleep(60)"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_stopped_call_is_taken_up_where_it_stopped(checkout: Checkout, number: signal.Signals) -> None:
    (checkout.root / "figures").mkdir()
    (checkout.root / "figures/01_b.csv").write_text("old")
    checkout.notebook("00_a", OK)
    checkout.notebook("01_b", 'write("01_b.csv", "half")', SLOW, 'write("01_b.csv", "whole")')
    process = checkout.start()
    checkout.wait_for("in")
    process.send_signal(number)
    output, _ = process.communicate(timeout=20)
    if number != signal.SIGKILL:
        assert process.returncode == 130 and "the same call goes on" in output and "Traceback" not in output
    checkout.wait_until_quiet()  # no kernel is left, and none goes on writing
    assert checkout.figures() == {"00_a.csv": "quick measured en 3 float32", "01_b.csv": "old"}
    (checkout.root / "go").touch()
    status, output = checkout.run()
    assert status == 0 and "00_a: up to date" in output and "01_b: done" in output
    assert checkout.figures()["01_b.csv"] == "whole"
    assert not list((checkout.root / "build/staging").glob("*"))


def test_two_at_once(checkout: Checkout) -> None:
    checkout.notebook("00_a", SLOW, OK)
    first = checkout.start()
    checkout.wait_for("in")
    started = time.monotonic()
    status, output = checkout.run()
    assert status == 3 and f"process {first.pid} is already running" in output
    assert time.monotonic() - started < 5
    first.terminate()
    first.communicate(timeout=20)


def test_a_move_that_was_cut_short_is_finished_by_the_next_call(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkout.notebook("00_a", OK)
    folder = staging.fresh(checkout.root, "00_a")
    (folder / "out/figures").mkdir()
    for name in ("1.svg", "2.svg", "3.svg"):
        (folder / "out/figures" / name).write_text(name)
    depends = staging.inputs(checkout.root, path, {})
    replace = os.replace

    def cut(source: str | Path, target: str | Path) -> None:
        if str(target).endswith("2.svg"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            staging.publish(checkout.root, folder, "00_a", depends)
    assert set(checkout.figures()) == {"1.svg"}
    assert staging.recover(checkout.root) == ["00_a"]
    assert checkout.figures() == {name: name for name in ("1.svg", "2.svg", "3.svg")}
    assert staging.out_of_date(checkout.root, "00_a", depends) == ""
    assert staging.recover(checkout.root) == []


def test_a_folder_that_cannot_be_written(checkout: Checkout) -> None:
    checkout.notebook("00_a", OK)
    (checkout.root / "figures").write_text("a file, not a folder")
    status, output = checkout.run()
    assert status == 2 and "figures" in output and "could not be written" in output
    assert "Traceback" not in output and "done" not in output


class Disk:
    """A small file system of its own at `folder`."""

    def __init__(self, folder: Path, size: str = "256k") -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def _mount(self, *options: str) -> None:
        done = subprocess.run(["mount", *options, str(self.folder)], capture_output=True)
        if done.returncode:
            pytest.skip("may not mount a small disk here")

    def remount(self, options: str) -> None:
        self._mount("-o", f"remount,{options}")

    def remove(self) -> None:
        subprocess.run(["umount", str(self.folder)], check=False)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_and_a_read_only_one(checkout: Checkout) -> None:
    checkout.notebook("00_a", 'write("1.svg", "1" * 100_000)\nwrite("2.svg", "2" * 300_000)')
    disk = Disk(checkout.root / "figures")
    try:
        (disk.folder / "1.svg").write_text("old")
        status, output = checkout.run()
        assert status == 1 and "No space left" in output and "Traceback" not in output
        assert checkout.figures() == {"1.svg": "old"}  # neither new nor half
        status, output = checkout.run()
        assert status == 1 and "No space left" in output and "Traceback" not in output
        disk.remount("size=2m")
        status, output = checkout.run()  # what had been computed was kept
        assert status == 0 and "done in" not in output and "up to date" in output
        assert {name: len(text) for name, text in checkout.figures().items()} == {
            "1.svg": 100_000,
            "2.svg": 300_000,
        }
        disk.remount("ro")
        status, output = checkout.run("--params", "seed=1")
        assert status == 2 and "could not be written" in output and "Traceback" not in output
    finally:
        disk.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_disk_that_fills_while_a_notebook_runs(tmp_path: Path) -> None:
    disk = Disk(tmp_path / "disk", "4m")
    try:
        checkout = Checkout(disk.folder / "checkout")
        checkout.notebook("00_a", 'write("1.svg", "1")\nwrite("2.svg", "2" * 8_000_000)')
        status, output = checkout.run()
        assert status == 1 and "00_a: FAILED" in output and "No space left" in output
        assert "Traceback" not in output and checkout.figures() == {}
        disk.remount("size=64m")
        status, output = checkout.run()
        assert status == 0 and len(checkout.figures()["2.svg"]) == 8_000_000
        checkout.wait_until_quiet()
    finally:
        disk.remove()


@pytest.mark.parametrize("folder", ["figures", "results/measured/laptop"])
def test_recover_removes_what_a_killed_move_left_half_written(checkout: Checkout, folder: str) -> None:
    left, kept = (checkout.root / folder / name for name in (staging.PART + "a.csv", "b.csv"))
    kept.parent.mkdir(parents=True)
    for path in (left, kept):
        path.write_text("x")
    staging.recover(checkout.root)
    assert kept.exists() and not left.exists()
