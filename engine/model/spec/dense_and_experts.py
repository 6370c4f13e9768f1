"""A dense feed-forward and routed experts side by side, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from firstlight.engine.model.spec.mlp import MLP
from firstlight.engine.model.spec.moe import MoE
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope


class DenseAndExperts(msgspec.Struct, frozen=True, kw_only=True, tag="dense_and_experts"):
    """norm(dense(norm x)) + norm(experts(norm x)), four norms of their own (Gemma 4); the router reads x itself."""

    dense: MLP
    experts: MoE
    norm: Norm

    def parameters(self, scope: Scope) -> Iterator[Param]:
        for name in ("dense_norm", "dense_post_norm", "experts_norm", "experts_post_norm"):
            yield from self.norm.parameters(scope.into(name), scope.hidden)
        yield from self.dense.parameters(scope.into("dense"))
        yield from self.experts.parameters(scope.into("routed"))

    def words(self) -> str:
        return f"{self.dense.words()}; beside it {self.experts.words()}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear and norms."""
        return tuple(dict.fromkeys((*self.dense.operators(), *self.experts.operators())))
