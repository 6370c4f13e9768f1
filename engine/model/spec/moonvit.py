"""MoonViT: a tower for pictures of any size, and the projector behind it, as data. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from firstlight.engine.model.spec.layer import LayerSpec
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import FIRST_STAGE, Param, Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRIDS = ("grid_thws", "image_grid_thw", "image_grid_hws")  # names of grids: [frames, rows, columns], or rows, columns


class MergedProjector(msgspec.Struct, frozen=True, kw_only=True):
    """Two linear layers over the patches of a kernel side by side; `pre_norm` of each patch, `post_norm` behind."""

    widths: tuple[int, int, int]  # of the patches of a kernel together, hidden, output
    activation: str
    bias: bool
    pre_norm: Norm | None = None
    post_norm: Norm | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        for name, norm, width in (
            ("pre_norm", self.pre_norm, scope.hidden),
            ("post_norm", self.post_norm, self.widths[-1]),
        ):
            for param in norm.parameters(scope.into(name), width) if norm is not None else ():
                yield msgspec.structs.replace(param, role="projector")
        for index, (width_in, width_out) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            yield scope.param(f"{index}.weight", width_out, width_in, role="projector")
            if self.bias:
                yield scope.param(f"{index}.bias", width_out, role="projector")


class MoonViT(msgspec.Struct, frozen=True, kw_only=True, tag="moonvit"):
    """Patches of pictures of any size in one batch (Kimi-VL, arXiv 2504.07491; Kimi K2.5 and K3).

    Positions are learned for a `grid` of (rows, columns) and stretched to each picture's; with `read_square` its
    entries are taken in order as a square with as many rows, whatever its columns are. Positions also rotate queries
    and keys by column and row. Pictures of several frames, at most `frames`, have a sine of the frame's number added.
    Behind the last norm frames are averaged and the patches of each `merge` kernel go through the projector side by
    side.
    """

    patch_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    grid: tuple[int, int]
    frames: int
    interpolation: Literal["bilinear", "bicubic"]
    rope_theta: float
    norm: Norm
    merge: tuple[int, int]
    projector: MergedProjector
    image_token_id: int
    channels: int = 3
    patch_bias: bool = False
    read_square: bool = False

    def parameters(self) -> Iterator[Param]:
        scope = Scope(prefix="vision.", layer=FIRST_STAGE, hidden=self.hidden, vision=True)
        patch = (self.channels, self.patch_size, self.patch_size)
        yield scope.param("patch_embed.weight", self.hidden, *patch, role="vision")
        if self.patch_bias:
            yield scope.param("patch_embed.bias", self.hidden, role="vision")
        yield scope.param("position_embed.weight", *self.grid, self.hidden, role="vision")
        for index, layer in enumerate(self.layers):
            yield from layer.parameters(scope.into(f"layers.{index}"))
        yield from self.norm.parameters(scope.into("norm"), self.hidden)
        yield from self.projector.parameters(msgspec.structs.replace(scope, prefix="projector."))

    def shapes(self, tensors: Mapping[str, Any]) -> list[tuple[int, int, int]]:
        """(frames, rows, columns) of each picture, from the grids among the picture tensors; empty without grids."""
        grids = next((tensors[name] for name in GRIDS if name in tensors), ())
        rows = [[int(size) for size in row] for row in grids]
        return [(1, row[0], row[1]) if len(row) == 2 else (row[0], row[1], row[2]) for row in rows]

    def problem(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        """(expected, found) where the tensors are not what the tower takes."""
        pixels, shapes = tensors.get("pixel_values"), self.shapes(tensors)
        size = (self.channels, self.patch_size, self.patch_size)
        if pixels is None or tuple(pixels.shape[1:]) != size:
            found = "no pixel_values" if pixels is None else f"pixel_values {list(pixels.shape)}"
            return f"pixel_values [patches, {', '.join(map(str, size))}]", found
        down, across = self.merge
        for frames, rows, columns in shapes:
            if not (0 < frames <= self.frames and rows > 0 < columns and rows % down == 0 == columns % across):
                expected = f"at most {self.frames} frames, rows in steps of {down}, columns in steps of {across}"
                return expected, f"{frames} frames of {rows} x {columns} patches"
        patches = sum(frames * rows * columns for frames, rows, columns in shapes)
        if patches != len(pixels):
            return f"grids ({' or '.join(GRIDS)}) of {len(pixels)} patches", f"grids of {patches} patches"
        return None

    def counts(self, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Features of each picture."""
        kernel = self.merge[0] * self.merge[1]
        return tuple(rows * columns // kernel for _, rows, columns in self.shapes(tensors))

    def share(self, tensors: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
        """The tensors of pictures [first, first + count)."""
        patches = [frames * rows * columns for frames, rows, columns in self.shapes(tensors)]
        start, stop = sum(patches[:first]), sum(patches[: first + count])
        bounds = {name: (first, first + count) if name in GRIDS else (start, stop) for name in tensors}
        return {name: tensor[slice(*bounds[name])] for name, tensor in tensors.items()}

    def blank(self) -> dict[str, NDArray[Any]]:
        """The tensors of one picture of zeros, two kernels high and three wide."""
        import numpy as np

        rows, columns = 2 * self.merge[0], 3 * self.merge[1]
        patch = (self.channels, self.patch_size, self.patch_size)
        pixels = np.zeros((rows * columns, *patch), np.float32)
        return {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]])}
