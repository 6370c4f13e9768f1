"""The expert layer over MXFP4 weights on CPUs: the experts that tokens chose are unpacked, one at a time.

Their numbers are exact in bfloat16 and float32. Legend: E experts held here, H hidden, F intermediate width.
"""

from __future__ import annotations

from torch import Tensor

from firstlight.kernels.moe.cpu import routed
from firstlight.kernels.moe_mxfp4.reference import unpack


def moe_mxfp4(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    gate_up_codes: Tensor,
    gate_up_scales: Tensor,
    down_codes: Tensor,
    down_scales: Tensor,
    activation: str = "silu",
    expert_start: int = 0,
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_EH: Tensor | None = None,
    gated: bool = True,
    weigh_input: bool = False,
) -> Tensor:
    """Sum each token's chosen experts, weighted (see the reference for the contract)."""

    def unpacked(expert: int) -> tuple[Tensor, Tensor]:
        gate_up = unpack(gate_up_codes[expert], gate_up_scales[expert])
        return gate_up.to(x_TH.dtype), unpack(down_codes[expert], down_scales[expert]).to(x_TH.dtype)

    return routed(
        x_TH,
        ids_Tk,
        weights_Tk,
        gate_up_codes.shape[0],
        unpacked,
        activation,
        expert_start,
        gate_up_bias_E2F,
        down_bias_EH,
        gated,
        weigh_input,
    )
