"""pyproject.toml, requirements.lock and environment.yml say the same, and so does what is installed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()
MODULES = {
    "yaml": "pyyaml",
    "huggingface_hub": "huggingface-hub",
    "IPython": "ipython",
}  # module → package where they differ


def declared() -> list[Requirement]:
    project = PROJECT["project"]
    extras = [text for extra in project["optional-dependencies"].values() for text in extra]
    return [Requirement(text) for text in (*project["dependencies"], *extras)]


def locked() -> dict[str, tuple[str, str]]:
    """Name → (version, marker or '')."""
    entries = re.findall(r"^([\w.-]+)==(\S+?)(?: ; (.*?))? \\$", LOCK, re.MULTILINE)
    return {name: (version, marker) for name, version, marker in entries}


def test_every_declared_package_is_locked_in_its_range() -> None:
    for requirement in declared():
        name = canonicalize_name(requirement.name)
        if name != "torch":
            assert requirement.specifier.contains(locked()[name][0]), name
    for text in PROJECT["build-system"]["requires"]:  # pdlib itself installs without a network
        assert canonicalize_name(Requirement(text).name) in locked()


def test_pitfall_24_the_lock_is_exact_hashed_and_names_no_host() -> None:
    entries = [entry for entry in re.split(r"\n(?=\w)", LOCK.split("\n", 2)[2])]
    assert len(entries) == len(locked()) > 100
    for entry in entries:
        first, *hashes = entry.rstrip("\n").split(" \\\n")
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+( ; .+)?", first), first
        assert hashes and all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line) for line in hashes)
    assert "://" not in LOCK and "index" not in LOCK.lower() and "find-links" not in LOCK
    assert not [name for name in locked() if re.match(r"(torch|triton|nvidia-|cuda-)", name)]


def test_the_lock_has_what_torch_shares_and_what_macs_need() -> None:
    assert {"filelock", "sympy", "networkx", "jinja2", "fsspec", "typing-extensions"} <= set(locked())
    marker = Marker(locked()["appnope"][1])  # the kernel needs it on macOS, and pip wants a hash for it
    assert marker.evaluate({"platform_system": "Darwin"}) and not marker.evaluate({"platform_system": "Linux"})


def test_conda_users_get_the_same() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    python, pip, with_pip = environment["dependencies"]
    assert python == "python" + PROJECT["project"]["requires-python"] and pip == "pip"
    *pins, editable = with_pip["pip"]
    assert editable == "-e ."
    pinned = dict(pin.split("==") for pin in pins)
    build = {canonicalize_name(Requirement(text).name) for text in PROJECT["build-system"]["requires"]}
    assert set(pinned) == {canonicalize_name(r.name) for r in declared()} | build
    torch = pinned.pop("torch")
    assert {name: locked()[name][0] for name in pinned} == pinned
    for tool in ("setup.py", "lock.py"):
        assert f'TORCH = "torch=={torch}"' in (ROOT / "tools" / tool).read_text()
    (torch_range,) = (r.specifier for r in declared() if r.name == "torch")
    assert torch_range.contains(torch)


def test_what_is_installed_is_what_is_locked() -> None:
    if not (Path(sys.prefix) / ".pdlib-ready").exists():
        pytest.skip("this environment was not made by tools/setup.py")
    for name, (version, marker) in locked().items():
        if not marker or Marker(marker).evaluate():
            assert metadata.version(name) == version, name


def test_every_import_is_declared() -> None:
    ours = {"pdlib", "benchmarks", "conftest", *(path.stem for path in (ROOT / "tests").glob("*.py"))}
    known = {canonicalize_name(r.name) for r in declared()}
    for folder in ("pdlib", "tests", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
                names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                for module in {str(name).split(".")[0] for name in names} - ours - sys.stdlib_module_names:
                    assert MODULES.get(module, module) in known, f"{path.name} imports {module}"
