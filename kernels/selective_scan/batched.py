"""The selective scan as calls of torch: single steps of all sequences at once, prompts by blocks of tokens.

Legend: T tokens of all sequences flattened, D channels, N state dim, S slots, C tokens of a block, B sequences of one
token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.sequences import Sequences

BLOCK = 32  # tokens whose decays and inputs are computed at once: C x D x N numbers each


def selective_scan(
    x_TD: Tensor,
    dt_TD: Tensor,
    rate_DN: Tensor,
    b_TN: Tensor,
    c_TN: Tensor,
    state_SDN: Tensor,
    sequences: Sequences,
) -> Tensor:
    """Decay, write and read the state of each channel (see the reference for the contract)."""
    out_TD = torch.empty(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    if sequences.single.numel():
        rows = sequences.single_row
        decay_BDN, added_BDN = _discrete(x_TD[rows], dt_TD[rows], rate_DN, b_TN[rows])
        state_BDN = decay_BDN.mul_(sequences.single_states(state_SDN)).add_(added_BDN)
        state_SDN[sequences.slot[sequences.single]] = state_BDN
        out_TD[rows] = _read(state_BDN, c_TN[rows])
    for first, last, slot, fresh in sequences.spans(2):
        state_DN = torch.zeros_like(state_SDN[slot]) if fresh else state_SDN[slot]
        for start in range(first, last, BLOCK):
            cut = slice(start, min(start + BLOCK, last))
            decay_CDN, states_CDN = _discrete(x_TD[cut], dt_TD[cut], rate_DN, b_TN[cut])
            for t in range(states_CDN.shape[0]):
                state_DN = torch.addcmul(states_CDN[t], decay_CDN[t], state_DN)
                states_CDN[t] = state_DN
            out_TD[cut] = _read(states_CDN, c_TN[cut])
        state_SDN[slot] = state_DN
    return out_TD


def _discrete(x_CD: Tensor, dt_CD: Tensor, rate_DN: Tensor, b_CN: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept of the state and what is added to it, [C, D, N] each."""
    dt_CD = dt_CD.float()
    added_CDN = (dt_CD * x_CD.float()).unsqueeze(-1) * b_CN.float().unsqueeze(1)
    return torch.exp(-rate_DN.float() * dt_CD.unsqueeze(-1)), added_CDN


def _read(states_CDN: Tensor, c_CN: Tensor) -> Tensor:
    return (states_CDN @ c_CN.float().unsqueeze(-1)).squeeze(-1)
