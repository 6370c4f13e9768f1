"""Selective state spaces (Mamba). See the spec of the same name for the formula.

Legend: T tokens, H hidden, D channels on this rank, R rank of dt, N state dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.layers.recurrent import sequences_of


class Mamba:
    """x [T, H] -> [T, H]; this rank's channels, summed over ranks. `cache`: the convolution's inputs, the memory."""

    def __init__(self, spec: specs.Mamba, weights: Access) -> None:
        self.spec = spec
        self._in = weights.linear("in")
        self._select = weights.linear("select")
        self._dt = weights.linear("dt")
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.maybe("o.bias")
        self._conv_DW = weights.tensor("conv.weight").squeeze(1)
        self._conv_bias_D = weights.maybe("conv.bias")
        self._rate_DN = weights.tensor("decay").exp()
        self._d_D = weights.tensor("d")
        names = ("dt_norm", "b_norm", "c_norm") if spec.norm is not None else ()
        self._norms = [Norm(spec.norm, weights.into(name)) for name in names if spec.norm is not None]

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        spec, ops, over, sequences = self.spec, batch.ops, batch.comms.heads, sequences_of(batch)
        conv_state, memory = cache
        x_TD, z_TD = self._in(x_TH).chunk(2, dim=-1)
        x_TD = ops.causal_conv(x_TD, self._conv_DW, self._conv_bias_D, conv_state, sequences, "silu")
        selected = over.all_reduce(self._select(x_TD)).split((spec.rank, spec.state_dim, spec.state_dim), dim=-1)
        if self._norms:
            selected = tuple(norm(part.contiguous()) for norm, part in zip(self._norms, selected, strict=True))
        dt_TR, b_TN, c_TN = selected
        dt_TD = F.softplus(self._dt(dt_TR).float())
        out_TD = ops.selective_scan(x_TD, dt_TD, self._rate_DN, b_TN, c_TN, memory, sequences)
        out_TD = (out_TD + self._d_D * x_TD.float()) * F.silu(z_TD.float())
        out_TH = over.all_reduce(self._o(out_TD.to(x_TH.dtype)))
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H
