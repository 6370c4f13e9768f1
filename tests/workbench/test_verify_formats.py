"""A model in a storage format verifies against transformers run on what its tensors stand for, under any mesh."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.engine.weights.formats.announced import every_format
from firstlight.workbench.golden import Golden
from firstlight.workbench.reference import Reference
from firstlight.workbench.streamed import StreamedReference
from firstlight.workbench.verify import verify
from tests.checkpoints import TINY, inputs, quiet, randomize
from tests.checkpoints import _model as model_of
from tests.engine.weights.quantized import compressed, quantize

Get = Callable[[str], Path]
FP8: Mapping[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4 = compressed(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=4, symmetric=False, actorder="group"
)
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
AWQ: Mapping[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}


def gpt_oss(home: Path) -> Path:
    """Experts as wide as a group of 32."""
    model = model_of({**TINY["gpt_oss"].config, "intermediate_size": 32})
    torch.manual_seed(6)
    randomize(model)
    with quiet():
        model.save_pretrained(home)
    return home


def made(name: str, quantization: Mapping[str, Any], checkpoint: Get, home: Path) -> tuple[Path, Path]:
    """A quantized copy of a tiny model, and the golden file of its plain counterpart."""
    source = gpt_oss(home / "whole") if name == "gpt_oss" else checkpoint(name)
    quantize(source, quantization, home / "packed", home / "plain")
    given = inputs(name)
    golden = Golden.of({**given, **Reference.open(home / "plain").run(given)}, name)
    golden.write(home / "golden.safetensors")
    return home / "packed", home / "golden.safetensors"


@pytest.mark.parametrize(
    ("name", "quantization", "mesh"),
    [
        ("llama", AWQ, Mesh(tp=2)),
        ("llama", NVFP4, Mesh()),
        ("qwen3_moe", INT4, Mesh(tp=2, ep=2)),
        ("deepseek_v3", FP8, Mesh(tp=2)),
        ("gpt_oss", {"quant_method": "mxfp4"}, Mesh(ep=2)),
    ],
    ids=["awq-tp2", "nvfp4", "int4-tp2-ep2", "fp8-tp2", "mxfp4-ep2"],
)
def test_verified_against_its_own_unpacked_reference(
    name: str, quantization: Mapping[str, Any], mesh: Mesh, checkpoint: Get, tmp_path: Path
) -> None:
    """Shards end inside blocks of 128, and inside groups in any order."""
    home, golden = made(name, quantization, checkpoint, tmp_path)
    report = verify(EngineOptions(checkpoint=str(home), mesh=mesh, threads=1), golden)
    assert report.status == "passed", [one for one in report.checks if one.status == "failed"]


def test_from_the_command_line_and_a_wrong_scale_fails(checkpoint: Get, tmp_path: Path) -> None:
    home, golden = made("llama", FP8, checkpoint, tmp_path)

    def run() -> tuple[int, dict[str, Any]]:
        words = ["verify", str(home), "--golden", str(golden), "--json", "-", "-q", "--tp", "2"]
        done = subprocess.run(
            [sys.executable, "-m", "firstlight.workbench", *words], capture_output=True, text=True, check=False
        )
        return done.returncode, json.loads(done.stdout)

    status, report = run()
    assert (status, report["status"]) == (0, "passed")
    held = read(home / "model.safetensors")
    scale = held["model.layers.1.mlp.up_proj.weight_scale_inv"]
    held["model.layers.1.mlp.up_proj.weight_scale_inv"] = scale * np.float32(1.05)  # type: ignore[operator]
    write(home / "model.safetensors", held, {"format": "pt"})
    status, report = run()
    assert (status, report["status"]) == (1, "failed")


@pytest.mark.parametrize(("name", "quantization"), [("qwen3_moe", INT4), ("llama", FP8)], ids=["int4", "fp8"])
def test_the_reference_of_a_quantized_checkpoint_is_that_of_its_plain_counterpart(
    name: str, quantization: Mapping[str, Any], checkpoint: Get, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole and layer by layer: transformers gets the numbers that codes and scales stand for, to the last bit.

    Not by what ranks unpack with: of a fault in that a reference must know nothing.
    """
    for kind in every_format():
        monkeypatch.setattr(kind, "unpack", None)
    quantize(checkpoint(name), quantization, tmp_path / "packed", tmp_path / "plain")
    given = inputs(name)
    expected = Reference.open(tmp_path / "plain").run(given)
    for reference in (Reference, StreamedReference):
        found = reference.open(tmp_path / "packed").run(given)
        np.testing.assert_allclose(found["logits"], expected["logits"], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(found["hidden.0"], expected["hidden.0"])
