"""Flat patches of pictures of any size: Qwen2-VL (and its heirs), GLM-4V, MiniMax-M3, Kimi-VL and Kimi K2.5.

Legend: P patches of all pictures, C channels, T frames of a patch, Y X pixels of a patch.
Source: transformers 5.24, models/{qwen2_vl,glm4v}/image_processing_pil_*.py,
models/{kimi_k25,minimax_m3_vl}/image_processing_*.py; KimiVLImageProcessor as released with
moonshotai/Kimi-VL-A3B-Instruct.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_kinds.kind import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    COMMON,
    HALF,
    SHORTEST_LONGEST,
    WITHIN,
    ImageKind,
    Tensors,
    check_aspect,
    check_shape,
    finished,
    finished_at_once,
    pixels_of,
    refuse,
    resized,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture

ASPECT_LIMIT = 200


def smart_shape(height: int, width: int, factor: int, least: int, most: int, frames: int = 1) -> tuple[int, int]:
    """Multiples of `factor` near a picture's sides with `least` to `most` pixels, counted over `frames` frames."""
    tall, wide = round(height / factor) * factor, round(width / factor) * factor
    if frames * tall * wide > most:
        shrink = math.sqrt(frames * height * width / most)
        tall = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif frames * tall * wide < least:
        grow = math.sqrt(least / (frames * height * width))
        tall, wide = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return tall, wide


def _qwen_shape(constants: ImageConstants, height: int, width: int) -> tuple[int, int]:
    factor = constants["patch_size"] * constants["merge_size"]
    return smart_shape(height, width, factor, constants["size"]["shortest_edge"], constants["size"]["longest_edge"])


def _glm_shape(constants: ImageConstants, height: int, width: int) -> tuple[int, int]:
    """Like Qwen2-VL's, but a picture counts as `temporal_patch_size` frames and is first enlarged to one patch."""
    factor, frames = constants["patch_size"] * constants["merge_size"], constants["temporal_patch_size"]
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    size = constants["size"]
    return smart_shape(height, width, factor, size["shortest_edge"], size["longest_edge"], frames)


def merged_patches(
    shape_of: Callable[[ImageConstants, int, int], tuple[int, int]],
    coloured: Callable[[ImageConstants, NDArray[np.uint8]], steps.Array] = finished,
) -> Callable[[ImageConstants, Sequence[Picture]], Tensors]:
    """`pixel_values` [P, C T Y X], patches to be merged side by side, and `image_grid_thw` [pictures, 3]."""

    def run(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
        import numpy as np

        patches, grids = [], []
        for picture in pictures:
            image = pixels_of(picture)
            check_aspect(picture, ASPECT_LIMIT)
            if constants["do_resize"]:
                image = resized(constants, picture, image, shape_of(constants, image.shape[1], image.shape[2]))
            _check_multiple(constants, picture, image.shape[1:])
            frames = constants["temporal_patch_size"]
            check_shape(picture, f"repeating it as {frames} frames", (frames * image.shape[1], image.shape[2]))
            rows, grid = _merge_order(constants, coloured(constants, image))
            patches.append(rows)
            grids.append((1, *grid))
        return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, dtype=np.int64)}

    return run


def _merge_order(constants: ImageConstants, image_CHW: steps.Array) -> tuple[NDArray[np.float32], tuple[int, int]]:
    import numpy as np

    size, merge, frames = constants["patch_size"], constants["merge_size"], constants["temporal_patch_size"]
    channels, height, width = image_CHW.shape
    grid = height // size, width // size
    blocks = image_CHW.astype(np.float32).reshape(
        channels, grid[0] // merge, merge, size, grid[1] // merge, merge, size
    )
    ordered = blocks.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]  # row, column, row, column, C, T, Y, X
    repeated = np.broadcast_to(ordered, (*ordered.shape[:5], frames, size, size))
    return repeated.reshape(grid[0] * grid[1], -1), grid


def _check_multiple(constants: ImageConstants, picture: Picture, shape: tuple[int, ...]) -> None:
    factor = constants["patch_size"] * constants["merge_size"]
    if shape[0] % factor or shape[1] % factor or not shape[0] * shape[1]:
        refuse(
            picture,
            "not a whole number of merged patches, and resizing is off",
            f"sides that are multiples of {factor}",
            f"{shape[1]} x {shape[0]}",
        )


