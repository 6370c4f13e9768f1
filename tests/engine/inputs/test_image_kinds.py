"""Every kind of image processor makes transformers' own tensors, bit for bit: names, dtypes, shapes, values."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoImageProcessor
from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as qwen2_vl

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.image_constants import read_constants
from firstlight.engine.inputs.image_kinds.patches import smart_shape
from firstlight.engine.inputs.image_kinds.registry import IMAGE_KINDS
from firstlight.engine.inputs.image_kinds.splits import long_side, whole_tiles
from firstlight.engine.inputs.image_kinds.tiles import best_canvas, closest_grid
from firstlight.engine.inputs.image_processor import ImageProcessor
from firstlight.engine.inputs.pictures import Picture
from firstlight.engine.model.spec.anyres import best_resolution
from tests.engine.inputs.test_image_processor import picture
from tests.engine.inputs.toys import write_json

SIZES = [(1, 1), (3, 2), (31, 33), (40, 40), (64, 48), (47, 90), (131, 20), (17, 199), (200, 150), (1, 300), (260, 2)]
QWEN = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2}
NEXT = {
    "image_processor_type": "LlavaNextImageProcessor",
    "size": {"shortest_edge": 24},
    "crop_size": 24,
    "image_grid_pinpoints": [[24, 48], [48, 24], [48, 48], [72, 24], [24, 72]],
}
GOT = {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 24, "width": 20}, "crop_to_patches": True}
GEMMA = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 24, "width": 24}}
PAN = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 16,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
IDEFICS = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 60},
    "max_image_size": {"longest_edge": 20},
}
PIXTRAL = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 64}, "patch_size": 4}
VARIANTS: dict[str, Mapping[str, Any]] = {
    "llava_next": NEXT,
    "llava_next, number": {**NEXT, "size": 24, "image_processor_type": "LlavaNextImageProcessorFast"},
    "llava_next, both sides": {**NEXT, "size": {"height": 24, "width": 30}, "do_center_crop": False},
    "qwen2_vl": {**QWEN, "size": {"shortest_edge": 256, "longest_edge": 4096}},
    "qwen2_vl, fast": {
        **QWEN,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 64, "longest_edge": 1024},
        "temporal_patch_size": 1,
        "merge_size": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "qwen2_vl, range of pixels": {**QWEN, "min_pixels": 256, "max_pixels": 2048},
    "qwen2_vl, both": {
        **QWEN,
        "min_pixels": 256,
        "max_pixels": 2048,
        "size": {"min_pixels": 3136, "max_pixels": 12845056},
    },
    "qwen2_vl, least only": {**QWEN, "min_pixels": 5000},
    "qwen2_vl, no rescaling": {**QWEN, "max_pixels": 1024, "min_pixels": 64, "do_rescale": False},
    "glm4v": {
        **QWEN,
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 512, "longest_edge": 8192},
    },
    "glm46v": {
        **QWEN,
        "image_processor_type": "Glm46VImageProcessorFast",
        "size": {"shortest_edge": 128, "longest_edge": 2048},
    },
    "pixtral": PIXTRAL,
    "pixtral, two sides": {**PIXTRAL, "size": {"height": 64, "width": 40}, "patch_size": {"height": 4, "width": 8}},
    "pixtral, crop": {**PIXTRAL, "do_center_crop": True, "crop_size": {"height": 24, "width": 32}},
    "gemma3": GEMMA,
    "gemma3, pan and scan": {**GEMMA, **PAN},
    "got_ocr2": GOT,
    "got_ocr2, whole": {**GOT, "crop_to_patches": False},
    "got_ocr2, 3 to 6": {**GOT, "min_patches": 3, "max_patches": 6},
    "idefics3": IDEFICS,
    "idefics3, whole": {**IDEFICS, "do_image_splitting": False},
    "smolvlm": {**IDEFICS, "image_processor_type": "SmolVLMImageProcessor", "size": {"longest_edge": 41}},
    "smolvlm, not resized": {**IDEFICS, "image_processor_type": "SmolVLMImageProcessor", "do_resize": False},
}
# Without torchvision transformers does not have these at all; `test_image_kinds_torchvision.py` has their arithmetic.
WITHOUT_PIL = {"Llama4ImageProcessor", "Kimi_K25ImageProcessor", "KimiVLImageProcessor", "MiniMaxM3VLImageProcessor"}


def save(directory: Path, config: Mapping[str, Any]) -> Path:
    write_json(directory / "preprocessor_config.json", config)
    write_json(directory / "config.json", {"model_type": "unheard_of"})
    return directory


def assert_same(ours: Mapping[str, np.ndarray], theirs: Mapping[str, Any], what: str) -> None:
    assert set(ours) == set(theirs), what
    for name, value in theirs.items():
        found = np.asarray(value)
        assert (ours[name].dtype, ours[name].shape) == (found.dtype, found.shape), (what, name)
        np.testing.assert_array_equal(ours[name], found, err_msg=f"{what}: {name}")


def attempt(processor: ImageProcessor, pictures: Sequence[Picture]) -> tuple[Any, str]:
    """The tensors, or None with the code of the refusal, which names the picture's size or shape."""
    try:
        return processor.process(pictures), ""
    except Refused as refused:
        return None, refused.findings[0].code


