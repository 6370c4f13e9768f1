"""Reference of a linear layer: the weight as it is stored, torch's own product.

Legend: T rows, H input width, F output width.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.signatures import PreparedLinear


def prepare(weight_FH: Tensor, bias_F: Tensor | None = None, row_counts: Sequence[int] = (1,)) -> PreparedLinear:
    """Keep the weight [F, H] and bias [F] as they are: x [T, H] gives x @ weight.T + bias, [T, F]."""
    return partial(F.linear, weight=weight_FH, bias=bias_F)
