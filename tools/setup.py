"""Make the environment that `make` works in, or see in a moment that it is up to date. Plain Python only.

Order: the folder (a venv), torch on its own (its wheel differs by platform), the lock, pdlib itself. A stamp
in the venv holds a hash of what it was made from; without the right stamp all is checked and repaired.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TORCH = "torch==2.13.0"
OLDEST_TORCH = (2, 11)
OLDEST_PYTHON = (3, 11)
STAMP = ".pdlib-ready"
TORCH_VERSION = "import torch, importlib.metadata as m; m.version('torch'); print(torch.__version__)"
LOCK = ".pdlib-lock"
NOT_COMPILED = "/(tests?|testing/_internal)/"  # never imported here
MAKING = ".pdlib-making"  # there while the folder itself is being made


class SetupError(Exception):
    """What is wrong and what to do, in one paragraph."""


def stamp_text(root):
    """What the environment depends on: the lock, the project's table, this file, and where pdlib lies."""
    digest = hashlib.sha256(root.encode())
    for name in ("requirements.lock", "pyproject.toml", os.path.join("tools", "setup.py")):
        with open(os.path.join(root, name), "rb") as file:
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest() + "\n"


def is_ready(venv, root):
    try:
        with open(os.path.join(venv, STAMP)) as file:
            return file.read() == stamp_text(root) and os.path.exists(python_of(venv))
    except FileNotFoundError:
        return False


def python_of(venv):
    return os.path.join(venv, "bin", "python")


def check_python():
    """Refuse a Python that is too old, naming a newer one where there is one."""
    if sys.version_info[:2] >= OLDEST_PYTHON:
        return
    newer = [name for name in ("python3.13", "python3.12", "python3.11") if works(name)]
    raise SetupError(
        "{} is Python {}, but 3.11 or newer is needed; {}".format(
            sys.executable,
            ".".join(map(str, sys.version_info[:3])),
            f"{newer[0]} is here: call make with PYTHON={newer[0]}"
            if newer
            else "install one and call make with PYTHON=/path/to/python3.11",
        )
    )


def works(name):
    """Whether the interpreter of this name starts (one that is only a shim may not)."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return shutil.which(name) is not None and subprocess.call([name, "-c", ""], **quiet) == 0


def answers(venv, code):
    """Output of `code` in the venv's Python, or None where it does not run."""
    try:
        command = [python_of(venv), "-c", code]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=venv)
    except OSError:  # no interpreter, or a link to one that was removed
        return None
    return done.stdout.decode().strip() if done.returncode == 0 else None


def call(what, *command):
    """Run one step, its output in sight; SetupError names it when it fails."""
    print(f"set-up: {what}", flush=True)
    if subprocess.call(command, cwd=ROOT) != 0:
        raise SetupError(f"{what} failed (see above); repair the cause and make the same call again")


def make_venv(venv):
    """Create the venv, or keep the one that works, or replace one that is broken."""
    version = answers(venv, "import sys, pip; print(*sys.version_info[:2])")
    making = os.path.join(venv, MAKING)
    if version is not None and not os.path.exists(making):
        if tuple(map(int, version.split())) < OLDEST_PYTHON:
            raise SetupError(f"the Python in {venv} is {version.replace(' ', '.')}; 3.11 or newer is needed")
        return
    check_python()
    others = [name for name in os.listdir(venv) if name not in (LOCK, MAKING)]
    ours = os.path.exists(os.path.join(venv, "pyvenv.cfg")) or os.path.exists(making)
    if others and not ours:
        raise SetupError(f"{venv} holds something that is no virtual environment; choose another VENV=")
    open(making, "w").close()
    for name in others:
        path = os.path.join(venv, name)
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
    step = f"{venv} with Python {sys.version_info[0]}.{sys.version_info[1]}"
    try:
        # when called by the very environment that is replaced: the Python that it was made from
        call(step, getattr(sys, "_base_executable", sys.executable), "-m", "venv", venv)
    except SetupError as error:
        raise SetupError(f"{error}. On Debian or Ubuntu: apt install python3-venv") from None
    os.unlink(making)


def drop_half_installed(venv):
    """Remove what an interrupted pip leaves: packages moved aside (~name), metadata without its last file.

    pip takes such a package for installed; without its metadata it installs it anew.
    """
    where = answers(venv, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    for name in os.listdir(where) if where else ():
        path = os.path.join(where, name)
        # every installer writes its name when all else is in place
        half = name.endswith(".dist-info") and not os.path.exists(os.path.join(path, "INSTALLER"))
        if name.startswith("~") or half:
            print(f"set-up: removing {name}, left by an interrupted installation", flush=True)
            shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)


def install(venv, torch):
    """torch, the lock, pdlib; each step may be repeated. Returns whether torch is there in the end."""
    python = python_of(venv)
    pip_install = (python, "-m", "pip", "--disable-pip-version-check", "install", "--no-compile")
    drop_half_installed(venv)
    found = answers(venv, TORCH_VERSION)
    if found and tuple(map(int, found.split(".")[:2])) >= OLDEST_TORCH:
        print(f"set-up: torch {found} is here and is kept", flush=True)
    elif torch == "skip":
        print(f"set-up: no torch here and TORCH=skip; install yours: {python} -m pip install ...")
    else:
        call(f"{TORCH} (TORCH=skip leaves it out)", *pip_install, TORCH)
    lock = os.path.join(ROOT, "requirements.lock")
    locked = ("-qq", "--require-hashes", "-r", lock)
    call("the packages of requirements.lock (a minute or two)", *pip_install, *locked)
    # the build backend is one of the locked packages, so this step needs no network
    call("pdlib, editable", *pip_install, "-qq", "--no-deps", "--no-build-isolation", "--no-index", "-e", ROOT)
    print("set-up: compiling", flush=True)  # on all cores, which pip does on one
    where = answers(venv, "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}  # some packages carry templates
    subprocess.call([python, "-m", "compileall", "-q", "-j", "0", "-x", NOT_COMPILED, where], **quiet)
    return bool(found) or torch != "skip"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"))
    parser.add_argument("--torch", default="", choices=("", "skip"), help="skip: use an own build")
    arguments = parser.parse_args(argv)
    venv = os.path.abspath(arguments.venv)
    if is_ready(venv, ROOT):
        return 0
    started = time.time()
    try:
        os.makedirs(venv, exist_ok=True)
        with open(os.path.join(venv, LOCK), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("set-up: another call is at it; waiting", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if is_ready(venv, ROOT):  # the other call has done it
                return 0
            stamp = os.path.join(venv, STAMP)
            if os.path.exists(stamp):  # an older one must not vouch for what is half changed
                os.unlink(stamp)
            make_venv(venv)
            if install(venv, arguments.torch):
                with open(stamp + ".part", "w") as file:
                    file.write(stamp_text(ROOT))
                os.replace(stamp + ".part", stamp)
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"set-up: {error}; free some space or give write permission", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("set-up: interrupted; the same call goes on from here", file=sys.stderr)
        return 130
    print(f"set-up: done in {time.time() - started:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