def theirs_of(directory: Path, pictures: Sequence[Picture], **more: Any) -> dict[str, Any]:
    processor = AutoImageProcessor.from_pretrained(directory)
    assert processor.backend == "pil"
    return dict(processor([p.image for p in pictures], return_tensors="np", **more))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", VARIANTS)
def test_tensors_equal_transformers(tmp_path: Path, name: str) -> None:
    directory = save(tmp_path, VARIANTS[name])
    processor = ImageProcessor.open(directory)
    more = {"return_row_col_info": True} if "max_image_size" in VARIANTS[name] else {}
    compared = []
    for width, height in SIZES:
        one = [picture(width, height)]
        ours, code = attempt(processor, one)
        if ours is None:
            assert code == "bad-image"
            with pytest.raises((ValueError, ZeroDivisionError, TypeError)):
                theirs_of(directory, one, **more)
            continue
        assert_same(ours, theirs_of(directory, one, **more), f"{width} x {height}")
        compared.append(one[0])
    assert len(compared) >= 7
    if "both sides" not in name:
        several = [compared[i] for i in (2, 5, 4)]
        assert_same(processor.process(several), theirs_of(directory, several, **more), "three pictures")


def test_every_class_is_compared() -> None:
    named = {str(v["image_processor_type"]).removesuffix("Fast") for v in VARIANTS.values()}
    single = {"CLIP", "Llava", "Siglip", "ViT", "Blip"}  # in test_image_processor.py
    released = {"KimiK3VisionProcessor"}  # in test_kimi_k3_pictures.py
    assert named | {f"{name}ImageProcessor" for name in single} | WITHOUT_PIL | released == set(IMAGE_KINDS)


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v"])
def test_a_picture_beyond_the_vendors_aspect_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(Refused) as caught:
        ImageProcessor.open(save(tmp_path, VARIANTS[name])).process([picture(2, 500)])
    finding = caught.value.findings[0]
    assert finding.code == "bad-image"
    assert "2 x 500" in finding.message
    assert "200 to 1" in (finding.expected or "")
    assert finding.found == "250.0 to 1"


