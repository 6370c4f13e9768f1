"""Models of unknown architecture, run by the reference's own modules: the interface that the engine needs of them.

Who provides such models registers with `FAMILIES.fall_back`, or is named by `EngineOptions.fallback`. They run on one
rank and one device, and everything that shows them says so. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from firstlight.engine.model.spec import CacheSpec, LayerSpec, ModelSpec, Norm, Param

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from firstlight.engine.inputs.pictures import Picture
    from firstlight.engine.model.batch import ForwardBatch
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.engine.weights.ledger import Ledger
    from firstlight.engine.weights.loader import Weights


class ForeignSpec(ModelSpec, frozen=True, kw_only=True):
    """What is known of a foreign model from its configuration; sizes come from the checkpoint alone.

    `by` names who computes, with its version.
    """

    by: str

    def parameters(self, share: tuple[int, int] = (0, 1)) -> tuple[Param, ...]:
        """Empty: the provider's modules hold their own parameters."""
        return ()

    def hidden_width(self, index: int) -> int:
        """0: not known, there may be several streams."""
        return 0


def foreign_spec(by: str, model_type: str, **fields: Any) -> ForeignSpec:
    """The spec of a foreign model with `num_layers` layers; `fields` are those of `ModelSpec`."""
    layers = (LayerSpec(),) * fields.pop("num_layers")
    return ForeignSpec(by=by, family=f"fallback: {model_type}", layers=layers, final_norm=Norm(), **fields)


class ForeignModel(Protocol):
    """A foreign model on this rank: what `Model` offers to the engine, and what only it can do."""

    spec: ForeignSpec
    ledger: Ledger
    weights: Weights
    layer_range: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    is_first: bool
    is_last: bool
    cache_specs: tuple[CacheSpec, ...]

    def admit(self, slot: int, images: Mapping[str, Tensor]) -> None:
        """Starts a sequence in `slot`, with these picture tensors."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Logits [R, vocabulary] float32 for the rows asked for."""

    def trace(
        self,
        inputs: Mapping[str, NDArray[Any]],
        given: Mapping[str, NDArray[Any]],
        steps: int,
    ) -> dict[str, NDArray[Any]]:
        """A golden file's inputs -> its outputs, padded; `given`: each layer alone on those hidden states."""

    def prepare(
        self, prompt: str | Sequence[Mapping[str, Any]], pictures: Sequence[Picture], chat: bool
    ) -> tuple[list[int], dict[str, NDArray[Any]]]:
        """Token ids and picture tensors of a prompt with pictures, by the vendor's own processor."""


class Foreign(Protocol):
    """A provider of foreign models; `always`: also for architectures that have a family here."""

    always: bool

    def describe(self, raw: Mapping[str, Any]) -> ForeignSpec | None:
        """The spec of a raw config.json, None if this does not know the architecture either."""

    def load(self, checkpoint: Checkpoint, spec: ForeignSpec, dtype: str, device: torch.device) -> ForeignModel:
        """The model, with a complete account of its tensors; raises `Refused` where it is not complete."""


def provider_of(name: str, checkpoint: str, trust_remote_code: bool) -> Foreign:
    """The provider that `package.module:function` makes for a checkpoint."""
    module, _, function = name.partition(":")
    made: Foreign = getattr(import_module(module), function)(checkpoint, trust_remote_code)
    return made
