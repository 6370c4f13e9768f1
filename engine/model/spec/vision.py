"""Vision tower and projector, as data. No torch.

Every kind of tower says of picture tensors under the vendor's names, arrays or torch's, what is wrong with them
(`problem`), how many features each picture gives (`counts`), and which part of them belongs to some of the pictures
(`share`); and it gives the tensors of a small picture for the first image of a start (`blank`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.engine.model.spec.layer import LayerSpec
from firstlight.engine.model.spec.norm import Norm
from firstlight.engine.model.spec.param import FIRST_STAGE, Param, Scope

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Projector(msgspec.Struct, frozen=True, kw_only=True):
    """Linear layers with an activation between them, from vision features, normed or not, to the decoder's width."""

    widths: tuple[int, ...]  # input, (hidden ...), output
    activation: str
    bias: bool
    norm: Norm | None = None

    def parameters(self, scope: Scope) -> Iterator[Param]:
        if self.norm is not None:
            yield from self.norm.parameters(scope.into("norm"), self.widths[0])
        for index, (width_in, width_out) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            yield scope.param(f"{index}.weight", width_out, width_in, role="projector")
            if self.bias:
                yield scope.param(f"{index}.bias", width_out, role="projector")


class VisionSpec(msgspec.Struct, frozen=True, kw_only=True, tag="fixed"):
    """A CLIP- or SigLIP-type tower: patches plus learned positions, encoder layers, chosen features, projector.

    `feature_layers` index hidden states as transformers does (0 is the embedding, negative from the end);
    several are concatenated. `drop_first` removes the class token from the features.
    """

    image_size: int
    patch_size: int
    channels: int
    hidden: int
    layers: tuple[LayerSpec, ...]
    projector: Projector
    image_token_id: int
    patch_bias: bool = False
    class_token: bool = True
    pre_norm: Norm | None = None
    post_norm: Norm | None = None
    feature_layers: tuple[int, ...] = (-1,)
    drop_first: bool = False

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_positions(self) -> int:
        return self.num_patches + (1 if self.class_token else 0)

    @property
    def tokens_per_image(self) -> int:
        return self.num_positions - (1 if self.drop_first else 0)

    def problem(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        """(expected, found) where the tensors are not what the tower takes."""
        pixels, shape = tensors.get("pixel_values"), (self.channels, self.image_size, self.image_size)
        if pixels is not None and tuple(pixels.shape[1:]) == shape:
            return None
        found = "no pixel_values" if pixels is None else f"pixel_values {list(pixels.shape)}"
        return f"pixel_values [pictures, {', '.join(map(str, shape))}]", found

    def counts(self, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Features of each picture."""
        return (self.tokens_per_image,) * len(tensors["pixel_values"])

    def share(self, tensors: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
        """The tensors of pictures [first, first + count)."""
        return {name: tensor[first : first + count] for name, tensor in tensors.items()}

    def blank(self) -> dict[str, NDArray[Any]]:
        """The tensors of one picture of zeros."""
        import numpy as np

        return {"pixel_values": np.zeros((1, self.channels, self.image_size, self.image_size), np.float32)}

    def parameters(self) -> Iterator[Param]:
        scope = Scope(prefix="vision.", layer=FIRST_STAGE, hidden=self.hidden, vision=True)
        yield scope.param(
            "patch_embed.weight", self.hidden, self.channels, self.patch_size, self.patch_size, role="vision"
        )
        if self.patch_bias:
            yield scope.param("patch_embed.bias", self.hidden, role="vision")
        if self.class_token:
            yield scope.param("class_embed", self.hidden, role="vision")
        yield scope.param("position_embed.weight", self.num_positions, self.hidden, role="vision")
        for name, norm in (("pre_norm", self.pre_norm), ("post_norm", self.post_norm)):
            if norm is not None:
                yield from norm.parameters(scope.into(name), self.hidden)
        for index, layer in enumerate(self.layers):
            yield from layer.parameters(scope.into(f"layers.{index}"))
        yield from self.projector.parameters(msgspec.structs.replace(scope, prefix="projector."))


def pictures_of_rows(counts: Sequence[int], placeholders: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(first picture, how many) of each row, by the features of each picture and the placeholder tokens of each row.

    Pictures are in the order of their placeholders; a row takes pictures until its placeholders are filled.
    """
    rows, used = [], 0
    for wanted in placeholders:
        first = used
        while wanted > 0 and used < len(counts):
            wanted -= counts[used]
            used += 1
        rows.append((first, used - first))
    return tuple(rows)
