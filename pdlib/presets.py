"""Models and devices by name: data/models.csv and data/devices.csv, a source beside each number. No torch.

A device's peaks are its data sheet's: dense, matrix units where the dtype has them, without sparsity; a link's rate
is one direction's. Nothing here was measured.
"""

from __future__ import annotations

import csv
from functools import cache
from typing import TYPE_CHECKING

from pdlib import paths
from pdlib.spec import DTYPE_BYTES, DeviceSpec, InputError, ModelSpec, one_of

if TYPE_CHECKING:  # half a second that a name's numbers do not need
    import pandas as pd

_FLAGS = ("gated_mlp", "learned_positions", "tied_head")


def models() -> pd.DataFrame:
    """Every model's sizes, one row a model, with the source of its numbers."""
    import pandas as pd

    return pd.read_csv(paths.DATA / "models.csv")


def devices() -> pd.DataFrame:
    """Every device's numbers, one row a number: name, quantity, value, source. FLOP/s under the dtype's name."""
    import pandas as pd

    return pd.read_csv(paths.DATA / "devices.csv")


@cache
def model(name: str) -> ModelSpec:
    """The sizes of a known model; InputError lists the names. Anything local: ModelSpec.from_hf(name, config)."""
    known = {line["name"]: line for line in _lines("models")}
    one_of("model", name, known)
    numbers = {key: int(value) for key, value in known[name].items() if key not in ("name", "source")}
    flags = {key: bool(numbers.pop(key)) for key in _FLAGS}
    return ModelSpec(name=name, **numbers, **flags)  # type: ignore[arg-type]  # one dict of sizes, one of flags


@cache
def device(name: str, dtype: str = "float16") -> DeviceSpec:
    """What the data sheet says of a device at a dtype: peaks, memory, link, power (0 = not known).

    Data sheets do not tell reading from copying: both are the memory's bandwidth. InputError for an unknown name
    or a dtype without a peak.
    """
    lines = _lines("devices")
    one_of("device", name, dict.fromkeys(line["name"] for line in lines))
    value = {line["quantity"]: float(line["value"]) for line in lines if line["name"] == name}
    source = {line["quantity"]: line["source"] for line in lines if line["name"] == name}
    peaks = [quantity for quantity in value if quantity in (*DTYPE_BYTES, "float8", "int8")]
    if dtype not in peaks:
        raise InputError(f"{name} has no peak for {dtype!r}; its data sheet gives: {', '.join(peaks)}")
    if "read_bytes_per_s" not in value:
        raise InputError(f"{name} has no bandwidth; add its read_bytes_per_s to devices.csv with a source")
    return DeviceSpec(
        name=name,
        flops_per_s=value[dtype],
        read_bytes_per_s=value["read_bytes_per_s"],
        copy_bytes_per_s=value["read_bytes_per_s"],
        origin=f"{source[dtype]}; {source['read_bytes_per_s']}",
        memory_bytes=value.get("memory_bytes", 0.0),
        link_bytes_per_s=value.get("link_bytes_per_s", 0.0),
        power_w=value.get("power_w", 0.0),
    )


@cache
def _lines(name: str) -> list[dict[str, str]]:
    with open(paths.DATA / f"{name}.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
