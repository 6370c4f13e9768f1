"""The implementations of the linear operator, the preferred ones first."""

from __future__ import annotations

from firstlight.kernels.registry_types import Implementation, Situation, Verdict


def anywhere(situation: Situation) -> Verdict:
    """The reference runs wherever torch does."""
    return True, ""


LINEAR: tuple[Implementation, ...] = (
    Implementation("linear", "reference", "firstlight.kernels.linear.reference", "prepare", anywhere),
)
