"""A parameter in global shape, and the scope in which a block declares it. No torch.

Placements name mesh axes (`tp`, `ep`, or `heads`, which is tp unless mixers are whole); dims are tensor dimensions.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from firstlight.engine.parallel.placement import Placement

Role = Literal["embedding", "attention", "mlp", "expert", "router", "norm", "head", "vision", "projector"]


FIRST_STAGE = -1  # `Param.layer` of what belongs to the first pipeline stage
LAST_STAGE = 1 << 30  # ... and to the last


class Param(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter of the model, in global shape.

    Parameters that share `storage` lie in one allocation: concatenated along dim 0 in the order declared and, with an
    `expert`, stacked over the rank's experts. `dtype` pins a storage dtype (`F32`); None follows the run. `padding`:
    rows of zeros that releases store behind it; they are part of the release's figures and never loaded. `limit`: what
    an integer table's numbers stay below. `widened`: releases store it in their own dtype, not in `dtype`.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int
    placements: tuple[Placement, ...] = ()
    storage: str = ""
    expert: int | None = None
    dtype: str | None = None
    padding: int = 0
    limit: int = 0
    widened: bool = False

    @property
    def home(self) -> str:
        return self.storage or self.name

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """As releases store it, padding included."""
        return (self.shape[0] + self.padding, *self.shape[1:]) if self.padding else self.shape

    @property
    def elements(self) -> int:
        """As releases count them, padding included."""
        count = 1
        for size in self.stored_shape:
            count *= size
        return count


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Where a block sits while it declares its parameters: name prefix, layer, width of the residual stream, tower.

    `share`: (rank, ranks) of the axis that experts are divided over, of which only the experts are declared.
    """

    prefix: str
    layer: int
    hidden: int
    vision: bool = False
    share: tuple[int, int] = (0, 1)

    def experts(self, count: int) -> range:
        """Those of `count` experts that are declared; all of them where they do not divide."""
        rank, ranks = self.share
        each, over = divmod(count, ranks)
        return range(count) if over else range(rank * each, (rank + 1) * each)

    def into(self, name: str) -> Scope:
        return msgspec.structs.replace(self, prefix=f"{self.prefix}{name}.")

    def param(
        self,
        name: str,
        *shape: int,
        role: Role,
        place: tuple[Placement, ...] = (),
        storage: str = "",
        expert: int | None = None,
        dtype: str | None = None,
        padding: int = 0,
        limit: int = 0,
    ) -> Param:
        """A parameter of this block. The vision tower is replicated: it is small and runs once a picture."""
        return Param(
            name=self.prefix + name,
            shape=shape,
            role="vision" if self.vision and role != "projector" else role,
            layer=self.layer,
            placements=() if self.vision else place,
            storage=self.prefix + storage if storage else "",
            expert=expert,
            dtype=dtype,
            padding=padding,
            limit=limit,
        )
