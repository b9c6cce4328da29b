"""What goes before the bytes: whose cache it is, how it lies, how long it is. Checked before a cache is touched."""

from __future__ import annotations

import builtins
import json
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

import torch
import xxhash

from pdlib.kv_cache import KVCache
from pdlib.models import Model
from pdlib.spec import DTYPE_BYTES, InputError, one_of, whole_numbers

FORMAT = 1
MOST_BYTES = 2**20  # of a manifest: 100,000 lengths take less
_MOST = 2**40  # of any one number: far above what exists, far below where a product of two overflows 2^80


class TransferError(InputError):
    """A hand-over that was refused or broke off: which side, what, and what to do."""


@dataclass(frozen=True)
class Fingerprint:
    """What two sides have to agree on. `name` is for messages only: one side may know the model by its folder."""

    name: str
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    positions: int
    dtype: str
    config: str  # hash of the library's configuration: the scaling of positions and the like
    weights: str  # hash of all weights

    def differences(self, other: Fingerprint) -> str:
        """What differs, as "layers 12 / 30, …"; '' for the same model."""
        mine, theirs = asdict(self), asdict(other)
        return ", ".join(f"{k} {mine[k]} / {theirs[k]}" for k in mine if k != "name" and mine[k] != theirs[k])


_known: weakref.WeakKeyDictionary[Any, Fingerprint] = weakref.WeakKeyDictionary()


def fingerprint(model: Model) -> Fingerprint:
    """The model's fingerprint; all weights are hashed (about 10 GB/s on one core) once, then it is kept."""
    if model.hf not in _known:
        weights = xxhash.xxh3_128()
        for name, weight in model.hf.named_parameters():
            weights.update(name.encode())
            weights.update(raw(weight.detach().cpu().contiguous()))
        told = model.hf.config.to_dict()
        # where it was found and what wrote it do not change what it computes
        for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
            told.pop(name, None)
        spec = model.spec
        _known[model.hf] = Fingerprint(
            name=spec.name,
            architecture=model.hf.config.model_type,
            layers=spec.layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            hidden=spec.hidden,
            vocab=spec.vocab,
            positions=spec.positions,
            dtype=model.dtype,
            config=xxhash.xxh3_128_hexdigest(json.dumps(told, sort_keys=True, default=str).encode()),
            weights=weights.hexdigest(),
        )
    return _known[model.hf]


def raw(tensor: torch.Tensor) -> Any:
    """The bytes of a contiguous CPU tensor, not copied; also of bfloat16, which NumPy does not know."""
    return tensor.view(torch.uint8).numpy() if tensor.dim() else tensor[None].view(torch.uint8).numpy()


@dataclass(frozen=True)
class Manifest:
    """One hand-over: `lengths` of its requests in order, in parts that end at the positions `cuts`."""

    model: Fingerprint
    wire: str  # dtype on the way
    lengths: tuple[int, ...]
    cuts: tuple[int, ...]  # ends of the chunks, the last the longest length; (longest,) when there is one
    checksums: bool
    bytes: int  # of keys and values, without checksums

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """(layer, start, stop) of every part, in the order in which prefill makes them."""
        bounds = pairwise((0, *self.cuts))
        return [(layer, start, stop) for start, stop in bounds for layer in range(self.model.layers)]

    def counts(self, start: int, stop: int) -> list[int]:
        """Positions of each request that lie in start … stop."""
        return [max(0, min(n, stop) - start) for n in self.lengths]

    def to_json(self) -> builtins.bytes:
        return json.dumps({"format": FORMAT, **asdict(self)}).encode()

    @classmethod
    def from_json(cls, data: builtins.bytes, whose: str = "the other side") -> Manifest:
        """Read what another process says of itself; TransferError for anything that `to_json` cannot have made."""
        try:
            if len(data) > MOST_BYTES:
                raise ValueError(f"{len(data)} bytes, at most {MOST_BYTES} are read")
            told = json.loads(data)
            if told.pop("format") != FORMAT:
                raise ValueError(f"a format other than {FORMAT}: run the same version of pdlib on both sides")
            model = Fingerprint(**_typed(Fingerprint, told.pop("model")))
            made = cls(model=model, **_typed(cls, told, {"model"}))
            made._check_numbers()
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise TransferError(
                f"the manifest of {whose} cannot be read ({type(error).__name__}: {str(error)[:200]}); "
                "is it pdlib that sent it?"
            ) from error
        return made

    def _check_numbers(self) -> None:
        sizes = {k: v for k, v in asdict(self.model).items() if isinstance(v, int)}
        whole_numbers(**sizes)
        one_of("dtype", self.model.dtype, DTYPE_BYTES)
        one_of("dtype on the way", self.wire, DTYPE_BYTES)
        longest = max(self.lengths, default=-1)
        if not self.lengths or min(self.lengths) < 0 or longest > self.model.positions:
            raise ValueError(f"lengths outside 0 … {self.model.positions}")
        if any(a >= b for a, b in pairwise((0, *self.cuts))) or (0, *self.cuts)[-1] != longest:
            raise ValueError(f"parts end at {self.cuts[-8:]}, which does not rise to the longest length {longest}")
        if max((*sizes.values(), self.bytes)) > _MOST or self.bytes != self._expected_bytes():
            raise ValueError(f"{self.bytes} bytes, the lengths and sizes make {self._expected_bytes()}")

    def _expected_bytes(self) -> int:
        m = self.model
        return 2 * m.layers * m.kv_heads * m.head_dim * DTYPE_BYTES[self.wire] * sum(self.lengths)

    def check(self, model: Model, cache: KVCache | None = None, slots: Sequence[int] | None = None) -> None:
        """Raise TransferError, before any cache is touched, unless this hand-over fits `model` (and `cache`)."""
        here = fingerprint(model)
        if differs := self.model.differences(here):
            raise TransferError(
                f"the cache comes from {self.model.name}, here runs {here.name}; they differ in {differs} "
                "(there / here): load the same model, weights and dtype on both sides"
            )
        if cache is None:
            return
        shape = cache.data.shape  # (L, 2, B, KV, C, D)
        if (shape[0], shape[3], shape[5]) != (here.layers, here.kv_heads, here.head_dim):
            raise TransferError(f"the cache here has shape {tuple(shape)}: make it with the model's new_cache")
        check_slots(cache, slots, len(self.lengths))
        if max(self.lengths) > cache.capacity:
            raise TransferError(
                f"the requests handed over are up to {max(self.lengths)} positions long, the cache here has a "
                f"capacity of {cache.capacity}: make it with capacity ≥ {max(self.lengths)}"
            )


