"""From a checkpoint to a running, sharded model: usable without notebooks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.engine.errors import FirstlightError, RankFailure, Refused
    from firstlight.engine.findings import Finding
    from firstlight.engine.model.families.registry import FAMILIES, register_family
    from firstlight.engine.model.spec import ModelSpec
    from firstlight.engine.parallel.mesh import Mesh
    from firstlight.engine.parallel.plan import make_plan
    from firstlight.engine.serving.client import EngineClient
    from firstlight.engine.serving.host import Host
    from firstlight.engine.serving.request import SamplingParams
    from firstlight.engine.serving.runtime import Engine
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.engine.weights.ledger import account

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "Engine",
    "EngineClient",
    "Finding",
    "FirstlightError",
    "Host",
    "Mesh",
    "ModelSpec",
    "RankFailure",
    "Refused",
    "SamplingParams",
    "account",
    "make_plan",
    "register_family",
]

_HOMES = {
    "FAMILIES": "model.families.registry",
    "Checkpoint": "weights.checkpoint",
    "Engine": "serving.runtime",
    "EngineClient": "serving.client",
    "Finding": "findings",
    "FirstlightError": "errors",
    "Host": "serving.host",
    "Mesh": "parallel.mesh",
    "ModelSpec": "model.spec",
    "RankFailure": "errors",
    "Refused": "errors",
    "SamplingParams": "serving.request",
    "account": "weights.ledger",
    "make_plan": "parallel.plan",
    "register_family": "model.families.registry",
}


def __getattr__(name: str) -> Any:
    """Names come when they are asked for: scanning and planning must not wait for torch."""
    if name in _HOMES:
        return getattr(import_module(f"firstlight.engine.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
