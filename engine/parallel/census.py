"""Counts a model's parameters by kind: identical layers are described once and all experts are one row. No torch.

Everything that only needs sizes (totals, plans, constraints, pipeline cuts) starts here and takes milliseconds however
many parameters there are. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache

import msgspec

from firstlight.engine.model.spec import FIRST_STAGE, LAST_STAGE, ModelSpec, Param, Scope
from firstlight.engine.parallel.placement import Expert, Placement


class Kind(msgspec.Struct, frozen=True):
    """A kind of parameter: `count` of them, alike, in each of `layers`.

    `layers` may hold `FIRST_STAGE` and `LAST_STAGE` for parameters outside the layers. `param` is the first expert's,
    where there are experts.
    """

    param: Param
    count: int
    layers: tuple[int, ...]

    @property
    def elements(self) -> int:
        return self.param.elements * self.count * len(self.layers)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How each is sharded, besides the assignment of experts to ranks."""
        return tuple(place for place in self.param.placements if not isinstance(place, Expert))


@lru_cache(maxsize=32)
def census(spec: ModelSpec) -> tuple[Kind, ...]:
    """All parameters of `spec.parameters()`, counted."""
    return census_by(spec, lambda layer: None)


def census_by(spec: ModelSpec, key: Callable[[int], Hashable]) -> tuple[Kind, ...]:
    """As `census`, with layers also grouped by `key`, where the storage format depends on the layer's number."""
    ends = msgspec.structs.replace(spec, layers=spec.layers[-1:]).parameters()  # one layer, for what the ends share
    kinds = [kind for layer in (FIRST_STAGE, LAST_STAGE) for kind in _kinds(ends, (layer,), layer)]
    alike: dict[Hashable, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        alike.setdefault((layer, key(index)), []).append(index)
    for layers in alike.values():
        first = layers[0]
        scope = Scope(prefix=f"layers.{first}.", layer=first, hidden=spec.hidden)
        kinds.extend(_kinds(spec.layers[first].parameters(scope), tuple(layers), first))
    return tuple(kinds)


def _kinds(params: Iterable[Param], layers: tuple[int, ...], layer: int) -> Iterable[Kind]:
    firsts: dict[Hashable, Param] = {}
    counts: dict[Hashable, int] = {}
    for param in params:
        if param.layer != layer:
            continue
        part = param.name.rsplit(".", 2)[-2:] if param.expert is not None else [param.name]
        key = (*part, param.storage, param.shape)
        firsts.setdefault(key, param)
        counts[key] = counts.get(key, 0) + 1
    return [Kind(param, counts[key], layers) for key, param in firsts.items()]
