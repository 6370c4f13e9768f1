"""What tests found out about families, as properties of their results: `table.py` makes a README of them.

A property is `verified`: JSON with the model type, what was compared (`text`, `image`, `steps`, or a mesh such as
`tp2 ep2`), and the largest error, relative to the largest value of the reference, where one was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison that passed."""

    model_type: str
    what: str
    error: float | None = None


def tell(request: pytest.FixtureRequest, home: Path, what: str, error: float | None = None) -> None:
    """Write a comparison that passed into the results of the test that runs."""
    config: dict[str, Any] = msgspec.json.decode((home / "config.json").read_bytes())
    found = Verified(model_type=str(config["model_type"]), what=what, error=error)
    request.node.user_properties.append(("verified", msgspec.json.encode(found).decode()))
