"""Mixture of experts.

Legend: T tokens, H hidden, Z the experts' own width, E experts and F intermediate width on this rank, k chosen,
M places: a token and one of the experts that it chose.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access, packed_matrix
from firstlight.engine.model.layers.mlp import MLP
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.routing import Routing
from firstlight.engine.parallel.kept import SUFFIXES
from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.packed.matrix import PackedMatrix


class MoE:
    """x [T, H] -> [T, H], summed over tp.

    Where every ep rank sees all tokens, each adds its own experts' share and the sum is reduced. Where ep ranks have
    rows of their own (`batch.division`), tokens travel to the experts they chose and back.
    """

    def __init__(self, spec: specs.MoE, weights: Access) -> None:
        self.spec = spec
        self._routing = Routing(spec.router, weights.into("router"))
        self._cached, self._site = weights.experts(), weights.prefix
        self._arriving = weights.experts_to_come()
        self._experts = None if self._cached else _matrices(spec, weights)
        self._packings = [weights.packing(name) for name in (spec.entry, "experts.down")]
        packed = None if self._experts is None else self._as_packed(self._experts)
        self._packed = None if packed is None else (packed[0].in_order(), packed[1].in_order())
        self._gate_up_bias_E2F = weights.maybe(f"{spec.entry}_bias")
        self._down_bias_EH = weights.maybe("experts.down_bias")
        self._latent = _Latent(spec.latent, weights.into("latent")) if spec.latent else None
        self._shared = MLP(spec.shared, weights.into("shared")) if spec.shared else None
        self._shared_bias_H = weights.maybe("shared.down.bias")
        self._shared_gate_1H = weights.maybe("shared_gate.weight")

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, chosen_by_TH: Tensor | None = None) -> Tensor:
        """`chosen_by_TH`: what the router reads, where that is not x."""
        tp = batch.comms.tp
        weights_Tk, ids_Tk = self._routing(x_TH if chosen_by_TH is None else chosen_by_TH, batch)
        seen_TZ = x_TH if self._latent is None else self._latent.enter(x_TH)
        if batch.division is not None and batch.division.over_experts:
            out_TH = self._exchanged(seen_TZ, ids_Tk, weights_Tk, batch)
        else:
            out_TH = batch.comms.ep.all_reduce(self._routed_part(seen_TZ, ids_Tk, weights_Tk, batch))
        shared_TH = self._shared_part(x_TH, batch)
        if self._latent is not None:  # the norm behind the sum needs all of it
            out_TH = self._latent.leave(tp.all_reduce(out_TH))
            out_TH = out_TH if shared_TH is None else out_TH + tp.all_reduce(shared_TH)
        else:
            out_TH = tp.all_reduce(out_TH if shared_TH is None else out_TH + shared_TH)
        if self.spec.zero_experts:
            kept_T1 = weights_Tk.masked_fill(ids_Tk < self.spec.num_experts, 0.0).sum(dim=-1, keepdim=True)
            out_TH = out_TH + x_TH * kept_T1.to(x_TH.dtype)
        return out_TH if self.spec.scale == 1.0 else out_TH * self.spec.scale

    def _exchanged(self, x_TZ: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, batch: ForwardBatch) -> Tensor:
        """Rows go to every rank that holds an expert they chose; what comes back is summed in float32, in rank order.

        How many rows go where is told first, so that nothing is padded. A token that chose several experts of one rank
        travels once. The sum is this rank's tp share, as that of `_routed_part` is.
        """
        ep = batch.comms.ep
        owner_Tk = ids_Tk // (self.spec.num_experts // ep.size)  # past the last rank: experts that compute nothing
        goes_ET = torch.stack([(owner_Tk == rank).any(dim=1) for rank in range(ep.size)])
        sent, received = ep.tell_counts(goes_ET.sum(dim=1))
        row_M = goes_ET.nonzero()[:, 1]  # by rank, then by token
        how_M2k = torch.cat((weights_Tk.float(), ids_Tk.float()), dim=1)[row_M]  # numbers below 2^24 are exact
        x_RZ = ep.all_to_all(x_TZ[row_M], sent, received)
        weights_Rk, ids_Rk = ep.all_to_all(how_M2k, sent, received).chunk(2, dim=1)
        share_RZ = x_RZ
        if x_RZ.shape[0]:
            share_RZ = self._routed_part(x_RZ, ids_Rk.to(ids_Tk.dtype), weights_Rk.contiguous(), batch)
        share_MZ = ep.all_to_all(share_RZ, received, sent)
        sum_TZ = torch.zeros_like(x_TZ, dtype=torch.float32).index_add_(0, row_M, share_MZ.float())
        return sum_TZ.to(x_TZ.dtype)

    def _routed_part(self, x_TZ: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, batch: ForwardBatch) -> Tensor:
        """What this rank's channels of its own experts contribute."""
        down_bias_EH = self._down_bias_EH if batch.comms.tp.index == 0 else None  # once in the sum over tp
        biases = self._gate_up_bias_E2F, down_bias_EH
        if self._experts is not None:
            first = batch.comms.ep.index * self._experts[self.spec.entry].shape[0]
            if self._arriving is not None:
                self._arriving.need(self._site, ids_Tk, first)
            return self._product(self._experts, x_TZ, ids_Tk, weights_Tk, first, biases, batch)
        assert self._cached is not None

        def of_slots(place_M: Tensor, slot_M1: Tensor, held: dict[str, Tensor], expert_C: Tensor) -> Tensor:
            """Each place by itself, rounded as an operator rounds it before it adds up what a token chose."""
            entry, down = (None if one is None else one[expert_C] for one in biases)
            rows_MZ, weight_M1 = x_TZ[place_M // ids_Tk.shape[1]], weights_Tk.reshape(-1)[place_M, None].float()
            by_M1 = weight_M1 if self.spec.weigh_input else torch.ones_like(weight_M1)
            part_MZ = self._product(held, rows_MZ, slot_M1, by_M1, 0, (entry, down), batch)
            return part_MZ.float() if self.spec.weigh_input else part_MZ * weight_M1

        first = batch.comms.ep.index * self._cached.experts(self._site)
        return self._cached.routed(self._site, ids_Tk, first, of_slots).to(x_TZ.dtype)

    def _product(
        self,
        held: Mapping[str, Tensor],
        x_TZ: Tensor,
        ids_Tk: Tensor,
        weights_Tk: Tensor,
        first: int,
        biases: tuple[Tensor | None, Tensor | None],
        batch: ForwardBatch,
    ) -> Tensor:
        """The expert layer over matrices in the run's dtype, or over those that stayed packed, with their scales."""
        spec, entry, down = self.spec, self.spec.entry, "experts.down"
        rules = ExpertRules(spec.activation, first, *biases, spec.gated, spec.weigh_input)
        matrices = self._packed if held is self._experts else self._as_packed(held)
        if matrices is None:
            return batch.ops.moe(x_TZ, ids_Tk, weights_Tk, held[entry], held[down], rules)
        return batch.ops.moe_packed(x_TZ, ids_Tk, weights_Tk, *matrices, rules)

    def _as_packed(self, held: Mapping[str, Tensor]) -> tuple[PackedMatrix, PackedMatrix] | None:
        """The matrices of experts that stayed packed; None of others."""
        into, back = self._packings
        if into is None or back is None:
            return None
        return packed_matrix(held, self.spec.entry, into), packed_matrix(held, "experts.down", back)

    def _shared_part(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor | None:
        """The shared expert's share of this rank, not yet summed over tp."""
        if self._shared is None:
            return None
        shared_TH = self._shared.partial(x_TH, batch)
        if self._shared_bias_H is not None and batch.comms.tp.index == 0:  # once in the sum over tp
            shared_TH = shared_TH + self._shared_bias_H
        if self._shared_gate_1H is None:
            return shared_TH
        return shared_TH * torch.sigmoid(torch.nn.functional.linear(x_TH, self._shared_gate_1H))


def _matrices(spec: specs.MoE, weights: Access) -> dict[str, Tensor]:
    """What the experts multiply by; of packed ones all that they are held as."""
    names = [name + suffix for name in (spec.entry, "experts.down") for suffix in SUFFIXES.values()]
    return {name: weights.storages[weights.prefix + name] for name in names if weights.has(name)}


class _Latent:
    """The way down to the experts' width and back up."""

    def __init__(self, spec: specs.Latent, weights: Access) -> None:
        self.enter, self._up = weights.linear("down"), weights.linear("up")
        self._norm = Norm(spec.norm, weights.into("norm")) if spec.norm else None

    def leave(self, y_TZ: Tensor) -> Tensor:
        return self._up(y_TZ if self._norm is None else self._norm(y_TZ))
