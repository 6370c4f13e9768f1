"""Options of quantization that ranks misread, and ones that are announced otherwise than stored: `verify` fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights import ledger
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.grid import Format
from firstlight.workbench.misannounced import misannounced
from firstlight.workbench.report import Report
from firstlight.workbench.verify import verify
from tests.checkpoints import edit_config
from tests.engine.weights.quantized import compressed, quantize

Get = Callable[[str], Path]
change = msgspec.structs.replace
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": False}
GPTQ_2 = {**GPTQ, "checkpoint_format": "gptq_v2"}
ROUND = {
    "quant_method": "auto-round",
    "bits": 4,
    "group_size": 16,
    "sym": False,
    "packing_format": "auto_round:gptqmodel",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 24, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [24, 28]}
INVERSE = {"quant_method": "fp8", "weight_scale_semantics": "inverse"}
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=24)
BLOCKS = compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[24, 28])


def check(home: Path) -> Report:
    return verify(EngineOptions(checkpoint=str(home), threads=1), reference="transformers")


def of_formats(wrong: Callable[[Any], Format]) -> Callable[..., Any]:
    """Ranks' reading of options, with a fault."""

    def misread(config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Any:
        scheme = announced(config, beside)
        return replace(scheme, groups=tuple(replace(one, format=wrong(one.format)) for one in scheme.groups))

    return misread


@pytest.mark.parametrize(
    ("quantization", "wrong"),
    [
        (GPTQ, lambda own: change(own, zero_offset=0)),
        (GPTQ_2, lambda own: change(own, zero_offset=1)),
        (ROUND, lambda own: change(own, zero_offset=1)),
        (AWQ, lambda own: change(own, group=28)),
        (FP8, lambda own: change(own, block=(28, 24))),
        (FP8, lambda own: change(own, inverse=True)),
        (INVERSE, lambda own: change(own, inverse=False)),
        (BLOCKS, lambda own: change(own, block=(28, 28))),
        (INT4, lambda own: change(own, group=28)),
    ],
    ids=["gptq as v2", "v2 as gptq", "auto-round", "awq group", "fp8 block", "fp8 inverse", "fp8 not inverse",
         "block rows", "int4 group"],
)  # fmt: skip
def test_an_option_that_ranks_misread(
    quantization: Mapping[str, Any],
    wrong: Callable[[Any], Format],
    checkpoint: Get,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes fit either reading: as many groups of 24 as of 28 in 32 and in 48 inputs."""
    quantize(checkpoint("llama"), quantization, tmp_path / "packed", tmp_path / "plain")
    assert check(tmp_path / "packed").status == "passed"
    monkeypatch.setattr(ledger, "announced", of_formats(wrong))
    report = check(tmp_path / "packed")
    assert report.status == "failed"
    assert "random teacher.1" in [one.name for one in report.checks if one.status == "failed"]


@pytest.mark.parametrize(
    ("bits", "stored", "said"), [(2, "gptq", "gptq_v2"), (4, "gptq", "gptq_v2"), (4, "gptq_v2", "gptq")]
)
def test_zero_points_that_are_announced_otherwise_than_stored(
    bits: int, stored: str, said: str, checkpoint: Get, tmp_path: Path
) -> None:
    """Both sides read it as it is said, and agree; the weights' means tell."""
    quantization = {**GPTQ, "bits": bits, "checkpoint_format": stored}
    quantize(checkpoint("llama"), quantization, tmp_path / "packed", tmp_path / "plain")
    assert misannounced(Checkpoint.open(tmp_path / "packed")) == ()
    edit_config(tmp_path / "packed", quantization_config={**quantization, "checkpoint_format": said})
    report = check(tmp_path / "packed")
    assert [one.name for one in report.checks if one.status == "failed"] == ["announced"]
    (finding,) = [one for one in report.findings if one.severity == "fatal"]
    assert finding.code == "conflicting-flag"
    assert f"they are those of {stored!r}" in finding.message


def test_scales_that_are_announced_the_wrong_way_round(checkpoint: Get, tmp_path: Path) -> None:
    """Codes that are said to be divided by what they must be multiplied by."""
    quantize(checkpoint("llama"), {"quant_method": "fp8"}, tmp_path / "packed", tmp_path / "plain")
    edit_config(tmp_path / "packed", quantization_config=INVERSE)
    report = check(tmp_path / "packed")
    assert "announced" in [one.name for one in report.checks if one.status == "failed"]
    assert any("the wrong way round" in one.message for one in report.findings)
