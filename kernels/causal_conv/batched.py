"""The short causal convolution as a few calls of torch: single steps of all sequences at once, prompts one by one.

Legend: T tokens of all sequences flattened, B sequences, C channels, W taps, S slots.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.sequences import Sequences


def causal_conv(
    x_TC: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    state_SCW: Tensor,
    sequences: Sequences,
    activation: str = "silu",
) -> Tensor:
    """Convolve each channel of each sequence with its own filter (see the reference for the contract)."""
    weight_CW = weight_CW.float()
    bias_C = None if bias_C is None else bias_C.float()
    y_TC = torch.empty(x_TC.shape, dtype=torch.float32, device=x_TC.device)
    if sequences.single.numel():
        x_DC1 = x_TC[sequences.single_row].unsqueeze(-1).to(state_SCW.dtype)
        seen_DCW = torch.cat((sequences.single_states(state_SCW), x_DC1), dim=-1)
        state_SCW[sequences.slot[sequences.single]] = seen_DCW[..., 1:]
        y_DC = (seen_DCW.float() * weight_CW).sum(-1)
        y_TC[sequences.single_row] = y_DC if bias_C is None else y_DC + bias_C
    for first, last, slot, fresh in sequences.spans(2):
        own_CW = state_SCW[slot]
        before_CW = torch.zeros_like(own_CW) if fresh else own_CW
        seen_CT = torch.cat((before_CW, x_TC[first:last].T.to(own_CW.dtype)), dim=1)
        own_CW.copy_(seen_CT[:, seen_CT.shape[1] - own_CW.shape[1] :])
        y_TC[first:last] = F.conv1d(seen_CT.float(), weight_CW.unsqueeze(1), bias_C, groups=seen_CT.shape[0]).T
    return (F.silu(y_TC) if activation == "silu" else y_TC).to(x_TC.dtype)
