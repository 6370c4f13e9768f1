"""Estimates how many tensors a release has from its configuration alone."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import msgspec

from firstlight.engine.model.rules import WeightRule
from firstlight.engine.model.spec import FIRST_STAGE, LAST_STAGE, ModelSpec, Param, Scope
from firstlight.engine.weights.formats.registry import StoredFormat
from firstlight.engine.weights.synthesize import outlines_of_params


def tensor_count(spec: ModelSpec, rules: Iterable[WeightRule], stored: StoredFormat) -> int:
    """Tensors that store the model's parameters under the first names its rules give them, scales included.

    Extra prediction layers are apart. Raises `Refused` when no rule names a parameter.
    """
    alike: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        alike.setdefault((layer, stored.layer_key(index)), []).append(index)
    params, copies = list(_ends(spec)), dict.fromkeys((FIRST_STAGE, LAST_STAGE), 1)
    for layers in alike.values():
        first = layers[0]
        copies[first] = len(layers)
        params += spec.layers[first].parameters(Scope(prefix=f"layers.{first}.", layer=first, hidden=spec.hidden))
    by_name = {param.name: param for param in params}
    outlines = outlines_of_params(params, rules)
    return sum(
        copies[by_name[item.params[0]].layer] * _parts(stored, by_name[item.params[0]], item.rule) for item in outlines
    )


def _ends(spec: ModelSpec) -> Iterable[Param]:
    """What stands before the first layer and behind the last, a tied head once."""
    whole = msgspec.structs.replace(spec, layers=spec.layers[-1:]).parameters()
    ends = (param for param in whole if param.layer in (FIRST_STAGE, LAST_STAGE))
    return (param for param in ends if not (spec.tied_head and param.name == "head.weight"))


def _parts(stored: StoredFormat, param: Param, rule: WeightRule) -> int:
    """Stored tensors of one that rules speak of: codes, scales and what else its format has."""
    format_ = stored.format_of(param)
    return 1 if format_ is None else len(format_.parts)
