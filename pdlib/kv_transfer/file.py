"""Road 4: a file, for a cache that is kept or handed over later. safetensors: bytes and names, nothing to execute."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash

from pdlib import paths
from pdlib.kv_cache import KVCache
from pdlib.kv_transfer.manifest import Manifest, TransferError, check_slots, manifest_of, raw
from pdlib.kv_transfer.parts import dtype_of, pack, pieces, settle, unpack, views
from pdlib.models import Model
from pdlib.spec import DTYPE_BYTES


def save(
    path: Path,
    model: Model,
    cache: KVCache,
    slots: Sequence[int] | None = None,
    wire: str = "",
    checksums: bool = True,
) -> Manifest:
    """Write the filled positions of `slots` (default: all) to `path`, whole or not at all; returns the manifest.

    One flat tensor a layer, in the order of the wire. InputError when the file cannot be written.
    """
    manifest = manifest_of(model, cache, slots, wire=wire, checksums=checksums)
    rows = check_slots(cache, slots, len(manifest.lengths))
    sums = ["0" * 16] * len(manifest.parts) if checksums else []  # as long as those that are known at the end
    kind = dtype_of(manifest.wire)
    buffer = torch.empty(manifest.bytes // len(manifest.parts) // kind.itemsize, dtype=kind)  # of one layer
    with paths.atomic(path) as file:
        file.write(_header(manifest, sums))
        for layer, start, stop in manifest.parts:
            found = [v for piece in pieces(manifest, layer, start, stop) for v in views(cache, piece, rows)]
            flat = raw(pack(found, buffer))
            file.write(flat)
            if checksums:
                sums[layer] = xxhash.xxh3_64_hexdigest(flat)
        file.seek(0)
        file.write(_header(manifest, sums))
    return manifest


def load_manifest(path: Path) -> Manifest:
    """What a file written by `save` holds, without reading the keys; TransferError when it is none."""
    with _opened(path) as file:
        return _manifest(file, path)[0]


def load(path: Path, model: Model, cache: KVCache, slots: Sequence[int] | None = None) -> Manifest:
    """Read a file written by `save` into `slots` (default: 0, 1, …) of `cache`; returns its manifest.

    TransferError, the cache's lengths as they were, for another model's file, one that was cut short or altered.
    """
    with _opened(path) as file:
        manifest, sums = _manifest(file, path)
        manifest.check(model, cache, slots)
        rows = check_slots(cache, slots, len(manifest.lengths))
        layers = [file.get_tensor(str(layer)) for layer, _, _ in manifest.parts]  # mapped, not read yet
        for (layer, start, stop), flat, wanted in zip(manifest.parts, layers, sums, strict=True):
            size = sum(manifest.counts(start, stop)) * manifest.bytes // max(1, sum(manifest.lengths))
            if flat.dtype != dtype_of(manifest.wire) or flat.nbytes * manifest.model.layers != size:
                raise TransferError(f"{path}: layer {layer} has not the size its manifest says; write it again")
            if wanted and xxhash.xxh3_64_hexdigest(raw(flat)) != wanted:
                raise TransferError(f"{path}: layer {layer} is not what was written (checksum); prefill again")
        for (layer, start, stop), flat in zip(manifest.parts, layers, strict=True):
            at = 0
            for piece in pieces(manifest, layer, start, stop):
                found = views(cache, piece, rows)
                size = sum(view.numel() for view in found)
                unpack(flat[at : at + size], found)
                at += size
    settle(cache, rows, manifest.lengths)
    return manifest


def _header(manifest: Manifest, sums: Sequence[str]) -> bytes:
    """What precedes the tensors of a safetensors file: its length in 8 bytes, then names, types and offsets as JSON.

    github.com/safetensors/safetensors, "Format". Its library writes whole tensors only, which would take the memory
    of the cache twice over; here a layer is enough.
    """
    size = manifest.bytes // len(manifest.parts)
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[manifest.wire]
    shape = [size // DTYPE_BYTES[manifest.wire]]
    told: dict[str, object] = {
        str(layer): {"dtype": kind, "shape": shape, "data_offsets": [layer * size, (layer + 1) * size]}
        for layer, _, _ in manifest.parts
    }
    told["__metadata__"] = {"manifest": manifest.to_json().decode()} | ({"checksums": " ".join(sums)} if sums else {})
    text = json.dumps(told).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _opened(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="pt")
    except (OSError, safetensors.SafetensorError) as error:
        raise TransferError(f"{path} is no whole safetensors file ({error}); write it again") from error


def _manifest(file: Any, path: Path) -> tuple[Manifest, list[str]]:
    told = file.metadata() or {}
    manifest = Manifest.from_json(told.get("manifest", "").encode(), str(path))
    if sorted(file.keys()) != sorted(str(layer) for layer, _, _ in manifest.parts):
        raise TransferError(f"{path}: its layers are not those of its manifest; write it again")
    sums = told.get("checksums", "").split() if manifest.checksums else [""] * len(manifest.parts)
    if len(sums) != len(manifest.parts):
        raise TransferError(f"{path}: its checksums are not those of its manifest; write it again")
    return manifest, sums
