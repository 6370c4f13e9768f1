"""Dense feed-forward. Legend: T tokens, H hidden, F intermediate width on this rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.kernels.gated_activation.reference import ACTIVATIONS


class MLP:
    """x [T, H] -> [T, H]; this rank's channels, summed over tp."""

    def __init__(self, spec: specs.MLP, weights: Access) -> None:
        self.spec = spec
        self._in = weights.linear("gate_up" if spec.gated else "up")
        self._down = weights.linear("down", bias=False)
        self._down_bias_H = weights.maybe("down.bias")
        self._act = _xielu(weights.into("act")) if spec.activation == "xielu" else ACTIVATIONS.get(spec.activation)

    def __call__(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        out_TH = batch.comms.tp.all_reduce(self.partial(x_TH, batch))
        out_TH = out_TH if self._down_bias_H is None else out_TH + self._down_bias_H
        return out_TH if self.spec.scale == 1.0 else out_TH * self.spec.scale

    def partial(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        """This rank's share, not yet summed over tp, without the output's bias."""
        hidden_TF = self._in(x_TH)
        if self.spec.gated:
            if self.spec.gate_scale != 1.0:
                gate_TF, up_TF = hidden_TF.chunk(2, dim=-1)
                hidden_TF = torch.cat((gate_TF * self.spec.gate_scale, up_TF), dim=-1)
            return self._down(batch.ops.gated_activation(hidden_TF, self.spec.activation))
        assert self._act is not None
        return self._down(self._act(hidden_TF))


def _xielu(weights: Access) -> Callable[[Tensor], Tensor]:
    """alpha_p x^2 + beta x above zero, alpha_n (exp(x) - 1 - x) + beta x below; arXiv 2411.13010."""
    beta, eps = weights.tensor("beta").float(), weights.tensor("eps").float()
    positive = F.softplus(weights.tensor("alpha_p").float())
    negative = beta + F.softplus(weights.tensor("alpha_n").float())

    def act(x_TF: Tensor) -> Tensor:
        x = x_TF.float()
        below = negative * (torch.expm1(torch.minimum(x, eps)) - x)
        return (torch.where(x > 0, positive * x * x, below) + beta * x).to(x_TF.dtype)

    return act
