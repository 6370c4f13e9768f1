"""Reference of the expert layer over MXFP4 weights: unpack them, then what the reference of `moe` does.

Legend: E experts held here, R rows, C columns of a weight, H hidden, F intermediate width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from firstlight.kernels.moe import reference as plain

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GROUP = 32


def unpack(codes: Tensor, scales: Tensor) -> Tensor:
    """Numbers [..., C], float32, of codes [..., C / 2] and scales [..., C / 32], both bytes.

    A byte holds column 2j in its low half and 2j + 1 in its high half: sign, then an index into MAGNITUDES. A scale s
    stands for 2^(s - 127), and 255 for NaN. OCP Microscaling Formats (MX) v1.0, section 5.3.
    """
    table = torch.tensor((*MAGNITUDES, *(-value for value in MAGNITUDES)), device=codes.device)
    numbers = table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).int()]
    exponents = scales.int()
    bits = torch.where(exponents == 0, 1 << 22, exponents << 23)  # 2^-127 is below the normal numbers
    factors = torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)
    return (numbers.unflatten(-1, (-1, GROUP)) * factors.unsqueeze(-1)).flatten(-2)


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
    """Sum each token's chosen experts, weighted, as `moe` does with the numbers that the codes stand for.

    Codes [E, 2F, H / 2] with scales [E, 2F, H / 32], and [E, H, F / 2] with [E, H, F / 32]; uint8, see `unpack`.
    """
    return plain.moe(
        x_TH,
        ids_Tk,
        weights_Tk,
        unpack(gate_up_codes, gate_up_scales),
        unpack(down_codes, down_scales),
        activation,
        expert_start,
        gate_up_bias_E2F,
        down_bias_EH,
        gated,
        weigh_input,
    )
