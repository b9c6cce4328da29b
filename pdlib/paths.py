"""Where things lie: the one module that knows absolute paths, and the one way to write a file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from pdlib.spec import InputError

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"

# The machine whose recorded rows are drawn when nobody names another one.
REFERENCE = "amd-epyc-2c"


def out() -> Path:
    """Root of everything written: the repository, or the folder in PDLIB_OUT while a run is staged."""
    return Path(os.environ.get("PDLIB_OUT") or ROOT).resolve()


def figures() -> Path:
    """Folder of the charts and tables."""
    return out() / "figures"


def measured(machine: str) -> Path:
    """Folder of the rows measured on `machine` by the reader."""
    return out() / "results" / "measured" / folder_name(machine)


def recorded(machine: str = REFERENCE) -> Path:
    """Folder of the rows that came with the repository for `machine`; never inside PDLIB_OUT."""
    return ROOT / "results" / "recorded" / folder_name(machine)


def folder_name(machine: str) -> str:
    """`machine` unchanged, or InputError when it cannot be the name of one folder."""
    if not machine or machine.startswith(".") or any(c in machine for c in '/\\:*?"<>|\n'):
        raise InputError(f"machine {machine!r} cannot name a folder; use letters, digits, '-', '_', '.'")
    return machine


def write_atomic(path: Path, content: str | bytes) -> Path:
    """Write `content` to `path` whole or not at all; returns `path`. Text is UTF-8, its ends '\\n' everywhere."""
    with atomic(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file that becomes `path`, folders and all, when the block ends, and leaves nothing when it fails.

    A reader of `path` sees the old file or the new one, also after a kill or on a full disk. Raises InputError with
    the path where it cannot be written.
    """
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A name of its own for every writer: two runs at once must not share a temporary file.
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes files only their owner can read
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"{path} could not be written ({error.strerror}); free some space or give write permission"
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # gone already when the move worked


def check_writable(folder: Path) -> Path:
    """`folder`, made if need be, after a trial write of 64 KiB; InputError before any work otherwise.

    An empty file would be written on a full disk, too.
    """
    write_atomic(folder / ".writable", bytes(1 << 16)).unlink(missing_ok=True)
    return folder
