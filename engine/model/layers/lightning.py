"""Linear attention with one fixed decay a head. Legend: T tokens, H hidden, N heads on this rank, D head dim."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import WidthNorm
from firstlight.engine.model.layers.recurrent import sequences_of
from firstlight.kernels.gated_activation.reference import ACTIVATIONS


class Lightning:
    """x [T, H] -> [T, H]; this rank's heads, summed over ranks. `cache` holds the memory."""

    def __init__(self, spec: specs.Lightning, weights: Access) -> None:
        self.spec = spec
        self._in = weights.linear("in")
        self._o = weights.linear("o")
        self._norm = WidthNorm(specs.Norm(eps=spec.eps), weights.into("norm"))
        self._width = weights.columns("o")
        self._slopes = torch.tensor(spec.slopes, device=weights.storages[f"{weights.prefix}o.weight"].device)

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: tuple[Tensor, ...]) -> Tensor:
        tokens, dim, over = x_TH.shape[0], self.spec.head_dim, batch.comms.heads
        (memory,) = cache
        qkv, gate = self._in(x_TH).split((3 * self._width, self._width), dim=-1)
        q_TND, k_TND, v_TND = ACTIVATIONS[self.spec.activation](qkv).view(tokens, -1, 3 * dim).split(dim, dim=-1)
        heads = self._width // dim
        log_decay_TN = -self._slopes[over.index * heads : (over.index + 1) * heads].expand(tokens, heads)
        out_TND = batch.ops.linear_attention(q_TND, k_TND, v_TND, log_decay_TN, None, memory, sequences_of(batch))
        out_TND = self._norm(out_TND, over)
        return over.all_reduce(self._o(out_TND.flatten(1) * torch.sigmoid(gate)))
