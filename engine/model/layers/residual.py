"""Residual topologies with several streams: how a block reads them, and how its output is added to them.

A topology's `read(planes, site)` gives what the mixer or the feed-forward (`site`) sees, and how its output joins the
planes; `Ends` makes planes of the embedding and one stream of the planes.

Legend: T tokens, P planes, H hidden, S = P H all planes of a token behind one another, R shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.engine.model import spec as specs
from firstlight.engine.model.layers.access import Access

Site = Literal["mixer", "ffn"]
Join = Callable[[Tensor], Tensor]
"""A block's output [T, H] -> the planes [T, P, H] with it in them."""


class Topology(Protocol):
    """The residual streams around one layer."""

    def read(self, x_TPH: Tensor, site: Site) -> tuple[Tensor, Join]:
        """(what the block sees [T, H], how its output joins)."""

    def shown(self, x_TPH: Tensor) -> Tensor:
        """The layer's output as shown in comparisons: [T, H], or all planes [T, S]."""


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

    def read(self, x_TPH: Tensor, site: Site) -> tuple[Tensor, Join]:
        seen_TH = self._reads[site](x_TPH)
        if site == "mixer" and self._starts_span:  # the sum so far is done: a new one begins at nothing
            x_TPH = torch.cat((x_TPH, torch.zeros_like(x_TPH[:, :1])), dim=1)
        return seen_TH, lambda out_TH: torch.cat((x_TPH[:, :-1], (x_TPH[:, -1] + out_TH).unsqueeze(1)), dim=1)

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


class _Shares:
    """Mixing coefficients from one small projection of all streams, RMS-normalised together; in float32."""

    def __init__(self, norm_eps: float, weights: Access, sizes: tuple[int, ...]) -> None:
        self._norm_eps, self._sizes = norm_eps, sizes
        self._project_RS, self._base_R = weights.tensor("project").float(), weights.tensor("base").float()
        scales = weights.tensor("scale").float()
        self._scale_R = torch.cat([scale.expand(size) for scale, size in zip(scales, sizes, strict=True)])

    def __call__(self, x_TPH: Tensor) -> tuple[Tensor, ...]:
        x_TS = x_TPH.flatten(1).float()
        x_TS = x_TS * torch.rsqrt(x_TS.square().mean(-1, keepdim=True) + self._norm_eps)
        return (F.linear(x_TS, self._project_RS) * self._scale_R + self._base_R).split(self._sizes, dim=-1)


class HyperConnections:
    """Streams mixed by a doubly stochastic matrix around every block; see the spec of the same name."""

    def __init__(self, spec: specs.HyperConnections, weights: Access, layer: int) -> None:
        self.spec = spec
        sizes = (spec.streams, spec.streams, spec.streams**2)
        self._shares = {site: _Shares(spec.norm_eps, weights.into(site), sizes) for site in ("mixer", "ffn")}

    def read(self, x_TPH: Tensor, site: Site) -> tuple[Tensor, Join]:
        spec = self.spec
        taken_TP, given_TP, mixed_TPP = self._shares[site](x_TPH)
        taken_TP, given_TP = torch.sigmoid(taken_TP) + spec.eps, 2.0 * torch.sigmoid(given_TP)
        mixed_TPP = self._balanced(mixed_TPP.unflatten(-1, (spec.streams, spec.streams)))
        seen_TH = torch.einsum("tp,tph->th", taken_TP, x_TPH.float()).to(x_TPH.dtype)
        kept_TPH = torch.einsum("tpq,tph->tqh", mixed_TPP.to(x_TPH.dtype), x_TPH)
        return seen_TH, lambda out_TH: kept_TPH + given_TP.to(out_TH.dtype).unsqueeze(-1) * out_TH.unsqueeze(1)

    def _balanced(self, logits_TPP: Tensor) -> Tensor:
        """Normalises rows and columns to sum to one, alternately (Sinkhorn-Knopp); columns last."""
        eps = self.spec.eps
        shares_TPP = torch.softmax(logits_TPP, dim=-1) + eps
        shares_TPP = shares_TPP / (shares_TPP.sum(dim=-2, keepdim=True) + eps)
        for _ in range(self.spec.iterations - 1):
            shares_TPP = shares_TPP / (shares_TPP.sum(dim=-1, keepdim=True) + eps)
            shares_TPP = shares_TPP / (shares_TPP.sum(dim=-2, keepdim=True) + eps)
        return shares_TPP

    def shown(self, x_TPH: Tensor) -> Tensor:
        return x_TPH.flatten(1)


class HyperConnectionsEnds:
    """Every stream begins as the embedding; the end of the stack reads a mixture."""

    def __init__(self, spec: specs.HyperConnections, weights: Access, is_last: bool) -> None:
        self.spec = spec
        self._shares = _Shares(spec.norm_eps, weights.into("read"), (spec.streams,)) if is_last else None

    def enter(self, x_TH: Tensor) -> Tensor:
        return x_TH.unsqueeze(1).repeat(1, self.spec.streams, 1)

    def leave(self, x_TPH: Tensor) -> Tensor:
        assert self._shares is not None, "only the last stage leaves the stack"
        (taken_TP,) = self._shares(x_TPH)
        taken_TP = torch.sigmoid(taken_TP) + self.spec.eps
        return torch.einsum("tp,tph->th", taken_TP, x_TPH.float()).to(x_TPH.dtype)


TOPOLOGIES: Mapping[type, Callable[..., Topology]] = MappingProxyType(
    {specs.AttentionResidual: AttentionResidual, specs.HyperConnections: HyperConnections}
)
ENDS: Mapping[type, Callable[..., Ends]] = MappingProxyType(
    {specs.AttentionResidual: AttentionResidualEnds, specs.HyperConnections: HyperConnectionsEnds}
)