@pytest.mark.parametrize("size", [(1, 10_000), (10_000, 1)])
@pytest.mark.parametrize("name", VARIANTS)
def test_no_picture_comes_to_nothing(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    """A line of 10,000 pixels is either refused, with its size, or becomes pixels."""
    processor = ImageProcessor.open(save(tmp_path, VARIANTS[name]))
    tensors, code = attempt(processor, [picture(*size)])
    assert code == ("bad-image" if tensors is None else "")
    assert tensors is None or tensors["pixel_values"].size > 0


def test_the_range_of_pixels_is_traced_to_its_own_keys(tmp_path: Path) -> None:
    save(tmp_path, VARIANTS["qwen2_vl, range of pixels"])
    size = {constant.name: constant for constant in read_constants(tmp_path).constants}["size"]
    assert size.value == {"shortest_edge": 256, "longest_edge": 2048}
    assert size.source == "preprocessor_config.json: min_pixels and max_pixels"


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**QWEN, "patch_size": 0}, "patch_size"),
        ({**QWEN, "patch_size": "14"}, "patch_size"),
        ({**QWEN, "size": {"shortest_edge": 64}}, "size"),
        ({**QWEN, "size": {"min_pixels": 64, "max_pixels": 99}}, "size"),
        ({**NEXT, "image_grid_pinpoints": []}, "image_grid_pinpoints"),
        ({**NEXT, "image_grid_pinpoints": [[336]]}, "image_grid_pinpoints"),
        ({**PIXTRAL, "patch_size": {"height": 4}}, "patch_size"),
        ({**IDEFICS, "max_image_size": {"height": 4, "width": 4}}, "max_image_size"),
        ({**GOT, "max_patches": -1}, "max_patches"),
        ({**GEMMA, **PAN, "pan_and_scan_min_ratio_to_activate": 0}, "pan_and_scan_min_ratio_to_activate"),
    ],
)
def test_values_no_step_can_use_are_refused(tmp_path: Path, config: Mapping[str, Any], key: str) -> None:
    save(tmp_path, config)
    with pytest.raises(Refused) as caught:
        read_constants(tmp_path)
    assert caught.value.findings[0].code == "side-file-invalid"
    assert key in caught.value.findings[0].message


sides = st.integers(1, 3000)


@settings(max_examples=150)
@given(sides, sides, st.sampled_from([8, 14, 28, 32]), st.integers(1, 90_000), st.integers(1, 4_000_000))
def test_smart_sizes_equal_transformers(height: int, width: int, factor: int, least: int, more: int) -> None:
    """Qwen2-VL's and, counted over two frames, GLM-4V's."""
    aspect = max(height, width) / min(height, width)
    if aspect <= 200:
        theirs = qwen2_vl.smart_resize(height, width, factor, least, least + more)
        assert smart_shape(height, width, factor, least, least + more) == theirs
    if aspect <= 200 and min(height, width) >= factor:
        theirs = glm4v.smart_resize(2, height, width, 2, factor, least, least + more)
        assert smart_shape(height, width, factor, least, least + more, frames=2) == theirs


@settings(max_examples=100)
@given(sides, sides, st.integers(1, 500), st.integers(1, 6000))
def test_sizes_of_tiles_equal_transformers(height: int, width: int, edge: int, longest: int) -> None:
    from transformers.image_processing_utils import select_best_resolution
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas
    from transformers.models.idefics3 import image_processing_pil_idefics3 as idefics3

    pinpoints = [(edge, 2 * edge), (2 * edge, edge), (2 * edge, 2 * edge), (3 * edge, edge), (edge, 3 * edge)]
    assert best_resolution(height, width, pinpoints) == select_best_resolution((height, width), pinpoints)
    columns, rows = get_optimal_tiled_canvas((height, width), (edge, edge + 3), 1, 12)
    assert closest_grid(height, width, (edge, edge + 3), 1, 12) == (rows, columns)
    shape = idefics3.get_resize_output_image_size(np.broadcast_to(np.uint8(0), (3, height, width)), longest)
    assert long_side(height, width, longest) == shape
    tall, wide = whole_tiles(*shape, edge)
    assert tall % edge == wide % edge == 0
    assert tall >= shape[0] - 1
    assert wide >= shape[1] - 1


@settings(max_examples=100)
@given(sides, sides, st.booleans())
def test_a_canvas_holds_the_picture_at_the_scale_it_was_chosen_for(height: int, width: int, largest: bool) -> None:
    """Llama 4's rule, said another way: no canvas enlarges by less without reducing (or by more, if so wished)."""
    rows, columns = best_canvas(height, width, 336, 16, largest)
    scales = {(r, c): min(336 * r / height, 336 * c / width) for r in range(1, 17) for c in range(1, 17) if r * c <= 16}
    chosen = scales[rows, columns]
    larger = [scale for scale in scales.values() if scale >= 1]
    best = (max(larger) if largest else min(larger)) if larger else max(scales.values())
    assert chosen == pytest.approx(best, rel=1e-6)
    assert rows * columns == min(r * c for (r, c), s in scales.items() if math.isclose(s, chosen, rel_tol=1e-7))
