"""Checkpoints made by running rules backwards: complete for every family, and of a release's real size as outlines."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.parallel.plan import totals
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.synthesize import outline, outlines_of, synthesize
from tests.checkpoints import TINY
from tests.engine.weights.files import LLAMA


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_every_family_is_complete(name: str, fused: bool, tmp_path: Path) -> None:
    """Names that the rules lead to lead back to the rules: no finding but a tied head, every parameter once."""
    config = TINY[name].config
    spec, matcher = FAMILIES.describe(config)
    payload = outline(config, tmp_path, dtype="F32", shards=2, fused=fused)
    checkpoint = Checkpoint.open(tmp_path)
    assert {finding.code for finding in checkpoint.findings} <= {"unwritten-bytes"}, "an outline has no weights"
    assert checkpoint.payload_bytes == payload == totals(spec, Plain("F32")).checkpoint_bytes
    ledger = account(checkpoint, spec, matcher)
    assert {finding.code for finding in ledger.findings} <= {"tied-head"}
    assert ledger.complete
    rules = [item.rule for item in outlines_of(spec, matcher.rules, fused=fused)]
    together = [one for one in rules if one.stacked or sum(".experts." in name for name in one.params) > 1]
    experts = any(param.expert is not None for param in spec.parameters())
    assert together or not (fused and experts)
    assert experts or not together


def test_values_are_reproducible_and_all_different(tmp_path: Path) -> None:
    config = TINY["qwen3_moe"].config
    one, other = (synthesize(config, tmp_path / name) for name in "ab")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])
    matrices = [value for value in one.values() if value.ndim == 2]
    assert len({value.tobytes() for value in matrices}) == len(matrices)
    assert synthesize(config, tmp_path / "c", seed=1)["embed.weight"].tobytes() != one["embed.weight"].tobytes()


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    values = synthesize(LLAMA, tmp_path, shards=3)
    found = {}
    for path in sorted(tmp_path.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert len(found) == len(values) == 21
    np.testing.assert_array_equal(found["model.layers.1.mlp.down_proj.weight"], values["layers.1.ffn.down.weight"])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no family supports"):
        synthesize({**LLAMA, "model_type": "new"}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def release(name: str) -> dict[str, Any]:
    raw = json.loads(resources.files("firstlight.data").joinpath("models", f"{name}.json").read_bytes())
    return {key: value for key, value in raw.items() if key != "quantization_config" and not key.startswith("_")}


def test_a_release_of_its_real_size_is_opened_accounted_and_cut_from_headers_alone(tmp_path: Path) -> None:
    """DeepSeek-V3 in bf16: 1.34 TB in 163 sparse files that take a few MB; everything but reading, in seconds."""
    config = release("deepseek-v3")
    payload = outline(config, tmp_path, shards=163)
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert payload > 1.3e12
    assert used < 30 << 20
    checkpoint = Checkpoint.open(tmp_path)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    ledger = account(checkpoint, spec, matcher)
    held = rank_pieces(spec, Mesh(tp=8, ep=8), 17, "BF16", ledger)
    assert ledger.complete
    assert checkpoint.payload_bytes == payload
    assert len(checkpoint.tensors) == 3 * 12 + 58 * (9 + 2 + 3 + 256 * 3) + 3
    assert len({piece.tensor for piece in held.pieces}) == len(held.pieces)
    assert held.nbytes < payload / 8
