"""The runner on tiny notebooks: what it refuses, what it skips, and that nothing is lost or half-written."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import PARAMETERS, Checkout

from pdlib import runner, staging

OK = 'write("00_a.csv", f"{profile} {source} {labels} {repeats} {dtype}")'


def test_runs_then_skips(checkout: Checkout) -> None:
    checkout.notebook("00_a", OK, "print('hello')")
    checkout.notebook("01_b", 'write("01_b.csv", str(seed))')
    checkout.profile("quick", **{"00_a": {"repeats": 5}})
    status, output = checkout.run("--params", "dtype=bfloat16 seed=7")
    assert status == 0, output
    assert checkout.figures() == {"00_a.csv": "quick measured en 5 bfloat16", "01_b.csv": "7"}
    done = [line for line in output.splitlines() if "done in" in line]
    assert [line.split(":")[0] for line in done] == ["00_a", "01_b"] and all(" min" in line for line in done)
    assert "\r" not in output and "\033" not in output  # no terminal, no bars
    executed = (checkout.root / "build/executed/00_a.ipynb").read_text()
    assert "hello" in executed and "papermill" not in executed and str(checkout.root) not in executed
    assert not list((checkout.root / "build/staging").glob("*"))

    started = time.monotonic()
    status, output = checkout.run("--params", "dtype=bfloat16 seed=7")
    assert status == 0 and output.count("up to date") == 2 and "done" not in output
    assert time.monotonic() - started < 5  # usually 0.3 s; the machine may be busy


def test_an_up_to_date_call_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'papermill', 'pandas', 'transformers'}"
    code = f"import sys, pdlib.runner; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


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
def test_bad_input_is_refused_before_anything_runs(
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


def test_a_failing_notebook_is_named_and_the_others_run(checkout: Checkout) -> None:
    (checkout.root / "figures").mkdir()
    (checkout.root / "figures/00_a.csv").write_text("old")
    checkout.notebook("00_a", OK, "# why\nboom = 1 / 0  # here")
    checkout.notebook("01_b", "import os\nos._exit(9)")
    checkout.notebook("02_c", 'write("02_c.csv", "fine")')
    status, output = checkout.run()
    assert status == 1
    assert "00_a: FAILED" in output
    assert "cell 4 of 4 (`boom = 1 / 0  # here`): ZeroDivisionError: division by zero" in output
    assert "01_b: FAILED" in output and "cell 3 of 3 (`import os`): DeadKernelError" in output
    assert "failed: 00_a, 01_b" in output and "Traceback" not in output
    assert checkout.figures() == {"00_a.csv": "old", "02_c.csv": "fine"}
    assert "ZeroDivisionError" in (checkout.root / "build/failed/00_a.ipynb").read_text()


def test_a_figure_that_was_not_written_is_an_error(checkout: Checkout) -> None:
    checkout.notebook("00_measure_honestly", 'write("00_roofline.svg", "x")')
    status, output = checkout.run()
    assert status == 1
    assert "did not write figures/00_roofline.png, figures/00_roofline.csv, figures/00_mistakes.svg" in output
    assert checkout.figures() == {}


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

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self._mount("-t", "tmpfs", "-o", "size=256k", "tmpfs")

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


def test_recorded_rows_are_drawn_at_once_and_measuring_runs_alone(checkout: Checkout) -> None:
    cell = """import time
mark = out / "../../../.."
(mark / f"{source}_NAME").touch()
deadline = time.monotonic() + (20 if source == "recorded" else 1)
while not (together := (mark / f"{source}_OTHER").exists()) and time.monotonic() < deadline:
    time.sleep(0.05)
(mark / f"{source}_NAME").unlink() if source == "measured" else None
write("NAME.csv", str(together))"""
    checkout.notebook("00_a", cell.replace("NAME", "a").replace("OTHER", "b"))
    checkout.notebook("01_b", cell.replace("NAME", "b").replace("OTHER", "a"))
    for source, together in (("measured", "False"), ("recorded", "True")):
        if source == "recorded" and os.cpu_count() == 1:
            continue
        status, output = checkout.run("--source", source)
        assert status == 0, output
        assert checkout.figures() == {"a.csv": together, "b.csv": together}


def test_this_python_s_kernel_whatever_the_user_has(checkout: Checkout, tmp_path: Path) -> None:
    foreign = {"argv": ["/bin/false"], "display_name": "foreign", "language": "python"}
    for folder in (".local/share/jupyter", "elsewhere"):
        kernel = tmp_path / folder / "kernels/python3/kernel.json"
        kernel.parent.mkdir(parents=True)
        kernel.write_text(json.dumps(foreign))
    checkout.notebook("00_a", 'import sys\nwrite("00_a.csv", sys.prefix)')
    status, output = checkout.run(HOME=str(tmp_path), JUPYTER_PATH=str(tmp_path / "elsewhere"))
    assert status == 0, output
    assert checkout.figures() == {"00_a.csv": sys.prefix}


def test_on_a_terminal_one_line_is_rewritten(checkout: Checkout) -> None:
    checkout.notebook("00_a", "import time\ntime.sleep(2)", OK)
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "pdlib.runner", "figures", "--root", str(checkout.root)]
    process = subprocess.Popen(command, stdout=follower, stderr=follower)
    os.close(follower)
    shown = b""
    while True:
        try:
            chunk = os.read(leader, 4096)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    assert process.wait() == 0
    assert b"\r\033[K00_a: cell 3 of 4" in shown and b"\r\033[K00_a: done in" in shown


def test_execute_in_place_gives_the_same_text_twice(checkout: Checkout) -> None:
    path = checkout.notebook(
        "00_a",
        "import sys\nprint('one'); print('two', file=sys.stderr); print(object(), out)",
        'write("00_a.csv", "not to figures")',
    )
    texts = []
    for _ in range(2):
        status, output = checkout.run(command="execute")
        assert status == 0 and "executed in place" in output, output
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    cells = json.loads(texts[0])["cells"]
    assert [cell["execution_count"] for cell in cells] == [1, 2, 3, 4]
    (stream,) = cells[2]["outputs"]
    assert stream["text"] == ["one\n", "<object object at 0x0> .\n"]
    assert str(checkout.root) not in texts[0]
    assert not (checkout.root / "figures").exists()


def test_execute_leaves_a_failing_notebook_as_it_was(checkout: Checkout) -> None:
    path = checkout.notebook("00_a", "1 / 0")
    before = path.read_text()
    status, output = checkout.run(command="execute")
    assert status == 1 and "00_a: FAILED" in output and path.read_text() == before
