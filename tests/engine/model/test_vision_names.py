"""The same checkpoint under the names of older releases and of the modules in memory loads without a gap."""

import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from tests import vision_checkpoints as vision

COMPOSITE = (  # language_model.model.X -> model.language_model.X, and everything else below model.
    (r"^language_model\.model\.", "model.language_model."),
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^(vision_tower|vision_model|multi_modal_projector|mm_projector|image_newline)", r"model.\1"),
)
QWEN = ((r"^visual\.", "model.visual."), (r"^model\.(layers|embed_tokens|norm)", r"model.language_model.\1"))
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    **dict.fromkeys(("gemma3", "internvl", "llama4", "llava-pixtral", "llava_next", "mistral3"), COMPOSITE),
}
RELEASED: dict[str, tuple[tuple[str, str], ...]] = {
    "gemma3": ((r"^vision_tower\.", "vision_tower.vision_model."),),
    "llava_next": ((r"^vision_tower\.", "vision_tower.vision_model."),),
    "kimi_k25": (
        (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
        (r"^model\.mm_projector\.", "mm_projector."),
    ),
}
CASES = [*((name, "memory") for name in RENAMED), *((name, "release") for name in RELEASED)]


@pytest.mark.parametrize(("name", "names"), CASES)
def test_other_names_of_the_same_tensors(tmp_path: Path, name: str, names: str) -> None:
    home = vision.build(name, tmp_path)
    changes, count = (RENAMED if names == "memory" else RELEASED)[name], 0
    other = tmp_path / "other"
    shutil.copytree(home, other)
    (other / "model.safetensors").unlink()
    renamed = {}
    for old, tensor in load_file(home / "model.safetensors").items():
        new = next((re.sub(*change, old) for change in changes if re.match(change[0], old)), old)
        renamed[new] = tensor
        count += new != old
    assert count > 5
    save_file(renamed, other / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(other)
    spec, matcher = FAMILIES.describe(checkpoint.config)
    account(checkpoint, spec, matcher).refuse_if_incomplete()


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_flat_configuration_is_the_same_model(name: str) -> None:
    """Releases of Qwen2-VL and Qwen2.5-VL have the keys of their text at the top level."""
    nested = vision.MODELS[name]
    flat = {key: value for key, value in nested.items() if key != "text_config"}
    flat |= {key: value for key, value in nested["text_config"].items() if key != "model_type"}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": flat["rope_parameters"]["mrope_section"]}
    flat["rope_theta"] = flat.pop("rope_parameters")["rope_theta"]
    flat["vision_config"] = {
        {"in_channels": "in_chans", "patch_size": "spatial_patch_size"}.get(key, key): value
        for key, value in flat["vision_config"].items()
        if key != "model_type"
    }
    expected, _ = FAMILIES.describe(nested)
    found, _ = FAMILIES.describe(flat)
    assert found.layers == expected.layers
    assert found.vision == expected.vision
    assert (found.hidden, found.vocab_size) == (expected.hidden, expected.vocab_size)
    assert found.tied_head == expected.tied_head
