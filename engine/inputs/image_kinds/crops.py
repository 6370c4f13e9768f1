"""Gemma 3: every picture at one size and, if enabled, crops of elongated ones ("pan and scan").

Legend: C channels, H height, W width.
Source: transformers 5.24, models/gemma3/image_processing_pil_gemma3.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_kinds.kind import (
    BILINEAR,
    COMMON,
    HALF,
    ImageKind,
    Tensors,
    check_shape,
    finished,
    pixels_of,
    resized,
    stacked,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture


def pan_and_scan(constants: ImageConstants, image_CHW: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Crops along the longer side of a picture that is long enough; none otherwise."""
    import numpy as np

    least, most = constants["pan_and_scan_min_crop_size"], constants["pan_and_scan_max_num_crops"]
    height, width = image_CHW.shape[1:]
    long, short = max(height, width), min(height, width)
    if long / short < constants["pan_and_scan_min_ratio_to_activate"]:
        return []
    count = min(most, max(2, min(long // least, math.floor(long / short + 0.5))))
    step = math.ceil(long / count)
    if min(step, short) < least:
        return []
    axis = 2 if width >= height else 1
    return [np.take(image_CHW, range(step * i, min(step * (i + 1), long)), axis=axis) for i in range(count)]


def crops(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [pictures and their crops, C, H, W] and `num_crops` [pictures]."""
    import numpy as np

    arrays, counts = [], []
    for picture in pictures:
        image = pixels_of(picture)
        extra = pan_and_scan(constants, image) if constants["do_pan_and_scan"] else []
        counts.append(len(extra))
        for part in (image, *extra):
            check_shape(picture, "pan and scan", part.shape[1:])
            if constants["do_resize"]:
                shape = steps.resized_shape(part.shape[1], part.shape[2], constants["size"])
                part = resized(constants, picture, part, shape)
            arrays.append(finished(constants, part))
    return {"pixel_values": stacked(constants, arrays), "num_crops": np.array(counts, dtype=np.int64)}


GEMMA3 = ImageKind(
    defaults={
        **COMMON,
        "resample": BILINEAR,
        "image_mean": HALF,
        "image_std": HALF,
        "default_to_square": True,
        "size": {"height": 224, "width": 224},
    },
    more=(
        "do_pan_and_scan",
        "pan_and_scan_min_crop_size",
        "pan_and_scan_max_num_crops",
        "pan_and_scan_min_ratio_to_activate",
    ),
    steps=crops,
)
