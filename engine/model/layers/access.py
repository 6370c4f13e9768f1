"""How a block finds its own weights: a prefix over the rank's storages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from firstlight.engine.weights.expert_cache import ExpertCache
from firstlight.kernels.registry import Choice
from firstlight.kernels.signatures import PreparedLinear

ROW_COUNTS = (1, 16)  # rows a linear layer sees in decode: what implementations are measured and prepared for


@dataclass(frozen=True, slots=True)
class Access:
    """The storages below `prefix`, and the operators that were chosen for them."""

    storages: Mapping[str, Tensor]
    ops: Choice
    prefix: str = ""
    cached: ExpertCache | None = None

    def into(self, name: str) -> Access:
        return Access(self.storages, self.ops, f"{self.prefix}{name}.", self.cached)

    def experts(self) -> ExpertCache | None:
        """Where the experts below this prefix are found, if they are not among the storages."""
        return self.cached if self.cached is not None and self.cached.has(self.prefix) else None

    def has(self, name: str) -> bool:
        return self.prefix + name in self.storages

    def tensor(self, name: str) -> Tensor:
        return self.storages[self.prefix + name]

    def maybe(self, name: str) -> Tensor | None:
        return self.storages.get(self.prefix + name)

    def linear(self, name: str, bias: bool = True, row_counts: Sequence[int] = ROW_COUNTS) -> PreparedLinear:
        """`name.weight` and, if there and wanted, `name.bias`, prepared by the chosen implementation."""
        return self.ops.linear(self.tensor(f"{name}.weight"), self.maybe(f"{name}.bias") if bias else None, row_counts)
