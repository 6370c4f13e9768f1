"""Single steps of image processors (resize, crop, rescale, normalize, pad) in Pillow and numpy, exact to transformers.

Legend: C channels, H height, W width. Arrays are CHW, uint8 until they are rescaled or normalized, float32 after.
Source: transformers 5.24, image_transforms.py and image_processing_backends.py (PilBackend).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[np.uint8] | NDArray[np.float32]"
Value = TypeVar("Value", bound="np.generic")


def resized_shape(height: int, width: int, size: Mapping[str, int]) -> tuple[int, int]:
    """Height and width after resizing to `size`: shortest_edge (with longest_edge), max_height and _width, or both."""
    if size.get("shortest_edge") and size.get("longest_edge"):
        return _within(height, width, size["shortest_edge"], size["longest_edge"])
    if size.get("shortest_edge"):
        edge = size["shortest_edge"]
        short, long = (width, height) if width <= height else (height, width)
        new_long = int(edge * long / short)
        return (new_long, edge) if width <= height else (edge, new_long)
    if size.get("max_height") and size.get("max_width"):
        scale = min(size["max_height"] / height, size["max_width"] / width)
        return int(height * scale), int(width * scale)
    return size["height"], size["width"]


def _within(height: int, width: int, edge: int, longest: int) -> tuple[int, int]:
    """The shorter edge brought to `edge`, or to less where the longer one would pass `longest`."""
    short, long = float(min(height, width)), float(max(height, width))
    raw: float = edge
    if long / short * edge > longest:
        raw = longest * short / long
        edge = round(raw)
    if (height <= width and height == edge) or (width <= height and width == edge):
        return height, width
    if width < height:
        return int(raw * height / width), edge
    return edge, int(raw * width / height)


def resize(image_CHW: NDArray[np.uint8], shape: tuple[int, int], resample: int) -> NDArray[np.uint8]:
    """Pillow's resize of an 8-bit picture to `shape` (height, width) with a filter of `PIL.Image.Resampling`."""
    import numpy as np
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(image_CHW.transpose(1, 2, 0)))
    height, width = shape
    return np.asarray(image.resize((width, height), resample=Image.Resampling(resample))).transpose(2, 0, 1)


def resize_as_torchvision(image_CHW: NDArray[np.uint8], shape: tuple[int, int], resample: int) -> NDArray[np.uint8]:
    """torchvision's antialiased resize of an 8-bit picture, for classes that transformers has with torchvision only.

    Bilinear and bicubic as torch does them; the other filters of `PIL.Image.Resampling` are Pillow's.
    """
    mode = {2: "bilinear", 3: "bicubic"}.get(resample)
    if mode is None or shape == image_CHW.shape[1:]:
        return resize(image_CHW, shape, resample)
    import torch

    image_1CHW = torch.from_numpy(image_CHW.copy())[None]
    return torch.nn.functional.interpolate(image_1CHW, shape, mode=mode, align_corners=False, antialias=True)[0].numpy()


def center_crop(image_CHW: NDArray[Value], shape: tuple[int, int]) -> NDArray[Value]:
    """The middle of a picture, in a frame of zeros where it is smaller than `shape` (height, width)."""
    import numpy as np

    (height, width), (crop_height, crop_width) = image_CHW.shape[-2:], shape
    top, left = (height - crop_height) // 2, (width - crop_width) // 2
    if top < 0 or left < 0:
        framed = (max(crop_height, height), max(crop_width, width))
        down, right = math.ceil((framed[0] - height) / 2), math.ceil((framed[1] - width) / 2)
        frame = np.zeros((*image_CHW.shape[:-2], *framed), dtype=image_CHW.dtype)
        frame[..., down : down + height, right : right + width] = image_CHW
        image_CHW, top, left = frame, top + down, left + right
    return image_CHW[..., top : top + crop_height, left : left + crop_width]


def rescale(image_CHW: Array, factor: float) -> NDArray[np.float32]:
    """Values times a factor, multiplied in float64 and rounded to float32."""
    import numpy as np

    return (image_CHW.astype(np.float64) * factor).astype(np.float32)


def normalize(image_CHW: Array, mean: Sequence[float], std: Sequence[float]) -> NDArray[np.float32]:
    """Values less the mean of their channel, divided by its deviation, in float32."""
    import numpy as np

    image = image_CHW.astype(np.float32)
    mean_C, std_C = np.array(mean, dtype=np.float32), np.array(std, dtype=np.float32)
    return ((image.T - mean_C) / std_C).T


def pad_to_square(image_CHW: NDArray[np.uint8], background: Sequence[int]) -> NDArray[np.uint8]:
    """The picture in the middle of a square of its longer edge, on a colour."""
    import numpy as np

    channels, height, width = image_CHW.shape
    if height == width:
        return image_CHW
    edge = max(height, width)
    square = np.empty((channels, edge, edge), dtype=image_CHW.dtype)
    square[:] = np.array(background, dtype=image_CHW.dtype)[:, None, None]
    down, right = (edge - height) // 2, (edge - width) // 2
    square[:, down : down + height, right : right + width] = image_CHW
    return square


def pad_to(image_CHW: NDArray[Any], shape: tuple[int, int]) -> NDArray[Any]:
    """The picture at the upper left of a frame of zeros of `shape` (height, width), which must not be smaller."""
    import numpy as np

    height, width = image_CHW.shape[-2:]
    frame = np.zeros((image_CHW.shape[0], *shape), dtype=image_CHW.dtype)
    frame[:, :height, :width] = image_CHW
    return frame
