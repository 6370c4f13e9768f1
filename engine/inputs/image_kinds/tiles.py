"""Tiles of one size and a thumbnail of the whole: InternVL (GOT-OCR2's processor) and Llama 4.

Legend: N tiles of all pictures, C channels, H height, W width of a tile.
Source: transformers 5.24, models/got_ocr2/image_processing_pil_got_ocr2.py, models/llama4/image_processing_llama4.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_kinds.kind import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    COMMON,
    HALF,
    HEIGHT_WIDTH,
    MAX_TILES,
    ImageKind,
    Tensors,
    finished,
    height_width,
    pixels_of,
    refuse,
    resized,
    stacked,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture


def closest_grid(height: int, width: int, tile: tuple[int, int], least: int, most: int) -> tuple[int, int]:
    """Rows and columns of `least` to `most` tiles whose aspect is closest to the picture's.

    Ties go to the larger grid, if the picture covers more than half of it.
    """
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    best, nearest = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * tile[0] * tile[1] * columns * rows
        if distance < nearest or (distance == nearest and is_filled):
            best, nearest = (columns, rows), distance
    return best[1], best[0]


def stretched(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [N, C, H, W], each stretched over its tiles and then whole, and `num_patches` [pictures]."""
    import numpy as np

    arrays, counts = [], []
    for picture in pictures:
        image, tile = pixels_of(picture), height_width(constants)
        if not constants["crop_to_patches"] or constants["max_patches"] <= 1:
            parts = [resized(constants, picture, image, tile)] if constants["do_resize"] else [image]
        else:
            least, most = constants["min_patches"], constants["max_patches"]
            grid = closest_grid(image.shape[1], image.shape[2], tile, least, most)
            canvas = resized(constants, picture, image, (tile[0] * grid[0], tile[1] * grid[1]), f"{grid} tiles")
            parts = list(cut(canvas, grid))
            if len(parts) > 1:
                parts.append(resized(constants, picture, image, tile))
        counts.append(len(parts))
        arrays += [finished(constants, part) for part in parts]
    return {"pixel_values": stacked(constants, arrays), "num_patches": np.array(counts, dtype=np.int64)}


def cut(canvas: NDArray[steps.Value], grid: tuple[int, int]) -> Iterator[NDArray[steps.Value]]:
    """The tiles of a canvas, row by row."""
    height, width = canvas.shape[1] // grid[0], canvas.shape[2] // grid[1]
    for row in range(grid[0]):
        for column in range(grid[1]):
            yield canvas[:, row * height : (row + 1) * height, column * width : (column + 1) * width]


def canvases(most: int) -> list[tuple[int, int]]:
    """Rows and columns of up to `most` tiles, in the order in which Llama 4 tries them: by aspect, larger first."""
    by_aspect: dict[float, list[tuple[int, int]]] = {}
    for count in range(most, 0, -1):
        for rows in (r for r in range(1, count + 1) if count % r == 0):
            by_aspect.setdefault(rows / (count // rows), []).append((rows, count // rows))
    return [grid for grids in by_aspect.values() for grid in grids]


def best_canvas(height: int, width: int, edge: int, most: int, largest: bool) -> tuple[int, int]:
    """Rows and columns of the canvas with the smallest upscaling or, if there is none, the smallest downscaling.

    `largest`: the largest upscaling instead. Ties go to the smallest area. Scales are float32, as in transformers.
    """
    import numpy as np

    grids = canvases(most)
    sides_N2 = np.array(grids, dtype=np.float32) * np.float32(edge)
    scales_N = np.minimum(sides_N2[:, 0] / np.float32(height), sides_N2[:, 1] / np.float32(width))
    larger = scales_N[scales_N >= 1]
    if larger.size:
        chosen = larger.max() if largest else larger.min()
    else:
        chosen = scales_N.max()
    return min((grid for grid, scale in zip(grids, scales_N, strict=True) if scale == chosen), key=math.prod)


def padded(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [N, C, H, W] in bfloat16's values, each picture in the corner of a canvas of tiles and, where that
    has several, then whole; `aspect_ratios` [pictures, 2]: rows and columns."""
    import numpy as np

    edge = constants["size"]["height"]
    arrays, grids = [], []
    for picture in pictures:
        image = pixels_of(picture)
        if not constants["do_resize"] or edge != constants["size"]["width"]:
            refuse(
                picture, "taken by this class in square tiles only", "do_resize, a square size", str(constants["size"])
            )
        height, width = image.shape[1:]
        grid = best_canvas(height, width, edge, constants["max_patches"], bool(constants["resize_to_max_canvas"]))
        frame = grid[0] * edge, grid[1] * edge
        shape = _within(height, width, frame, None if constants["resize_to_max_canvas"] else edge)
        canvas = steps.pad_to(resized(constants, picture, image, shape), frame)
        parts = list(cut(canvas, grid))
        if len(parts) > 1:
            parts.append(resized(constants, picture, image, (edge, edge)))
        arrays += [_in_bfloat16(constants, part) for part in parts]
        grids.append(grid)
    return {"pixel_values": stacked(constants, arrays), "aspect_ratios": np.array(grids, dtype=np.int64)}


def _within(height: int, width: int, frame: tuple[int, int], enlarged: int | None) -> tuple[int, int]:
    """Height and width inside a frame, enlarged up to `enlarged` pixels a side at most (None: without bound)."""
    if enlarged is not None:
        frame = min(max(height, enlarged), frame[0]), min(max(width, enlarged), frame[1])
    wide, tall = frame[1] / width, frame[0] / height
    if wide < tall:
        return max(min(math.floor(height * wide), frame[0]), 1), frame[1]
    return frame[0], max(min(math.floor(width * tall), frame[1]), 1)


def _in_bfloat16(constants: ImageConstants, image_CHW: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Rescaled and normalized with every result rounded to bfloat16, as the class does."""
    import numpy as np

    from firstlight.engine.weights.files.safetensors_file import bfloat16

    image = image_CHW.astype(np.float32)
    if not (constants["do_rescale"] and constants["do_normalize"]):
        return finished(constants, image_CHW).astype(np.float32)

    def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return bfloat16(values).float32()

    image = rounded(image * np.float32(constants["rescale_factor"]))
    mean_C = rounded(np.array(constants["image_mean"], dtype=np.float32))
    std_C = rounded(np.array(constants["image_std"], dtype=np.float32))
    return rounded(rounded(image - mean_C[:, None, None]) / std_C[:, None, None])


GOT_OCR2 = ImageKind(
    defaults={
        **COMMON,
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "default_to_square": True,
        "size": {"height": 384, "width": 384},
        "crop_to_patches": False,
        "min_patches": 1,
        "max_patches": 12,
    },
    limits={"min_patches": MAX_TILES, "max_patches": MAX_TILES},
    sizes=(HEIGHT_WIDTH,),
    steps=stretched,
)
LLAMA4 = ImageKind(
    defaults={
        **COMMON,
        "resample": BILINEAR,
        "image_mean": HALF,
        "image_std": HALF,
        "default_to_square": True,
        "size": {"height": 336, "width": 336},
        "max_patches": 16,
        "resize_to_max_canvas": False,
    },
    limits={"max_patches": MAX_TILES},
    sizes=(HEIGHT_WIDTH,),
    steps=padded,
    tags={"pixel_values": "BF16"},
    torchvision=True,
)
