"""What a family file provides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.rules import Part, WeightRule
from firstlight.engine.model.spec import ModelSpec

Silent: TypeAlias = Mapping[str, Mapping[str, Any]]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture: how its configuration becomes a `ModelSpec` and which tensors fill which parameters.

    `model_types` are the values of `model_type` it answers to. `spec(config, *nested)` gets the specs of the nested
    models named by `parts`, whose rules come along. `silent` says, by model type, what its own code takes where
    config.json lacks a key and most of its kin take another value; `config` holds it when `spec` is called. `left_out`
    adds rules that depend on the configuration: tensors nobody consumes, with the reason, and names that mean one
    thing here and another there. `classes` is the class that transformers writes into `architectures` for a model type,
    where that is another family's: its configuration there is the other's in all but name.
    """

    name: str
    model_types: tuple[str, ...]
    spec: Callable[..., ModelSpec]
    rules: tuple[WeightRule, ...]
    silent: Silent = {}
    parts: tuple[Part, ...] = ()
    left_out: Callable[[Config], tuple[WeightRule, ...]] | None = None
    classes: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        """Tables that are read for every configuration become read-only: whoever changed one would change all."""
        silent = MappingProxyType({name: MappingProxyType(dict(values)) for name, values in self.silent.items()})
        msgspec.structs.force_setattr(self, "silent", silent)
        msgspec.structs.force_setattr(self, "classes", MappingProxyType(dict(self.classes)))
