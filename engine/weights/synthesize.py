"""Makes synthetic checkpoints from a configuration by running its family's weight rules backwards. No torch.

For tests, notebooks and trial runs of layouts: `synthesize` writes random values, `outline` headers alone, in sparse
files of a release's real size. Each parameter is stored under the first name that a rule of its family gives it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.backwards import Backwards, filled, stored_as
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.rules import Matcher, WeightRule
from firstlight.engine.model.spec import ModelSpec, Param
from firstlight.engine.weights.files.header import DTYPE_BITS, TensorInfo
from firstlight.engine.weights.files.index import INDEX
from firstlight.engine.weights.files.safetensors_file import Tagged, Tensor, bfloat16, write
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.grid import Format
from firstlight.engine.weights.formats.registry import QUANTIZED_ROLES
from firstlight.engine.weights.ledger import expand
from firstlight.engine.weights.packed import part_names
from firstlight.engine.weights.packing import pack

Values = dict[str, NDArray[np.float32]]
Stored = Literal["F32", "BF16", "F16"]


class Outline(msgspec.Struct, frozen=True):
    """A tensor to be stored: its shape, and the parameters in it, expert by expert, as `rule` puts them together."""

    tensor: str
    shape: tuple[int, ...]
    members: tuple[tuple[str, ...], ...]
    rule: WeightRule

    @property
    def params(self) -> tuple[str, ...]:
        return tuple(name for row in self.members for name in row)


def synthesize(
    config: Mapping[str, Any],
    directory: str | Path,
    *,
    dtype: Stored = "F32",
    shards: int = 1,
    fused: bool = False,
    tied: bool | None = None,
    seed: int = 0,
) -> Values:
    """Write `config.json`, shards and index of a random checkpoint; returns the parameters by name, as stored.

    A configuration that announces a storage format gets its weights in it; their values are those that it unpacks to.

    Args:
        config: a raw `config.json`; sizes as in it, so they had better be small.
        dtype: of every tensor but those that the architecture pins to float32.
        shards: files to cut the tensors into, in forward order; one is `model.safetensors` without an index.
        fused: stack experts where the family's rules know a stacked form.
        tied: leave the output head out; None: when the configuration ties it.

    Raises `Refused` when no family knows the configuration, or its rules name no tensor for a parameter.
    """
    spec, matcher = FAMILIES.describe(config)
    params = _stored_params(spec, tied)
    values = {param.name: _float32(_as(_draw(param, seed), param.dtype or dtype)) for param in params}
    outlines = outlines_of(spec, matcher.rules, fused=fused, tied=tied)
    pinned = _pinned(params)
    storage = _Storage(config, spec, matcher)
    tensors: dict[str, Tensor] = {}
    for item in outlines:
        value, format_ = value_of(item, values), storage.format_of(item)
        if format_ is None:
            tensors[item.tensor] = _as(value, _dtype(item, pinned, dtype))
        else:
            packed, value = storage.pack(item.tensor, value, format_, seed)
            tensors.update(packed)
            values.update(storage.params_of(item, value))
    home = _home(directory, config)
    files = _files(list(tensors), shards)
    for file, names in files.items():
        write(home / file, {name: tensors[name] for name in names}, {"format": "pt"})
    _write_index(home, files, sum(_nbytes(tensor) for tensor in tensors.values()))
    return values


def outline(
    config: Mapping[str, Any], directory: str | Path, *, dtype: Stored = "BF16", shards: int = 1, fused: bool = False
) -> int:
    """Write the headers of a checkpoint of any size; its weights are holes of sparse files. Returns their bytes.

    Arguments and errors as for `synthesize`.
    """
    spec, matcher = FAMILIES.describe(config)
    pinned = _pinned(_stored_params(spec, None))
    storage = _Storage(config, spec, matcher)
    stored: dict[str, tuple[str, tuple[int, ...]]] = {}
    for item in outlines_of(spec, matcher.rules, fused=fused):
        format_ = storage.format_of(item)
        if format_ is None:
            stored[item.tensor] = _dtype(item, pinned, dtype), item.shape
        else:
            stored.update(storage.parts(item.tensor, item.shape, format_))
    home = _home(directory, config)
    files = _files(list(stored), shards)
    total = 0
    for file, names in files.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            tag, shape = stored[name]
            start, end = end, end + math.prod(shape) * DTYPE_BITS[tag] // 8
            header[name] = {"dtype": tag, "shape": shape, "data_offsets": (start, end)}
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        with (home / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + end)
        total += end
    _write_index(home, files, total)
    return total


class _Storage:
    """How the configuration says that weights are stored."""

    def __init__(self, config: Mapping[str, Any], spec: ModelSpec, matcher: Matcher) -> None:
        self.params = {param.name: param for param in spec.parameters()}
        self.matcher = matcher
        self.scheme = announced(config)
        self.roles = QUANTIZED_ROLES | ({"head"} if self.scheme.head else set())

    def format_of(self, item: Outline) -> Format | None:
        """The format of a tensor of matrices that a linear module holds; None: stored plain."""
        of_linear = all(
            (param := self.params[name]).role in self.roles and len(param.shape) == 2 for name in item.params
        )
        return self.scheme.of(item.tensor.removesuffix(".weight")) if of_linear else None

    def parts(
        self, weight: str, shape: tuple[int, ...], format_: Format
    ) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        """Name, dtype and shape of each tensor that stores a weight."""
        shape = (*shape[:-2], shape[-1], shape[-2]) if format_.swapped else shape
        for part in format_.parts:
            yield part_names(weight, part)[0], (part.dtypes[0], part.shape(shape))

    def pack(
        self, weight: str, value: NDArray[np.float32], format_: Format, seed: int
    ) -> tuple[dict[str, Tensor], NDArray[np.float32]]:
        """The tensors that store a weight, and the value that they stand for."""
        stored, value = pack(np.swapaxes(value, -1, -2) if format_.swapped else value, format_, seed)
        named = {part_names(weight, part)[0]: stored[part.role] for part in format_.parts}
        return named, np.swapaxes(value, -1, -2) if format_.swapped else value

    def params_of(self, item: Outline, value: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
        """The parameters in a tensor of this value."""
        match = self.matcher.match(item.tensor)
        assert match is not None
        info = TensorInfo(item.tensor, "F32", item.shape, "", 0, value.nbytes)
        for name, source in expand(info, match, self.params):
            part = value[tuple(slice(*cut) for cut in source.region)]
            part = part.reshape(part.shape[-2:])
            yield name, np.ascontiguousarray(part.T if source.transpose else part)


def outlines_of(
    spec: ModelSpec, rules: Iterable[WeightRule], *, fused: bool = False, tied: bool | None = None
) -> list[Outline]:
    """The tensors that store a model's parameters, in forward order.

    The first rule that names a parameter stores it; with `fused`, rules of several parameters or experts come first.
    Raises `Refused` when no rule names a parameter.
    """
    return outlines_of_params(_stored_params(spec, tied), rules, fused)


def outlines_of_params(params: Iterable[Param], rules: Iterable[WeightRule], fused: bool = False) -> list[Outline]:
    """The same for some of a model's parameters."""
    shapes = {param.name: param.stored_shape for param in params}
    ordered = sorted(rules, key=lambda rule: fused and not (rule.stacked or len(rule.params) > 1))
    storage = _Tensors(Backwards(ordered), shapes)
    found: list[Outline] = []
    done: set[str] = set()
    for name in shapes:
        if name not in done:
            found.append(storage.outline(name))
            done.update(found[-1].params)
    return found


