"""Linear layers on weights that oneDNN has rearranged for its kernels, for bfloat16 on CPUs.

The rearranged copy takes as much memory as the weight (to within padding); the weight itself is not kept here.
Legend: T rows, H input width, F output width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firstlight.kernels.signatures import PreparedLinear


def prepare(weight_FH: Tensor, bias_F: Tensor | None = None, row_counts: Sequence[int] = (1,)) -> PreparedLinear:
    """Rearrange the weight [F, H], contiguous bfloat16 on the CPU: x [T, H] gives x @ weight.T + bias, [T, F]."""
    with torch.inference_mode():
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_FH.contiguous(), max(row_counts))
    pointwise = torch.ops.mkldnn._linear_pointwise.default

    def linear(x_TH: Tensor) -> Tensor:
        return pointwise(x_TH, packed, bias_F, "none", [], "")

    return linear
