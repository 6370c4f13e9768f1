"""Converts pictures to pixel tensors as the checkpoint's own image processor does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from firstlight.engine.inputs.image_constants import ImageConstants, read_constants
from firstlight.engine.inputs.image_kinds.kind import Tensors

if TYPE_CHECKING:
    from firstlight.engine.inputs.pictures import Picture


class ImageProcessor:
    """The image processor of a checkpoint: steps in transformers' order, constants traced to a file.

    Covered: the classes in `image_kinds/registry.py`, each with its Fast and Pil names. The results are those of
    transformers without torchvision, bit for bit; with torchvision, resizing differs by up to 2 8-bit levels for
    bilinear and 9 for bicubic filters on pictures, which is said where the file names a Fast class. Two classes (Llama
    4, Kimi K2.5) exist there with torchvision only, and are resized as it does.
    """

    def __init__(self, constants: ImageConstants) -> None:
        self.constants = constants

    @classmethod
    def open(cls, directory: str | Path, overrides: Mapping[str, Any] | None = None, source: str = "") -> Self:
        """The image processor of a checkpoint directory; raises `Refused`, see `read_constants`."""
        return cls(read_constants(directory, overrides, source))

    def process(self, pictures: Sequence[Picture]) -> Tensors:
        """The tensors of the vendor's image processor under its names, float32 and int64 (uint8 where the file asks for
        neither rescaling nor normalizing); raises `Refused` (bad-image) for a picture no step can bring to a usable
        size. What `constants.kind.tags` names holds the values of a dtype that numpy lacks."""
        return self.constants.kind.steps(self.constants, pictures) if pictures else {}
