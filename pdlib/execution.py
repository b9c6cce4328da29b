"""Both ends of one notebook's run: Worker starts `python -m pdlib.execution job.json`, which runs papermill.

The process tells one JSON object a line on its standard output: a cell begun, the error, the end. It ends
itself and its kernel when the runner is gone, however that ended. Progress prints what workers told.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pdlib import paths, staging

LOCAL = ("JUPYTER_PATH", "MATPLOTLIBRC")  # a user's own kernels and styles, not for these notebooks


def say(line: str) -> None:
    """One line for the reader, at once."""
    print(line, flush=True)


class Worker:
    """A notebook being run in `folder`: its process, and what it told last."""

    def __init__(self, root: Path, stem: str, notebook: Path, values: dict[str, Any]) -> None:
        self.stem, self.root = stem, root
        self.folder = staging.fresh(root, stem)
        self.executed = self.folder / "out" / "build" / "executed" / f"{stem}.ipynb"
        self.executed.parent.mkdir(parents=True)
        self.started = time.monotonic()
        self.last: dict[str, Any] = {}
        self.outcome: dict[str, Any] = {}
        self._text = b""
        job = self.folder / "job.json"
        job.write_text(
            json.dumps(
                {
                    "notebook": str(notebook),
                    "output": str(self.executed),
                    "parameters": values,
                    "cwd": str(notebook.parent),
                    "parent": os.getpid(),
                }
            )
        )
        self._log = open(self.folder / "log.txt", "wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdlib.execution", str(job)],
            stdout=subprocess.PIPE,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
            cwd=paths.ROOT,
            env=environment(root, self.folder / "out"),
            start_new_session=True,  # Ctrl-C goes to the runner alone, which then ends this one
        )
        assert self.process.stdout is not None
        self.pipe = self.process.stdout

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.started) / 60

    def read(self) -> bool:
        """Take in what the process told; False once it has ended."""
        chunk = os.read(self.pipe.fileno(), 65536)
        *lines, self._text = (self._text + chunk).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "cell" in message:
                self.last = message
            else:
                self.outcome = message
        return bool(chunk)

    def problem(self) -> str:
        """What went wrong, with the cell, or '' after a success."""
        status = self.process.wait()
        self.pipe.close()
        self._log.close()
        if self.outcome.get("done"):
            return ""
        error = self.outcome.get("error")
        if error is None:
            lines = (self.folder / "log.txt").read_text("utf-8", "replace").split("\n")
            tail = next((line for line in reversed(lines) if line.strip()), "no message")
            error = f"its process ended with status {status}: {tail}"
        where = "cell {cell} of {of} (`{source}`): ".format(**self.last) if self.last else ""
        return where + " ".join(error.split())[:600]

    def keep_failed(self) -> str:
        """Keep the executed copy of a failed run for the reader; says where."""
        if not self.executed.exists():
            return ""
        kept = self.root / "build" / "failed" / self.executed.name
        kept.parent.mkdir(exist_ok=True)
        os.replace(self.executed, kept)
        return f" (see {kept.relative_to(self.root)})"

    def kill(self) -> None:
        """End the process, its kernel and whatever the kernel started."""
        import psutil

        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            family = []
        self.process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.wait()
        psutil.wait_procs(family, timeout=5)


def environment(root: Path, out: Path) -> dict[str, str]:
    """A notebook's environment: it writes to `out`, runs in this Python's kernel, no network, no bars."""
    build = root / "build"
    return {
        **{name: value for name, value in os.environ.items() if name not in LOCAL},
        "PDLIB_OUT": str(out),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_RUNTIME_DIR": str(build / "runtime"),
        "IPYTHONDIR": str(build / "ipython"),
        "MPLCONFIGDIR": str(build / "matplotlib"),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TQDM_DISABLE": "1",
    }


class Progress:
    """What the reader sees: one line a notebook, and in between where it is.

    On a terminal that line is rewritten every second; elsewhere a plain line comes every half minute.
    """

    def __init__(self) -> None:
        self.terminal = sys.stdout.isatty()
        self.next = time.monotonic() + (0 if self.terminal else 30)

    def tick(self, running: list[Worker]) -> None:
        """Show where the running notebooks are, if it is time."""
        if not running or time.monotonic() < self.next:
            return
        self.next = time.monotonic() + (1 if self.terminal else 30)
        line = "; ".join(
            f"{w.stem}: cell {w.last.get('cell', 0)} of {w.last.get('of', '?')}, {w.minutes:.1f} min" for w in running
        )
        if self.terminal:
            print(f"\r\033[K{line[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)
        else:
            say(line)

    def finished(self, worker: Worker, wrong: str, remark: str) -> None:
        """The one line that stays."""
        if self.terminal:
            print("\r\033[K", end="")
        if wrong:
            say(f"{worker.stem}: FAILED after {worker.minutes:.1f} min: {wrong}")
        else:
            say(f"{worker.stem}: done in {worker.minutes:.1f} min, {remark}")


def tell(**message: Any) -> None:
    """One line for the runner."""
    sys.__stdout__.write(json.dumps(message) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def end_with(parent: int) -> None:
    """Kill this process and all below it once `parent` is no longer the parent."""
    import psutil

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def execute(notebook: Path, output: Path, parameters: dict[str, Any], cwd: Path) -> None:
    """Run `notebook` with `parameters` in folder `cwd`, write the executed copy to `output`.

    Cells begun and the error, if any, are told to the runner.
    """
    # jsonschema would compile a grammar for checking IRIs on import, 2 s a notebook; notebooks have none
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    import papermill
    from papermill.engines import NBClientEngine, papermill_engines

    class Telling(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            begin = nb_man.cell_start
            # counted as in the notebook itself: papermill's own cell with the parameters left out
            own = [c for c in nb_man.nb.cells if "injected-parameters" not in c.metadata.get("tags", [])]
            number = {cell.id: i for i, cell in enumerate(own, start=1)}

            def told(cell: Any, cell_index: int, **more: Any) -> Any:
                if cell.id in number:
                    tell(cell=number[cell.id], of=len(own), source=first_line(cell.source))
                return begin(cell, cell_index, **more)

            nb_man.cell_start = told
            return super().execute_managed_notebook(nb_man, kernel_name, **options)

    papermill_engines.register("telling", Telling)
    try:
        papermill.execute_notebook(
            str(notebook),
            str(output),
            parameters=parameters,
            engine_name="telling",
            kernel_name="python3",
            language="python",
            cwd=str(cwd),
            progress_bar=False,
            start_timeout=300,  # a kernel on a busy machine takes its time
        )
    except papermill.PapermillExecutionError as error:
        tell(error=f"{error.ename}: {error.evalue}".strip())
    except Exception as error:  # a dead kernel, a full disk: said in one line, like an error in a cell
        tell(error=f"{type(error).__name__}: {error}")
    else:
        tell(done=True)


def first_line(source: str) -> str:
    """The first line of a cell that says something, shortened."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    line = next((line for line in lines if not line.startswith(("#", "%"))), lines[0] if lines else "")
    return line if len(line) <= 80 else line[:77] + "..."


def main() -> None:
    """Execute the job described by the JSON file named on the command line."""
    job = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    end_with(job["parent"])
    execute(Path(job["notebook"]), Path(job["output"]), job["parameters"], Path(job["cwd"]))


if __name__ == "__main__":
    main()
