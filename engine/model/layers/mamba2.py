"""State space duality (Mamba 2). See the spec of the same name for the formula.

Legend: T tokens, H hidden, N heads and G groups on this rank, P head dim, S state dim, I = N P, R rows of a projection.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.recurrent import sequences_of
from firstlight.engine.parallel.comm import Comm


class Mamba2:
    """x [T, H] -> [T, H]; this rank's heads, summed over ranks. `cache`: the convolution's inputs, the memory."""

    def __init__(self, spec: specs.Mamba2, weights: Access) -> None:
        self.spec = spec
        self._in = weights.linear("in")
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.maybe("o.bias")
        self._conv_RW = weights.tensor("conv.weight").squeeze(1)
        self._conv_bias_R = weights.maybe("conv.bias")
        self._rate_N = weights.tensor("decay").exp()
        self._dt_bias_N = weights.tensor("dt_bias")
        self._d_N1 = weights.tensor("d").unsqueeze(-1)
        self._norm_I = weights.maybe("norm.weight")
        width = weights.columns("o")
        shared = (self._conv_RW.shape[0] - width) // 2
        self._rows = (width, width, shared, shared, width // spec.head_dim)
        self._scale_R = self._input_scale(self._conv_RW)

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        spec, tokens, sequences = self.spec, x_TH.shape[0], sequences_of(batch)
        conv_state, memory = cache
        all_TR = self._in(x_TH) if self._scale_R is None else self._in(x_TH) * self._scale_R
        width, _, shared, _, heads = self._rows
        z_TI, xbc_TR, dt_TN = all_TR.split((width, width + 2 * shared, heads), dim=-1)
        xbc_TR = batch.ops.causal_conv(xbc_TR, self._conv_RW, self._conv_bias_R, conv_state, sequences, "silu")
        x_TI, b_TR, c_TR = xbc_TR.split((width, shared, shared), dim=-1)
        x_TNP = x_TI.view(tokens, heads, spec.head_dim).float()
        b_TGS, c_TGS = b_TR.view(tokens, -1, spec.state_dim), c_TR.view(tokens, -1, spec.state_dim)
        dt_TN = F.softplus(dt_TN.float() + self._dt_bias_N).clamp(*spec.dt_limits)
        out_TNP = batch.ops.linear_attention(
            c_TGS, b_TGS, x_TNP * dt_TN.unsqueeze(-1), -self._rate_N * dt_TN, None, memory, sequences
        )
        out_TI = (out_TNP + self._d_N1 * x_TNP).view(tokens, -1)
        out_TI = self._gated(out_TI, z_TI.float(), batch.comms.heads).to(x_TH.dtype)
        out_TH = batch.comms.heads.all_reduce(self._o(out_TI))
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H

    def _input_scale(self, like: Tensor) -> Tensor | None:
        if self.spec.scales is None:
            return None
        parts = [torch.full((rows,), scale) for rows, scale in zip(self._rows, self.spec.scales, strict=True)]
        return torch.cat(parts).to(like)

    def _gated(self, y_TI: Tensor, z_TI: Tensor, over: Comm) -> Tensor:
        if self.spec.norm == "before":
            return self._normed(y_TI, over) * F.silu(z_TI)
        y_TI = y_TI * F.silu(z_TI)
        return y_TI if self.spec.norm is None else self._normed(y_TI, over)

    def _normed(self, y_TI: Tensor, over: Comm) -> Tensor:
        """RMSNorm over each group; the only group there is lies on all ranks."""
        assert self._norm_I is not None
        groups = self.spec.num_groups
        if groups == 1:
            square_T1 = over.all_reduce(y_TI.square().sum(-1, keepdim=True)) / self.spec.width
            return y_TI * torch.rsqrt(square_T1 + self.spec.eps) * self._norm_I.float()
        y_TGE = y_TI.unflatten(-1, (-1, self.spec.width // groups))
        return F.rms_norm(y_TGE, y_TGE.shape[-1:], None, self.spec.eps).flatten(1) * self._norm_I.float()
