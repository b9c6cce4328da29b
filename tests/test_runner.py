"""The runner on tiny notebooks: what it says, in which order it runs, what a failure looks like."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

from conftest import Checkout

from pdlib.machine import cores

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


def test_pitfall_26_a_figure_that_was_not_written_is_an_error(checkout: Checkout) -> None:
    checkout.notebook("00_measure_honestly", 'write("00_roofline.svg", "x")')
    status, output = checkout.run()
    assert status == 1
    assert "did not write figures/00_roofline.png, figures/00_roofline.csv, figures/00_mistakes.svg" in output
    assert checkout.figures() == {}


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
        if source == "recorded" and cores() == 1:
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
