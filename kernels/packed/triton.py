"""Products with packed weights in Triton: the kernel of `moe` with a weight that is decoded as its tiles are loaded.

Legend: T tokens, E experts held here, H hidden, F output or intermediate width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.moe.rules import ExpertRules
from firstlight.kernels.moe.triton import moe, multiply_groups
from firstlight.kernels.packed.matrix import PackedMatrix


def linear_packed(x_TH: Tensor, weight_FH: PackedMatrix, bias_F: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see the reference for the contract): a grouped product with one group."""
    if x_TH.dim() != 2:
        return linear_packed(x_TH.flatten(0, -2), weight_FH, bias_F).unflatten(0, x_TH.shape[:-1])
    out_TF = torch.empty(x_TH.shape[0], weight_FH.rows, dtype=x_TH.dtype, device=x_TH.device)
    whole = torch.arange(2, dtype=torch.int32, device=x_TH.device) * x_TH.shape[0]
    return multiply_groups(
        x_TH, weight_FH.as_expert(), whole, out_TF, None, None if bias_F is None else bias_F.unsqueeze(0)
    )


def moe_packed(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_E2FH: PackedMatrix,
    down_EHF: PackedMatrix,
    rules: ExpertRules,
) -> Tensor:
    """Sum each token's chosen experts, weighted (see the reference for the contract); rounded as `moe` in Triton is."""
    return moe(x_TH, ids_Tk, weights_Tk, gate_up_E2FH, down_EHF, rules)
