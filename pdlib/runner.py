"""Papermill over the notebooks: `python -m pdlib.runner figures ...`, behind `make figures`.

Everything is checked before anything runs. A notebook runs in a staging folder; when it has succeeded and
wrote all its figures, the folder is renamed to `build/finished` and its files are moved into place one by
one. After a kill the next call moves what was finished and runs what was not.
"""

from __future__ import annotations

import argparse
import collections
import selectors
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdlib import parameters, paths, staging
from pdlib.execution import Progress, Worker, say
from pdlib.machine import cores
from pdlib.normalise import normalise
from pdlib.spec import InputError, one_of

CHART = ("svg", "png", "csv")  # a chart and the numbers drawn
TABLE = ("csv", "md", "html")
BOTH = ("svg", "png", *TABLE)

# What each notebook must leave in figures/; one that was not written is an error.
OUTPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "00_measure_honestly": {"00_roofline": CHART, "00_mistakes": BOTH},
    "01_two_phases": {
        "01_two_phases": CHART,
        "01_figures": TABLE,
        "01_decomposition": CHART,
        "01_ratio_by_batch": CHART,
    },
    "02_placements": {
        "02_table1": TABLE,
        "02_table2": TABLE,
        "02_prefill": CHART,
        "02_phases": CHART,
        "02_equal_decode": CHART,
        "02_live_pair": CHART,
        "02_puzzle": CHART,
    },
    "03_kv_transfer": {
        "03_kv_bytes": TABLE,
        "03_bandwidth": CHART,
        "03_timeline": CHART,
        "03_hidden": CHART,
        "03_links": BOTH,
    },
    "04_latency_model": {
        "04_terms": CHART,
        "04_audit": TABLE,
        "04_inferred_hardware": CHART,
        "04_conflict": CHART,
        "04_ratio": CHART,
        "04_heldout": CHART,
        "04_errors": TABLE,
    },
    "08_beyond_one_machine": {"08_slow_link": CHART},
}
FAILED, BAD_INPUT, BUSY, INTERRUPTED = 1, 2, 3, 130


class Job:
    """One notebook with the parameters it is to run with, and what its result depends on."""

    def __init__(self, root: Path, notebook: Path, values: dict[str, Any]) -> None:
        self.notebook, self.stem, self.values = notebook, notebook.stem, values
        self.inputs = staging.inputs(root, notebook, values)
        self.expected = [
            f"figures/{name}.{ending}" for name, endings in OUTPUTS.get(self.stem, {}).items() for ending in endings
        ]


def choose(root: Path, asked: str) -> list[Path]:
    """The notebooks asked for: all, or the one whose name is or begins with `asked`."""
    found = sorted((root / "notebooks").glob("[0-9]*.ipynb"))
    if not found:
        raise InputError(f"there are no notebooks in {root / 'notebooks'}; restore them")
    if not asked:
        return found
    chosen = [path for path in found if path.stem == asked or path.stem.split("_")[0] == asked]
    if not chosen:
        one_of("notebook", asked, [path.stem for path in found])
    return chosen


def plan(
    root: Path,
    profile: str = "quick",
    notebook: str = "",
    source: str = "measured",
    labels: str = "en",
    machine: str = "",
    params: str = "",
) -> list[Job]:
    """The notebooks to run with their parameters; InputError for anything unknown or out of range.

    Later wins: the notebook's own default, the profile, PARAMS. Devices are checked by `figures`, for
    the notebooks that really run.
    """
    known = {path.stem: parameters.defaults(path) for path in choose(root, "")}
    in_profile = parameters.load_profile(root / "notebooks" / "profiles", profile, known)
    for stem, values in in_profile.items():
        parameters.check(f"profile {profile}, {stem}", known[stem], values)
    common = {"profile": profile, "source": source, "labels": labels}
    if machine:
        if source != "recorded":
            raise InputError(f"MACHINE={machine} names recorded rows; add SOURCE=recorded, or leave it out")
        there = sorted(path.name for path in (root / "results" / "recorded").glob("*") if path.is_dir())
        one_of("machine", machine, there)
        common["machine"] = machine
    given = parameters.by_hand(params)
    for name in set(given) & set(common):
        raise InputError(f"PARAMS sets {name}; call make with {name.upper()}={given[name]} instead")
    jobs, used = [], set()
    for path in choose(root, notebook):
        own = known[path.stem]
        mine = {name: parameters.read(text, own[name]) for name, text in given.items() if name in own}
        used |= set(mine)
        values = {**in_profile.get(path.stem, {}), **mine, **common}
        parameters.check(path.stem, own, values)
        jobs.append(Job(root, path, values))
    for name in set(given) - used:
        names = sorted(set().union(*(known[job.stem] for job in jobs)))
        raise InputError(f"PARAMS: no notebook to run has a parameter {name!r}; they have: {', '.join(names)}")
    return jobs


