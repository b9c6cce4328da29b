"""Models and devices by name, as data with a source beside each number (data/models.csv, data/devices.csv). No torch.

A device's peaks are its data sheet's: dense, matrix units where the dtype has them, without sparsity; a link's rate is
one direction's. Nothing here was measured.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pandas as pd

from pdlib import paths
from pdlib.spec import DTYPE_BYTES, DeviceSpec, InputError, ModelSpec, one_of

_FLAGS = ("gated_mlp", "learned_positions", "tied_head")


def models() -> pd.DataFrame:
    """Every model's sizes, one row a model, with the source of its numbers."""
    return _table("models").copy()


def devices() -> pd.DataFrame:
    """Every device's numbers, one row a number: name, quantity, value, source. FLOP/s under the dtype's name."""
    return _table("devices").copy()


@cache
def model(name: str) -> ModelSpec:
    """The sizes of a known model; InputError lists the names. Anything local: ModelSpec.from_hf(name, config)."""
    table = _table("models")
    one_of("model", name, list(table["name"]))
    sizes: dict[str, Any] = table[table["name"] == name].drop(columns="source").iloc[0].to_dict()
    numbers = {key: int(value) for key, value in sizes.items() if key != "name"}
    return ModelSpec(name=name, **numbers | {flag: bool(numbers[flag]) for flag in _FLAGS})


@cache
def device(name: str, dtype: str = "float16") -> DeviceSpec:
    """What the data sheet says of a device at a dtype: peaks, memory, link, power (0 = not known).

    Data sheets do not tell reading from copying: both are the memory's bandwidth. InputError for an unknown name
    or a dtype without a peak.
    """
    table = _table("devices")
    one_of("device", name, list(table["name"].unique()))
    own = table[table["name"] == name].set_index("quantity")
    if dtype not in own.index or dtype not in (*DTYPE_BYTES, "float8", "int8"):
        known = [q for q in own.index if q in (*DTYPE_BYTES, "float8", "int8")]
        raise InputError(f"{name} has no peak for {dtype!r}; its data sheet gives: {', '.join(known)}")
    if "read_bytes_per_s" not in own.index:
        raise InputError(f"{name} has no bandwidth; add its read_bytes_per_s to devices.csv with a source")
    value = own["value"].to_dict()
    return DeviceSpec(
        name=name,
        flops_per_s=value[dtype],
        read_bytes_per_s=value["read_bytes_per_s"],
        copy_bytes_per_s=value["read_bytes_per_s"],
        origin=f"{own.loc[dtype, 'source']}; {own.loc['read_bytes_per_s', 'source']}",
        memory_bytes=value.get("memory_bytes", 0.0),
        link_bytes_per_s=value.get("link_bytes_per_s", 0.0),
        power_w=value.get("power_w", 0.0),
    )


@cache
def _table(name: str) -> pd.DataFrame:
    return pd.read_csv(paths.DATA / f"{name}.csv")
