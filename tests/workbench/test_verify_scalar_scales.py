"""One scale for a whole matrix: a number without dims, as most writers store it, or in one or two dims of one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.unpacked import Unpacked
from firstlight.workbench.verify import verify
from tests.engine.weights.quantized import quantize

STATIC = {"quant_method": "fp8", "activation_scheme": "static"}


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=["no dims", "one", "two"])
def test_a_scale_a_matrix_is_read_in_any_dims(
    shape: tuple[int, ...], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """References unpack by codes times the number, and `verify` passes with it."""
    quantize(checkpoint("llama"), STATIC, tmp_path / "packed", tmp_path / "plain")
    (path,) = (tmp_path / "packed").glob("*.safetensors")
    stored = {name: tensor.reshape(shape) if "_scale" in name else tensor for name, tensor in load_file(path).items()}
    save_file(stored, path, metadata={"format": "pt"})
    weights = Unpacked(Checkpoint.open(tmp_path / "packed"))
    assert weights.packed
    for name in weights.packed:
        scale = stored[weights.recipe(name).tensors["scale"].name]
        assert scale.shape == shape
        torch.testing.assert_close(weights.read(name), stored[name].float() * scale.float().flatten(), rtol=0, atol=0)
    report = verify(EngineOptions(checkpoint=str(tmp_path / "packed"), threads=1), reference="transformers")
    assert report.status == "passed", [one.name for one in report.checks if one.status != "passed"]
