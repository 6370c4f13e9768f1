"""LLaVA-NeXT: a fixed-size tower over the picture and over tiles of the best resolution, as data. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.engine.model.spec.layer import LayerSpec
from firstlight.engine.model.spec.param import FIRST_STAGE, Param, Scope
from firstlight.engine.model.spec.vision import VisionSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

Size = tuple[int, int]


def best_resolution(height: int, width: int, resolutions: Sequence[Size]) -> Size | None:
    """Of the resolutions (height, width) the one that keeps most pixels of a picture and wastes least; or None."""
    best, most, least = None, 0, math.inf
    for tall, wide in resolutions:
        scale = min(wide / width, tall / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = tall * wide - kept
        if kept > most or (kept == most and wasted < least):
            best, most, least = (tall, wide), kept, wasted
    return best


def cut_away(height: int, width: int, rows: int, columns: int) -> Size:
    """Rows and columns of features that are padding, at each border, where a picture was fitted into a canvas."""
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


class AnyRes(msgspec.Struct, frozen=True, kw_only=True, tag="anyres"):
    """`tower` over tiles; features of the whole picture, then of its canvas row by row, each row ended by a mark.

    `resolutions` are the canvases (height, width), in pixels; tiles have the tower's size. What was padded around the
    picture is left out. Source: llava-vl.github.io, LLaVA-NeXT, as transformers 5.24 has it.
    """

    tower: VisionSpec
    resolutions: tuple[Size, ...]
    text_hidden: int

    @property
    def image_token_id(self) -> int:
        return self.tower.image_token_id

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.tower.layers

    def parameters(self) -> Iterator[Param]:
        yield from self.tower.parameters()
        scope = Scope(prefix="projector.", layer=FIRST_STAGE, hidden=self.text_hidden, vision=True)
        yield scope.param("row_end", self.text_hidden, role="projector")

    def grid(self, height: int, width: int) -> Size:
        """Rows and columns of tiles of a picture of that size; it must have some (`problem`)."""
        best = best_resolution(height, width, self.resolutions)
        assert best is not None
        return best[0] // self.tower.image_size, best[1] // self.tower.image_size

    def problem(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        """(expected, found) where the tensors are not what the tower takes."""
        pixels, sizes, side = tensors.get("pixel_values"), tensors.get("image_sizes"), self.tower.image_size
        expected = f"pixel_values [pictures, tiles, {self.tower.channels}, {side}, {side}]"
        if pixels is None or len(pixels.shape) != 5 or tuple(pixels.shape[2:]) != (self.tower.channels, side, side):
            return expected, "no pixel_values" if pixels is None else f"pixel_values {list(pixels.shape)}"
        if sizes is None or tuple(sizes.shape) != (len(pixels), 2):
            found = "no image_sizes" if sizes is None else f"image_sizes {list(sizes.shape)}"
            return f"image_sizes [{len(pixels)}, 2]", found
        for height, width in ((int(size[0]), int(size[1])) for size in sizes):
            if min(height, width) < 1 or best_resolution(height, width, self.resolutions) is None:
                return "pictures that keep a pixel in one of the resolutions", f"{width} x {height} pixels"
            rows, columns = self.grid(height, width)
            if 1 + rows * columns > pixels.shape[1]:
                return f"{1 + rows * columns} tiles for {width} x {height} pixels", f"{pixels.shape[1]} tiles"
        return None

    def counts(self, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Features of each picture."""
        return tuple(self._count(int(size[0]), int(size[1])) for size in tensors["image_sizes"])

    def _count(self, height: int, width: int) -> int:
        side = self.tower.image_size // self.tower.patch_size
        tiles = self.grid(height, width)
        rows, columns = tiles[0] * side, tiles[1] * side
        above, left = cut_away(height, width, rows, columns)
        return self.tower.tokens_per_image + (rows - 2 * above) * (columns - 2 * left + 1)

    def share(self, tensors: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
        """The tensors of pictures [first, first + count)."""
        return {name: tensor[first : first + count] for name, tensor in tensors.items()}

    def blank(self) -> dict[str, NDArray[Any]]:
        """The tensors of one picture of zeros, as large as the first resolution."""
        import numpy as np

        height, width = self.resolutions[0]
        rows, columns = self.grid(height, width)
        side = self.tower.image_size
        pixels = np.zeros((1, 1 + rows * columns, self.tower.channels, side, side), np.float32)
        return {"pixel_values": pixels, "image_sizes": np.array([[height, width]])}
