"""Per-layer input embeddings (Gemma 3n and 4); the formulas are in the specs of the same names.

Legend: T tokens, H hidden, V vocabulary, L layers, P width of an input.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.batch import ForwardBatch
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.kernels.gated_activation.reference import ACTIVATIONS


class PerLayerInputs:
    """Embeddings [T, H] and the tokens themselves -> the inputs of all layers, [T, L, P]."""

    def __init__(self, spec: specs.PerLayerInputs, weights: Access) -> None:
        self.spec = spec
        self._table_VF = weights.tensor("embed.weight")
        self._project = weights.linear("project")
        self._norm = Norm(spec.norm, weights.into("norm"))

    def __call__(self, x_TH: Tensor, batch: ForwardBatch) -> Tensor:
        spec, tp, rows = self.spec, batch.comms.tp, self._table_VF.shape[0]
        local_T = batch.token_ids_T - tp.index * rows
        here_T = (local_T >= 0) & (local_T < rows)
        own_TF = F.embedding(local_T.masked_fill(~here_T, 0), self._table_VF)
        own_TF = tp.all_reduce(own_TF.masked_fill(~here_T.unsqueeze(-1), 0.0)) * spec.width**0.5
        seen_TLP = (self._project(x_TH) * x_TH.shape[1] ** -0.5).unflatten(-1, (spec.layers, spec.width))
        return (self._norm(seen_TLP) + own_TF.unflatten(-1, (spec.layers, spec.width))) * 2.0**-0.5


class PerLayerGate:
    """x [T, H] and the layer's input [T, P] -> [T, H], with the input taken in."""

    def __init__(self, spec: specs.PerLayerGate, weights: Access) -> None:
        self._gate, self._project = weights.linear("gate"), weights.linear("project")
        self._norm = Norm(spec.norm, weights.into("norm"))
        self._act = ACTIVATIONS[spec.activation]

    def __call__(self, x_TH: Tensor, input_TP: Tensor) -> Tensor:
        return x_TH + self._norm(self._project(self._act(self._gate(x_TH)) * input_TP))
