"""Reference of grouped products and of the expert layer: plain torch, the truth others are compared with.

Legend: M rows sorted by expert, T tokens, E experts held here, k chosen experts, H hidden, F output or intermediate
width.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from firstlight.kernels.gated_activation.reference import ACTIVATIONS, gated_activation
from firstlight.kernels.moe.rules import ExpertRules


def grouped_matmul(x_MH: Tensor, weight_EFH: Tensor, group_start_E1: Tensor) -> Tensor:
    """Multiply each expert's rows by its own weight: rows `group_start[e]` to `group_start[e + 1]` by `weight[e].T`.

    `x_MH` [M, H], `weight_EFH` [E, F, H] and `group_start_E1` [E + 1] (integers, ascending) give [M, F] in the dtype of
    `x_MH`, summed in float32. Rows outside all groups are zero.
    """
    out_MF = x_MH.new_zeros(x_MH.shape[0], weight_EFH.shape[1])
    bounds = group_start_E1.tolist()
    for expert, (start, end) in enumerate(pairwise(bounds)):
        out_MF[start:end] = (x_MH[start:end].float() @ weight_EFH[expert].float().T).to(x_MH.dtype)
    return out_MF


def plain_activation(x: Tensor, activation: str) -> Tensor:
    """The activation alone, computed in float32 and rounded once."""
    return ACTIVATIONS[activation](x.float()).to(x.dtype)


def moe(
    x_TH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, gate_up_E2FH: Tensor, down_EHF: Tensor, rules: ExpertRules
) -> Tensor:
    """Sum each token's chosen experts, weighted: the part that the experts held here contribute.

    `ids_Tk` [T, k] are global expert numbers; those outside [start, start + E) belong to other ranks and contribute
    nothing. `gate_up_E2FH` [E, 2F, H] and `down_EHF` [E, H, F] are the experts' weights. The result is [T, H] in the
    dtype of `x_TH`; the intermediate and a weighted input are rounded to that dtype, the weighted sum is float32.
    """
    out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    for expert in range(gate_up_E2FH.shape[0]):
        token, column = torch.where(ids_Tk == expert + rules.start)
        if token.numel() == 0:
            continue
        rows, weight = x_TH[token].float(), weights_Tk[token, column].float().unsqueeze(-1)
        if rules.weigh_input:
            rows = (rows * weight).to(x_TH.dtype).float()
        gate_up = rows @ gate_up_E2FH[expert].float().T
        if rules.gate_up_bias_E2F is not None:
            gate_up = gate_up + rules.gate_up_bias_E2F[expert].float()
        gate_up = gate_up.to(x_TH.dtype)
        activate = gated_activation if rules.gated else plain_activation
        hidden = activate(gate_up, rules.activation)
        down = hidden.float() @ down_EHF[expert].float().T
        if rules.down_bias_EH is not None:
            down = down + rules.down_bias_EH[expert].float()
        out_TH.index_add_(0, token, down if rules.weigh_input else down * weight)
    return out_TH.to(x_TH.dtype)
