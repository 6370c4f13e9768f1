"""Mixture of experts: router, routed experts and shared experts, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.model.spec.mlp import MLP
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import Expert, Placement, Shard


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """How experts are chosen and weighted for a token; see `kernels/router_topk` for the exact order of steps.

    `float32`: the router's logits are computed in float32 from the weight as stored, plus a `bias` of their own, bent
    by `logit_softcap` tanh(logit / logit_softcap). A `norm` stands in front of them, and `logit_scale` multiplies them;
    with `expert_scale` each expert's weight is multiplied by a learned number. `hashed` > 0: a table of so many token
    ids names the experts.
    `sparsemixer` takes two experts and uses nothing of the rest but `jitter`.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    score_chosen: bool = False
    eps: float = 1e-20
    floor: float = 0.0
    float32: bool = False
    bias: bool = False
    logit_softcap: float | None = None
    norm: Norm | None = None
    logit_scale: float = 1.0
    expert_scale: bool = False
    hashed: int = 0
    jitter: float = 0.0

    def parameters(self, scope: Scope, num_experts: int) -> Iterator[Param]:
        yield scope.param("weight", num_experts, scope.hidden, role="router")
        if self.norm is not None:
            yield from self.norm.parameters(scope.into("norm"), scope.hidden)
        if self.expert_scale:
            yield scope.param("expert_scale", num_experts, role="router")
        if self.bias:
            yield scope.param("bias", num_experts, role="router")
        if self.correction_bias:
            yield scope.param("correction_bias", num_experts, role="router", dtype="F32")
        if self.hashed:
            yield scope.param("table", self.hashed, self.top_k, role="router", dtype="I64", limit=num_experts)


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Experts work at a narrower `width`: one projection down before all of them, one up behind their weighted sum.

    `norm` stands between the sum and the projection up.
    """

    width: int
    norm: Norm | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        """Replicated: small beside the experts, and the norm needs the whole sum.

        Counted with the router: both lead to the experts, and releases store both plain when they pack the experts.
        """
        yield scope.param("down.weight", self.width, scope.hidden, role="router")
        if self.norm is not None:
            yield from self.norm.parameters(scope.into("norm"), self.width)
        yield scope.param("up.weight", scope.hidden, self.width, role="router")


class MoE(msgspec.Struct, frozen=True, kw_only=True, tag="moe"):
    """Routed experts (MLPs of `intermediate`), optionally with a shared expert that sees every token.

    The router and the shared expert see the layer's own width, the experts that of `latent` where there is one. The
    router's last `zero_experts` give back their input and have no weights (LongCat-Flash, arXiv 2509.01322).
    `weigh_input`: an expert's weight multiplies what goes in. `scale` multiplies the sum of routed and shared.
    """

    num_experts: int
    intermediate: int
    activation: str
    router: Router
    shared: MLP | None = None
    shared_gate: bool = False
    latent: Latent | None = None
    gated: bool = True
    bias: bool = False
    weigh_input: bool = False
    zero_experts: int = 0
    scale: float = 1.0

    @property
    def entry(self) -> str:
        """The storage of the experts' first projections."""
        return "experts.gate_up" if self.gated else "experts.up"

    def parameters(self, scope: Scope) -> Iterator[Param]:
        yield from self.router.parameters(scope.into("router"), self.num_experts + self.zero_experts)
        width = scope.hidden if self.latent is None else self.latent.width
        if self.latent is not None:
            yield from self.latent.parameters(scope.into("latent"))
        yield from self._experts(scope, width)
        if self.shared is not None:
            yield from self.shared.parameters(scope.into("shared"))
        if self.shared_gate:
            yield scope.param("shared_gate.weight", 1, scope.hidden, role="router")

    def _experts(self, scope: Scope, width: int) -> Iterator[Param]:
        """Parameters of all experts, with shared values computed once: there may be hundreds of thousands."""
        parts = tuple(self._parts(width))
        for expert in scope.experts(self.num_experts):
            owner, one = Expert(expert, self.num_experts), f"experts.{expert}."
            for name, shape, cut, storage in parts:
                place: tuple[Placement, ...] = (owner, *cut)
                yield scope.param(one + name, *shape, role="expert", place=place, storage=storage, expert=expert)

    def _parts(self, width: int) -> Iterator[tuple[str, tuple[int, ...], tuple[Shard, ...], str]]:
        """Of one expert: name, shape, cuts and storage of each parameter."""
        columns = (Shard(0, self.intermediate, unit_name="expert channels"),)
        rows = (Shard(1, self.intermediate, unit_name="expert channels"),)
        for part in ("gate", "up") if self.gated else ("up",):
            yield f"{part}.weight", (self.intermediate, width), columns, self.entry
            if self.bias:
                yield f"{part}.bias", (self.intermediate,), columns, f"{self.entry}_bias"
        yield "down.weight", (width, self.intermediate), rows, "experts.down"
        if self.bias:
            yield "down.bias", (width,), (), "experts.down_bias"

    def words(self) -> str:
        """`MoE, 8 of 256 experts of 2,048, sigmoid, shared 2,048`."""
        router = self.router
        groups = f", {router.topk_groups} of {router.num_groups} groups" if router.num_groups > 1 else ""
        shared = f", shared {self.shared.intermediate:,}" if self.shared else ""
        shared += f", latent {self.latent.width:,}" if self.latent else ""
        shared += f", {self.zero_experts} zero experts" if self.zero_experts else ""
        experts = f"{router.top_k} of {self.num_experts} experts of {self.intermediate:,}"
        return f"MoE, {experts}, {router.scoring}{groups}{shared}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear."""
        return ("router_topk", "moe", "gated_activation")
