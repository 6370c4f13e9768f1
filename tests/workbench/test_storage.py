"""Scan says in which storage formats the weights are: by pattern, counted, in bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.scan import scan
from tests.engine.weights.quantized import CONFIGS
from tests.engine.weights.test_formats_load import change, written

LABELS = {
    "fp8-blocks": "FP8, a scale per 16 x 16",
    "packed-ordered": "packed INT4, groups of 8, zero points, activation order",
    "mxfp4": "MXFP4, groups of 32",
    "gptq": "GPTQ INT4, groups of 16, g_idx",
}


@pytest.mark.parametrize("name", LABELS)
def test_formats_are_listed_by_pattern(name: str, tmp_path: Path) -> None:
    written("qwen3_moe", CONFIGS[name], tmp_path)
    report = scan(tmp_path)
    assert report.status == "passed", report.findings
    rows = report.tables["storage"]
    assert {row["format"] for row in rows} == {LABELS[name]}
    experts = next(row for row in rows if "experts" in row["weights"] and "up_proj" in row["weights"])
    assert experts["weights"] == "model.layers.0.mlp.experts.{0..3}.up_proj.weight"
    assert (experts["count"], experts["elements"]) == (4, 4 * 32 * 64)
    checkpoint = Checkpoint.open(tmp_path)
    stems = tuple(row["weights"].rpartition(".")[0].rpartition(".")[2] for row in rows)
    of_linear = [tensor for tensor in checkpoint.tensors.values() if tensor.name.split(".")[-2] in stems]
    assert sum(row["total_bytes"] for row in rows) == sum(tensor.nbytes for tensor in of_linear)
    assert sum(row["tensors"] for row in rows) == len(of_linear)


def test_a_scan_of_a_broken_one_fails_and_names_the_scale(tmp_path: Path) -> None:
    written("llama", CONFIGS["fp8-blocks"], tmp_path)
    change(tmp_path, lambda held: held.pop("model.layers.0.mlp.up_proj.weight_scale_inv"))
    report = scan(tmp_path)
    assert report.status == "failed"
    assert "unpaired-scale" in {finding.code for finding in report.findings}
