"""Pixel tensors equal transformers' own, bit for bit, for many sizes, classes and settings; constants are traced."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor

from firstlight.engine.errors import Refused
from firstlight.engine.inputs import image_steps
from firstlight.engine.inputs.image_constants import read_constants
from firstlight.engine.inputs.image_kinds import kind as module
from firstlight.engine.inputs.image_kinds.registry import CLASS_OF_MODEL_TYPE, IMAGE_KINDS
from firstlight.engine.inputs.image_processor import ImageProcessor
from firstlight.engine.inputs.pictures import Picture
from tests.engine.inputs.toys import IMAGE_PROCESSOR, picture_of, write_json

SIZES = [
    (1, 1),
    (1, 2),
    (2, 500),
    (500, 2),
    (31, 33),
    (32, 32),
    (33, 31),
    (63, 100),
    (100, 63),
    (7, 224),
    (640, 480),
    (481, 17),
]
CLIP = {
    **IMAGE_PROCESSOR,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
SIGLIP = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 40, "width": 24},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.25, 0.5],
}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "clip": CLIP,
    "clip fast": {**CLIP, "image_processor_type": "CLIPImageProcessorFast"},
    "clip, feature extractor": {**CLIP, "image_processor_type": None, "feature_extractor_type": "CLIPFeatureExtractor"},
    "numbers for sizes": {**CLIP, "size": 30, "crop_size": 36},
    "crop larger than the picture": {**CLIP, "size": {"shortest_edge": 21}, "crop_size": {"height": 28, "width": 47}},
    "odd crop": {**CLIP, "size": {"shortest_edge": 33}, "crop_size": {"height": 20, "width": 31}},
    "crop without resizing": {**CLIP, "do_resize": False, "crop_size": {"height": 64, "width": 33}},
    "longest edge": {**CLIP, "size": {"shortest_edge": 32, "longest_edge": 40}},
    "largest height and width": {**CLIP, "size": {"max_height": 40, "max_width": 60}},
    "no normalizing": {**CLIP, "do_normalize": False},
    "no rescaling": {**CLIP, "do_rescale": False},
    "neither": {**CLIP, "do_rescale": False, "do_normalize": False},
    "another factor": {**CLIP, "rescale_factor": 0.00784313725},
    "one mean for all": {**CLIP, "image_mean": 0.5, "image_std": 0.25},
    "nearest": {**CLIP, "resample": 0},
    "lanczos": {**CLIP, "resample": 1},
    "box": {**CLIP, "resample": 4},
    "hamming": {**CLIP, "resample": 5},
    "padded at the end": {**CLIP, "do_pad": True, "pad_size": {"height": 50, "width": 41}},
    "siglip": SIGLIP,
    "siglip, number": {**SIGLIP, "size": 24},
    "siglip, list": {**SIGLIP, "size": [24, 30]},
    "llava": {**CLIP, "image_processor_type": "LlavaImageProcessor"},
    "llava, square": {**CLIP, "image_processor_type": "LlavaImageProcessorFast", "do_pad": True},
    "llava, square, no frame": {
        **CLIP,
        "image_processor_type": "LlavaImageProcessor",
        "do_pad": True,
        "pad_size": {"height": 50, "width": 41},
    },
    "vit": {**SIGLIP, "image_processor_type": "ViTImageProcessor"},
    "vit, number": {**SIGLIP, "image_processor_type": "ViTImageProcessorFast", "size": 24},
    "blip": {**SIGLIP, "image_processor_type": "BlipImageProcessor"},
}


def picture(width: int, height: int, seed: int = 0) -> Picture:
    """Noise over a gradient: every filter and every row shows."""
    rng = np.random.default_rng(seed + width * 1000 + height)
    ramp = np.linspace(0, 200, width)[None, :, None] + np.linspace(0, 55, height)[:, None, None]
    values = (ramp + rng.integers(0, 56, (height, width, 3))) % 256
    return picture_of(Image.fromarray(values.astype(np.uint8)))


def save(directory: Path, config: Mapping[str, Any]) -> Path:
    write_json(directory / "preprocessor_config.json", {k: v for k, v in config.items() if v is not None})
    write_json(directory / "config.json", {"model_type": "llava"})
    return directory


def theirs_of(directory: Path, pictures: list[Picture]) -> Any:
    processor = AutoImageProcessor.from_pretrained(directory)
    assert processor.backend == "pil"
    return np.asarray(processor([p.image for p in pictures], return_tensors="np")["pixel_values"])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_equal_transformers(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, VARIANTS[name])
    processor = ImageProcessor.open(directory)
    compared = 0
    for width, height in SIZES:
        one = [picture(width, height)]
        try:
            ours = processor.process(one)["pixel_values"]
        except Refused:  # no pixels are left: transformers fails as well
            with pytest.raises((ValueError, ZeroDivisionError)):
                theirs_of(directory, one)
            continue
        theirs = theirs_of(directory, one)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        np.testing.assert_array_equal(ours, theirs, err_msg=f"{width} x {height}")
        compared += 1
    assert compared >= 9


@pytest.mark.filterwarnings("ignore")
def test_several_pictures_come_in_one_tensor(tmp_path: Path) -> None:
    directory = save(tmp_path, CLIP)
    pictures = [picture(w, h, seed=7) for w, h in ((30, 90), (64, 64), (5, 3))]
    ours = ImageProcessor.open(directory).process(pictures)["pixel_values"]
    assert ours.shape == (3, 3, 32, 32)
    np.testing.assert_array_equal(ours, theirs_of(directory, pictures))


@settings(max_examples=80)
@given(
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    short=st.integers(1, 400),
    longest=st.none() | st.integers(1, 800),
)
def test_sizes_equal_transformers(height: int, width: int, short: int, longest: int | None) -> None:
    from transformers.image_transforms import get_resize_output_image_size, get_size_with_aspect_ratio

    size = {"shortest_edge": short} | ({"longest_edge": longest} if longest else {})
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    theirs = (
        get_size_with_aspect_ratio((height, width), short, longest)
        if longest
        else get_resize_output_image_size(image, short, default_to_square=False, input_data_format="channels_first")
    )
    assert image_steps.resized_shape(height, width, size) == tuple(theirs)


def test_every_constant_is_traced_to_its_file(tmp_path: Path) -> None:
    """The nested configuration of processor_config.json comes before a file of its own; nothing is made up."""
    save(tmp_path, SIGLIP)
    constants = read_constants(tmp_path)
    assert {c.name: c.source for c in constants.constants}["image_mean"] == "preprocessor_config.json: image_mean"
    write_json(tmp_path / "processor_config.json", {"image_processor": IMAGE_PROCESSOR})
    constants = read_constants(tmp_path)
    assert constants["image_mean"] == (0.5, 0.5, 0.5)
    assert all(
        c.source == f"processor_config.json: image_processor.{c.name}"
        for c in constants.constants
        if c.name in IMAGE_PROCESSOR
    )
    assert {finding.code for finding in constants.findings} == {"conflicting-flag"}  # of what the other file says


def test_half_and_half_is_not_clip(tmp_path: Path) -> None:
    """What the file says reaches the tensor: black is -1 and white is 1, whatever CLIP would make of them."""
    save(tmp_path, IMAGE_PROCESSOR)
    for level, value in ((0, -1.0), (255, 1.0)):
        plain = picture_of(Image.new("RGB", (40, 40), (level,) * 3))
        pixels = ImageProcessor.open(tmp_path).process([plain])["pixel_values"]
        np.testing.assert_allclose(pixels, np.float32(value), atol=1e-6)


@pytest.mark.parametrize("key", ["image_mean", "image_std", "size", "crop_size", "resample", "rescale_factor"])
@pytest.mark.filterwarnings("ignore")
def test_a_key_the_file_leaves_out_comes_from_the_class_and_is_said(tmp_path: Path, key: str) -> None:
    directory = save(tmp_path, {**CLIP, key: None})
    constants = read_constants(directory)
    assert [(f.code, f.expected, f.severity) for f in constants.findings] == [("class-default", key, "warning")]
    assert f"default of {constants.class_name}" in {c.name: c.source for c in constants.constants}[key]
    one = [picture(300, 250)]
    np.testing.assert_array_equal(ImageProcessor(constants).process(one)["pixel_values"], theirs_of(directory, one))


def test_an_absent_file_is_refused(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("vlm")
    config = json.loads((directory / "processor_config.json").read_text())
    del config["image_processor"]
    write_json(directory / "processor_config.json", config)
    with pytest.raises(Refused) as caught:
        ImageProcessor.open(directory)
    finding = caught.value.findings[0]
    assert (finding.code, finding.file) == ("missing-side-file", str(directory / "preprocessor_config.json"))


@pytest.mark.parametrize("name", ["Siglip2ImageProcessor", "MyImageProcessor", None])
def test_an_unknown_class_is_refused(tmp_path: Path, name: str | None) -> None:
    save(tmp_path, {**CLIP, "image_processor_type": name})
    write_json(tmp_path / "config.json", {"model_type": "unheard_of"})
    with pytest.raises(Refused) as caught:
        ImageProcessor.open(tmp_path)
    finding = caught.value.findings[0]
    assert (finding.code, finding.found) == ("unsupported-block", str(name))
    assert finding.file == str(tmp_path / "preprocessor_config.json")


BAD = [
    ("image_mean", [0.5, 0.5]),
    ("image_mean", "0.5"),
    ("image_std", [0.5, 0, 0.5]),
    ("size", {"longest_edge": 32}),
    ("size", {"shortest_edge": 0}),
    ("size", "large"),
    ("crop_size", {"shortest_edge": 3}),
    ("resample", 9),
    ("resample", "bicubic"),
    ("rescale_factor", "1/255"),
    ("rescale_factor", 10**400),
    ("rescale_factor", 0),
    ("do_resize", "false"),
    ("crop_size", {"height": 1 << 20, "width": 1 << 20}),
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_values_no_step_can_use_are_refused(tmp_path: Path, key: str, value: Any) -> None:
    save(tmp_path, {**CLIP, key: value})
    with pytest.raises(Refused) as caught:
        read_constants(tmp_path)
    assert caught.value.findings[0].code == "side-file-invalid"
    assert key in caught.value.findings[0].message


def test_a_very_long_picture_is_refused_before_it_is_made(tmp_path: Path) -> None:
    directory = save(tmp_path, {**CLIP, "size": {"shortest_edge": 224}})
    with pytest.raises(Refused) as caught:
        ImageProcessor.open(directory).process([picture(1, 10_000)])
    finding = caught.value.findings[0]
    assert finding.code == "bad-image"
    assert "1 x 10000" in finding.message
    assert str(module.MAX_STEP_PIXELS) in (finding.expected or "")
    assert finding.found == f"{224 * 2_240_000} pixels"


def test_a_picture_that_would_have_no_pixels_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path, {**CLIP, "size": {"shortest_edge": 32, "longest_edge": 40}})
    with pytest.raises(Refused) as caught:
        ImageProcessor.open(directory).process([picture(1, 2000)])
    assert caught.value.findings[0].found == "0 pixels"


def test_pictures_that_come_to_several_sizes_are_refused(tmp_path: Path) -> None:
    directory = save(tmp_path, {**CLIP, "do_center_crop": False})
    with pytest.raises(Refused, match="one size"):
        ImageProcessor.open(directory).process([picture(40, 40), picture(80, 40)])


def test_a_frame_too_small_for_a_picture_is_refused(tmp_path: Path) -> None:
    directory = save(tmp_path, {**CLIP, "do_pad": True, "pad_size": {"height": 50, "width": 31}})
    with pytest.raises(Refused, match="larger than the frame"):
        ImageProcessor.open(directory).process([picture(40, 40)])


def test_the_class_defaults_are_those_of_transformers() -> None:
    """Every key that a class reads, and of the usual keys those that its steps use."""
    for class_name, kind in IMAGE_KINDS.items():
        if not hasattr(transformers, f"{class_name}Pil"):
            continue
        theirs = getattr(transformers, f"{class_name}Pil")()
        for key in kind.keys:
            value = getattr(theirs, key, None)
            value = dict(value) if "size" in key and isinstance(value, transformers.image_utils.SizeDict) else value
            expected = kind.defaults.get(key)
            same = value == expected or (not value and not expected) or _as_tuples(value) == expected
            assert same, f"{class_name}.{key}: {value} there, {expected} here"


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def test_the_classes_by_model_type_are_those_of_transformers() -> None:
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    elsewhere = {"kimi_k3"}  # models that bring their processor with them
    assert not elsewhere & IMAGE_PROCESSOR_MAPPING_NAMES.keys()
    for model_type, class_name in CLASS_OF_MODEL_TYPE.items():
        if model_type in elsewhere:
            continue
        names = IMAGE_PROCESSOR_MAPPING_NAMES[model_type]
        assert names.get("pil", f"{names['torchvision']}Pil") == f"{class_name}Pil"


def test_a_fast_class_is_said_to_be_resized_otherwise_there(tmp_path: Path) -> None:
    """Pillow's steps are taken whatever the file names; how far torch's differ on a picture is measured here."""
    write_json(tmp_path / "preprocessor_config.json", {**CLIP, "image_processor_type": "CLIPImageProcessorFast"})
    (finding,) = (one for one in read_constants(tmp_path).findings if "torchvision" in one.message)
    assert finding.severity == "note"
    write_json(tmp_path / "preprocessor_config.json", CLIP)
    assert not [one for one in read_constants(tmp_path).findings if "torchvision" in one.message]
    cat = np.asarray(Image.open("data/samples/pictures/cat.png").convert("RGB")).transpose(2, 0, 1)
    for resample, most in ((2, 2), (3, 9)):
        ours, theirs = (
            resize(cat, (112, 90), resample) for resize in (image_steps.resize, image_steps.resize_as_torchvision)
        )
        assert 0 < np.abs(ours.astype(int) - theirs).max() <= most
