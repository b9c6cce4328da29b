"""Write requirements.lock and the pins of environment.yml: `make lock`, with the oldest Python supported.

pip resolves pyproject.toml (with torch, so that what torch shares with the others fits both). The lock holds
the result without torch and its CUDA parts, with the hash of every file that the package index lists for each
version, so that one lock serves Linux and macOS on each supported Python.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
OLDEST = (3, 11)  # resolved with the oldest Python, a version works on the newer ones too
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (("linux", "Linux", "x86_64"), ("linux", "Linux", "aarch64"), ("darwin", "Darwin", "arm64"))
PLATFORM_WHEELS = re.compile(r"(torch|triton|nvidia-.*|cuda-.*)$")


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def inputs() -> list[str]:
    """Every requirement of pyproject.toml: to build, to run and to test."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return (
        project["build-system"]["requires"]
        + project["project"]["dependencies"]
        + [r for extra in project["project"]["optional-dependencies"].values() for r in extra]
    )


def resolve(requirements: list[str]) -> dict[str, dict[str, Any]]:
    """pip's answer to `requirements`: canonical name → metadata (name, version, requires_dist, ...)."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq"]
    report = subprocess.run([*command, "--report", "-", *requirements], stdout=subprocess.PIPE, check=True).stdout
    found = {}
    for item in json.loads(report)["install"]:
        metadata = item["metadata"]
        # the metadata lists a package's extras; what was asked for is `requested_extras`
        found[canonical(metadata["name"])] = {**metadata, "extras": item.get("requested_extras", [])}
    return found


def needed_elsewhere(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Requirements that only another platform or Python has: name → requirement with its marker."""
    from pip._vendor.packaging.markers import default_environment
    from pip._vendor.packaging.requirements import Requirement

    missing: dict[str, str] = {}
    for metadata in found.values():
        for text in metadata.get("requires_dist", []):
            requirement = Requirement(text)
            if requirement.marker is None or canonical(requirement.name) in found:
                continue
            for sys_platform, system, machine in PLATFORMS:
                for python in PYTHONS:
                    environment = {
                        **default_environment(),
                        "sys_platform": sys_platform,
                        "platform_system": system,
                        "platform_machine": machine,
                        "python_version": python,
                        "python_full_version": python + ".0",
                    }
                    if any(
                        requirement.marker.evaluate({**environment, "extra": extra})
                        for extra in ("", *metadata["extras"])
                    ):
                        missing[canonical(requirement.name)] = text
    return missing


def inherit(markers: dict[str, str], found: dict[str, dict[str, Any]], everywhere: set[str]) -> dict[str, str]:
    """Give what only marked packages need the marker of the one that needs it: name → marker."""
    from pip._vendor.packaging.requirements import Requirement

    marked = {name: text.split(";", 1)[1].strip() for name, text in markers.items()}
    waiting = list(marked)
    while waiting:
        name = waiting.pop()
        for text in found[name].get("requires_dist", []):
            needed = canonical(Requirement(text).name)
            if needed in found and needed not in everywhere and needed not in marked:
                marked[needed] = marked[name]
                waiting.append(needed)
    return marked


def hashes(packages: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Package → sha256 of every file that the index lists for its version, wheels of all platforms.

    The index states them, so nothing is downloaded; pip has no public call for this.
    """
    from pip._internal.commands.install import InstallCommand
    from pip._internal.index.collector import parse_links
    from pip._internal.models.link import Link

    logging.disable(logging.WARNING)  # one line for every extra index that lacks a project
    command = InstallCommand("install", "read the index")
    options, _ = command.parse_args([])
    listed = {}
    with command.main_context():
        finder = command._build_package_finder(options, command.get_default_session(options))
        for name, metadata in packages.items():
            urls = finder.search_scope.get_index_urls_locations(name)
            pages = [finder._link_collector.fetch_response(Link(url)) for url in urls]
            links = [link for page in pages if page is not None for link in parse_links(page)]
            listed[name] = sorted(
                {
                    link.hash
                    for link in links
                    if link.hash_name == "sha256" and belongs(link.filename, name, metadata["version"])
                }
            )
            if not listed[name]:
                raise SystemExit(f"the package index lists no hash for {name}=={metadata['version']}")
    return listed


def belongs(filename: str, name: str, version: str) -> bool:
    """Whether `filename` is a wheel or a source archive of this version of this package."""
    stem = re.sub(r"\.(tar\.gz|zip|tar\.bz2)$", "", filename)
    found = filename.split("-")[:2] if filename.endswith(".whl") else stem.rsplit("-", 1)
    return len(found) == 2 and canonical(found[0]) == name and found[1] == version


def write(packages: dict[str, dict[str, Any]], markers: dict[str, str]) -> None:
    """Write both files; `markers` says which packages only some platforms need."""
    listed = hashes(packages)
    lines = [
        "# Exact, hashed; made by `make lock` from pyproject.toml; for Linux and macOS, Python 3.11 to 3.14.",
        f"# Without torch and its CUDA parts: `make figures` and `make test` install {TORCH} first.",
    ]
    for name in sorted(packages):
        marker = f" ; {markers[name]}" if name in markers else ""
        lines.append(f"{name}=={packages[name]['version']}{marker} \\")
        lines += [f"    --hash=sha256:{value} \\" for value in listed[name]]
        lines[-1] = lines[-1].removesuffix(" \\")
    (ROOT / "requirements.lock").write_text("\n".join(lines) + "\n")

    direct = sorted({canonical(re.split(r"[^\w.-]", text, maxsplit=1)[0]) for text in inputs()} - {"torch"})
    pins = "".join(f"      - {name}=={packages[name]['version']}\n" for name in direct)
    (ROOT / "environment.yml").write_text(
        "# For conda users: `conda env create -f environment.yml`. Pins as in requirements.lock, written by\n"
        "# `make lock`; an own CUDA or ROCm build of torch goes in place of the torch line.\n"
        "name: pdlib\nchannels:\n  - conda-forge\ndependencies:\n  - python>=3.11\n  - pip\n  - pip:\n"
        f"      - {TORCH}\n{pins}      - -e .\n"
    )


def main() -> None:
    if sys.version_info[:2] != OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise SystemExit(f"make lock resolves with the oldest Python supported: make lock PYTHON=python{wanted}")
    if "--inside" not in sys.argv:  # a system Python may refuse pip even to look: use a throwaway venv
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            raise SystemExit(subprocess.call([f"{folder}/bin/python", __file__, "--inside"]))
    requirements = [TORCH, *inputs()]
    print("resolving (a minute or two) ...", flush=True)
    found = resolve(requirements)
    everywhere, markers = set(found), {}
    while missing := needed_elsewhere(found):
        markers |= missing
        found = resolve([*requirements, *(text.split(";")[0] for text in markers.values())])
    packages = {name: m for name, m in found.items() if not PLATFORM_WHEELS.match(name)}
    write(packages, inherit(markers, found, everywhere))
    print(f"requirements.lock: {len(packages)} packages; environment.yml: the same versions")


if __name__ == "__main__":
    main()