def navit(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [P, C, Y, X] in rows of the picture, and `image_grid_thw`: only scaled down, padded to blocks."""
    import numpy as np

    patches, grids = [], []
    for picture in pictures:
        image = pixels_of(picture)
        if constants["do_resize"]:
            shape = navit_shape(constants, image.shape[1], image.shape[2])
            image = resized(constants, picture, image, shape)
            image = to_blocks(picture, image, constants["patch_size"] * constants["merge_size"])
        _check_multiple(constants, picture, image.shape[1:])
        rows, grid = row_order(finished_at_once(constants, image), constants["patch_size"])
        patches.append(rows)
        grids.append((1, *grid))
    return {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, dtype=np.int64)}


def navit_shape(constants: ImageConstants, height: int, width: int) -> tuple[int, int]:
    """Height and width of a picture that is scaled down to the limits of patches, in all and along a side."""
    size, side = constants["patch_size"], constants["size"]["max_height"] * constants["patch_size"]
    count = max(1.0, height // size) * max(1.0, width // size)
    scale = min(1.0, math.sqrt(constants["max_patches"] / count), side / height, side / width)
    return min(max(1, int(height * scale)), side), min(max(1, int(width * scale)), side)


def moonvit(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [P, C, Y, X] and `image_grid_hws` [pictures, 2]: at most `in_token_limit` patches a picture."""
    import numpy as np

    size, limit = constants["patch_size"], constants["in_token_limit"]
    patches, grids = [], []
    for picture in pictures:
        image = pixels_of(picture)
        count = (image.shape[1] // size) * (image.shape[2] // size)
        if count > limit:
            scale = math.sqrt(limit / count)
            shape = int(image.shape[1] * scale), int(image.shape[2] * scale)
            image = resized(constants, picture, image, shape, f"scaling to {limit} patches")
        if constants["pad_input"]:
            image = to_blocks(picture, image, size * constants["merge_size"])
        else:
            whole = image.shape[1] // size * size, image.shape[2] // size * size
            check_shape(picture, f"cropping to patches of {size}", whole)
            image = steps.center_crop(image, whole)
        grid = image.shape[1] // size, image.shape[2] // size
        if max(grid) >= MOONVIT_SIDE:
            refuse(picture, "too long", f"fewer than {MOONVIT_SIDE} patches a side", f"{grid[1]} x {grid[0]} patches")
        rows, grid = row_order(finished(constants, image), size)
        patches.append(rows)
        grids.append(grid)
    return {"pixel_values": np.concatenate(patches), "image_grid_hws": np.array(grids, dtype=np.int64)}


MOONVIT_SIDE = 512


def to_blocks(picture: Picture, image_CHW: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """The picture's pixels padded with zeros below and on the right to multiples of `factor`."""
    height, width = (-(-side // factor) * factor for side in image_CHW.shape[1:])
    check_shape(picture, f"padding to multiples of {factor}", (height, width))
    return steps.pad_to(image_CHW, (height, width))


def row_order(image_CHW: steps.Array, size: int) -> tuple[NDArray[np.float32], tuple[int, int]]:
    """Patches [P, C, Y, X] row by row, and how many there are (down, across)."""
    import numpy as np

    channels, height, width = image_CHW.shape
    grid = height // size, width // size
    blocks = image_CHW.astype(np.float32).reshape(channels, grid[0], size, grid[1], size)
    return blocks.transpose(1, 3, 0, 2, 4).reshape(-1, channels, size, size), grid


def _pixel_range(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Releases of 2024 give the range of pixels as `min_pixels` and `max_pixels`; they win over `size`."""
    size = config.get("size")
    merged = dict(size if isinstance(size, Mapping) else defaults["size"])
    found = []
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if config.get(old) is not None:
            merged[new] = config[old]
            merged.pop(old, None)
            found.append(old)
    if found:
        yield "size", merged, " and ".join(found)


def _minimax_range(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Replaces the release's unused size [672, 672] with the class's default, as transformers does."""
    if config.get("size") == [672, 672]:
        yield from _pixel_range({**config, "size": None}, defaults)
        if config.get("min_pixels") is None and config.get("max_pixels") is None:
            yield "size", defaults["size"], "the class, in place of size [672, 672]"
    else:
        yield from _pixel_range(config, defaults)


def media(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Kimi's releases nest the constants of pictures under `media_proc_cfg`, by other names."""
    media = config.get("media_proc_cfg")
    if not isinstance(media, Mapping):
        return
    names = {"patch_size": "patch_size", "merge_kernel_size": "merge_size", "in_patch_limit": "max_patches"}
    names |= {"image_mean": "image_mean", "image_std": "image_std"}
    for theirs, ours in names.items():
        if media.get(theirs) is not None:
            yield ours, media[theirs], f"media_proc_cfg.{theirs}"
    side = media.get("patch_limit_on_one_side")
    if side is not None:
        yield "size", {"max_height": side, "max_width": side}, "media_proc_cfg.patch_limit_on_one_side"


def _kernel(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    kernel = config.get("merge_kernel_size")
    if isinstance(kernel, list | tuple) and len(set(kernel)) == 1:
        yield "merge_size", kernel[0], "merge_kernel_size"
    elif kernel is not None:
        yield "merge_size", kernel, "merge_kernel_size"


_QWEN: Mapping[str, Any] = {
    **COMMON,
    "resample": BICUBIC,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "default_to_square": False,
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
QWEN2_VL = ImageKind(defaults=_QWEN, sizes=(SHORTEST_LONGEST,), steps=merged_patches(_qwen_shape), renamed=_pixel_range)
GLM4V = ImageKind(
    defaults={**_QWEN, "size": {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000}},
    sizes=(SHORTEST_LONGEST,),
    steps=merged_patches(_glm_shape),
)
MINIMAX_M3 = ImageKind(
    defaults={**_QWEN, "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 451584}},
    sizes=(SHORTEST_LONGEST,),
    steps=merged_patches(_qwen_shape, finished_at_once),
    renamed=_minimax_range,
    torchvision=True,
)
KIMI_K25 = ImageKind(
    defaults={
        **COMMON,
        "resample": BICUBIC,
        "image_mean": HALF,
        "image_std": HALF,
        "size": {"max_height": 512, "max_width": 512},
        "max_patches": 16384,
        "patch_size": 14,
        "merge_size": 2,
    },
    sizes=(WITHIN,),
    steps=navit,
    renamed=media,
    torchvision=True,
)
KIMI_VL = ImageKind(
    defaults={
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "patch_size": 14,
        "merge_size": 2,
        "in_token_limit": 4096,
        "pad_input": False,
    },
    steps=moonvit,
    renamed=_kernel,
)
