"""What tests found out about families, as properties of their results: `table.py` makes a README of them.

A property is `verified`: JSON with the model type, what was compared (`text`, `image`, `steps`, or a mesh such as
`tp2 ep2`), the largest error, relative to the largest value of the reference, where one was measured, and how the
checkpoint stores its weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.workbench.storage import storage_rows


class Verified(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison that passed."""

    model_type: str
    what: str
    error: float | None = None
    formats: tuple[str, ...] = ()


def formats_of(home: Path) -> tuple[str, ...]:
    """`F32`, `BF16`, `MXFP4`: of the weights of a checkpoint, as headers and configuration have them."""
    checkpoint = Checkpoint.open(str(home))
    levels = (checkpoint.config, checkpoint.config.get("text_config") or {})
    is_packed = any("quantization_config" in level for level in levels)
    ledger = account(checkpoint, *FAMILIES.describe(checkpoint.config)) if is_packed else None
    packed = {row["format"].partition(",")[0] for row in storage_rows(ledger)} if ledger is not None else set()
    plain = {info.dtype for info in checkpoint.tensors.values() if len(info.shape) > 1} & {"F32", "BF16", "F16"}
    return tuple(sorted(plain | packed))


def tell(request: pytest.FixtureRequest, home: Path, what: str, error: float | None = None) -> None:
    """Write a comparison that passed into the results of the test that runs."""
    config: dict[str, Any] = msgspec.json.decode((home / "config.json").read_bytes())
    found = Verified(model_type=str(config["model_type"]), what=what, error=error, formats=formats_of(home))
    request.node.user_properties.append(("verified", msgspec.json.encode(found).decode()))
