"""A vision transformer over patches of pictures, or of their tiles, of any size, as data. No torch.

One tower covers what released models do: how pictures come in, which positions their patches have, what attends to
what, which states become features, and the chain of steps to the decoder. See `vision.py` for the older fixed tower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from firstlight.engine.model.spec.chain import Chain
from firstlight.engine.model.spec.layer import LayerSpec
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import FIRST_STAGE, Param, Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray

Shape = tuple[int, int, int]  # frames, rows, columns, in patches


class AxialRope(msgspec.Struct, frozen=True, kw_only=True):
    """Queries and keys turn by row and column.

    `halves`: the pairs of a head are (i, i + half); the first half of the pairs turns by the row, the second by the
    column, with the same frequencies, or, `split`, with every other one. `pairs`: neighbouring dims are a pair, columns
    come first and both count from one; a class token does not turn (Llama 4). With `frames` a third of the pairs each,
    from the first on and rounded down, turns by frame, row and column, with the same frequencies; what is left of a
    head stands still (MiniMax-M3).
    """

    theta: float
    layout: Literal["halves", "pairs"] = "halves"
    split: bool = False
    frames: bool = False


class GridPositions(msgspec.Struct, frozen=True, kw_only=True):
    """Learned positions for a square grid of `side` patches, brought to each picture's own grid.

    `linear` and `cubic` interpolate, between corners or, `centres`, between the centres of patches; `nearest` takes the
    position at the same fraction of the side; `exact` asks for pictures of that very grid.
    """

    side: int
    how: Literal["linear", "cubic", "nearest", "exact"]
    centres: bool = True


class DeepFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """Features of a middle layer's output, added behind one of the decoder's first layers (arXiv 2406.04334)."""

    layer: int
    chain: Chain


class PatchTower(msgspec.Struct, frozen=True, kw_only=True, tag="patches"):
    """Patches -> layers -> chosen states -> chain.

    `inputs`, how pictures come: `flat` pixel_values [patches, C T Y X] in kernel order with image_grid_thw; `sized`
    [pictures, C, Y, X] of which image_sizes is picture; `tiles` [tiles, C, Y, X]; `masked` [rows, tiles, C, Y, X] with
    pixel_attention_mask, where a tile of zeros is none. `weight_dims`: the dims of the stored patch embedding, 5 with
    frames, 4 as a convolution, 2 as a linear layer. `batched`: class token and positions are stored with a leading 1.
    `window`: the side in kernels of the windows in which the layers not in `whole_layers` attend. `states` index hidden
    states as transformers does; several lie side by side; `norm` goes over the last. `layer_scale`: what a layer's
    blocks add is multiplied by a weight per channel. `mrope`: features have positions of their own in the decoder.
    """

    inputs: Literal["flat", "sized", "tiles", "masked"]
    patch_size: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    chain: Chain
    image_token_id: int
    channels: int = 3
    frames: int = 1
    kernel: int = 1
    weight_dims: Literal[2, 4, 5] = 4
    patch_bias: bool = False
    batched: bool = False
    embed_norm: Norm | None = None
    class_token: Literal["first", "last"] | None = None
    positions: GridPositions | None = None
    pre_norm: Norm | None = None
    rope: AxialRope | None = None
    window: int | None = None
    whole_layers: tuple[int, ...] = ()
    layer_scale: bool = False
    norm: Norm | None = None
    states: tuple[int, ...] = (-1,)
    keep_class: bool = False
    deep: tuple[DeepFeatures, ...] = ()
    mrope: bool = False
    image_size: int | None = None

    def parameters(self) -> Iterator[Param]:
        scope = Scope(prefix="vision.", layer=FIRST_STAGE, hidden=self.hidden, vision=True)
        size, lead = self.patch_size, (1,) if self.batched else ()
        elements = self.channels * self.frames * size**2
        shape = {2: (elements,), 4: (self.channels, size, size), 5: (self.channels, self.frames, size, size)}
        yield scope.param("patch_embed.weight", self.hidden, *shape[self.weight_dims], role="vision")
        if self.patch_bias:
            yield scope.param("patch_embed.bias", self.hidden, role="vision")
        if self.class_token is not None:
            yield scope.param("class_embed", *lead, *lead, self.hidden, role="vision")
        if self.positions is not None:
            count = self.positions.side**2 + (self.class_token is not None)
            yield scope.param("position_embed.weight", *lead, count, self.hidden, role="vision")
        for name, norm in (("embed_norm", self.embed_norm), ("pre_norm", self.pre_norm), ("norm", self.norm)):
            if norm is not None:
                yield from norm.parameters(scope.into(name), self.hidden)
        for index, layer in enumerate(self.layers):
            inner = scope.into(f"layers.{index}")
            yield from layer.parameters(inner)
            for name in ("mixer_scale", "ffn_scale") if self.layer_scale else ():
                yield inner.param(name, self.hidden, role="vision")
        projector = msgspec.structs.replace(scope, prefix="projector.")
        yield from self.chain.parameters(projector)
        for index, deep in enumerate(self.deep):
            yield from deep.chain.parameters(projector.into(f"deep.{index}"))

    def problem(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        """(expected, found) where the tensors are not what the tower takes."""
        pixels = tensors.get("pixel_values")
        wanted = self._pixels()
        if pixels is None or len(pixels.shape) != len(wanted):
            return _shape_of(wanted), "no pixel_values" if pixels is None else f"pixel_values {list(pixels.shape)}"
        if any(isinstance(size, int) and size != found for size, found in zip(wanted, pixels.shape, strict=True)):
            return _shape_of(wanted), f"pixel_values {list(pixels.shape)}"
        needed = {"flat": "image_grid_thw", "sized": "image_sizes"}.get(self.inputs)
        if needed is not None and (needed not in tensors or len(tensors[needed].shape) != 2):
            return f"{needed} [pictures, {3 if self.inputs == 'flat' else 2}]", "no such tensor"
        shapes = self.shapes(tensors)
        for frames, rows, columns in shapes:
            if min(frames, rows, columns) < 1 or rows % self.kernel or columns % self.kernel:
                return f"rows and columns in steps of {self.kernel} patches", f"{rows} x {columns} patches"
        patches = sum(frames * rows * columns for frames, rows, columns in shapes)
        if self.inputs == "flat" and patches != len(pixels):
            return f"image_grid_thw of {len(pixels)} patches", f"grids of {patches} patches"
        return None

    def _pixels(self) -> tuple[int | str, ...]:
        size: tuple[int | str, ...] = (self.channels, self.image_size or "rows", self.image_size or "columns")
        return {
            "flat": ("patches", self.channels * self.frames * self.patch_size**2),
            "sized": ("pictures", self.channels, "rows", "columns"),
            "tiles": ("tiles", *size),
            "masked": ("rows", "tiles", *size),
        }[self.inputs]

    def shapes(self, tensors: Mapping[str, Any]) -> list[Shape]:
        """(frames, rows, columns) of each picture or tile, in patches."""
        if self.inputs == "flat":
            return [(int(row[0]), int(row[1]), int(row[2])) for row in tensors["image_grid_thw"]]
        size = self.patch_size
        if self.inputs == "sized":
            return [(1, int(row[0]) // size, int(row[1]) // size) for row in tensors["image_sizes"]]
        pixels = tensors["pixel_values"]
        count = len(pixels) if self.inputs == "tiles" else len(self.real_tiles(tensors))
        return [(1, pixels.shape[-2] // size, pixels.shape[-1] // size)] * count

    def real_tiles(self, tensors: Mapping[str, Any]) -> list[tuple[int, int]]:
        """(row, tile) of the tiles of `masked` inputs that hold a picture: those that are not zero throughout."""
        flat = tensors["pixel_values"].reshape(*tensors["pixel_values"].shape[:2], -1)
        return [
            (row, tile) for row, tiles in enumerate(flat) for tile, one in enumerate(tiles) if bool((one != 0).any())
        ]

    def counts(self, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Features of each picture or tile."""
        return tuple(frames * rows * columns // self.chain.merged for frames, rows, columns in self.shapes(tensors))

    def grids(self, tensors: Mapping[str, Any]) -> tuple[Shape, ...]:
        """(frames, rows, columns) of each picture in features, for positions in the decoder; empty without `mrope`."""
        if not self.mrope:
            return ()
        return tuple(
            (frames, rows // self.kernel, columns // self.kernel) for frames, rows, columns in self.shapes(tensors)
        )

    def share(self, tensors: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
        """The tensors of pictures or tiles [first, first + count)."""
        if self.inputs == "masked":
            chosen = self.real_tiles(tensors)[first : first + count]
            return {name: _stacked([value[row][tile] for row, tile in chosen]) for name, value in tensors.items()}
        if self.inputs != "flat":
            return {name: value[first : first + count] for name, value in tensors.items()}
        patches = [frames * rows * columns for frames, rows, columns in self.shapes(tensors)]
        start, stop = sum(patches[:first]), sum(patches[: first + count])
        return {
            "pixel_values": tensors["pixel_values"][start:stop],
            "image_grid_thw": tensors["image_grid_thw"][first : first + count],
        }

    def blank(self) -> dict[str, NDArray[Any]]:
        """The tensors of one small picture; where zeros would be none, of ones."""
        import numpy as np

        rows, columns = 2 * self.kernel, 3 * self.kernel
        size = self.patch_size
        if self.inputs == "flat":
            pixels = np.zeros((rows * columns, self.channels * self.frames * size**2), np.float32)
            return {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]])}
        high, wide = self.image_size or rows * size, self.image_size or columns * size
        if self.image_size is None and self.inputs != "sized" and self.positions is not None:
            high = wide = self.positions.side * size  # tiles are square wherever they come from
        if self.inputs == "sized":
            pixels = np.zeros((1, self.channels, high, wide), np.float32)
            return {"pixel_values": pixels, "image_sizes": np.array([[high, wide]])}
        if self.inputs == "tiles":
            return {"pixel_values": np.zeros((1, self.channels, high, wide), np.float32)}
        mask = np.ones((1, 1, high, wide), np.int64)
        return {"pixel_values": np.ones((1, 1, self.channels, high, wide), np.float32), "pixel_attention_mask": mask}


def _shape_of(sizes: Sequence[int | str]) -> str:
    return f"pixel_values [{', '.join(map(str, sizes))}]"


def _stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Tiles [1, tiles, ...]."""
    import numpy as np

    return np.stack(list(parts))[None]
