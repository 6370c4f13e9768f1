"""Token embedding and output head, cut by rows over tp. Legend: T tokens, H hidden, V vocabulary, P positions."""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.engine.model.spec import ModelSpec


class TokenEmbedding:
    """ids [T] -> [T, H]; pictures' rows are filled in afterwards, unscaled or scaled as the spec says."""

    def __init__(self, spec: ModelSpec, weights: Access) -> None:
        self._weight_VH = weights.tensor("embed.weight")
        self._vocab_size = spec.vocab_size
        self._scale = spec.embed_scale
        self._scales_pictures = spec.scales_pictures
        self._positions_PH = weights.maybe("positions.weight")
        self._position_offset = spec.position_offset
        self._norm = Norm(spec.embed_norm, weights.into("embed_norm")) if spec.embed_norm else None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        tp, rows = batch.comms.tp, self._weight_VH.shape[0]
        if tp.size == 1 and not batch.embeddings:
            x_TH = torch.nn.functional.embedding(batch.token_ids_T, self._weight_VH)
        else:  # ids of other ranks and placeholder ids beyond the vocabulary give zero rows
            local_T = batch.token_ids_T - tp.index * rows
            here_T = (local_T >= 0) & (local_T < rows) & (batch.token_ids_T < self._vocab_size)
            x_TH = torch.nn.functional.embedding(local_T.masked_fill(~here_T, 0), self._weight_VH)
            x_TH = tp.all_reduce(x_TH.masked_fill_(~here_T.unsqueeze(-1), 0.0))
        if self._scale != 1.0:
            x_TH = x_TH * torch.tensor(self._scale, dtype=x_TH.dtype)
        for filled in batch.embeddings:
            features_NH = filled.features_NH[:, : x_TH.shape[1]]
            if self._scales_pictures:
                features_NH = features_NH * torch.tensor(self._scale, dtype=features_NH.dtype)
            x_TH[filled.start : filled.start + features_NH.shape[0]] = features_NH
        if self._positions_PH is not None:
            x_TH = x_TH + self._positions_PH[batch.positions_T + self._position_offset]
        return x_TH if self._norm is None else self._norm(x_TH)


class Head:
    """x [T, H] -> logits [T, V] float32 on every tp rank; rows that pad the vocabulary are cut off."""

    def __init__(self, spec: ModelSpec, weights: Access) -> None:
        self._linear = weights.linear("head")
        self._vocab_size = spec.vocab_size
        self._scale = spec.logit_scale
        self._softcap = spec.logit_softcap

    def __call__(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        logits_TV = batch.comms.tp.all_gather(self._linear(x_TH), dim=-1)[:, : self._vocab_size].float()
        if self._scale != 1.0:
            logits_TV = logits_TV * self._scale
        if self._softcap is not None:
            logits_TV = self._softcap * torch.tanh(logits_TV / self._softcap)
        return logits_TV
