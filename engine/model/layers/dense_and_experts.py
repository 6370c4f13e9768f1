"""A dense feed-forward and routed experts side by side. Legend: T tokens, H hidden."""

from __future__ import annotations

from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.mlp import MLP
from firstlight.engine.model.layers.moe import MoE
from firstlight.engine.model.layers.norm import Norm


class DenseAndExperts:
    """x [T, H], not normed -> [T, H], summed over tp and ep. See the spec of the same name for the formula."""

    def __init__(self, spec: specs.DenseAndExperts, weights: Access) -> None:
        self.spec = spec
        self._dense, self._experts = MLP(spec.dense, weights.into("dense")), MoE(spec.experts, weights.into("routed"))
        names = ("dense_norm", "dense_post_norm", "experts_norm", "experts_post_norm")
        self._norms = [Norm(spec.norm, weights.into(name)) for name in names]

    def __call__(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        before_dense, behind_dense, before_experts, behind_experts = self._norms
        dense_TH = behind_dense(self._dense(before_dense(x_TH), batch))
        return dense_TH + behind_experts(self._experts(before_experts(x_TH), batch, chosen_by_TH=x_TH))
