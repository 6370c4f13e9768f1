"""RMSNorm and LayerNorm. Legend: T tokens, H width, N heads on this rank, D head dim."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.spec import Norm as NormSpec
from firstlight.engine.parallel.comm import Comm


class Norm:
    """RMSNorm or LayerNorm over the last dim as the spec says; x [..., H] gives the same shape and dtype."""

    def __init__(self, spec: NormSpec, weights: Access) -> None:
        self.spec = spec
        self.weight_H = weights.tensor("weight") if spec.weight else None
        self.bias_H = weights.tensor("bias") if spec.bias else None
        if self.weight_H is not None and spec.kind == "layer" and spec.offset:
            self.weight_H = self.weight_H + spec.offset
        self._rms_norm = weights.ops.rms_norm
        self._add_rms_norm = weights.ops.add_rms_norm

    def __call__(self, x_TH: Tensor) -> Tensor:
        if self.spec.kind == "layer":
            return F.layer_norm(x_TH, x_TH.shape[-1:], self.weight_H, self.bias_H, self.spec.eps)
        if self.weight_H is None:
            return F.rms_norm(x_TH, x_TH.shape[-1:], None, self.spec.eps)
        return self._rms_norm(x_TH, self.weight_H, self.spec.eps, self.spec.offset)

    def after_add(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(residual + x), residual + x)."""
        if self.spec.kind == "layer" or self.weight_H is None:
            residual_TH = residual_TH + x_TH
            return self(residual_TH), residual_TH
        return self._add_rms_norm(x_TH, residual_TH, self.weight_H, self.spec.eps, self.spec.offset)


class HeadsNorm:
    """Norm over each head of x [T, N, D], every head with a weight of its own."""

    def __init__(self, spec: NormSpec, weights: Access) -> None:
        self._plain = Norm(NormSpec(kind=spec.kind, eps=spec.eps, weight=False), weights)
        self._weight_ND = weights.tensor("weight") + spec.offset

    def __call__(self, x_TND: Tensor, over: Comm) -> Tensor:
        return self._plain(x_TND) * self._weight_ND


class EachNorm:
    """The same with weights stored per head; every rank has those of all heads."""

    def __init__(self, spec: NormSpec, weights: Access) -> None:
        self._plain = Norm(NormSpec(kind=spec.kind, eps=spec.eps, weight=False), weights)
        self._offset, self._weight_F = spec.offset, weights.tensor("weight")

    def __call__(self, x_TND: Tensor, over: Comm) -> Tensor:
        weight_ND = self._weight_F.view(-1, x_TND.shape[-1]) + self._offset
        first = over.index * len(weight_ND) // over.size
        return self._plain(x_TND) * weight_ND[first : first + x_TND.shape[1]]


class WidthNorm:
    """RMSNorm over all heads of a token together; this rank has N of them, so the mean is taken over ranks.

    Replicated key heads are counted several times, in the sum and in the number of terms alike.
    """

    def __init__(self, spec: NormSpec, weights: Access) -> None:
        assert spec.kind == "rms"
        self._eps, self._offset = spec.eps, spec.offset
        self._weight_H = weights.tensor("weight")

    def __call__(self, x_TND: Tensor, over: Comm) -> Tensor:
        x_TH = x_TND.flatten(1).float()
        square_T1 = over.all_reduce(x_TH.square().sum(-1, keepdim=True)) / (x_TH.shape[1] * over.size)
        x_TH = x_TH * torch.rsqrt(square_T1 + self._eps)
        return ((self._weight_H.float() + self._offset) * x_TH).to(x_TND.dtype).view_as(x_TND)


class HeadNorm:
    """Norm over each head of x [T, N, D], all heads with the same weight."""

    def __init__(self, spec: NormSpec, weights: Access) -> None:
        self._norm = Norm(spec, weights)

    def __call__(self, x_TND: Tensor, over: Comm) -> Tensor:
        return self._norm(x_TND)


QkNorm = EachNorm | HeadNorm | HeadsNorm | WidthNorm
QK_NORMS: Mapping[str, Callable[[NormSpec, Access], QkNorm]] = {
    "head": HeadNorm,
    "heads": HeadsNorm,
    "each": EachNorm,
    "width": WidthNorm,
}
