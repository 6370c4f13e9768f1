"""One tensor per picture, all of one size: CLIP, LLaVA, SigLIP, ViT, BLIP.

Source: transformers 5.24, image_processing_backends.py (PilBackend) and models/llava/image_processing_pil_llava.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_kinds.kind import (
    BICUBIC,
    BILINEAR,
    CLIP_MEAN,
    CLIP_STD,
    COMMON,
    HALF,
    ImageKind,
    Tensors,
    check_shape,
    finished,
    pixels_of,
    refuse,
    resized,
    stacked,
)

if TYPE_CHECKING:
    import numpy as np

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture

_MORE = ("do_center_crop", "crop_size", "do_pad", "pad_size")


def plain(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """`pixel_values` [pictures, C, H, W]: resize, crop, rescale, normalize, and pad last."""
    arrays = [one(constants, picture, pixels_of(picture)) for picture in pictures]
    if constants["do_pad"]:
        arrays = _padded(constants, pictures, arrays)
    return {"pixel_values": stacked(constants, arrays)}


def on_a_square(constants: ImageConstants, pictures: Sequence[Picture]) -> Tensors:
    """The same, but padded first, to a square of the mean's colour."""
    arrays = []
    for picture in pictures:
        image = pixels_of(picture)
        if constants["do_pad"]:
            check_shape(picture, "padding to a square", (max(image.shape[1:]),) * 2)
            background = tuple(int(mean * 255) for mean in constants["image_mean"] or (0.0, 0.0, 0.0))
            image = steps.pad_to_square(image, background)
        arrays.append(one(constants, picture, image))
    return {"pixel_values": stacked(constants, arrays)}


def one(constants: ImageConstants, picture: Picture, image: np.ndarray) -> steps.Array:
    """Resize, crop, rescale, normalize."""
    if constants["do_resize"]:
        shape = steps.resized_shape(image.shape[1], image.shape[2], constants["size"])
        image = resized(constants, picture, image, shape)
    if constants["do_center_crop"]:
        image = steps.center_crop(image, (constants["crop_size"]["height"], constants["crop_size"]["width"]))
    return finished(constants, image)


def _padded(constants: ImageConstants, pictures: Sequence[Picture], arrays: Sequence[steps.Array]) -> list[steps.Array]:
    size = constants["pad_size"]
    largest = tuple(max(array.shape[axis] for array in arrays) for axis in (1, 2))
    shape = (size["height"], size["width"]) if size else (largest[0], largest[1])
    for picture, array in zip(pictures, arrays, strict=True):
        if array.shape[1] > shape[0] or array.shape[2] > shape[1]:
            refuse(
                picture,
                "larger than the frame it is padded to",
                f"at most {shape[1]} x {shape[0]}",
                f"{array.shape[2]} x {array.shape[1]}",
            )
    return [steps.pad_to(array, shape) for array in arrays]


CLIP = ImageKind(
    defaults={
        **COMMON,
        "resample": BICUBIC,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "default_to_square": False,
        "size": {"shortest_edge": 224},
        "crop_size": {"height": 224, "width": 224},
        "do_center_crop": True,
    },
    more=_MORE[2:],
    steps=plain,
)
LLAVA = ImageKind(defaults={**CLIP.defaults, "do_pad": False}, more=("pad_size",), steps=on_a_square)
SIGLIP = ImageKind(
    defaults={
        **COMMON,
        "resample": BICUBIC,
        "image_mean": HALF,
        "image_std": HALF,
        "default_to_square": False,
        "size": {"height": 224, "width": 224},
    },
    more=_MORE,
    steps=plain,
)
VIT = ImageKind(
    defaults={
        **SIGLIP.defaults,
        "do_convert_rgb": None,
        "resample": BILINEAR,
        "default_to_square": True,
    },
    more=_MORE,
    steps=plain,
)
BLIP = ImageKind(
    defaults={
        **SIGLIP.defaults,
        "image_mean": CLIP_MEAN,
        "image_std": CLIP_STD,
        "default_to_square": True,
        "size": {"height": 384, "width": 384},
    },
    more=_MORE,
    steps=plain,
)
