"""Accounts of tiny checkpoints after something was changed in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import Tagged, Tensor, read, write
from firstlight.engine.weights.ledger import Ledger, account
from tests.engine.weights.files import LLAMA

MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 4,
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 6,
}
Change = Callable[[dict[str, Tensor]], Any]


def settle(home: Path, change: Change | None = None, **config: Any) -> Ledger:
    """The account of a single-file checkpoint after a change to its tensors or its configuration."""
    if change is not None:
        tensors = read(home / "model.safetensors")
        change(tensors)
        write(home / "model.safetensors", tensors)
    if config:
        raw = json.loads((home / "config.json").read_text())
        (home / "config.json").write_text(json.dumps({**raw, **config}))
    checkpoint = Checkpoint.open(home)
    return account(checkpoint, *FAMILIES.describe(checkpoint.config))


def fatal(ledger: Ledger) -> list[Finding]:
    found = [finding for finding in ledger.findings if finding.severity == "fatal"]
    assert ledger.complete is not bool(found)
    for finding in found:
        assert finding.tensors
        assert finding.expected
        assert finding.found
        assert finding.next
    if found:
        with pytest.raises(Refused):
            ledger.refuse_if_incomplete()
    return found


def one(ledger: Ledger) -> Finding:
    (finding,) = fatal(ledger)
    return finding


def quantize(tensors: dict[str, Tensor]) -> None:
    for name in [name for name in tensors if "proj" in name]:
        shape = tensors[name].shape  # type: ignore[union-attr]
        tensors[name] = Tagged("F8_E4M3", np.zeros(shape, np.uint8))
        tensors[f"{name}_scale_inv"] = np.ones((1, 1), np.float32)
