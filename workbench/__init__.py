"""The face: bring-up sessions, rungs, reports, telemetry, runs and the command line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from firstlight.workbench.bringup import Bringup
    from firstlight.workbench.notebook import NotebookBringup
    from firstlight.workbench.report import Report
    from firstlight.workbench.runs import Run

__all__ = ["Bringup", "NotebookBringup", "Report", "Run"]

_HOMES = {"Bringup": "bringup", "NotebookBringup": "notebook", "Report": "report", "Run": "runs"}


def __getattr__(name: str) -> Any:
    """Names come when they are asked for: the command line must not wait for notebooks or torch."""
    if name in _HOMES:
        return getattr(import_module(f"firstlight.workbench.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
