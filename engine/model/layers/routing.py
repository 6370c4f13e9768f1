"""Expert routing: which experts a token uses, and their weights. Legend: T tokens, H hidden, E experts, k chosen."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.kernels.router_topk.reference import sparsemixer


class Routing:
    """x [T, H] -> (weights [T, k] float32, ids [T, k]), the same on every rank."""

    def __init__(self, spec: specs.Router, weights: Access) -> None:
        self.spec = spec
        self._weight_EH = weights.tensor("weight")
        self._bias_E = weights.maybe("bias")
        self._correction_bias_E = weights.maybe("correction_bias")
        self._norm = Norm(spec.norm, weights.into("norm")) if spec.norm else None
        self._expert_scale_E = weights.maybe("expert_scale")
        self._table_Vk = weights.maybe("table")

    def __call__(self, x_TH: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        spec, logits_TE = self.spec, self._logits(x_TH)
        if spec.scoring == "sparsemixer":
            return sparsemixer(logits_TE, spec.jitter)
        weights_Tk, ids_Tk = batch.ops.router_topk(
            logits_TE,
            self._correction_bias_E,
            spec.top_k,
            spec.scoring,
            spec.normalize,
            spec.num_groups,
            spec.topk_groups,
            spec.group_score,
            spec.scale,
            spec.score_chosen,
            spec.eps,
            spec.floor,
            None if self._table_Vk is None else self._table_Vk[batch.token_ids_T.clamp(max=spec.hashed - 1)],
        )
        return (weights_Tk if self._expert_scale_E is None else weights_Tk * self._expert_scale_E[ids_Tk]), ids_Tk

    def _logits(self, x_TH: Tensor) -> Tensor:
        weight_EH, bias_E, cap = self._weight_EH, self._bias_E, self.spec.logit_softcap
        x_TH = x_TH if self._norm is None else self._norm(x_TH)
        if self.spec.float32:
            x_TH, weight_EH = x_TH.float(), weight_EH.float()
            bias_E = None if bias_E is None else bias_E.float()
        logits_TE = F.linear(x_TH, weight_EH, bias_E).float() * self.spec.logit_scale
        return logits_TE if cap is None else cap * torch.tanh(logits_TE / cap)
