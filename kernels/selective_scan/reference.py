"""Reference of the selective scan: token by token, the truth others are compared with.

Legend: T tokens of all sequences flattened, D channels, N state dim, S slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.sequences import Sequences


def selective_scan(
    x_TD: Tensor,
    dt_TD: Tensor,
    rate_DN: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    state_SDN: Tensor,
    sequences: Sequences,
) -> Tensor:
    """Decay, write and read each channel: h <- exp(-rate dt) h + dt x b; y = h c (Mamba, arXiv 2312.00752).

    `x_TD` [T, D], `dt_TD` [T, D] (above zero), `rate_DN` [D, N] (above zero), `b_TN` and `c_TN` [T, N]. `state_SDN`
    [S, D, N] float32 is moved on in place. Gives [T, D] float32; everything inside is float32.
    """
    out_TD = torch.empty(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    for first, last, slot, fresh in sequences.spans():
        state_DN = torch.zeros_like(state_SDN[slot]) if fresh else state_SDN[slot].clone()
        for t in range(first, last):
            dt_D1 = dt_TD[t].float()[:, None]
            state_DN = torch.exp(-rate_DN.float() * dt_D1) * state_DN
            state_DN = state_DN + dt_D1 * x_TD[t].float()[:, None] * b_TN[t].float()
            out_TD[t] = (state_DN * c_TN[t].float()).sum(-1)
        state_SDN[slot] = state_DN
    return out_TD
