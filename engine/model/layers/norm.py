"""Normalisation over the last dim. Legend: T tokens, H width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.spec import Norm as NormSpec


class Norm:
    """RMSNorm or LayerNorm as the spec says; x [..., H] gives the same shape and dtype."""

    def __init__(self, spec: NormSpec, weights: Access) -> None:
        self.spec = spec
        self.weight_H = weights.tensor("weight")
        self.bias_H = weights.tensor("bias") if spec.bias else None
        self._rms_norm = weights.ops.rms_norm
        self._add_rms_norm = weights.ops.add_rms_norm

    def __call__(self, x_TH: Tensor) -> Tensor:
        if self.spec.kind == "layer":
            return F.layer_norm(x_TH, self.weight_H.shape, self.weight_H, self.bias_H, self.spec.eps)
        return self._rms_norm(x_TH, self.weight_H, self.spec.eps, self.spec.offset)

    def after_add(self, x_TH: Tensor, residual_TH: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(residual + x), residual + x)."""
        if self.spec.kind == "layer":
            residual_TH = residual_TH + x_TH
            return self(residual_TH), residual_TH
        return self._add_rms_norm(x_TH, residual_TH, self.weight_H, self.spec.eps, self.spec.offset)
