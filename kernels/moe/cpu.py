"""Grouped products and the expert layer on CPUs: torch's own product per expert that has rows, in the weights' dtype.

Legend: M rows sorted by expert, T tokens, E experts held here, k chosen experts, H hidden, F output or intermediate
width.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.gated_activation.cpu import gated_activation
from firstlight.kernels.moe.reference import plain_activation
from firstlight.kernels.moe.rules import ExpertRules


def grouped_matmul(x_MH: Tensor, weight_EFH: Tensor, group_start_E1: Tensor) -> Tensor:
    """Multiply each expert's rows by its own weight (see the reference for the contract)."""
    out_MF = x_MH.new_zeros(x_MH.shape[0], weight_EFH.shape[1])
    for expert, (start, end) in enumerate(pairwise(group_start_E1.tolist())):
        if end > start:
            out_MF[start:end] = F.linear(x_MH[start:end], weight_EFH[expert])
    return out_MF


def moe(
    x_TH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, gate_up_E2FH: Tensor, down_EHF: Tensor, rules: ExpertRules
) -> Tensor:
    """Sum each token's chosen experts, weighted (see the reference for the contract)."""
    num_local = gate_up_E2FH.shape[0]
    return routed(x_TH, ids_Tk, weights_Tk, num_local, lambda expert: (gate_up_E2FH[expert], down_EHF[expert]), rules)


def routed(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    num_local: int,
    weights_of: Callable[[int], tuple[Tensor, Tensor]],
    rules: ExpertRules,
) -> Tensor:
    """The same with the weights of an expert, [2F, H] and [H, F], asked for when a token chose it."""
    top_k = ids_Tk.shape[1]
    places: dict[int, list[int]] = {}
    for place, expert in enumerate(ids_Tk.flatten().tolist()):
        if 0 <= expert - rules.start < num_local:
            places.setdefault(expert - rules.start, []).append(place)
    out_TH = torch.zeros_like(x_TH, dtype=torch.float32)
    weights_M = weights_Tk.flatten()
    activate = gated_activation if rules.gated else plain_activation
    for expert, own in sorted(places.items()):
        place_M = torch.tensor(own)
        token_M = place_M // top_k
        rows_MH = x_TH if x_TH.shape[0] == 1 else x_TH[token_M]
        weight_M1 = weights_M[place_M, None]
        if rules.weigh_input:
            rows_MH = (rows_MH * weight_M1).to(x_TH.dtype)
        gate_up_2FH, down_HF = weights_of(expert)
        gate_up_M2F = F.linear(rows_MH, gate_up_2FH, _of(rules.gate_up_bias_E2F, expert))
        hidden_MF = activate(gate_up_M2F, rules.activation)
        down_MH = F.linear(hidden_MF, down_HF, _of(rules.down_bias_EH, expert))
        out_TH.index_add_(0, token_M, down_MH.float() if rules.weigh_input else down_MH * weight_M1)
    return out_TH.to(x_TH.dtype)


def _of(bias_EF: Tensor | None, expert: int) -> Tensor | None:
    return None if bias_EF is None else bias_EF[expert]
