"""Pixtral: pictures keep their own sizes, in whole patches, and are padded to the largest of the request.

Legend: C channels, H height, W width.
Source: transformers 5.24, models/pixtral/image_processing_pil_pixtral.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_kinds.kind import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    COMMON,
    HEIGHT_WIDTH,
    LONGEST,
    ImageKind,
    Tensors,
    finished,
    height_width,
    pixels_of,
    resized,
    stacked,
)

if TYPE_CHECKING:
    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture


def whole_patches(constants: ImageConstants, height: int, width: int) -> tuple[int, int]:
    """Height and width within the largest size, rounded up to whole patches."""
    size, patch = constants["size"], constants["patch_size"]
    most = (size["longest_edge"],) * 2 if "longest_edge" in size else (size["height"], size["width"])
    ratio = max(height / most[0], width / most[1])
    if ratio > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    return ((height - 1) // patch["height"] + 1) * patch["height"], ((width - 1) // patch["width"] + 1) * patch["width"]


def ragged(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [pictures, C, H, W], zeros beyond each picture's own `image_sizes` (height, width)."""
    import numpy as np

    arrays = []
    for picture in pictures:
        image = pixels_of(picture)
        if constants["do_resize"]:
            image = resized(constants, picture, image, whole_patches(constants, image.shape[1], image.shape[2]))
        if constants["do_center_crop"]:
            image = steps.center_crop(image, height_width(constants, "crop_size"))
        arrays.append(finished(constants, image))
    sizes = [array.shape[1:] for array in arrays]
    if constants["do_pad"]:
        frame = max(size[0] for size in sizes), max(size[1] for size in sizes)
        arrays = [steps.pad_to(array, frame) for array in arrays]
    return {"pixel_values": stacked(constants, arrays), "image_sizes": np.array(sizes, dtype=np.int64)}


PIXTRAL = ImageKind(
    defaults={
        **COMMON,
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "default_to_square": True,
        "size": {"longest_edge": 1024},
        "patch_size": {"height": 16, "width": 16},
        "do_pad": True,
    },
    more=("do_center_crop", "crop_size"),
    sizes=(LONGEST, HEIGHT_WIDTH),
    steps=ragged,
)
