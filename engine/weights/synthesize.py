"""Tiny synthetic checkpoints made from a configuration alone: the weight rules of its family, run backwards. No torch.

For tests, notebooks and trial runs of layouts. Parameters get reproducible random values; each is written under the
first name that a rule of its family gives it, in the shape in which it is stored there.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.rules import WeightRule
from firstlight.engine.model.spec import ModelSpec, Param
from firstlight.engine.weights.safetensors_file import Tagged, Tensor, bfloat16, write

Values = dict[str, NDArray[np.float32]]
Stored = Literal["F32", "BF16", "F16"]


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

    Args:
        config: a raw `config.json`; sizes as in it, so they had better be small.
        dtype: of every tensor but those that the architecture pins to float32.
        shards: files to cut the tensors into, in forward order; one is `model.safetensors` without an index.
        fused: stack experts where the family's rules know a stacked form.
        tied: leave the output head out; None: when the configuration ties it.

    Raises `Refused` when no family knows the configuration, or its rules name no tensor for a parameter.
    """
    spec, matcher = FAMILIES.describe(config)
    tied = spec.tied_head if tied is None else tied
    params = [param for param in spec.parameters() if not (tied and param.name == "head.weight")]
    values = {param.name: _stored(_draw(param, seed), param.dtype or dtype) for param in params}
    tensors = tensors_of(spec, matcher.rules, {name: _float32(value) for name, value in values.items()}, fused=fused)
    pinned = {param.name for param in params if param.dtype == "F32"}
    home = Path(directory)
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    stored = {
        name: _stored(value, "F32" if set(sources) & pinned else dtype) for name, (value, sources) in tensors.items()
    }
    _write(home, stored, shards)
    return {name: _float32(value) for name, value in values.items()}


def tensors_of(
    spec: ModelSpec, rules: Iterable[WeightRule], values: Mapping[str, NDArray[np.float32]], fused: bool = False
) -> dict[str, tuple[NDArray[np.float32], tuple[str, ...]]]:
    """Tensor name -> its value, and the parameters that it holds: the rules run backwards.

    The first rule that names a parameter stores it; with `fused`, rules of several parameters or experts come first.
    Raises `Refused` when no rule names a parameter.
    """
    usable = sorted(
        (rule for rule in rules if rule.params and "{*}" not in rule.tensor),
        key=lambda rule: fused and not (rule.stacked or len(rule.params) > 1),
    )
    found: dict[str, tuple[NDArray[np.float32], tuple[str, ...]]] = {}
    done: set[str] = set()
    for name in values:
        if name in done:
            continue
        tensor, rule, members = _home(name, usable, values)
        parts = [[values[part] for part in expert] for expert in members]
        whole = [_join(rule, expert) for expert in parts]
        found[tensor] = (np.stack(whole) if rule.stacked else whole[0], tuple(n for row in members for n in row))
        done.update(n for row in members for n in row)
    return found


def _home(
    name: str, rules: Iterable[WeightRule], values: Mapping[str, NDArray[np.float32]]
) -> tuple[str, WeightRule, list[list[str]]]:
    """The tensor that stores a parameter, the rule that says so, and all parameters in it, expert by expert."""
    for rule in rules:
        for pattern in rule.params:
            numbers = re.fullmatch(_named(pattern), name)
            if numbers is None:
                continue
            where = numbers.groupdict()
            experts = [where]
            if rule.stacked:
                experts = []
                while all(_fill(param, {**where, "e": str(len(experts))}) in values for param in rule.params):
                    experts.append({**where, "e": str(len(experts))})
            members = [[_fill(param, numbers) for param in rule.params] for numbers in experts]
            if members and all(member in values for row in members for member in row):
                return _fill(_first_choice(rule.tensor), where), rule, members
    raise Refused(
        fatal(
            "missing-tensor",
            f"no weight rule of the family says where {name} is stored",
            expected=f"a rule with {name} among its parameters",
            found="none",
            next="add the rule to the family file",
        )
    )


def _join(rule: WeightRule, parts: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """One expert's, or the only, value of a tensor: parts behind one another or in turns, then transposed."""
    stored = [np.swapaxes(part, -1, -2) if rule.transpose else part for part in parts]
    if len(stored) == 1:
        return np.ascontiguousarray(stored[0])
    if not rule.interleaved:
        return np.concatenate(stored, axis=rule.split_dim)
    turns = np.stack(stored, axis=rule.split_dim + 1)
    shape = list(stored[0].shape)
    shape[rule.split_dim] *= len(stored)
    return np.ascontiguousarray(turns.reshape(shape))


def _named(pattern: str) -> str:
    """A parameter pattern as a regular expression: `{i}` is a named run of digits."""
    return re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>\\d+)", re.escape(pattern))


def _fill(pattern: str, numbers: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: numbers[found[1]], pattern)


def _first_choice(tensor: str) -> str:
    """The first of each `(a|b)` in a tensor pattern."""
    return re.sub(r"\(([^|)]*)\|?[^)]*\)", r"\1", tensor)


def _draw(param: Param, seed: int) -> NDArray[np.float32]:
    """Norms around one, everything else around zero with a spread that keeps activations of the order of one."""
    noise = np.random.default_rng([seed, zlib.crc32(param.name.encode())]).standard_normal(param.shape, np.float32)
    if param.role == "norm" or "norm" in param.name:
        return noise * np.float32(0.3) + np.float32(param.name.endswith("weight"))
    return noise * np.float32(param.shape[-1] ** -0.5 if len(param.shape) > 1 else 0.3)


def _stored(value: NDArray[np.float32], dtype: str) -> Tensor:
    if dtype == "BF16":
        return bfloat16(value)
    return value.astype(np.float16) if dtype == "F16" else value


def _float32(value: Tensor) -> NDArray[np.float32]:
    return value.float32() if isinstance(value, Tagged) else value.astype(np.float32)


def _write(home: Path, tensors: Mapping[str, Tensor], shards: int) -> None:
    """Files of about equal numbers of tensors, with an index when there are several."""
    names = list(tensors)
    shards = min(shards, len(names))
    if shards == 1:
        write(home / "model.safetensors", tensors, {"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        write(home / file, {name: tensors[name] for name in part}, {"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(_nbytes(tensor) for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (home / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _nbytes(tensor: Tensor) -> int:
    return int(tensor.bits.nbytes if isinstance(tensor, Tagged) else tensor.nbytes)
