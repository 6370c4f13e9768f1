"""Looks up a block's weights by prefix among the rank's storages, with the operators chosen for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from firstlight.engine.parallel.kept import SUFFIXES
from firstlight.engine.weights.formats.grid import Packing
from firstlight.engine.weights.loading.arriving import Arriving
from firstlight.engine.weights.loading.expert_cache import ExpertCache
from firstlight.kernels.packed.matrix import PackedMatrix
from firstlight.kernels.registry import Choice
from firstlight.kernels.signatures import PreparedLinear

ROW_COUNTS = (1, 16)  # rows a linear layer sees in decode: what implementations are measured and prepared for


@dataclass(frozen=True, slots=True)
class Access:
    """The storages below `prefix`, and the operators that were chosen for them.

    `packings`: storages that hold codes -> how they are multiplied by. `arriving`: experts among the storages that are
    to be asked for before they are multiplied by.
    """

    storages: Mapping[str, Tensor]
    ops: Choice
    prefix: str = ""
    cached: ExpertCache | None = None
    packings: Mapping[str, Packing] = field(default_factory=dict)
    arriving: Arriving | None = None

    def into(self, name: str) -> Access:
        return replace(self, prefix=f"{self.prefix}{name}.")

    def experts(self) -> ExpertCache | None:
        """Where the experts below this prefix are found, if they are not among the storages."""
        return self.cached if self.cached is not None and self.cached.has(self.prefix) else None

    def experts_to_come(self) -> Arriving | None:
        """Who is asked for the experts below this prefix, where they are still being read."""
        return self.arriving if self.arriving is not None and self.arriving.has(self.prefix) else None

    def has(self, name: str) -> bool:
        return self.prefix + name in self.storages

    def tensor(self, name: str) -> Tensor:
        assert self.packing(name) is None, f"{self.prefix}{name} holds codes"
        return self.storages[self.prefix + name]

    def maybe(self, name: str) -> Tensor | None:
        return self.tensor(name) if self.has(name) else None

    def packing(self, name: str) -> Packing | None:
        """How a weight that stays packed is multiplied by; None for any other."""
        return self.packings.get(self.prefix + name)

    def rows(self, name: str) -> int:
        """Rows of `name.weight` on this rank."""
        return self.storages[f"{self.prefix}{name}.weight"].shape[0]

    def columns(self, name: str) -> int:
        """Columns of `name.weight` on this rank, packed or not."""
        packing = self.packing(f"{name}.weight")
        return self.tensor(f"{name}.weight").shape[1] if packing is None else packing.columns

    def linear(self, name: str, bias: bool = True, row_counts: Sequence[int] = ROW_COUNTS) -> PreparedLinear:
        """`name.weight` and, if there and wanted, `name.bias`, prepared by the chosen implementation."""
        bias_F = self.maybe(f"{name}.bias") if bias else None
        packing = self.packing(f"{name}.weight")
        if packing is None:
            return self.ops.linear(self.tensor(f"{name}.weight"), bias_F, row_counts)
        weight_FH = packed_matrix(self.storages, f"{self.prefix}{name}.weight", packing).in_order()
        return partial(self.ops.linear_packed, weight_FH=weight_FH, bias_F=bias_F)


def packed_matrix(held: Mapping[str, Tensor], name: str, packing: Packing) -> PackedMatrix:
    """What an operator multiplies by, of the tensors that hold the weight of this name."""
    parts = {role: held[name + SUFFIXES[role]] for role in packing.roles}
    return PackedMatrix(
        parts["codes"],
        parts["scale"],
        packing.code,
        packing.block,
        packing.columns,
        zeros=parts.get("zero"),
        outer=parts.get("outer"),
        divides=packing.outer == "by",
        order=parts.get("order"),
        rows_together=packing.rows,
    )