def _typed(kind: type, told: Any, but: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    """`told` with exactly the fields of `kind` and values of their types; ValueError otherwise."""
    wanted = {f.name: str(f.type) for f in fields(kind) if f.name not in but}
    if not isinstance(told, dict) or set(told) != set(wanted):
        raise ValueError(f"{kind.__name__} needs the fields {', '.join(wanted)}")
    for name, type_name in wanted.items():
        value = told[name]
        if type_name.startswith("tuple"):
            if not isinstance(value, list) or any(type(n) is not int for n in value):
                raise ValueError(f"{name} is no list of whole numbers")
            told[name] = tuple(value)
        elif type(value).__name__ != type_name:
            raise ValueError(f"{name} = {str(value)[:40]!r} is not of type {type_name}")
    return told


def check_slots(cache: KVCache, slots: Sequence[int] | None, count: int) -> list[int]:
    """`slots`, or 0 … count − 1; TransferError unless they are `count` different ones of the cache."""
    chosen = list(range(count)) if slots is None else list(slots)
    if len(chosen) != count or len(set(chosen)) != count or any(not 0 <= s < cache.requests for s in chosen):
        raise TransferError(
            f"slots {chosen} for {count} requests in a cache of {cache.requests}: give {count} different ones "
            f"of 0 … {cache.requests - 1}"
        )
    return chosen


def cuts_of(prompt_tokens: int, chunk: int | None = None, past: int = 0) -> tuple[int, ...]:
    """Where the chunks of a prefill of (padded) `prompt_tokens` behind `past` positions end."""
    chunk = chunk or prompt_tokens
    whole_numbers(prompt_tokens=prompt_tokens, chunk=chunk)
    return tuple(past + min(end, prompt_tokens) for end in range(chunk, prompt_tokens + chunk, chunk))


def manifest_of(
    model: Model,
    cache: KVCache,
    slots: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    cuts: Sequence[int] | None = None,
    wire: str = "",
    checksums: bool = True,
) -> Manifest:
    """The manifest of a hand-over of `slots` (default: all) of P's cache.

    `lengths`: final lengths, one a slot, when prefill has yet to run. `cuts`: from `cuts_of`, when it will run
    in chunks. `wire`: a dtype to cast to on the way. InputError when these do not fit the cache.
    """
    wire = wire or model.dtype
    one_of("dtype on the way", wire, DTYPE_BYTES)
    rows = check_slots(cache, slots, cache.requests if slots is None else len(slots))
    final = [cache.lengths[s] for s in rows] if lengths is None else list(lengths)
    if len(final) != len(rows) or not rows or any(not 0 <= n <= cache.capacity for n in final):
        raise InputError(f"lengths {final} for slots {rows} of a cache of capacity {cache.capacity}")
    longest = max(final)
    ends = sorted({min(c, longest) for c in (cuts or ())} | {longest}) if longest else []
    per_position = cache.data[:, :, 0, :, 0].numel() * DTYPE_BYTES[wire]
    made = Manifest(fingerprint(model), wire, tuple(final), tuple(ends), checksums, per_position * sum(final))
    made._check_numbers()
    return made
