"""Mixture of experts.

Legend: T tokens, H hidden, Z the experts' own width, E experts and F intermediate width on this rank, k chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.mlp import MLP
from firstlight.engine.model.layers.norm import Norm


class MoE:
    """x [T, H] -> [T, H]. Every ep rank sees all tokens; its own experts' share is summed over ep and tp."""

    def __init__(self, spec: specs.MoE, weights: Access) -> None:
        self.spec = spec
        self._router_EH = weights.tensor("router.weight")
        self._correction_bias_E = weights.maybe("router.correction_bias")
        self._gate_up_E2FH = weights.tensor("experts.gate_up")
        self._down_EHF = weights.tensor("experts.down")
        self._latent = _Latent(spec.latent, weights.into("latent")) if spec.latent else None
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
        seen_TZ = x_TH if self._latent is None else self._latent.enter(x_TH)
        out_TH = batch.ops.moe(seen_TZ, ids_Tk, weights_Tk, self._gate_up_E2FH, self._down_EHF, spec.activation, first)
        out_TH = batch.comms.ep.all_reduce(out_TH)
        shared_TH = self._shared_part(x_TH, batch)
        tp = batch.comms.tp
        if self._latent is not None:  # the norm behind the sum needs all of it
            out_TH = self._latent.leave(tp.all_reduce(out_TH))
            return out_TH if shared_TH is None else out_TH + tp.all_reduce(shared_TH)
        return tp.all_reduce(out_TH if shared_TH is None else out_TH + shared_TH)

    def _shared_part(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor | None:
        """The shared expert's share of this rank, not yet summed over tp."""
        if self._shared is None:
            return None
        shared_TH = self._shared.partial(x_TH, batch)
        if self._shared_gate_1H is None:
            return shared_TH
        return shared_TH * torch.sigmoid(torch.nn.functional.linear(x_TH, self._shared_gate_1H))


class _Latent:
    """The way down to the experts' width and back up."""

    def __init__(self, spec: specs.Latent, weights: Access) -> None:
        self.enter, self._up = weights.linear("down"), weights.linear("up")
        self._norm = Norm(spec.norm, weights.into("norm")) if spec.norm else None

    def leave(self, y_TZ: Tensor) -> Tensor:
        return self._up(y_TZ if self._norm is None else self._norm(y_TZ))
