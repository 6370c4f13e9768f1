"""More rows of a vocabulary stored than there are tokens: the same logits, as wide, here and in the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.workbench.reference import Reference
from firstlight.workbench.verify import verify
from tests.checkpoints import build, inputs, write_golden
from tests.families.tiny import VOCAB


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and a copy whose embedding and head have seven rows more that would win wherever they took part."""
    home = build("llama-biases", tmp_path_factory.mktemp("vocabulary"))
    padded = home.parent / "padded"
    padded.mkdir()
    tensors = read(home / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.pad(tensors[name], ((0, 7), (0, 0)), constant_values=50)  # type: ignore[arg-type]
    write(padded / "model.safetensors", tensors, {"format": "pt"})
    (padded / "config.json").write_text((home / "config.json").read_text())
    return home, padded


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(tp=2)])
def test_the_golden_file_of_the_unpadded_one_passes(mesh: Mesh, homes: tuple[Path, Path]) -> None:
    home, padded = homes
    options = EngineOptions(checkpoint=str(padded), mesh=mesh, threads=1)
    report = verify(options, write_golden("llama-biases", home))
    assert report.status == "passed"
    assert "padded-tensor" in {finding.code for finding in report.findings}


def test_the_reference_reads_it_too(homes: tuple[Path, Path]) -> None:
    home, padded = homes
    given = inputs("llama-biases", batch=1)
    one, other = (Reference.open(path).run(given)["logits"] for path in (home, padded))
    assert other.shape[-1] == VOCAB
    np.testing.assert_array_equal(one, other)
