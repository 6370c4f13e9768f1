"""Pictures to pixel tensors, by the steps and constants of the checkpoint's own image processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import image_steps as steps
from firstlight.engine.inputs.image_constants import ImageConstants, read_constants

if TYPE_CHECKING:
    from firstlight.engine.inputs.pictures import Picture

# No step may make a picture larger than this; a processor of 384 pixels makes fewer than one of these 64 million.
MAX_STEP_PIXELS = 64_000_000


class ImageProcessor:
    """The image processor of a checkpoint: steps in transformers' order, constants traced to a file.

    Covered: the classes in `image_constants.CLASS_DEFAULTS`, each with its Fast and Pil names. The results are those of
    transformers without torchvision, bit for bit; with torchvision, resizing differs by up to a few 8-bit levels.
    """

    def __init__(self, constants: ImageConstants) -> None:
        self.constants = constants

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """The image processor of a checkpoint directory; raises `Refused`, see `read_constants`."""
        return cls(read_constants(directory))

    def process(self, pictures: Sequence[Picture]) -> dict[str, NDArray[np.generic]]:
        """`pixel_values` [pictures, 3, height, width], float32 (uint8 where the file asks for neither rescaling nor
        normalizing); raises `Refused` (bad-image) for a picture no step can bring to a usable size."""
        if not pictures:
            return {}
        arrays = [self._one(picture) for picture in pictures]
        # CLIP's kind pads last, after normalizing; LLaVA's pads to a square first.
        if self.constants["do_pad"] and self.constants.class_name != "LlavaImageProcessor":
            arrays = self._padded(pictures, arrays)
        shapes = {array.shape for array in arrays}
        if len(shapes) > 1:
            raise Refused(
                fatal(
                    "bad-image",
                    "the pictures do not come to one size, as the model needs",
                    file=self.constants.file,
                    expected="one size for all pictures of a request",
                    found=", ".join(f"{shape[2]} x {shape[1]}" for shape in sorted(shapes)),
                    next="send pictures of one size, or one at a time",
                )
            )
        return {"pixel_values": np.ascontiguousarray(np.stack(arrays))}

    def _one(self, picture: Picture) -> steps.Array:
        constants = self.constants
        image: NDArray[np.uint8] = np.asarray(picture.image).transpose(2, 0, 1)
        if constants["do_pad"] and constants.class_name == "LlavaImageProcessor":
            self._check_shape(picture, "padding to a square", (max(image.shape[1:]),) * 2)
            background = tuple(int(mean * 255) for mean in constants["image_mean"] or (0.0, 0.0, 0.0))
            image = steps.pad_to_square(image, background)
        if constants["do_resize"]:
            shape = steps.resized_shape(image.shape[1], image.shape[2], constants["size"])
            self._check_shape(picture, f"resizing to {constants['size']}", shape)
            image = steps.resize(image, shape, constants["resample"])
        array: steps.Array = image
        if constants["do_center_crop"]:
            array = steps.center_crop(array, (constants["crop_size"]["height"], constants["crop_size"]["width"]))
        if constants["do_rescale"]:
            array = steps.rescale(array, constants["rescale_factor"])
        if constants["do_normalize"]:
            array = steps.normalize(array, constants["image_mean"], constants["image_std"])
        return array

    def _padded(self, pictures: Sequence[Picture], arrays: list[steps.Array]) -> list[steps.Array]:
        size = self.constants["pad_size"]
        largest = tuple(max(array.shape[axis] for array in arrays) for axis in (1, 2))
        shape = (size["height"], size["width"]) if size else (largest[0], largest[1])
        for picture, array in zip(pictures, arrays, strict=True):
            if array.shape[1] > shape[0] or array.shape[2] > shape[1]:
                _refuse(picture, "larger than the frame it is padded to", shape, (array.shape[1], array.shape[2]))
        return [steps.pad_to(array, shape) for array in arrays]

    def _check_shape(self, picture: Picture, step: str, shape: tuple[int, int]) -> None:
        if not 0 < shape[0] * shape[1] <= MAX_STEP_PIXELS:
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


def _refuse(picture: Picture, message: str, expected: tuple[int, int], found: tuple[int, int]) -> NoReturn:
    raise Refused(
        fatal(
            "bad-image",
            f"the picture is {message}",
            file=picture.record.source,
            expected=f"at most {expected[1]} x {expected[0]}",
            found=f"{found[1]} x {found[0]}",
        )
    )
