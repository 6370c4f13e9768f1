"""The account of a checkpoint that transformers loads: tensor to parameter and back, by its own renaming.

transformers reports success where it filled a parameter only in part or with random numbers; this account does not
trust that: what goes into each parameter is counted in elements. Source of the renaming: the conversion mapping of the
loaded model, the one that the loading itself used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from firstlight.engine.findings import Finding, fatal, note, several
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import Ledger
from firstlight.engine.weights.source import Source
from firstlight.workbench.fallback import errors_of_configs
from firstlight.workbench.reference import load_transformers, part_of_transformers, quiet, unavailable


@dataclass(slots=True)
class _Group:
    """Tensors that go into the same parameters: elements on both sides must agree."""

    tensors: list[str] = field(default_factory=list)
    params: list[str] = field(default_factory=list)


def without_weights(directory: str | Path, *, trust_remote_code: bool = False) -> Any:
    """transformers' own module of a checkpoint on the meta device: names and shapes alone. Raises `Refused`."""
    transformers = load_transformers()
    unusable: tuple[type[Exception], ...] = (*errors_of_configs(), OSError, ImportError)
    with quiet(), torch.device("meta"):
        try:
            config = transformers.AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=trust_remote_code
            )
            sees = hasattr(config, "vision_config")
            kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
            return kind.from_config(config, trust_remote_code=trust_remote_code)
        except unusable as error:
            raise unavailable(directory, str(error).splitlines()[0]) from error


def account_of(checkpoint: Checkpoint, model: Any) -> Ledger:
    """Both sides of what `model`, which may be without memory, would be loaded from; before a byte is read."""
    params = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tied = _tied(model, params)
    groups, astray = _groups(checkpoint, model, params)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    left_out = {
        name: "the reference leaves it out" for name in astray if any(pattern.search(name) for pattern in ignored)
    }
    unconsumed = tuple(name for name in astray if name not in left_out)
    filled = {param for group in groups for param in group.params}
    missing = tuple(name for name in params if name not in filled and name not in tied)
    findings = [*_problems(checkpoint, params, groups), *_both_sides(missing, unconsumed)]
    findings += [
        note("tied-head", f"{name} <- {source}: tied, stored once", tensors=(source,))
        for name, source in tied.items()
        if name not in filled
    ]
    sources = {param: Source(group.tensors[0], ()) for group in groups for param in group.params}
    sources |= {name: Source(sources[by].tensor, (), tied=True) for name, by in tied.items() if by in sources}
    return Ledger(
        sources=sources,
        consumed={tensor: tuple(group.params) for group in groups for tensor in group.tensors},
        left_out=left_out,
        missing=missing,
        unconsumed=unconsumed,
        findings=tuple(findings),
    )


def _groups(
    checkpoint: Checkpoint, model: Any, params: Mapping[str, tuple[int, ...]]
) -> tuple[list[_Group], list[str]]:
    """Tensors by the parameters that they go into, and tensors that lead to none."""
    loading = part_of_transformers("core_model_loading")
    mapping = part_of_transformers("conversion_mapping").get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, loading.WeightConverter)]
    found: dict[str, _Group] = {}
    astray: list[str] = []
    meta = model.state_dict()
    for name in checkpoint.tensors:
        key, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, meta)
        if key not in params and name in params:
            key, pattern = name, None
        if key not in params:
            astray.append(name)
            continue
        group = found.setdefault(key, _Group(params=[key]))
        group.tensors.append(name)
        if pattern is not None and len(group.tensors) == 1:
            converter = next(one for one in converters if pattern in one.source_patterns)
            group.params = _targets(key, converter, params)
    return list(found.values()), astray


def _targets(key: str, converter: Any, params: Mapping[str, tuple[int, ...]]) -> list[str]:
    """All parameters that a converter makes beside the first one."""
    first, *others = [pattern.replace("\\", "") for pattern in converter.target_patterns]
    found = [key]
    for other in others:
        name = key.replace(first, other)
        if name != key and name in params:
            found.append(name)
    return found


def _problems(checkpoint: Checkpoint, params: Mapping[str, tuple[int, ...]], groups: list[_Group]) -> list[Finding]:
    """Parameters that would be filled in part only, or by more than they hold."""
    if "quantization_config" in checkpoint.config:  # packed: elements are not those of the parameters
        return []
    found = []
    for group in groups:
        given = sum(math.prod(checkpoint.tensors[name].shape) for name in group.tensors)
        wanted = sum(math.prod(params[name]) for name in group.params)
        if given == wanted:
            continue
        less = given < wanted
        found.append(
            fatal(
                "missing-tensor" if less else "shape-mismatch",
                f"the tensors of {', '.join(group.params)} hold {'fewer' if less else 'more'} elements than it does",
                tensors=tuple(group.tensors),
                expected=f"{wanted:,} elements",
                found=f"{given:,} elements in {several(len(group.tensors), 'tensor', 'tensors')}",
                next="compare the checkpoint's names and shapes with its config.json; nothing is filled up",
            )
        )
    return found


def _both_sides(missing: tuple[str, ...], unconsumed: tuple[str, ...]) -> list[Finding]:
    found = []
    if missing:
        found.append(
            fatal(
                "missing-tensor",
                several(len(missing), "parameter of the reference has", "parameters of the reference have")
                + " no tensor to come from",
                tensors=missing,
                next="compare the checkpoint with its config.json",
            )
        )
    if unconsumed:
        found.append(
            fatal(
                "unconsumed-tensor",
                f"{several(len(unconsumed), 'tensor', 'tensors')} that no parameter of the reference consumes",
                tensors=unconsumed,
                next="compare the checkpoint with its config.json",
            )
        )
    return found


def _tied(model: Any, params: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Parameters that are the same as another one: name -> that one; either may be the one that is stored."""
    pairs = getattr(model, "all_tied_weights_keys", None) or {}
    found = {name: source for name, source in pairs.items() if name in params and source in params}
    return found | {source: name for name, source in found.items()}
