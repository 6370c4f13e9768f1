"""LLaVA-NeXT: the whole picture, then the tiles of the resolution that wastes the least area.

Legend: C channels, H height, W width, N tiles of a picture with the whole one first.
Source: transformers 5.24, models/llava_next/image_processing_pil_llava_next.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from firstlight.engine.inputs.image_kinds.kind import (
    HEIGHT_WIDTH,
    SHORTEST,
    ImageKind,
    Tensors,
    check_tiles,
    pixels_of,
    refuse,
    resized,
    stacked,
)
from firstlight.engine.inputs.image_kinds.single import CLIP, one
from firstlight.engine.model.spec.anyres import best_resolution

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture


def anyres(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [pictures, N, C, H, W], zeros for tiles a picture lacks, and `image_sizes` (height, width)."""
    import numpy as np

    tiles = [stacked(constants, [one(constants, p, tile) for tile in _tiles(constants, p)]) for p in pictures]
    if constants["do_pad"]:
        most = max(len(tile_NCHW) for tile_NCHW in tiles)
        tiles = [np.concatenate((t, np.zeros((most - len(t), *t.shape[1:]), t.dtype))) for t in tiles]
    sizes = [(picture.image.size[1], picture.image.size[0]) for picture in pictures]
    return {"pixel_values": stacked(constants, tiles), "image_sizes": np.array(sizes, dtype=np.int64)}


def _tiles(constants: ImageConstants, picture: Picture) -> Iterator[NDArray[np.uint8]]:
    import numpy as np

    image = pixels_of(picture)
    height, width = image.shape[1:]
    best = best_resolution(height, width, constants["image_grid_pinpoints"])
    if best is None:
        refuse(
            picture,
            f"too long and narrow: {width} x {height}",
            f"at least one pixel in one of the resolutions {constants['image_grid_pinpoints']}",
            "none",
        )
    size, crop = constants["size"], constants["crop_size"]
    whole = (size["height"], size["width"]) if "height" in size else (size["shortest_edge"],) * 2
    edge = crop["height"] if crop else whole[0]
    check_tiles(picture, (-(-best[0] // edge), -(-best[1] // edge)))
    yield resized(constants, picture, image, whole)
    shape = _fitted(height, width, best)
    frame = np.zeros((image.shape[0], *best), dtype=image.dtype)
    down, right = (best[0] - shape[0]) // 2, (best[1] - shape[1]) // 2
    frame[:, down : down + shape[0], right : right + shape[1]] = resized(constants, picture, image, shape)
    for top in range(0, best[0], edge):
        for left in range(0, best[1], edge):
            yield frame[:, top : top + edge, left : left + edge]


def _fitted(height: int, width: int, best: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the picture scaled to fit into a resolution, the loose side rounded up."""
    wide, tall = best[1] / width, best[0] / height
    if wide < tall:
        return min(math.ceil(height * wide), best[0]), best[1]
    return best[0], min(math.ceil(width * tall), best[1])


LLAVA_NEXT = ImageKind(
    defaults={
        **CLIP.defaults,
        "do_pad": True,
        "image_grid_pinpoints": ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)),
    },
    sizes=(HEIGHT_WIDTH, SHORTEST),
    steps=anyres,
)
