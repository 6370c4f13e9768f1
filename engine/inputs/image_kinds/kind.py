"""What an image processor class is, as data: its defaults, its keys, and the function that runs its steps.

Legend: C channels, H height, W width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import image_steps as steps

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from firstlight.engine.inputs.image_constants import ImageConstants
    from firstlight.engine.inputs.pictures import Picture

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
NEAREST, LANCZOS, BILINEAR, BICUBIC = 0, 1, 2, 3
COMMON: Mapping[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
}

# No step may make a picture larger than this; a processor of 384 pixels makes fewer than one of these 64 million.
MAX_STEP_PIXELS = 64_000_000
MAX_TILES = 1024  # of a picture

HEIGHT_WIDTH = frozenset({"height", "width"})
SHORTEST = frozenset({"shortest_edge"})
LONGEST = frozenset({"longest_edge"})
SHORTEST_LONGEST = frozenset({"shortest_edge", "longest_edge"})
WITHIN = frozenset({"max_height", "max_width"})

Tensors: TypeAlias = "Mapping[str, NDArray[np.generic]]"  # in words: numpy is loaded for pictures, not for constants
Steps: TypeAlias = "Callable[[ImageConstants, Sequence[Picture]], Tensors]"
Renamed = Callable[[Mapping[str, Any], Mapping[str, Any]], Iterator[tuple[str, Any, str]]]


class ImageKind(msgspec.Struct, frozen=True, kw_only=True):
    """One image processor class.

    `defaults`: what the class takes for a key that the file leaves out; its keys, with `more`, are all that are read.
    `sizes`: the keys that `size` may have. `steps`: pictures to tensors under the vendor's names. `renamed`: keys that
    stand in the file under another name, as (key, value, where); it is given the file's keys and the defaults.
    `limits`: the largest value of a key, if it is smaller than for other classes.
    `tags`: tensors whose values are those of a dtype numpy lacks. `torchvision`: the class needs it in
    transformers, and resizes as it does.
    """

    defaults: Mapping[str, Any]
    steps: Steps
    more: tuple[str, ...] = ()
    sizes: tuple[frozenset[str], ...] = (HEIGHT_WIDTH, SHORTEST, SHORTEST_LONGEST, WITHIN)
    renamed: Renamed | None = None
    limits: Mapping[str, int] = {}
    tags: Mapping[str, str] = {}
    torchvision: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.defaults, *self.more)


def pixels_of(picture: Picture) -> NDArray[np.uint8]:
    """A picture as an array [C, H, W]."""
    import numpy as np

    return np.asarray(picture.image).transpose(2, 0, 1)


def resized(
    constants: ImageConstants, picture: Picture, image_CHW: NDArray[np.uint8], shape: tuple[int, int], step: str = ""
) -> NDArray[np.uint8]:
    """The picture resized to `shape` (height, width) with the checkpoint's filter; refused beyond the limits."""
    check_shape(picture, step or f"resizing to {constants['size']}", shape)
    if constants.kind.torchvision and shape == (1, 1) != image_CHW.shape[1:]:
        refuse(picture, "scaled to one pixel, which torchvision cannot do", "two pixels or more", "1 x 1 pixel")
    resize = steps.resize_as_torchvision if constants.kind.torchvision else steps.resize
    return resize(image_CHW, shape, constants["resample"])


def finished(constants: ImageConstants, image_CHW: steps.Array) -> steps.Array:
    """Rescaled and normalized, as far as the file asks for it."""
    if constants["do_rescale"]:
        image_CHW = steps.rescale(image_CHW, constants["rescale_factor"])
    if constants["do_normalize"]:
        image_CHW = steps.normalize(image_CHW, constants["image_mean"], constants["image_std"])
    return image_CHW


def finished_at_once(constants: ImageConstants, image_CHW: steps.Array) -> steps.Array:
    """The same as torchvision does it: mean and deviation are scaled instead of the picture."""
    import numpy as np

    if not (constants["do_rescale"] and constants["do_normalize"]):
        return finished(constants, image_CHW)
    factor = np.float32(1.0 / constants["rescale_factor"])
    mean_C = np.array(constants["image_mean"], dtype=np.float32) * factor
    std_C = np.array(constants["image_std"], dtype=np.float32) * factor
    return ((image_CHW.astype(np.float32).T - mean_C) / std_C).T


def height_width(constants: ImageConstants, key: str = "size") -> tuple[int, int]:
    """A size that the kind needs as height and width."""
    return constants[key]["height"], constants[key]["width"]


def check_shape(picture: Picture, step: str, shape: tuple[int, int]) -> None:
    """Refuses (bad-image) a step whose result would have no pixels, or too many."""
    if shape[0] > 0 and shape[1] > 0 and shape[0] * shape[1] <= MAX_STEP_PIXELS:
        return
    width, height = picture.image.size
    raise Refused(
        fatal(
            "bad-image",
            f"the picture is too narrow or small: {step} makes {shape[1]} x {shape[0]} of {width} x {height}",
            file=picture.record.source,
            expected=f"1 to {MAX_STEP_PIXELS} pixels after {step}",
            found=f"{shape[0] * shape[1]} pixels",
            next="crop or scale the picture so that its sides are less unequal",
        )
    )


def check_tiles(picture: Picture, grid: tuple[int, int]) -> None:
    """Refuses (bad-image) a picture that would be cut into more than `MAX_TILES` tiles."""
    if grid[0] * grid[1] > MAX_TILES:
        refuse(picture, "cut into too many tiles", f"at most {MAX_TILES} tiles", f"{grid[0]} rows of {grid[1]}")


def check_aspect(picture: Picture, limit: float) -> None:
    """Refuses (bad-image) a picture whose aspect ratio is beyond the vendor's limit."""
    width, height = picture.image.size
    if max(width, height) / min(width, height) > limit:
        refuse(
            picture,
            f"too long and narrow: {width} x {height}",
            f"sides of at most {limit:g} to 1, the limit of the model's own processor",
            f"{max(width, height) / min(width, height):.1f} to 1",
        )


def refuse(picture: Picture, message: str, expected: str, found: str) -> NoReturn:
    raise Refused(
        fatal(
            "bad-image",
            f"the picture is {message}",
            file=picture.record.source,
            expected=expected,
            found=found,
            next="crop or scale the picture",
        )
    )


def stacked(constants: ImageConstants, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Arrays of one size as one tensor; refused (bad-image) where they differ."""
    import numpy as np

    shapes = {array.shape for array in arrays}
    if len(shapes) > 1:
        raise Refused(
            fatal(
                "bad-image",
                "the pictures have different sizes after resizing, and the model needs one size",
                file=constants.file,
                expected="one size for all pictures of a request",
                found=", ".join(f"{shape[-1]} x {shape[-2]}" for shape in sorted(shapes)),
                next="send pictures of one size, or one at a time",
            )
        )
    return np.ascontiguousarray(np.stack(arrays))
