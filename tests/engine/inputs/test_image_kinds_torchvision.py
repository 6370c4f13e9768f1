"""Image processors that transformers has with torchvision only equal its classes, run on a stand-in for torchvision."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.image_processor import ImageProcessor
from firstlight.engine.inputs.pictures import Picture
from tests.engine.inputs.test_image_kinds import save
from tests.engine.inputs.test_image_processor import picture
from tests.engine.inputs.torchvision_stand_in import imported

SIZES = [(1, 1), (3, 2), (31, 33), (40, 40), (64, 48), (47, 90), (131, 20), (17, 199), (200, 150), (1, 300), (260, 2)]
LLAMA4 = ("llama4", "Llama4ImageProcessor")
KIMI = ("kimi_k25", "Kimi_K25ImageProcessor")
MINIMAX = ("minimax_m3_vl", "MiniMaxM3VLImageProcessor")
CASES: dict[str, tuple[tuple[str, str], Mapping[str, Any]]] = {
    "llama4": (LLAMA4, {"size": {"height": 24, "width": 24}, "max_patches": 5}),
    "llama4, largest canvas": (
        LLAMA4,
        {"size": {"height": 16, "width": 16}, "max_patches": 16, "resize_to_max_canvas": True, "resample": 3},
    ),
    "llama4, other colours": (
        LLAMA4,
        {"size": {"height": 20, "width": 20}, "image_mean": [0.4, 0.45, 0.5], "image_std": [0.2, 0.25, 0.3]},
    ),
    "kimi": (KIMI, {"patch_size": 4, "max_patches": 60, "size": {"max_height": 40, "max_width": 40}}),
    "minimax": (MINIMAX, {"patch_size": 4, "size": {"shortest_edge": 200, "longest_edge": 4000}}),
    "minimax, older keys": (
        MINIMAX,
        {"patch_size": 5, "merge_size": 3, "min_pixels": 500, "max_pixels": 3000, "image_std": [0.2, 0.25, 0.3]},
    ),
    "minimax, a size that was never used": (MINIMAX, {"size": [672, 672]}),
    "kimi, sides": (
        KIMI,
        {"patch_size": 5, "merge_size": 3, "size": {"max_height": 9, "max_width": 9}, "image_std": [0.2, 0.25, 0.3]},
    ),
}


def theirs_of(processor: Any, pictures: list[Picture]) -> dict[str, torch.Tensor]:
    images = [torch.from_numpy(np.asarray(p.image).transpose(2, 0, 1).copy()) for p in pictures]
    return dict(processor(images, return_tensors="pt"))


@pytest.mark.parametrize("name", CASES)
def test_tensors_equal_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (model_type, class_name), config = CASES[name]
    theirs = imported(monkeypatch, model_type, f"image_processing_{model_type}", class_name)(**config)
    processor = ImageProcessor.open(save(tmp_path, {**config, "image_processor_type": class_name}))
    tags = processor.constants.kind.tags
    several = [picture(31, 33), picture(64, 48), picture(47, 90)]
    sizes = [size for size in SIZES if model_type != "minimax_m3_vl" or max(size) <= 200 * min(size)]  # its limit
    for given in (several, *([picture(*size)] for size in sizes)):
        ours, found = processor.process(given), theirs_of(theirs, given)
        assert set(ours) == set(found)
        for key, tensor in found.items():
            assert tags.get(key) == ("BF16" if tensor.dtype == torch.bfloat16 else None)
            array = tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()
            assert ours[key].dtype == array.dtype
            np.testing.assert_array_equal(ours[key], array, err_msg=f"{key} of {[p.image.size for p in given]}")


def test_constants_nested_as_the_release_has_them(tmp_path: Path) -> None:
    media = {
        "in_patch_limit": 60,
        "patch_size": 4,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 40,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    remote = {"AutoImageProcessor": "kimi_k25_vision_processing.KimiK25VisionProcessor"}
    nested = ImageProcessor.open(save(tmp_path, {"auto_map": remote, "media_proc_cfg": media}))
    flat = {
        "image_processor_type": "Kimi_K25ImageProcessor",
        "max_patches": 60,
        "patch_size": 4,
        "merge_size": 2,
        "size": {"max_height": 40, "max_width": 40},
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    sources = {constant.name: constant.source for constant in nested.constants.constants}
    assert sources["max_patches"] == "preprocessor_config.json: media_proc_cfg.in_patch_limit"
    given = [picture(200, 150)]
    (tmp_path / "flat").mkdir()
    expected = ImageProcessor.open(save(tmp_path / "flat", flat)).process(given)["pixel_values"]
    np.testing.assert_array_equal(nested.process(given)["pixel_values"], expected)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize(("width", "height"), [(31, 33), (64, 48), (200, 150), (90, 16)])
def test_kimi_vl(tmp_path: Path, width: int, height: int, pad: bool) -> None:
    """As its release does it, step by step in Pillow and torch: scale by the limit, pad or crop, rescale, normalize."""
    size, limit = 4, 100
    config = {
        "image_processor_type": "KimiVLImageProcessor",
        "patch_size": size,
        "merge_kernel_size": [2, 2],
        "in_token_limit": limit,
        "pad_input": pad,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    }
    given = picture(width, height)
    image, count = given.image, (width // size) * (height // size)
    if count > limit:
        scale = math.sqrt(limit / count)
        image = image.resize((int(width * scale), int(height * scale)), Image.Resampling.BICUBIC)
    wide, tall = image.size
    pixels = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1)
    if pad:
        pixels = torch.nn.functional.pad(pixels, (0, -wide % (2 * size), 0, -tall % (2 * size)))
    else:
        top, left = (tall % size) // 2, (wide % size) // 2
        pixels = pixels[:, top : top + tall // size * size, left : left + wide // size * size]
    mean, std = (torch.tensor(config[key]).view(3, 1, 1) for key in ("image_mean", "image_std"))
    values = (pixels.float().div(255) - mean) / std
    grid = values.shape[1] // size, values.shape[2] // size
    expected = values.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4).flatten(0, 1)
    ours = ImageProcessor.open(save(tmp_path, config)).process([given])
    np.testing.assert_allclose(ours["pixel_values"], expected.numpy(), atol=2e-7)
    assert ours["image_grid_hws"].tolist() == [list(grid)]
    assert grid[0] * grid[1] <= limit + (2 * sum(grid) if pad else 0)


def test_kimi_vl_refuses_what_its_positions_do_not_reach(tmp_path: Path) -> None:
    config = {"image_processor_type": "KimiVLImageProcessor", "patch_size": 4, "in_token_limit": 10_000}
    with pytest.raises(Refused) as caught:
        ImageProcessor.open(save(tmp_path, config)).process([picture(4 * 512, 8)])
    assert caught.value.findings[0].found == "512 x 2 patches"


def test_one_pixel_is_refused_and_two_are_not(tmp_path: Path) -> None:
    """torch's antialiased resize of 8-bit pictures fails on an output of one pixel."""
    for side in (1, 2):
        config = {"image_processor_type": "Llama4ImageProcessor", "size": {"height": side, "width": side}}
        processor = ImageProcessor.open(save(tmp_path, {**config, "max_patches": 1}))
        if side == 2:
            assert processor.process([picture(9, 9)])["pixel_values"].shape == (1, 3, 2, 2)
            continue
        with pytest.raises(Refused) as caught:
            processor.process([picture(9, 9)])
        assert caught.value.findings[0].code == "bad-image"
