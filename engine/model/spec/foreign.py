"""The vision part of a model of unknown architecture, of which only the image token is known. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.engine.model.spec.layer import LayerSpec
from firstlight.engine.model.spec.param import Param

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ForeignVision(msgspec.Struct, frozen=True, kw_only=True, tag="foreign"):
    """Pictures whose tensors and features are the foreign model's own affair: all of a prompt's go in together."""

    image_token_id: int
    layers: tuple[LayerSpec, ...] = ()

    def problem(self, tensors: Mapping[str, Any]) -> tuple[str, str] | None:
        """The model itself says what it does not take."""
        return None

    def counts(self, tensors: Mapping[str, Any]) -> tuple[int, ...]:
        """Not known before the model has run."""
        return ()

    def share(self, tensors: Mapping[str, Any], first: int, count: int) -> dict[str, Any]:
        """All of them: which part belongs to which picture is not known."""
        return dict(tensors)

    def blank(self) -> dict[str, NDArray[Any]]:
        """None: what a picture becomes is not known."""
        return {}

    def parameters(self) -> tuple[Param, ...]:
        return ()
