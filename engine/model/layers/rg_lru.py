"""The real-gated linear recurrent unit. See the spec of the same name for the formula.

Legend: T tokens, H hidden, C channels and N blocks of B channels on this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.recurrent import sequences_of
from firstlight.kernels.gated_activation.reference import ACTIVATIONS


class RgLru:
    """x [T, H] -> [T, H]; this rank's channels, summed over ranks. `cache`: the convolution's inputs, the memory."""

    def __init__(self, spec: specs.RgLru, weights: Access) -> None:
        self.spec = spec
        self._in = weights.linear("in")
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.tensor("o.bias")
        self._conv_CW, self._conv_bias_C = weights.tensor("conv.weight").squeeze(1), weights.tensor("conv.bias")
        self._gates = [
            (weights.tensor(f"{gate}_gate.weight"), weights.tensor(f"{gate}_gate.bias")) for gate in ("input", "decay")
        ]
        self._rate_C = 8.0 * F.softplus(weights.tensor("decay"))

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        conv_state, memory = cache
        sequences, tokens = sequences_of(batch), x_TH.shape[0]
        u_TC, y_TC = self._in(x_TH).chunk(2, dim=-1)
        u_TC = batch.ops.causal_conv(u_TC, self._conv_CW, self._conv_bias_C, conv_state, sequences, "none")
        input_TC, decay_TC = (self._gate(u_TC, *gate) for gate in self._gates)
        log_decay_TC = -self._rate_C * decay_TC
        root_TC = torch.sqrt(-torch.expm1(2.0 * log_decay_TC))
        root_TC = torch.where((batch.positions_T == 0).unsqueeze(-1), 1.0, root_TC)
        one_T11 = torch.ones(tokens, 1, 1, device=x_TH.device)
        v_TC1 = (u_TC.float() * input_TC * root_TC).unsqueeze(-1)
        h_TC1 = batch.ops.linear_attention(one_T11, one_T11, v_TC1, log_decay_TC, None, memory, sequences)
        out_TC = h_TC1.squeeze(-1).to(x_TH.dtype) * ACTIVATIONS[self.spec.activation](y_TC)
        return batch.comms.heads.all_reduce(self._o(out_TC)) + self._o_bias_H

    def _gate(self, u_TC: Tensor, weight_NBB: Tensor, bias_NB: Tensor) -> Tensor:
        """A projection within each block, as a share; float32."""
        u_TNB = u_TC.unflatten(-1, weight_NBB.shape[:2])
        return torch.sigmoid((torch.einsum("tnb,nbc->tnc", u_TNB, weight_NBB) + bias_NB).float()).flatten(1)
