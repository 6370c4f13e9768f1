"""The projector steps between a vision tower and the decoder; spec: `spec/chain.py`. Legend: T patches, n features."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers.access import Access
from firstlight.engine.model.layers.norm import Norm
from firstlight.kernels.gated_activation.reference import ACTIVATIONS

Run = Callable[[Tensor], Tensor]


class Chain:
    """x [T, width], the patches of a kernel side by side -> [n, decoder width]."""

    def __init__(self, spec: specs.Chain, weights: Access) -> None:
        self._runs = [STEPS[type(step)](step, weights) for step in spec.steps]

    def __call__(self, x_TH: Tensor) -> Tensor:
        for run in self._runs:
            x_TH = run(x_TH)
        return x_TH


def _linear(step: specs.LinearStep, weights: Access) -> Run:
    if step.kernel is None:
        return weights.linear(step.name)
    weight_OI, bias_O = weights.tensor(f"{step.name}.weight").flatten(1), weights.maybe(f"{step.name}.bias")
    return lambda x_TH: F.linear(x_TH, weight_OI, bias_O)


def _norm(step: specs.NormStep, weights: Access) -> Run:
    return Norm(step.norm, weights.into(step.name))


def _activation(step: specs.ActivationStep, weights: Access) -> Run:
    return ACTIVATIONS[step.activation]


def _gated(step: specs.GatedStep, weights: Access) -> Run:
    gate, up, down = (weights.linear(part) for part in ("gate", "up", "down"))
    activation = ACTIVATIONS[step.activation]
    return lambda x_TH: down(activation(gate(x_TH)) * up(x_TH))


def _merge(step: specs.MergeStep, weights: Access) -> Run:
    def run(x_TH: Tensor) -> Tensor:
        x_nKH = x_TH.unflatten(0, (-1, step.patches))
        if step.how == "mean":
            return x_nKH.float().mean(1).to(x_TH.dtype)
        return (x_nKH.transpose(1, 2) if step.how == "interleaved" else x_nKH).flatten(1)

    return run


STEPS: dict[type, Callable[..., Run]] = {
    specs.LinearStep: _linear,
    specs.NormStep: _norm,
    specs.ActivationStep: _activation,
    specs.GatedStep: _gated,
    specs.MergeStep: _merge,
}
