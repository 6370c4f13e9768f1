"""Residual topologies: how a block reads the planes that flow between layers, and how its output joins them.

A topology has `read(planes, site)`, what the mixer or the feed-forward (`site`) sees, and `write(planes, out, site)`;
`Ends` makes planes of the embedding and one stream of the planes. Legend: T tokens, P planes, H hidden.
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers.access import Access

Site = Literal["mixer", "ffn"]


class Topology(Protocol):
    """The residual streams around one layer."""

    def read(self, x_TPH: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """(what the block sees [T, H], the planes that it will be written to)."""

    def write(self, x_TPH: Tensor, out_TH: Tensor, site: Site) -> Tensor:
        """The planes with the block's output in them."""

    def shown(self, x_TPH: Tensor) -> Tensor:
        """What stands for the layer's output in comparisons, [T, H]."""


class Ends(Protocol):
    """The two ends of the stack."""

    def enter(self, x_TH: Tensor) -> Tensor:
        """Planes in front of the first layer."""

    def leave(self, x_TPH: Tensor) -> Tensor:
        """One stream behind the last, [T, H]."""


class _Reader:
    """softmax over planes of (RMS-normalised plane . w . p), times the planes; float32 inside."""

    def __init__(self, eps: float, weights: Access) -> None:
        self._eps = eps
        self._query_H = weights.tensor("norm.weight").float() * weights.tensor("project.weight").float().flatten()

    def __call__(self, x_TPH: Tensor) -> Tensor:
        planes_TPH = x_TPH.float()
        scale_TP1 = torch.rsqrt(planes_TPH.square().mean(-1, keepdim=True) + self._eps)
        share_TP = torch.softmax((planes_TPH * scale_TP1) @ self._query_H, dim=-1)
        return torch.einsum("tp,tph->th", share_TP, planes_TPH).to(x_TPH.dtype)


class AttentionResidual:
    """Planes are the bank of finished spans, oldest first, and the running sum; see the spec of the same name."""

    def __init__(self, spec: specs.AttentionResidual, weights: Access, layer: int) -> None:
        self._reads = {site: _Reader(spec.eps, weights.into(f"{site}_read")) for site in ("mixer", "ffn")}
        self._starts_span = layer % spec.block_size == 0

    def read(self, x_TPH: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        seen_TH = self._reads[site](x_TPH)
        if site == "mixer" and self._starts_span:  # the sum so far is done: a new one begins at nothing
            x_TPH = torch.cat((x_TPH, torch.zeros_like(x_TPH[:, :1])), dim=1)
        return seen_TH, x_TPH

    def write(self, x_TPH: Tensor, out_TH: Tensor, site: Site) -> Tensor:
        return torch.cat((x_TPH[:, :-1], (x_TPH[:, -1] + out_TH).unsqueeze(1)), dim=1)

    def shown(self, x_TPH: Tensor) -> Tensor:
        return x_TPH[:, -1]


class AttentionResidualEnds:
    """The embedding is the first running sum; the end of the stack reads once more."""

    def __init__(self, spec: specs.AttentionResidual, weights: Access, is_last: bool) -> None:
        self._read = _Reader(spec.eps, weights.into("read")) if is_last else None

    def enter(self, x_TH: Tensor) -> Tensor:
        return x_TH.unsqueeze(1)

    def leave(self, x_TPH: Tensor) -> Tensor:
        assert self._read is not None, "only the last stage leaves the stack"
        return self._read(x_TPH)


TOPOLOGIES = {specs.AttentionResidual: AttentionResidual}  # one line a topology
ENDS = {specs.AttentionResidual: AttentionResidualEnds}
