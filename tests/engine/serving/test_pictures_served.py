"""A picture and a question through processor, scheduler and model give the tokens that transformers gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.inputs.prepare import Processor
from firstlight.engine.serving.request import SamplingParams
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.weights.files.safetensors_file import Tagged
from firstlight.workbench.reference import Reference
from tests import vision_checkpoints as vision
from tests.checkpoints import quiet, randomize
from tests.engine.inputs.test_image_processor import picture
from tests.engine.inputs.test_processors import CASES, FEATURES, Case

PINPOINTS = vision.LLAVA_NEXT["image_grid_pinpoints"]
# The image processor and the processor's keys that go with the tiny model of a name; tokens are those of the case.
FITTING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ({"size": {"shortest_edge": 64, "longest_edge": 1024}}, {}),
    "glm4v": ({"size": {"shortest_edge": 128, "longest_edge": 2048}}, {}),
    "gemma3": ({}, {}),
    "idefics3": ({"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}, {"image_seq_len": 4}),
    "internvl": ({"size": {"height": 16, "width": 16}, "crop_to_patches": True}, {}),
    "llama4": ({"size": {"height": 16, "width": 16}}, {"patch_size": 4}),
    "llava_next": (
        {"size": {"shortest_edge": 12}, "crop_size": 12, "image_grid_pinpoints": PINPOINTS},
        {"num_additional_image_tokens": 1},
    ),
    "kimi_k25": ({}, {}),
}


def build(name: str, directory: Path) -> Path:
    """The tiny model of a name with the tokens and processor of the case of the same name."""
    case, (image, keys) = CASES[name], FITTING[name]
    image, keys = {**case.image, **image}, {**case.keys, **keys}
    home = Case(case.class_name, image, case.token, case.tokens[1:], case.named, **keys).save(directory / name)
    template = home / "chat_template.jinja"  # transformers takes pictures of grids that touch for one
    template.write_text(template.read_text().replace(case.token, f"{case.token}."))
    tokenizer = Processor.open(home).tokenizer
    config = json.loads(json.dumps(vision.MODELS[name]))
    key = "image_token_index" if "image_token_index" in config else "image_token_id"
    config[key] = tokenizer.token_id(FEATURES.get(name, case.token))
    config["text_config"] |= {"vocab_size": 512, "max_position_embeddings": 512}
    with quiet():
        from transformers import AutoConfig, AutoModelForImageTextToText

        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config), dtype=torch.float32).eval()
        torch.manual_seed(3)
        randomize(model)
        model.save_pretrained(home)
    return home


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FITTING)
def test_answers_about_pictures_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """One picture, and two of other sizes, wide and tall; the second question is asked while the first is answered."""
    home = build(name, tmp_path)
    asked = [[picture(31, 33)], [picture(90, 24), picture(20, 70)]]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True, temperature=0.0)
    engine = Engine.start(str(home), device="cpu", dtype="F32", max_context=400, max_batch=2)
    try:
        streams = [engine.generate("What are these?", pictures, params) for pictures in asked]
        ours = [[token for delta in stream for token in delta.tokens] for stream in streams]
    finally:
        engine.close()
    processor, reference = Processor.open(home), Reference.open(home)
    for pictures, found in zip(asked, ours, strict=True):
        arrays = processor.prepare("What are these?", pictures, chat=True).arrays()
        given = {key: value.float32() if isinstance(value, Tagged) else value for key, value in arrays.items()}
        theirs = reference.run(given, generate=6)["generated"][0]
        np.testing.assert_array_equal(found, theirs)
