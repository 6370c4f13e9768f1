"""A gated short convolution (LFM2). Legend: T tokens, H hidden, C channels on this rank."""

from __future__ import annotations

from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.recurrent import sequences_of


class ShortConv:
    """x [T, H] -> [T, H]; this rank's channels, summed over ranks. `cache` holds the convolution's inputs."""

    def __init__(self, spec: specs.ShortConv, weights: Access) -> None:
        self._in = weights.linear("in")
        self._o = weights.linear("o", bias=False)
        self._o_bias_H = weights.maybe("o.bias")
        self._conv_CW = weights.tensor("conv.weight").squeeze(1)
        self._conv_bias_C = weights.maybe("conv.bias")

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        (state,) = cache
        b_TC, c_TC, u_TC = self._in(x_TH).chunk(3, dim=-1)
        seen_TC = batch.ops.causal_conv(
            b_TC * u_TC, self._conv_CW, self._conv_bias_C, state, sequences_of(batch), "none"
        )
        out_TH = batch.comms.heads.all_reduce(self._o(c_TC * seen_TC))
        return out_TH if self._o_bias_H is None else out_TH + self._o_bias_H
