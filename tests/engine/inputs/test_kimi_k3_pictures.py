"""Kimi K3's pictures, against its processor's formulas restated here pixel by pixel: no library has that class."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.image_processor import ImageProcessor
from firstlight.engine.inputs.prepare import Processor
from tests.engine.inputs.toys import picture_of
from tests.kimi_k3 import MEDIA_PAD, PREPROCESSOR, write_side_files

SIZES = [(1, 1), (28, 28), (50, 90), (131, 20), (260, 200), (3, 400)]


def settings(**more: Any) -> dict[str, Any]:
    return {**PREPROCESSOR, "media_proc_cfg": {**PREPROCESSOR["media_proc_cfg"], **more}}


def save(directory: Path, config: dict[str, Any]) -> ImageProcessor:
    (directory / "preprocessor_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k3"}))
    return ImageProcessor.open(directory)


def random_picture(size: tuple[int, int], mode: str) -> Image.Image:
    channels = len(mode)
    pixels = np.random.default_rng(sum(size)).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)
    return Image.fromarray(pixels, mode)


def restated(image: Image.Image, media: dict[str, Any]) -> tuple[NDArray[np.float32], list[int]]:
    """Patches and grid of one picture, one pixel after the other."""
    patch, width, height = media["patch_size"], image.width, image.height
    side = media["patch_limit_on_one_side"] * patch
    patches = max(1.0, width // patch) * max(1.0, height // patch)
    scale = min(1.0, math.sqrt(media["in_patch_limit"] / patches), side / width, side / height)
    new = min(max(1, int(width * scale)), side), min(max(1, int(height * scale)), side)
    if media["transparent_bg_fill_stage"] == "before_resize":
        scaled = opaque(image, media).resize(new, Image.Resampling.BICUBIC)
    else:
        scaled = opaque(image.resize(new, Image.Resampling.BICUBIC), media)
    block = patch * media["merge_kernel_size"]
    columns, rows = (-(-length // block) * block // patch for length in new)
    framed = Image.new("RGB", (columns * patch, rows * patch))
    framed.paste(scaled, (0, 0))
    out = np.empty((rows * columns, 3, patch, patch), np.float32)
    for row in range(rows):
        for column in range(columns):
            box = (column * patch, row * patch, (column + 1) * patch, (row + 1) * patch)
            values = np.asarray(framed.crop(box)).astype(np.float32).transpose(2, 0, 1) / 255
            out[row * columns + column] = (values - 0.5) / 0.5
    return out, [1, rows, columns]


def opaque(image: Image.Image, media: dict[str, Any]) -> Image.Image:
    board = media["transparent_bg_config"]
    if image.mode == "RGB" or board is None:
        return image.convert("RGB")
    out = Image.new("RGB", image.size)
    for y in range(image.height):
        for x in range(image.width):
            *colour, alpha = image.getpixel((x, y))
            is_grey = (x // board["chessboard_square_size"] + y // board["chessboard_square_size"]) % 2 == 1
            behind = board["chessboard_gray_value"] if is_grey else board["chessboard_white_value"]
            share = np.float32(alpha) / np.float32(255)
            out.putpixel((x, y), tuple(int(share * c + (np.float32(1) - share) * behind) for c in colour))
    return out


@pytest.mark.parametrize("stage", ["before_resize", "after_resize"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_patches_are_those_of_the_formulas(tmp_path: Path, mode: str, stage: str) -> None:
    config = settings(transparent_bg_fill_stage=stage)
    processor = save(tmp_path, config)
    images = [random_picture(size, mode) for size in SIZES]
    found = processor.process([picture_of(image) for image in images])
    expected = [restated(image, config["media_proc_cfg"]) for image in images]
    np.testing.assert_array_equal(found["grid_thws"], [grid for _, grid in expected])
    np.testing.assert_allclose(found["pixel_values"], np.concatenate([patches for patches, _ in expected]), atol=1e-6)
    assert (found["pixel_values"].dtype, found["grid_thws"].dtype) == (np.float32, np.int64)


def test_without_a_background_alpha_is_dropped(tmp_path: Path) -> None:
    image = random_picture((30, 40), "RGBA")
    found = save(tmp_path, settings(transparent_bg_config=None)).process([picture_of(image)])
    expected, _ = restated(image, settings(transparent_bg_config=None)["media_proc_cfg"])
    np.testing.assert_allclose(found["pixel_values"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("fixed_output_tokens", 64),
        ("transparent_bg_fill_stage", "never"),
        ("transparent_bg_config", {"pattern": "stripes"}),
        ("transparent_bg_config", {"pattern": "chessboard", "chessboard_square_size": 0}),
        ("transparent_bg_config", "white"),
    ],
)
def test_a_step_that_is_not_known_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(Refused) as caught:
        save(tmp_path, settings(**{key: value}))
    assert caught.value.findings[0].code in ("unsupported-block", "side-file-invalid")


def test_a_pad_in_the_prompt_becomes_one_for_each_feature(tmp_path: Path) -> None:
    save(tmp_path, settings())
    write_side_files(tmp_path)
    pictures = [picture_of(random_picture(size, "RGB")) for size in ((50, 90), (28, 28))]
    prepared = Processor.open(tmp_path).prepare("What is it?", pictures, chat=True)
    assert [count for _, count in prepared.image_spans] == [2 * 4, 1]
    assert int((prepared.input_ids == MEDIA_PAD).sum()) == 9
