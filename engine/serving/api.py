"""What an engine can be asked, wherever it runs: `Engine` in this process and `EngineClient` over HTTP offer it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np

from firstlight.engine.findings import Finding
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.health import Beat, Failure, StageRecord, Status
from firstlight.engine.serving.profile_data import RankProfile
from firstlight.engine.serving.request import Completion, Delta, SamplingParams
from firstlight.engine.weights.ledger import Ledger

if TYPE_CHECKING:
    from firstlight.engine.inputs.pictures import Picture

Message = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]
PictureSource: TypeAlias = "bytes | str | Path | Picture"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is: `status` ready means that it answers. `failure` names the rank and phase at fault."""

    status: Status
    stage: str
    stages: tuple[StageRecord, ...] = ()
    done: float = 0.0
    total: float = 0.0
    failure: Failure | None = None
    ranks: tuple[Beat, ...] = ()
    running: int = 0
    waiting: int = 0

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What runs: checkpoint, mesh, device, sizes, chosen operators with the reasons, and findings of the start."""

    model: str
    checkpoint: str
    family: str
    mesh: Mesh
    device: str
    dtype: str
    max_context: int
    max_batch: int
    page_size: int
    num_pages: int
    vocab_size: int
    num_layers: int
    hidden: int
    sees: bool
    operators: tuple[tuple[str, str, bool, str], ...] = ()
    findings: tuple[Finding, ...] = ()
    load_s: float = 0.0
    load_bytes: int = 0


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one rank; `resident_bytes` is the process's, with everything that is not in a pool.

    `pools`: how each is backed, empty unless asked for: the system walks over every page to say so.

    `residency`: what of the weights came and went (`ResidencyReport`), None where all of them are in memory.

    `allocated_bytes` and `reserved_bytes` are torch's own account of a GPU's memory; None on CPUs, which have none.
    """

    rank: int
    device: str
    bytes_by_role: dict[str, int]
    pools: tuple[dict[str, Any], ...] = ()
    resident_bytes: int
    pages: int
    page_size: int
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    residency: dict[str, Any] | None = None


class EngineLike(Protocol):
    """The methods that rungs, notebooks and the dashboard use."""

    def info(self) -> EngineInfo: ...

    def generate(
        self,
        prompt: Prompt,
        pictures: Sequence[PictureSource] = (),
        params: SamplingParams | None = None,
        chat: bool = True,
    ) -> Iterator[Delta]:
        """Continue a prompt: a text (one user turn with the pictures first if `chat`, else as it is), token ids, or
        messages. Errors a user can cause raise `Refused` before the first delta; the last delta carries `finish`."""
        ...

    def complete(
        self,
        prompt: Prompt,
        pictures: Sequence[PictureSource] = (),
        params: SamplingParams | None = None,
        chat: bool = True,
    ) -> Completion:
        """`generate`, collected."""
        ...

    def trace(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        layers: tuple[int, int] | None = None,
        inputs: Mapping[str, np.ndarray] | None = None,
        steps: int = 0,
        blocks: bool = False,
    ) -> dict[str, np.ndarray]:
        """Run a padded batch [B, T] and return hidden.0 ... hidden.L, logits and image_features, float32.

        `inputs` maps hidden.i to the given input of layer i: each layer runs alone on it (teacher forcing), and
        hidden.L gives logits. `layers` [first, last) limits what comes back; (0, 0): the decoder's input hidden.0, for
        which no layer runs. `steps`: also `generated` [B, steps] int64, the greedy continuation as it is served, with
        `generated.likeliest` and `generated.logprobs` [B, steps, K]: the likeliest tokens of each step. `blocks`: also
        `layers.i.mixer`. Zeros at padding.
        """
        ...

    def ledger(self) -> Ledger: ...

    def memory(self, pools: bool = False) -> tuple[RankMemory, ...]: ...

    def profile(self, prompt_tokens: int = 128, decode_steps: int = 8, batch: int = 1) -> tuple[RankProfile, ...]: ...

    def health(self) -> Health: ...

    def drain(self) -> None:
        """Take no new requests and return when the running ones are done."""
        ...

    def close(self) -> None:
        """Stop; every later call is refused."""
        ...
