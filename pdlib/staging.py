"""The runner's files: one run at a time, what a result depends on, and results moved into place whole.

build/staging/<notebook>.<pid>/  while it runs: out/ (figures, results) and the executed copy
build/finished/<notebook>/       succeeded; its files are being moved
build/stamps/<notebook>.json     what the result was made from, and the hashes of its files
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from pdlib import paths
from pdlib.machine import cores, cpu_name, settings

WEIGHTS = ("PDLIB_MODELS", "HF_HOME", "HF_HUB_CACHE")  # variables that say where weights are
PART = ".moving-"  # prefix of a file that is being copied to another file system


class Busy(Exception):
    """Another run is at work in this checkout."""


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Hold the checkout for one run; raises Busy with the other's process id. A kill frees it."""
    path = root / "build" / "runner.lock"
    path.parent.mkdir(exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise Busy(
                f"process {file.read().strip() or '(starting)'} is already running the notebooks of this "
                "checkout; wait for it, or stop it, and make the same call again"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def sha256(path: Path) -> str:
    """Hash of one file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(folder: Path) -> str:
    """Hash of the names and contents of all files below `folder`, compiled ones aside."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)} {sha256(path)}\n".encode())
    return digest.hexdigest()


def inputs(root: Path, notebook: Path, values: dict[str, Any]) -> dict[str, Any]:
    """What a notebook's result depends on. Its own stored outputs do not count, its cells and tags do."""
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    sources = [["".join(c["source"]), c["cell_type"], c.get("metadata", {}).get("tags", [])] for c in cells]
    lock = root / "requirements.lock"
    depends = {
        "notebook": hashlib.sha256(json.dumps(sources).encode()).hexdigest(),
        "pdlib": tree(root / "pdlib"),
        "packages": sha256(lock) if lock.exists() else "",
        "parameters": values,
    }
    if values.get("source") == "recorded":  # drawn the same on every machine
        return {**depends, "recorded rows": tree(root / "results" / "recorded")}
    return {**depends, "machine": machine()}


def machine() -> dict[str, Any]:
    """This machine in a few milliseconds: no torch (devices.fingerprint has the rest)."""
    gpus = sorted(p.read_text("utf-8") for p in Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return {
        "host": [platform.system(), platform.machine(), cpu_name(), cores(), os.sysconf("SC_PHYS_PAGES")],
        "gpus": gpus,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers")},
        "settings": settings() | {name: os.environ[name] for name in WEIGHTS if name in os.environ},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def out_of_date(root: Path, stem: str, depends: dict[str, Any]) -> str:
    """Why the notebook has to run ('' when it need not): what changed since its last success."""
    try:
        stamp = json.loads((root / "build" / "stamps" / f"{stem}.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return "not run yet"
    now = json.loads(json.dumps(depends))
    for name in now.keys() | stamp["inputs"].keys():
        if now.get(name) != stamp["inputs"].get(name):
            return f"{name} changed"
    for name, value in stamp["outputs"].items():
        path = root / name
        if not path.is_file() or sha256(path) != value:
            return f"{name} is gone or was overwritten"
    return ""


def fresh(root: Path, stem: str) -> Path:
    """A new staging folder with out/ in it, no other run's: what a killed run had started may write a moment on."""
    folder = root / "build" / "staging" / f"{stem}.{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "out").mkdir(parents=True)
    return folder


def publish(root: Path, folder: Path, stem: str, depends: dict[str, Any]) -> int:
    """Move what a notebook left in `folder` into place and stamp it; returns the number of files.

    From the rename on it is finished: an interrupted or failed move is taken up by `recover`.
    """
    files = sorted(p.relative_to(folder / "out") for p in (folder / "out").rglob("*") if p.is_file())
    outputs = {str(name): sha256(folder / "out" / name) for name in files}
    paths.write_atomic(folder / "stamp.json", json.dumps({"inputs": depends, "outputs": outputs}, indent=1))
    finished = root / "build" / "finished" / stem
    finished.parent.mkdir(exist_ok=True)
    os.replace(folder, finished)
    _move(root, finished)
    return len(files)


def recover(root: Path) -> list[str]:
    """Clean up after an interrupted call; returns the notebooks whose finished files were moved now."""
    build = root / "build"
    shutil.rmtree(build / "staging", ignore_errors=True)
    for name in ("figures", "results/measured"):
        for part in (root / name).rglob(PART + "*"):
            part.unlink()
    finished = sorted((build / "finished").glob("*"))
    for folder in finished:
        _move(root, folder)
    return [folder.name for folder in finished]


def _move(root: Path, finished: Path) -> None:
    """Every file of out/ to its place, then the stamp. May be repeated after any interruption."""
    if not (finished / "stamp.json").exists():  # all had been moved
        return shutil.rmtree(finished)
    stamp = json.loads((finished / "stamp.json").read_text("utf-8"))
    there = [name for name in stamp["outputs"] if (finished / "out" / name).exists()]
    for name in there:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    moves = []
    try:
        for name in there:
            source, target = finished / "out" / name, root / name
            if os.stat(source).st_dev != os.stat(target.parent).st_dev:
                # a rename cannot cross file systems: copy all first, so that a full disk changes nothing
                part = target.parent / (PART + target.name)
                moves.append((part, target))
                shutil.copyfile(source, part)
            else:
                moves.append((source, target))
        for source, target in moves:
            os.replace(source, target)
    except OSError:
        for source, _ in moves:
            if source.name.startswith(PART):
                source.unlink(missing_ok=True)
        raise
    (root / "build" / "stamps").mkdir(exist_ok=True)
    os.replace(finished / "stamp.json", root / "build" / "stamps" / f"{finished.name}.json")
    shutil.rmtree(finished)
