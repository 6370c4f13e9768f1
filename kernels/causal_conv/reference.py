"""Reference of the short causal convolution: plain torch, the truth others are compared with.

Legend: T tokens of all sequences flattened, C channels, W taps, S slots.
"""

from __future__ import annotations

import torch
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
    """Convolve each channel of each sequence with its own filter: y_t = act(sum_w weight_w x_(t - W + 1 + w) + bias).

    `x_TC` [T, C] gives [T, C] in its dtype, computed in float32. `state_SCW` [S, C, W - 1] holds the last inputs of
    each sequence, oldest first (zeros before its first token), and is moved on in place. `activation` is `silu` or
    `none`.
    """
    taps = weight_CW.shape[1]
    out_TC = torch.empty_like(x_TC)
    for first, last, slot, fresh in sequences.spans():
        before_CW = torch.zeros_like(state_SCW[slot]) if fresh else state_SCW[slot].clone()
        seen_CT = torch.cat((before_CW, x_TC[first:last].T.to(before_CW.dtype)), dim=1)
        for t in range(last - first):
            y_C = (seen_CT[:, t : t + taps].float() * weight_CW.float()).sum(-1)
            y_C = y_C if bias_C is None else y_C + bias_C.float()
            out_TC[first + t] = (torch.nn.functional.silu(y_C) if activation == "silu" else y_C).to(x_TC.dtype)
        state_SCW[slot] = seen_CT[:, seen_CT.shape[1] - taps + 1 :]
    return out_TC
