"""What a family file provides."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.rules import Part, WeightRule
from firstlight.engine.model.spec import ModelSpec


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture: how its configuration becomes a `ModelSpec` and which tensors fill which parameters.

    `model_types` are the values of `model_type` it answers to. `spec(config, *nested)` gets the specs of the nested
    models named by `parts`, whose rules come along. `left_out` adds rules that depend on the configuration: tensors
    nobody consumes, with the reason, and names that mean one thing here and another there.
    """

    name: str
    model_types: tuple[str, ...]
    spec: Callable[..., ModelSpec]
    rules: tuple[WeightRule, ...]
    parts: tuple[Part, ...] = ()
    left_out: Callable[[Config], tuple[WeightRule, ...]] | None = None