def run(root: Path, jobs: list[Job], at_once: int, done: Callable[[Job, Worker], str]) -> list[str]:
    """Run the jobs, `at_once` at a time; `done` puts a success in its place and says so. Returns who failed.

    Whatever ends this, no worker and no kernel is left.
    """
    waiting, running, failed = collections.deque(jobs), dict[int, tuple[Job, Worker]](), list[str]()
    progress = Progress()
    try:
        with selectors.DefaultSelector() as selector:
            while waiting or running:
                while waiting and len(running) < at_once:
                    job = waiting.popleft()
                    worker = Worker(root, job.stem, job.notebook, job.values)
                    running[worker.process.pid] = job, worker
                    selector.register(worker.pipe, selectors.EVENT_READ, worker)
                for key, _ in selector.select(timeout=0.5):
                    worker = key.data
                    if worker.read():
                        continue
                    selector.unregister(worker.pipe)
                    job, _ = running[worker.process.pid]
                    wrong, remark = worker.problem(), ""
                    try:
                        remark = "" if wrong else done(job, worker)
                    except (InputError, OSError) as error:
                        wrong = str(error)
                    if wrong:
                        failed.append(job.stem)
                        wrong += worker.keep_failed()
                    del running[worker.process.pid]
                    progress.finished(worker, wrong, remark)
                progress.tick([worker for _, worker in running.values()])
    finally:
        for _, worker in running.values():
            worker.kill()
    return failed


def figures(root: Path, **asked: str) -> int:
    """Bring figures/ up to date; returns the exit status (0, or 1 when a notebook failed).

    `asked` as for `plan`. Rows measured while anything else runs are worth nothing, so notebooks that
    measure run one after the other; recorded rows are only drawn, as many at once as there are cores.
    """
    jobs = plan(root, **asked)
    recorded = asked.get("source") == "recorded"
    with staging.alone(root):
        for stem in staging.recover(root):
            say(f"{stem}: the results of an interrupted call are in place now")
        todo = []
        for job in jobs:
            why = staging.out_of_date(root, job.stem, job.inputs)
            say(f"{job.stem}: {f'to run ({why})' if why else 'up to date'}")
            if why:
                todo.append(job)
        if not todo:
            return 0
        for folder in ("figures",) if recorded else ("figures", "results/measured"):
            paths.check_writable(root / folder)
        if not recorded:
            for job in todo:
                parameters.check_devices({**parameters.defaults(job.notebook), **job.values})
        at_once = cores() if recorded else 1
        failed = run(root, todo, at_once, lambda job, worker: _into_place(root, job, worker))
    if failed:
        say(f"failed: {', '.join(failed)}; what the other notebooks wrote is in place")
    return FAILED if failed else 0


def _into_place(root: Path, job: Job, worker: Worker) -> str:
    """Check that everything was written and move it; says how much."""
    missing = [name for name in job.expected if not (worker.folder / "out" / name).is_file()]
    if missing:
        raise InputError(f"it ran, but did not write {', '.join(missing)}")
    text = normalise(worker.executed, worker.folder / "out", root)
    paths.write_atomic(worker.executed, text)
    return f"{staging.publish(root, worker.folder, job.stem, job.inputs)} files written"


def execute(root: Path, notebook: str = "") -> int:
    """Run the committed notebooks at their own defaults, normalise them and put them in their place."""
    jobs = [Job(root, path, {}) for path in choose(root, notebook)]

    def done(job: Job, worker: Worker) -> str:
        paths.write_atomic(job.notebook, normalise(worker.executed, worker.folder / "out", root))
        return "executed in place"

    with staging.alone(root):
        staging.recover(root)
        return FAILED if run(root, jobs, 1, done) else 0


def main(argv: list[str] | None = None) -> int:
    """Read the command line and run; every problem is one paragraph and an exit status, no traceback."""
    parser = argparse.ArgumentParser(prog="python -m pdlib.runner", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="figures | execute")
    drawing = commands.add_parser("figures", help="run notebooks, write figures/")
    for name, default in (("profile", "quick"), ("source", "measured"), ("labels", "en")):
        drawing.add_argument(f"--{name}", default=default)
    for name in ("machine", "params"):
        drawing.add_argument(f"--{name}", default="")
    in_place = commands.add_parser("execute", help="re-execute the committed notebooks in place")
    for command in (drawing, in_place):
        command.add_argument("--notebook", default="")
        command.add_argument("--root", type=Path, default=paths.ROOT)
    asked = vars(parser.parse_args(argv))
    command, root = asked.pop("command"), asked.pop("root").resolve()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        return figures(root, **asked) if command == "figures" else execute(root, **asked)
    except InputError as error:
        print(f"make {command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except staging.Busy as error:
        print(f"make {command}: {error}", file=sys.stderr)
        return BUSY
    except OSError as error:
        print(f"make {command}: {error}; free some space or give write permission", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("\ninterrupted; notebooks that had finished are kept, the same call goes on", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
