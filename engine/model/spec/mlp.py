"""Dense feed-forward, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import Shard


class MLP(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """scale down(act(gate_scale gate x) * up x), or scale down(act(up x)) when not `gated`.

    The activation `xielu` has two learned numbers and two that stand beside them (arXiv 2411.13010), and no gate.
    """

    intermediate: int
    activation: str
    gated: bool = True
    bias: bool = False
    gate_scale: float = 1.0
    scale: float = 1.0

    def parameters(self, scope: Scope) -> Iterator[Param]:
        columns = Shard(0, self.intermediate, unit_name="feed-forward channels")
        for part in ("gate", "up") if self.gated else ("up",):
            yield scope.param(
                f"{part}.weight",
                self.intermediate,
                scope.hidden,
                role="mlp",
                place=(columns,),
                storage="gate_up.weight" if self.gated else "",
            )
            if self.bias:
                yield scope.param(
                    f"{part}.bias",
                    self.intermediate,
                    role="mlp",
                    place=(columns,),
                    storage="gate_up.bias" if self.gated else "",
                )
        rows = Shard(1, self.intermediate, unit_name="feed-forward channels")
        yield scope.param("down.weight", scope.hidden, self.intermediate, role="mlp", place=(rows,))
        if self.bias:
            yield scope.param("down.bias", scope.hidden, role="mlp")
        if self.activation == "xielu":
            yield scope.param("act.alpha_p", 1, role="mlp")
            yield scope.param("act.alpha_n", 1, role="mlp")
            yield scope.param("act.beta", role="mlp")
            yield scope.param("act.eps", role="mlp")

    def words(self) -> str:
        """`MLP 1,536 silu gated`."""
        return f"MLP {self.intermediate:,} {self.activation}" + (" gated" if self.gated else "")

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear."""
        return ("gated_activation",) if self.gated else ()
