"""Parameters of a notebook: read from its cell, set by a profile or by hand, checked before anything runs."""

from __future__ import annotations

import ast
import difflib
import json
import math
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from pdlib.spec import DTYPE_BYTES, GPT2, SCENARIOS, InputError, Workload, one_of

CHOICES: dict[str, Iterable[str]] = {
    "source": ("measured", "recorded"),
    "labels": ("en", "zh"),
    "dtype": tuple(DTYPE_BYTES),
    "scenario": tuple(SCENARIOS),
    "scenarios": tuple(SCENARIOS),
}
DEVICES = ("device", "devices", "fast", "slow")  # parameters that hold names of devices
AUTO = "auto"  # a device that the notebook picks by itself


def defaults(notebook: Path) -> dict[str, Any]:
    """Names and default values of the cell tagged `parameters`, in order.

    Only literals may stand there: papermill sets values in a cell of its own after this one, and what
    was derived here would keep the old value. Raises InputError otherwise.
    """
    try:
        cells = json.loads(notebook.read_text("utf-8"))["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{notebook.name} is not a notebook ({error}); restore the file") from error
    tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise InputError(f"{notebook.name} has {len(tagged)} cells tagged 'parameters'; give it one")
    found: dict[str, Any] = {}
    for statement in ast.parse("".join(tagged[0]["source"])).body:
        try:
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
                raise ValueError("not an assignment")
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            (name,) = (target.id for target in targets if isinstance(target, ast.Name))
            found[name] = ast.literal_eval(statement.value)
        except ValueError as error:
            raise InputError(
                f"{notebook.name}: `{ast.unparse(statement)}` in its parameters cell is not `name = literal`;"
                " move what is derived to the next cell"
            ) from error
    return found


def profiles(folder: Path) -> list[str]:
    """Names of the profiles in `folder` (one YAML file each)."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load_profile(folder: Path, name: str, stems: Iterable[str]) -> dict[str, dict[str, Any]]:
    """A profile: notebook → parameters; InputError for an unknown profile or notebook, or bad YAML."""
    one_of("profile", name, profiles(folder))
    path = folder / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text("utf-8")) or {}
    except yaml.YAMLError as error:
        raise InputError(f"{path.name} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict) or not all(isinstance(v, dict | None) for v in content.values()):
        raise InputError(f"{path.name} must map each notebook to its parameters (name: value)")
    for stem in content:
        one_of(f"notebook in {path.name}", stem, stems)
    return {stem: values or {} for stem, values in content.items()}


def by_hand(text: str) -> dict[str, str]:
    """Split 'repeats=3 dtype=bfloat16' into names and texts; InputError where a part is no name=value."""
    try:
        parts = shlex.split(text)
    except ValueError as error:
        raise InputError(f"PARAMS={text!r}: {error}") from error
    pairs = [part.partition("=") for part in parts]
    for name, equals, _ in pairs:
        if not equals or not name.isidentifier():
            raise InputError(f"PARAMS: {name + equals!r} is not name=value; e.g. PARAMS='repeats=3 seed=1'")
    return {name: value for name, _, value in pairs}


def read(text: str, default: Any) -> Any:
    """`text` as a value of the default's kind: '3', '0.5', 'true', '1,8,32' or '[1, 8, 32]', 'float32'."""
    if isinstance(default, str):
        return text
    if isinstance(default, list | tuple) and not text.strip().startswith("["):
        text = f"[{text}]"
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def check(where: str, known: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise InputError unless every one of `values` is a known parameter with a value that it can have.

    `where` says who gave them (a profile and a notebook); `known` are the notebook's defaults.
    """
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"{where}: unknown parameter {name!r}; {hint}It has: {', '.join(known)}")
        _check_value(f"{where}: {name}", name, known[name], value)
    merged = {**known, **values}
    if merged.get("model", "gpt2") == "gpt2":
        for prompt, new in _lengths(merged):
            try:
                Workload(1, prompt, new).check_fits(GPT2)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error


def check_devices(values: Mapping[str, Any]) -> None:
    """Raise InputError when a parameter names a device that is not here (imports torch)."""
    asked = [v for name in DEVICES for v in _flat(values.get(name)) if v not in (None, "", AUTO)]
    if asked:
        from pdlib import devices

        for name in asked:
            devices.parse(name)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _lengths(values: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(prompt tokens, new tokens) of every workload among the parameters."""
    found = [(values.get("prompt_tokens"), values.get("new_tokens"))]
    for value in values.values():
        if isinstance(value, dict):
            found += [tuple(pair) for pair in value.values() if isinstance(pair, list | tuple) and len(pair) == 2]
    return [pair for pair in found if all(isinstance(n, int) for n in pair)]  # type: ignore[misc]


def _check_value(where: str, name: str, default: Any, value: Any) -> None:
    """One value against its default's kind; lists and mappings element by element."""

    def refuse(allowed: str) -> None:
        raise InputError(f"{where} = {value!r}; give {allowed}")

    if default is None or value is default:
        return
    if isinstance(default, bool):
        if not isinstance(value, bool):
            refuse("true or false")
    elif isinstance(default, int):
        least = 0 if name == "seed" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            refuse(f"a whole number of at least {least}")
    elif isinstance(default, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            refuse("a number above 0")
    elif isinstance(default, str):
        if not isinstance(value, str) or (default and not value.strip()):
            refuse(f"a text like {default!r}")
        if name in CHOICES and value not in CHOICES[name]:
            refuse(f"one of: {', '.join(CHOICES[name])}")
    elif isinstance(default, dict):
        if not isinstance(value, dict) or not value:
            refuse(f"a mapping like {default!r}")
        for key, item in value.items():
            if set(default) <= set(SCENARIOS) and key not in SCENARIOS:
                raise InputError(f"{where}: unknown scenario {key!r}; choose from: {', '.join(SCENARIOS)}")
            _check_value(f"{where}[{key}]", name, next(iter(default.values()), None), item)
    elif not isinstance(value, list | tuple) or not value:
        refuse(f"a list like {list(default)!r}")
    elif default:
        for item in value:
            _check_value(f"{where}, element", name, default[0], item)
