"""Weights that stay packed: what is kept, what it takes, and that products are those of what is unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.kept import SCALE, UNWANTED, kept_roles
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.workbench.load import load
from firstlight.workbench.verify import verify
from tests.checkpoints import inputs
from tests.engine.direct import Direct
from tests.engine.weights.quantized import compressed, quantize
from tests.workbench.test_verify_formats import made

Get = Callable[[str], Path]
EVERY, _ = kept_roles("always", "cpu")
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)
FORMS: Mapping[str, Mapping[str, Any]] = {
    "fp8": FP8,
    "int4": INT4,
    "int4-rows": compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "fp8-rows": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "mxfp8": compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3_moe", "int4"), ("qwen3_moe", "fp8"), ("qwen3_moe", "int8"), ("deepseek_v3", "fp8"), ("llama", "int4-rows"),
     ("llama", "fp8-rows"), ("llama", "mxfp8")],
)  # fmt: skip
def test_products_are_those_of_the_unpacked_weights(name: str, form: str, checkpoint: Get, tmp_path: Path) -> None:
    quantize(checkpoint(name), FORMS[form], tmp_path / "packed", tmp_path / "plain")
    given = inputs(name)
    kept, unpacked = Direct(tmp_path / "packed", keep=EVERY), Direct(tmp_path / "packed", keep=())
    packings = kept.weights.pieces.packings
    assert len(packings) >= (4 if name == "deepseek_v3" else 6), sorted(packings)
    assert not any("kv_b" in home or "router" in home for home in packings), "read by more than products"
    assert not unpacked.weights.pieces.packings
    assert kept.weights.nbytes == kept.weights.pieces.nbytes < unpacked.weights.nbytes
    np.testing.assert_allclose(kept.run(given)["logits"], unpacked.run(given)["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("form", "mesh"), [("fp8", Mesh(tp=2)), ("int4", Mesh(tp=2, ep=2)), ("int4", Mesh(ep=2))], ids=str
)
def test_verified_with_everything_packed(form: str, mesh: Mesh, checkpoint: Get, tmp_path: Path) -> None:
    home, golden = made("qwen3_moe", FORMS[form], checkpoint, tmp_path)
    report = verify(EngineOptions(checkpoint=str(home), mesh=mesh, threads=1, packed="always"), golden)
    assert report.status == "passed", [one for one in report.checks if one.status == "failed"]


def test_what_stays_packed_is_said_and_counted(checkpoint: Get, tmp_path: Path) -> None:
    form = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
    quantize(checkpoint("qwen3_moe"), form, tmp_path / "packed", tmp_path / "plain")
    found = {wish: load(tmp_path / "packed", packed=wish, limit=False) for wish in ("auto", "always", "never")}  # type: ignore[arg-type]
    for report in found.values():
        assert report.status == "passed"
        assert all(row["planned_bytes"] == row["resident_bytes"] for row in report.tables["memory"])
    sizes = {wish: report.metrics["largest_rank_bytes"].value for wish, report in found.items()}
    assert sizes["always"] < sizes["auto"] < sizes["never"]
    assert {row["role"] for row in found["auto"].tables["packed"]} == {"expert"}
    assert "attention" in {row["role"] for row in found["always"].tables["packed"]}
    assert found["never"].metrics["packed_bytes"].value == 0
    assert "as asked for" in found["never"].metrics["packed_bytes"].detail
    for row in found["always"].tables["packed"]:
        assert row["form"] == "int4, groups of 8"
        elements = row["unpacked_bytes"] // 4  # the toy runs in float32
        least = elements // 2 + elements // 8 * 2
        assert least <= row["resident_bytes"] < 1.25 * least, "a last word and a last group may be part empty"


@pytest.mark.parametrize(("tp", "is_kept"), [(1, True), (2, True), (4, False)])
def test_a_share_that_cuts_a_block_is_unpacked(tp: int, is_kept: bool, checkpoint: Get, tmp_path: Path) -> None:
    """48 columns of the way down, eight a word and a group: quarters of them are a group and a half."""
    form = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
    quantize(checkpoint("llama"), form, tmp_path / "packed", tmp_path / "plain")
    opened = Checkpoint.open(tmp_path / "packed")
    spec, matcher = FAMILIES.describe(opened.config)
    assert opened.config["intermediate_size"] == 48
    ledger = account(opened, spec, matcher)
    held = rank_pieces(spec, Mesh(tp=tp), 0, "F32", ledger, keep_packed=EVERY)
    name = "layers.0.ffn.down.weight"
    assert name in {storage.name for storage in held.storages}
    assert (name in held.packings) == is_kept
    assert any(storage.name == name + SCALE for storage in held.storages) == is_kept


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}, "several inputs"),
        ({"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True}, "several outputs"),
        (compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
         "scale of their own"),
        (compressed("pack-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), "zero point"),
        (compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False), "zero point"),
        ({"quant_method": "fp8"}, "one scale each"),
    ],
)  # fmt: skip
def test_what_cannot_stay_packed_is_said_by_name(
    form: Mapping[str, Any], words: str, checkpoint: Get, tmp_path: Path
) -> None:
    quantize(checkpoint("llama"), form, tmp_path / "packed", tmp_path / "plain")
    found = load(tmp_path / "packed", packed="always", limit=False)
    rows = found.tables["unpacked"]
    assert {row["role"] for row in rows if words in row["why"]} == {"attention", "mlp"}, rows
    sizes = {row["role"]: row["resident_bytes"] for row in found.tables["memory"]}
    if not found.tables["packed"]:
        for role in ("attention", "mlp"):
            own = sum(row["resident_bytes"] for row in rows if row["role"] == role)
            assert 0.9 * sizes[role] < own <= sizes[role], "all of it but norms and biases"


def test_what_is_not_kept_by_choice_or_beside_another_is_said(checkpoint: Get, tmp_path: Path) -> None:
    quantize(checkpoint("deepseek_v3"), FP8, tmp_path / "packed", tmp_path / "plain")
    auto = {row["why"] for row in load(tmp_path / "packed", limit=False).tables["unpacked"]}
    always = {row["why"] for row in load(tmp_path / "packed", packed="always", limit=False).tables["unpacked"]}
    assert UNWANTED in auto
    assert UNWANTED not in always
    assert "more than a product reads it" in always


def test_ordered_and_shifted_codes_are_unpacked(checkpoint: Get, tmp_path: Path) -> None:
    """Inputs in any order, or zero points: no operator multiplies by those, and the load is as it was."""
    form = compressed(
        "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False, actorder="group"
    )
    quantize(checkpoint("llama"), form, tmp_path / "packed", tmp_path / "plain")
    assert not Direct(tmp_path / "packed", keep=EVERY).weights.pieces.packings


def test_bfloat16_rounds_numbers_once_as_unpacking_does(checkpoint: Get, tmp_path: Path) -> None:
    from firstlight.kernels.packed.codes import unpack
    from firstlight.kernels.packed.matrix import PackedMatrix

    quantize(checkpoint("llama"), FP8, tmp_path / "packed", tmp_path / "plain")
    kept, unpacked = Direct(tmp_path / "packed", keep=EVERY), Direct(tmp_path / "packed", keep=())
    for home, packing in kept.weights.pieces.packings.items():
        codes, scales = kept.weights.storages[home], kept.weights.storages[home + SCALE]
        numbers = unpack(PackedMatrix(codes, scales, packing.code, packing.block, packing.columns))
        assert torch.equal(numbers, unpacked.weights.storages[home]), home
