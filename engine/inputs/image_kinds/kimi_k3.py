"""Kimi K3's image processor: pictures are only scaled down, and transparency is filled with a chessboard.

Legend: P patches of all pictures, C channels, Y X pixels of a patch.
Source: KimiK3VisionProcessor as released with moonshotai/Kimi-K3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_kinds.kind import (
    HALF,
    WITHIN,
    ImageKind,
    Tensors,
    check_shape,
)
from firstlight.engine.inputs.image_kinds.patches import media, navit_shape, row_order, to_blocks

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture

PLAIN = {"white": 255, "black": 0, "gray": 128}
FILL_STAGES = ("before_resize", "after_resize")


def on_board(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [P, C, Y, X], float32, and `grid_thws` [pictures, 3]."""
    import numpy as np

    patches, grids = [], []
    for picture in pictures:
        image_HWC = _scaled(constants, picture)
        factor = constants["patch_size"] * constants["merge_size"]
        image_CHW = _normalized(constants, to_blocks(picture, image_HWC.transpose(2, 0, 1), factor))
        rows, grid = row_order(image_CHW, constants["patch_size"])
        patches.append(rows)
        grids.append((1, *grid))
    return {"pixel_values": np.concatenate(patches), "grid_thws": np.array(grids, dtype=np.int64)}


def _scaled(constants: ImageConstants, picture: Picture) -> NDArray[np.uint8]:
    """The picture at its new size, opaque, [height, width, 3]."""
    import numpy as np
    from PIL import Image

    image, bicubic = picture.rgba or picture.image, Image.Resampling.BICUBIC
    shape = navit_shape(constants, image.height, image.width)
    check_shape(picture, "scaling to the limits of patches", shape)
    if constants["fill_after_resize"]:
        return _opaque(constants, image.resize((shape[1], shape[0]), bicubic))
    opaque = Image.fromarray(_opaque(constants, image))
    return np.asarray(opaque.resize((shape[1], shape[0]), bicubic))


def _opaque(constants: ImageConstants, image: Any) -> NDArray[np.uint8]:
    """The picture composited on the background and truncated to integers; without a background, alpha is dropped."""
    import numpy as np

    background = constants.values.get("background")
    if image.mode != "RGBA" or background is None:
        return np.asarray(image.convert("RGB"))
    rgba = np.asarray(image)
    alpha = rgba[..., 3:].astype(np.float32) / 255.0
    board = _board(background, rgba.shape[0], rgba.shape[1])
    return (alpha * rgba[..., :3] + (1 - alpha) * board).astype(np.uint8)


def _board(background: Mapping[str, Any], height: int, width: int) -> NDArray[np.uint8]:
    """One colour, or a chessboard of squares."""
    import numpy as np

    if background["pattern"] in PLAIN:
        return np.full((height, width, 3), PLAIN[background["pattern"]], np.uint8)
    y, x = np.ogrid[:height, :width]
    square, white_first = background["chessboard_square_size"], background["chessboard_square_on_top_left"]
    is_grey = (y // square + x // square) % 2 == (1 if white_first else 0)
    values = np.where(is_grey, background["chessboard_gray_value"], background["chessboard_white_value"])
    return np.repeat(values[..., None].astype(np.uint8), 3, axis=-1)


def _normalized(constants: ImageConstants, image_CHW: steps.Array) -> NDArray[np.float32]:
    """(x / 255 - mean) / std with the vendor's roundings: each step in float64, kept in float32."""
    import numpy as np

    mean_C, std_C = (np.array(constants[key], np.float64)[:, None, None] for key in ("image_mean", "image_std"))
    value_CHW = image_CHW.astype(np.float32) / np.float32(255)
    value_CHW = (value_CHW - mean_C).astype(np.float32)
    return (value_CHW * (1.0 / std_C)).astype(np.float32)


def _renamed(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    yield from media(config, defaults)
    nested = config.get("media_proc_cfg")
    nested = nested if isinstance(nested, Mapping) else {}
    if nested.get("fixed_output_tokens") is not None:
        _refuse("fixed_output_tokens", nested["fixed_output_tokens"], "null: as many tokens as the picture has patches")
    stage = nested.get("transparent_bg_fill_stage", FILL_STAGES[0])
    if stage not in FILL_STAGES:
        _refuse("transparent_bg_fill_stage", stage, " or ".join(FILL_STAGES))
    yield "fill_after_resize", stage == FILL_STAGES[1], "media_proc_cfg.transparent_bg_fill_stage"
    if nested.get("transparent_bg_config") is not None:
        yield "background", nested["transparent_bg_config"], "media_proc_cfg.transparent_bg_config"


def _refuse(key: str, value: Any, expected: str) -> None:
    raise Refused(
        fatal(
            "unsupported-block",
            f"media_proc_cfg.{key} asks for a step that is not known",
            file="preprocessor_config.json",
            expected=expected,
            found=str(value),
            next="text works; for pictures, add the step to engine/inputs/image_kinds/kimi_k3.py",
        )
    )


KIMI_K3 = ImageKind(
    defaults={
        "do_convert_rgb": True,
        "image_mean": HALF,
        "image_std": HALF,
        "size": {"max_height": 512, "max_width": 512},
        "max_patches": 65536,
        "patch_size": 14,
        "merge_size": 2,
        "fill_after_resize": False,
    },
    more=("background",),
    sizes=(WITHIN,),
    steps=on_board,
    renamed=_renamed,
)
