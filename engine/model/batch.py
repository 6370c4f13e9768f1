"""The explicit argument of every layer: what one step computes, with no global state.

Shapes: T tokens of all sequences laid end to end, B sequences, H hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from firstlight.engine.model.division import Division
    from firstlight.engine.model.spec import Rope
    from firstlight.engine.parallel.comm import Comms
    from firstlight.kernels.attention.meta import AttentionMeta
    from firstlight.kernels.registry import Choice

Tap = Callable[[str, Tensor], None]
"""Called with a name (`layers.3`, `layers.3.mixer`, `embed`, `norm`) and that block's output [T, H]."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows of the token sequence that a picture fills: features_NH replaces the embeddings of rows [start, start+N).

    Features that are added behind the decoder's first layers lie side by side behind the H columns of the embedding.
    """

    start: int
    features_NH: Tensor


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step over B sequences: prefill chunks and decodes side by side, tokens flattened to T.

    `cache[i]` holds the tensors that layer i keeps, in the order of its `CacheSpec`: paged ones [pages, heads, page,
    dim] each, then states [slots, ...], of which sequence b has row `slots[b]`. A state counts for nothing while its
    sequence has no token in the cache (`attention.kv_lens[b] == attention.query_lens[b]`): blocks begin at zero then.
    `attention` knows lengths, pages and where each token's entry goes. `logit_rows` picks the rows whose logits are
    wanted (None: all). `rope_lens` are the lengths by which stretched rotary positions choose their frequencies (None:
    each sequence's own; transformers takes the width of a padded batch, and comparisons with it must follow, also where
    an indexer chooses among equal scores). `prompt_lens`: tokens behind so many of a sequence choose as if each came
    by itself, as those of answers do (None: rows of scores are as long as `rope_lens` says). `rotary`
    keeps each rotary variant's (cos, sin), [T, dim / 2], once the first layer asked for it. `handed` is what a layer
    leaves for those behind it beside the stream: `inputs`, those of this stage's layers and of all behind it, [T, L,
    P], and `input`, that of the layer that runs; `chosen`, the keys [T, k] that the last indexer chose, and `chosen.i`,
    those that layer i chose; `deep`, picture features that are added behind the first layers. Where a batch has
    pictures and the model makes a difference: `positions_3T` are the frame, row and column of each token,
    `picture_rows` the rows that pictures fill, and `groups` says of each sequence which of its tokens [L] belong to
    one picture (-1: text). `division`: these are one rank's rows of a step that several ranks share.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    attention: AttentionMeta
    cache: tuple[tuple[Tensor, ...], ...]
    comms: Comms
    ops: Choice
    slots: tuple[int, ...]
    logit_rows: Tensor | None = None
    positions_3T: Tensor | None = None
    picture_rows: Tensor | None = None
    groups: tuple[Tensor, ...] | None = None
    embeddings: tuple[Embedding, ...] = ()
    tap: Tap | None = None
    rope_lens: tuple[int, ...] | None = None
    prompt_lens: tuple[int, ...] | None = None
    rotary: dict[Rope, tuple[Tensor, Tensor]] = field(default_factory=dict)
    handed: dict[str, Tensor] = field(default_factory=dict)
    division: Division | None = None
