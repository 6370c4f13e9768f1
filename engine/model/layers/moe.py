"""Mixture of experts. Legend: T tokens, H hidden, E experts and F intermediate width on this rank, k chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.mlp import MLP


class MoE:
    """x [T, H] -> [T, H]. Every ep rank sees all tokens; its own experts' share is summed over ep and tp."""

    def __init__(self, spec: specs.MoE, weights: Access) -> None:
        self.spec = spec
        self._router_EH = weights.tensor("router.weight")
        self._correction_bias_E = weights.maybe("router.correction_bias")
        self._gate_up_E2FH = weights.tensor("experts.gate_up")
        self._down_EHF = weights.tensor("experts.down")
        self._shared = MLP(spec.shared, weights.into("shared")) if spec.shared else None
        self._shared_gate_1H = weights.maybe("shared_gate.weight")

    def __call__(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        spec, router = self.spec, self.spec.router
        if router.float32:
            logits_TE = torch.nn.functional.linear(x_TH.float(), self._router_EH.float())
        else:
            logits_TE = torch.nn.functional.linear(x_TH, self._router_EH)
        weights_Tk, ids_Tk = batch.ops.router_topk(
            logits_TE.float(),
            self._correction_bias_E,
            router.top_k,
            router.scoring,
            router.normalize,
            router.num_groups,
            router.topk_groups,
            router.group_score,
            router.scale,
            router.softmax_after,
        )
        first = batch.comms.ep.index * self._gate_up_E2FH.shape[0]
        out_TH = batch.ops.moe(x_TH, ids_Tk, weights_Tk, self._gate_up_E2FH, self._down_EHF, spec.activation, first)
        out_TH = batch.comms.ep.all_reduce(out_TH)
        if self._shared is not None:
            shared_TH = self._shared.partial(x_TH, batch)
            if self._shared_gate_1H is not None:
                shared_TH = shared_TH * torch.sigmoid(torch.nn.functional.linear(x_TH, self._shared_gate_1H))
            out_TH = out_TH + shared_TH
        return batch.comms.tp.all_reduce(out_TH)
