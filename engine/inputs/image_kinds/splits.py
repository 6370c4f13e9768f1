"""Idefics3 and SmolVLM: pictures are enlarged to whole tiles and cut; the whole picture comes last, with a mask.

Legend: N tiles of all pictures, C channels, H height, W width.
Source: transformers 5.24, models/idefics3/image_processing_pil_idefics3.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_kinds.kind import (
    COMMON,
    HALF,
    HEIGHT_WIDTH,
    LANCZOS,
    LONGEST,
    ImageKind,
    Tensors,
    check_tiles,
    finished,
    pixels_of,
    resized,
    stacked,
)
from firstlight.engine.inputs.image_kinds.tiles import cut

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture

SIDE_LIMIT = 4096


def long_side(height: int, width: int, longest: int) -> tuple[int, int]:
    """Height and width with the longer side brought to `longest`, the shorter one even, neither beyond 4096."""
    aspect = width / height
    if width >= height:
        width, height = longest, int(longest / aspect)
        height += height % 2
    else:
        height, width = longest, int(longest * aspect)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > SIDE_LIMIT:
        width, height = SIDE_LIMIT, int(SIDE_LIMIT / aspect)
    elif height > width and height > SIDE_LIMIT:
        height, width = SIDE_LIMIT, int(SIDE_LIMIT * aspect)
    return max(height, 1), max(width, 1)


def whole_tiles(height: int, width: int, edge: int) -> tuple[int, int]:
    """Height and width rounded up to whole tiles, the longer side first, the shorter one by its aspect."""
    aspect = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        return math.ceil(int(width / aspect) / edge) * edge, width
    height = math.ceil(height / edge) * edge
    return height, math.ceil(int(height * aspect) / edge) * edge


def splits(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [1, N, C, H, W], `pixel_attention_mask` [1, N, H, W] int64, `rows` and `cols` [1, pictures]."""
    import numpy as np

    arrays: list[steps.Array] = []
    grids = []
    for picture in pictures:
        parts, grid = _parts(constants, picture)
        arrays += [finished(constants, part) for part in parts]
        grids.append(grid)
    grids_P2 = np.array([grids], dtype=np.int64)
    found = {"rows": grids_P2[..., 0], "cols": grids_P2[..., 1]}
    if not constants["do_pad"]:
        return {"pixel_values": stacked(constants, arrays)[None], **found}
    frame = max(a.shape[1] for a in arrays), max(a.shape[2] for a in arrays)
    masks = [steps.pad_to(np.ones((1, *a.shape[1:]), dtype=np.int64), frame)[0] for a in arrays]
    pixels = stacked(constants, [steps.pad_to(array, frame) for array in arrays])
    return {"pixel_values": pixels[None], "pixel_attention_mask": np.stack(masks)[None], **found}


def _parts(constants: ImageConstants, picture: Picture) -> tuple[list[NDArray[np.uint8]], tuple[int, int]]:
    """The tiles of a picture with the whole one last, and rows and columns; (0, 0) where it is not cut."""
    image, size, edge = pixels_of(picture), constants["size"], constants["max_image_size"]["longest_edge"]
    if constants["do_resize"]:
        is_long = "longest_edge" in size
        height, width = image.shape[1:]
        shape = long_side(height, width, size["longest_edge"]) if is_long else (size["height"], size["width"])
        image = resized(constants, picture, image, shape)
    if not constants["do_image_splitting"]:
        return [resized(constants, picture, image, (edge, edge))], (0, 0)
    height, width = image.shape[1:]
    image = resized(constants, picture, image, whole_tiles(height, width, edge), f"whole tiles of {edge}")
    grid = image.shape[1] // edge, image.shape[2] // edge
    check_tiles(picture, grid)
    if grid == (1, 1):
        return [image], (0, 0)
    return [*cut(image, grid), resized(constants, picture, image, (edge, edge))], grid


IDEFICS3 = ImageKind(
    defaults={
        **COMMON,
        "resample": LANCZOS,
        "image_mean": HALF,
        "image_std": HALF,
        "default_to_square": True,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_image_splitting": True,
        "do_pad": True,
    },
    sizes=(LONGEST, HEIGHT_WIDTH),
    steps=splits,
)
