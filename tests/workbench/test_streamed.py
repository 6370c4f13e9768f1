"""The reference layer by layer gives what the whole reference gives, to the last bits of float32."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.workbench.golden import Golden
from firstlight.workbench.reference import Reference
from firstlight.workbench.streamed import StreamedReference, open_reference
from firstlight.workbench.verify import verify
from tests.checkpoints import edit_config

Get = Callable[[str], Path]
LAST_BITS = 2e-6  # of scale: models with experts were seen to differ from run to run by up to 1.5e-7 of scale


def same(found: NDArray[Any], expected: NDArray[Any], name: str = "") -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=LAST_BITS * np.abs(expected).max(), err_msg=name)


NAMES = ("llama-tied", "qwen2-window", "gemma2", "qwen3_moe", "mixtral", "deepseek_v3-yarn", "llava-clip", "llava-moe")
WITH_STATES = ("kimi_linear", "qwen3_next", "qwen3_5", "granitemoehybrid")


@pytest.mark.parametrize("name", NAMES + WITH_STATES)
def test_layer_by_layer_is_the_whole(name: str, checkpoint: Get, golden_file: Get) -> None:
    golden = Golden.read(golden_file(name))
    found = StreamedReference.open(checkpoint(name)).run(golden.inputs())
    assert set(found) == set(golden.outputs) - {"generated"}
    for key, value in found.items():
        real = golden.mask if value.shape[:2] == golden.mask.shape else ...
        same(value[real], golden.outputs[key][real], key)


def test_teacher_forcing_and_mixers_are_those_of_the_whole(checkpoint: Get, golden_file: Get) -> None:
    golden = Golden.read(golden_file("gemma2"))
    given = {name: value * np.float32(1.1) for name, value in golden.outputs.items() if name.startswith("hidden.")}
    whole, streamed = Reference.open(checkpoint("gemma2")), StreamedReference.open(checkpoint("gemma2"))
    expected, found = whole.forced(golden.inputs(), given), streamed.forced(golden.inputs(), given)
    for index in range(1, 4):
        ours, theirs = found[f"hidden.{index}"], expected[f"hidden.{index}"]
        same(ours[golden.mask], theirs[golden.mask])
    theirs = whole.mixer(1, golden.inputs(), given["hidden.1"])
    ours = streamed.mixer(1, golden.inputs(), given["hidden.1"])
    assert ours is not None
    assert theirs is not None
    same(ours[golden.mask], theirs[golden.mask])


def test_a_layer_with_a_gap_is_refused(checkpoint: Get, golden_file: Get, tmp_path: Path) -> None:
    home = tmp_path / "gap"
    shutil.copytree(checkpoint("llama-tied"), home)
    tensors = read(home / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write(home / "model.safetensors", tensors)
    with pytest.raises(Refused, match="random numbers"):
        StreamedReference.open(home).run(Golden.read(golden_file("llama-tied")).inputs())


def test_models_whose_layers_cannot_be_told_apart_are_refused(checkpoint: Get, tmp_path: Path) -> None:
    home = tmp_path / "other"
    shutil.copytree(checkpoint("llama-tied"), home)
    edit_config(home, model_type="olmo")
    with pytest.raises(Refused, match="layer by layer"):
        StreamedReference.open(home)


def test_what_fits_runs_whole(checkpoint: Get) -> None:
    opened = Checkpoint.open(checkpoint("llama"))
    assert isinstance(open_reference(opened), Reference)
    assert isinstance(open_reference(opened, streamed=True), StreamedReference)


def test_verify_against_a_streamed_reference(checkpoint: Get) -> None:
    report = verify(EngineOptions(checkpoint=str(checkpoint("llava-layers")), threads=1), streamed=True)
    assert report.passed
    assert any("layer by layer" in finding.message for finding in report.findings)
    assert report.tables["random layers"][1]["forced_floor"] > 0