def value_of(item: Outline, values: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """The value of a tensor from those of its parameters."""
    whole = [_join(item.rule, [values[name] for name in row]) for row in item.members]
    return np.stack(whole) if item.rule.stacked else whole[0]


class _Tensors:
    """The tensors that store parameters: the first rule that fills one, and all others that it takes, stores it."""

    def __init__(self, backwards: Backwards, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        self.backwards = backwards

    def outline(self, name: str) -> Outline:
        for rule, numbers in self.backwards.rules_of(name):
            if members := self._members(rule, numbers):
                return Outline(stored_as(rule, numbers), self._shape(rule, members), members, rule)
        raise Refused(
            fatal(
                "missing-tensor",
                f"no weight rule of the family says where {name} is stored",
                expected=f"a rule with {name} among its parameters",
                found="none",
                next="add the rule to the family file",
            )
        )

    def _members(self, rule: WeightRule, numbers: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
        """The parameters of a tensor, expert by expert; none when the model lacks one of them."""
        rows: list[tuple[str, ...]] = []
        counts = rule.stacked and any("{e}" in param for param in rule.params)
        while not rows or counts:
            where = {**numbers, "e": str(len(rows))} if rule.stacked else numbers
            row = tuple(filled(param, where) for param in rule.params)
            if not all(name in self.shapes for name in row):
                break
            rows.append(row)
        return tuple(rows)

    def _shape(self, rule: WeightRule, members: tuple[tuple[str, ...], ...]) -> tuple[int, ...]:
        parts = [self.shapes[name] for name in members[0]]
        if rule.transpose:
            parts = [(*part[:-2], part[-1], part[-2]) for part in parts]
        shape = list(parts[0])
        if len(parts) > 1:
            shape[rule.split_dim] = sum(part[rule.split_dim] for part in parts)
        return (len(members), *shape) if rule.stacked else tuple(shape)


def _join(rule: WeightRule, parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """One expert's, or the only, value of a tensor: parts transposed, then behind one another or in turns."""
    stored = [np.swapaxes(part, -1, -2) if rule.transpose else part for part in parts]
    if len(stored) == 1:
        return np.ascontiguousarray(stored[0])
    if not rule.interleaved:
        return np.concatenate(stored, axis=rule.split_dim)
    shape = list(stored[0].shape)
    shape[rule.split_dim] *= len(stored)
    return np.ascontiguousarray(np.stack(stored, axis=rule.split_dim + 1).reshape(shape))


def _stored_params(spec: ModelSpec, tied: bool | None) -> tuple[Param, ...]:
    tied = spec.tied_head if tied is None else tied
    return tuple(param for param in spec.parameters() if not (tied and param.name == "head.weight"))


def _pinned(params: Iterable[Param]) -> dict[str, str]:
    """Parameters that the architecture pins to a dtype."""
    return {param.name: param.dtype for param in params if param.dtype is not None}


def _dtype(item: Outline, pinned: Mapping[str, str], dtype: str) -> str:
    return next((pinned[name] for name in item.params if name in pinned), dtype)


def _draw(param: Param, seed: int) -> NDArray[np.float32]:
    """Norms around one, everything else around zero with a spread that keeps activations of the order of one."""
    draw = np.random.default_rng([seed, zlib.crc32(param.name.encode())])
    if param.limit:  # a table: in every row numbers that differ
        first = draw.integers(0, param.limit, (*param.shape[:-1], 1))
        return ((first + np.arange(param.shape[-1])) % param.limit).astype(np.float32)
    noise = draw.standard_normal(param.shape, np.float32)
    if param.role == "norm" or "norm" in param.name:
        return noise * np.float32(0.3) + np.float32(param.name.endswith("weight"))
    return noise * np.float32(param.shape[-1] ** -0.5 if len(param.shape) > 1 else 0.3)


def _as(value: NDArray[np.float32], dtype: str) -> Tensor:
    if dtype == "BF16":
        return bfloat16(value)
    if dtype == "I64":
        return value.astype(np.int64)
    return value.astype(np.float16) if dtype == "F16" else value


def _float32(value: Tensor) -> NDArray[np.float32]:
    return value.float32() if isinstance(value, Tagged) else value.astype(np.float32)


def _nbytes(tensor: Tensor) -> int:
    return int(tensor.bits.nbytes if isinstance(tensor, Tagged) else tensor.nbytes)


def _home(directory: str | Path, config: Mapping[str, Any]) -> Path:
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    return home


def _files(names: list[str], shards: int) -> dict[str, list[str]]:
    """File -> tensors, about as many in each."""
    shards = min(shards, len(names))
    if shards == 1:
        return {"model.safetensors": names}
    return {f"model-{i + 1:05d}-of-{shards:05d}.safetensors": list(part) for i, part in enumerate(_cut(names, shards))}


def _cut(names: list[str], parts: int) -> Iterator[list[str]]:
    for part in range(parts):
        yield names[part * len(names) // parts : (part + 1) * len(names) // parts]


def _write_index(home: Path, files: Mapping[str, list[str]], total_bytes: int) -> None:
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (home / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n")
