"""What the expert layer is told beside its tokens and its weights."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertRules:
    """How experts compute, and which of them are held here: those from `start` on, by their global numbers.

    `gate_up_bias_E2F` and `down_bias_EH` belong to the two products, where there are any. Not `gated`: the first
    weight is [E, F, H], its bias [E, F], and the activation stands alone. `weigh_input` multiplies an expert's input
    by its weight instead of its output (Llama 4).
    """

    activation: str = "silu"
    start: int = 0
    gate_up_bias_E2F: Tensor | None = None
    down_bias_EH: Tensor | None = None
    gated: bool = True
    weigh_input: bool = False
