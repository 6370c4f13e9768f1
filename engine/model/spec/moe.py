"""Routed experts, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from firstlight.engine.model.spec.mlp import MLP
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import Param, Scope
from firstlight.engine.parallel.placement import Expert, Shard


class Router(msgspec.Struct, frozen=True, kw_only=True):
    """How experts are chosen and weighted for a token; see `kernels/router_topk` for the exact order of steps.

    `float32`: the router's logits are computed in float32 from the weight as stored.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scale: float = 1.0
    correction_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    softmax_after: bool = False
    float32: bool = False


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Experts work at a narrower `width`: one projection down before all of them, one up behind their weighted sum.

    `norm` stands between the sum and the projection up.
    """

    width: int
    norm: Norm | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        """Replicated: small beside the experts, and the norm needs the whole sum."""
        yield scope.param("down.weight", self.width, scope.hidden, role="mlp")
        if self.norm is not None:
            yield from self.norm.parameters(scope.into("norm"), self.width)
        yield scope.param("up.weight", scope.hidden, self.width, role="mlp")


class MoE(msgspec.Struct, frozen=True, kw_only=True, tag="moe"):
    """Routed experts (gated MLPs of `intermediate`), optionally with a shared expert that sees every token.

    The router and the shared expert see the layer's own width, the experts that of `latent` where there is one.
    """

    num_experts: int
    intermediate: int
    activation: str
    router: Router
    shared: MLP | None = None
    shared_gate: bool = False
    latent: Latent | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        yield scope.param("router.weight", self.num_experts, scope.hidden, role="router")
        if self.router.correction_bias:
            yield scope.param("router.correction_bias", self.num_experts, role="router", dtype="F32")
        width = scope.hidden if self.latent is None else self.latent.width
        if self.latent is not None:
            yield from self.latent.parameters(scope.into("latent"))
        columns = Shard(0, self.intermediate, unit_name="expert channels")
        rows = Shard(1, self.intermediate, unit_name="expert channels")
        for expert in range(self.num_experts):
            owner = Expert(expert, self.num_experts)
            for part in ("gate", "up"):
                yield scope.param(
                    f"experts.{expert}.{part}.weight",
                    self.intermediate,
                    width,
                    role="expert",
                    place=(owner, columns),
                    storage="experts.gate_up",
                    expert=expert,
                )
            yield scope.param(
                f"experts.{expert}.down.weight",
                width,
                self.intermediate,
                role="expert",
                place=(owner, rows),
                storage="experts.down",
                expert=expert,
            )
        if self.shared is not None:
            yield from self.shared.parameters(scope.into("shared"))
        if self.shared_gate:
            yield scope.param("shared_gate.weight", 1, scope.hidden, role="router")

    def words(self) -> str:
        """`MoE, 8 of 256 experts of 2,048, sigmoid, shared 2,048`."""
        router = self.router
        groups = f", {router.topk_groups} of {router.num_groups} groups" if router.num_groups > 1 else ""
        shared = f", shared {self.shared.intermediate:,}" if self.shared else ""
        shared += f", latent {self.latent.width:,}" if self.latent else ""
        experts = f"{router.top_k} of {self.num_experts} experts of {self.intermediate:,}"
        return f"MoE, {experts}, {router.scoring}{groups}{shared}"

    def operators(self) -> tuple[str, ...]:
        """Operators of kernels/ that a forward calls, beside linear."""
        return ("router_topk", "moe", "gated_activation")
