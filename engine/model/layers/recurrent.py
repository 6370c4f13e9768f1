"""Shared by blocks with a recurrent state. Legend: T tokens, N heads on this rank, K key dim, V value dim."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model.batch import ForwardBatch
from firstlight.kernels.sequences import Sequences


def sequences_of(batch: ForwardBatch) -> Sequences:
    """The batch's sequences and the slots of their states; made by the first layer of a step, kept for the rest."""
    meta, key = batch.attention, ("sequences", batch.slots)
    if key not in meta.memo:
        fresh = [kv_len == length for kv_len, length in zip(meta.kv_lens, meta.query_lens, strict=True)]
        meta.memo[key] = Sequences.build(meta.query_lens, batch.slots, fresh, batch.token_ids_T.device)
    found: Sequences = meta.memo[key]
    return found


def unit_length(x_TNK: Tensor, eps: float = 1e-6) -> Tensor:
    """x / |x| over the last dim in float32."""
    x_TNK = x_TNK.float()
    return x_TNK * torch.rsqrt(x_TNK.square().sum(-1, keepdim=True) + eps)


def gated_norm(x_TNV: Tensor, gate_TNV: Tensor, weight_V: Tensor, eps: float, activation: str) -> Tensor:
    """rms(x) weight act(gate) over the last dim, in float32; the dtype of x."""
    gate_TNV = gate_TNV.float()
    gate_TNV = F.silu(gate_TNV) if activation == "silu" else torch.sigmoid(gate_TNV)
    normed_TNV = F.rms_norm(x_TNV.float(), x_TNV.shape[-1:], weight_V.float(), eps)
    return (normed_TNV * gate_TNV).to(x_TNV.dtype)
