"""One rank of many on this machine: its share of a release of any size, some of its layers built, read and run.

The other ranks are not there: torch's fake process group stands in for them, so that what is summed over ranks is this
rank's part alone. Which experts a token would choose depends on those ranks as well; here tokens are spread over all
experts evenly, so that this rank's have their share of the work. Shapes, bytes, memory and time are the rank's own; the
numbers that come out mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.constraints import refuse_impossible
from firstlight.engine.parallel.kept import Wish
from firstlight.engine.parallel.mesh import HEADS, Mesh
from firstlight.engine.parallel.pieces import Piece, RankPieces, rank_pieces
from firstlight.engine.room import available_bytes
from firstlight.engine.settings import read_settings
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import DTYPE_BITS
from firstlight.engine.weights.ledger import account
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.resident import kept_here

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from firstlight.engine.model.batch import ForwardBatch
    from firstlight.engine.model.layers.layer import Layer
    from firstlight.engine.parallel.comm import Comms
    from firstlight.kernels.registry import Choice
    from firstlight.kernels.signatures import RouterTopk

TOKENS = 8  # of the one forward


def one_rank(
    source: str | Path,
    mesh: Mesh,
    rank: int,
    layers: tuple[int, int] | None = None,
    *,
    forward: bool = False,
    dtype: str = "auto",
    threads: int | None = None,
    packed: Wish = "auto",
    progress: Progress | None = None,
) -> Report:
    """The share of `rank` in `mesh`: all of it accounted for, its `layers` [first, last) read and, if asked, run.

    `layers` None: the first of its stage. Raises `Refused`: usage for a rank or layers that are not there, does-not-fit
    where the chosen layers are larger than the memory that is free, and what an unsound checkpoint deserves.
    """
    if not 0 <= rank < mesh.world_size:
        raise _usage(f"there is no rank {rank} in {mesh.describe()}", f"0 to {mesh.world_size - 1}", str(rank))
    began_s = time.perf_counter()
    checkpoint = Checkpoint.open(str(source))
    checkpoint.refuse_if_broken()
    spec, matcher = FAMILIES.describe(checkpoint.config)
    assert isinstance(spec, ModelSpec), "a model of others has no ranks"
    refuse_impossible(spec, mesh)
    progress = progress or Progress()
    progress("account")
    ledger = account(checkpoint, spec, matcher)
    ledger.refuse_if_incomplete()
    draft = Draft("load", f"{checkpoint.name}, rank {rank} of {mesh.world_size}, {mesh.describe()}", began_s)
    draft.find((*checkpoint.findings, *spec.findings, *ledger.findings))
    run_dtype = spec.dtype if dtype == "auto" else dtype
    keep = kept_here(spec, mesh, (rank,), run_dtype, ledger, packed, "cpu")
    share = rank_pieces(spec, mesh, rank, run_dtype, ledger, keep_packed=keep.roles, kinds=keep.kinds)
    start, stop = layers or (share.layers[0], share.layers[0] + 1)
    _refuse_elsewhere(spec, share, start, stop)
    chosen = _only(share, start, stop)
    _refuse_too_large(chosen)
    progress("read weights")
    part = _Part(checkpoint, spec, mesh, chosen, (start, stop), threads)
    try:
        _bytes(draft, checkpoint, share, chosen, part)
        seconds = part.run() if forward else {}
        if forward:
            draft.check("the forward of the layers is finite, and of their shapes", part.is_sound, detail=part.said)
            draft.metric("forward_s", sum(seconds.values()), "s", f"{TOKENS} tokens, the other ranks left out")
        _tables(draft, spec, share, chosen, part, seconds)
    finally:
        part.close()
    return draft.close()


class _Part:
    """Some layers of a rank, their weights in memory, beside a group of ranks that are not there."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        mesh: Mesh,
        chosen: RankPieces,
        layers: tuple[int, int],
        threads: int | None,
    ) -> None:
        from firstlight.engine.weights.loader import load

        self.spec, self.layers, self.pieces = spec, layers, chosen
        self.weights = load(checkpoint, chosen, "cpu", threads)
        self.is_sound, self.said = False, ""
        self.rows_of_experts = [0, 0]  # of this rank, of all
        self._mesh = mesh
        self._comms: Comms | None = None

    def run(self) -> dict[int, float]:
        """One forward of each layer, on what the one before it gave; seconds by layer."""
        import torch

        from firstlight.engine.model.layers.access import Access
        from firstlight.engine.model.layers.layer import Layer
        from firstlight.engine.weights.loader import TORCH_DTYPES
        from firstlight.kernels.registry import choose

        dtype = TORCH_DTYPES[self.pieces.dtype]
        cache = read_settings().cache_dir
        ops = choose("cpu", dtype, {}, force={"linear": "reference"}, cache_dir=cache)  # others keep copies of weights
        if any(name.endswith("experts.down") for name in self.weights.storages):
            ops = replace(ops, router_topk=self._evenly(ops.router_topk))
        access = Access(self.weights.storages, ops, packings=self.weights.pieces.packings)
        built = [Layer(self.spec.layers[i], access.into(f"layers.{i}"), i) for i in range(*self.layers)]
        shape = (TOKENS, *self.spec.stream_shape(self.layers[0]))
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        batch = self._batch(ops, dtype)
        seconds: dict[int, float] = {}
        with torch.inference_mode():
            for index, layer in zip(range(*self.layers), built, strict=True):
                started_s = time.perf_counter()
                x = self._through(layer, x, batch, index)
                seconds[index] = time.perf_counter() - started_s
        expected = (TOKENS, *self.spec.stream_shape(self.layers[1]))
        self.is_sound = bool(torch.isfinite(x).all()) and tuple(x.shape) == expected
        size = float(x.float().square().mean().sqrt())
        self.said = f"{list(x.shape)} behind layer {self.layers[1] - 1}, root mean square {size:.3g}"
        if self.rows_of_experts[1]:
            own, rows = self.rows_of_experts
            self.said += f"; {own:,} of {rows:,} rows went to this rank's experts, spread evenly"
        return seconds

    def _evenly(self, router_topk: RouterTopk) -> RouterTopk:
        """The router's weights, for experts one as often as the other; counts those of this rank among them."""
        import torch

        held = next(len(one) for name, one in self.weights.storages.items() if name.endswith("experts.down"))

        def spread(
            logits_TE: Tensor, correction_bias_E: Tensor | None, top_k: int, *options: Any, **named: Any
        ) -> tuple[Tensor, Tensor]:
            weights_Tk, ids_Tk = router_topk(logits_TE, correction_bias_E, top_k, *options, **named)
            tokens, chosen = ids_Tk.shape
            place_Tk = torch.arange(tokens).unsqueeze(1) + tokens * torch.arange(chosen)
            spread_Tk = place_Tk * logits_TE.shape[1] // (tokens * chosen)
            self.rows_of_experts[0] += int((spread_Tk // held == self.pieces.at.ep).sum())
            self.rows_of_experts[1] += spread_Tk.numel()
            return weights_Tk, spread_Tk

        return spread

    def _through(self, layer: Layer, x: Tensor, batch: ForwardBatch, index: int) -> Tensor:
        owner = self.spec.layers[index].keys_of
        out: Tensor = layer(x, batch, batch.cache[(index if owner is None else owner) - self.layers[0]])
        return out

    def _batch(self, ops: Choice, dtype: torch.dtype) -> ForwardBatch:
        """One sequence of `TOKENS` tokens over a cache of its own."""
        import torch
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from firstlight.engine.model.batch import ForwardBatch
        from firstlight.engine.parallel.comm import Comms
        from firstlight.engine.serving.cache import KVCache
        from firstlight.kernels.attention.meta import AttentionMeta

        self._comms = Comms.connect(self._mesh, self.pieces.rank, FakeStore(), "fake")
        specs = tuple(self.spec.layers[i].cache() for i in range(*self.layers))
        cache = KVCache(specs, 1, TOKENS, 1, self._mesh.size(HEADS), dtype, torch.device("cpu"))
        inputs = self.spec.per_layer
        return ForwardBatch(
            token_ids_T=torch.zeros(TOKENS, dtype=torch.int64),
            positions_T=torch.arange(TOKENS),
            attention=AttentionMeta.build([TOKENS], [TOKENS], [[0]], TOKENS),
            cache=cache.layers,
            comms=self._comms,
            ops=ops,
            slots=(0,),
            handed={} if inputs is None else {"input": torch.zeros(TOKENS, inputs.width, dtype=dtype)},
        )

    def close(self) -> None:
        """Leave the group again."""
        if self._comms is not None:
            self._comms.disconnect()


def _refuse_elsewhere(spec: ModelSpec, share: RankPieces, start: int, stop: int) -> None:
    first, last = share.layers
    if not first <= start < stop <= last:
        raise _usage(
            f"rank {share.rank} has layers {first} to {last - 1}", f"layers within {first}:{last}", f"{start}:{stop}"
        )
    for index in range(start, stop):
        owner = spec.layers[index].keys_of
        if owner is not None and owner < start:
            raise _usage(f"layer {index} attends to keys of layer {owner}", f"layers from {owner}", f"from {start}")
    chosen = spec.chooser(start)
    if chosen is not None and chosen < start:
        raise _usage(
            f"layer {start} attends to keys that layer {chosen} chose", f"layers from {chosen}", f"from {start}"
        )


def _only(share: RankPieces, start: int, stop: int) -> RankPieces:
    storages = tuple(storage for storage in share.storages if start <= storage.layer < stop)
    names = {storage.name for storage in storages}
    pieces = tuple(piece for piece in share.pieces if piece.storage in names)
    return msgspec.structs.replace(share, storages=storages, pieces=pieces, layers=(start, stop), tied_head=False)


def _refuse_too_large(chosen: RankPieces) -> None:
    free = available_bytes()
    if free is not None and chosen.nbytes > free:
        raise Refused(
            fatal(
                "does-not-fit",
                f"layers {chosen.layers[0]} to {chosen.layers[1] - 1} of rank {chosen.rank} are larger than the free "
                "memory of this machine",
                expected=f"at most {free:,} bytes",
                found=f"{chosen.nbytes:,} bytes",
                next="choose fewer layers (--layers A:B), or a mesh of more ranks",
            )
        )


def _bytes(draft: Draft, checkpoint: Checkpoint, share: RankPieces, chosen: RankPieces, part: _Part) -> None:
    """What is read and resident, against what the rank's share needs."""
    weights = part.weights
    needed = sum(_stored_bytes(checkpoint, piece) for piece in chosen.pieces)
    more = weights.bytes_read - needed
    draft.check(
        "the layers' own bytes are read, each once",
        weights.bytes_needed == needed and more >= 0,
        value=weights.bytes_needed,
        limit=needed,
        unit="B",
        detail=f"and {more:,} B beside them: narrow shares are cut out of whole rows" if more else "and nothing else",
    )
    draft.check(
        "resident bytes are those planned",
        weights.nbytes == chosen.nbytes,
        value=weights.nbytes,
        limit=chosen.nbytes,
        unit="B",
    )
    draft.metric("rank_bytes", share.nbytes, "B", f"all that rank {share.rank} holds, kept as {share.dtype} or packed")
    whole = sum(_stored_bytes(checkpoint, piece) for piece in share.pieces)
    draft.metric("rank_stored_bytes", whole, "B", "of the release, as stored")
    draft.metric("checkpoint_bytes", checkpoint.payload_bytes, "B")
    draft.metric("read_bytes", weights.bytes_read, "B", f"of layers {chosen.layers[0]} to {chosen.layers[1] - 1}")
    draft.metric("read_s", weights.read_s, "s")


def _stored_bytes(checkpoint: Checkpoint, piece: Piece) -> int:
    """Bytes as stored that a piece needs, counted from its region alone."""
    if piece.packed is not None:
        box = tuple((start, stop) for start, stop, _ in piece.region)
        return piece.packed.box_bytes(box, piece.roles + piece.roles_beside)
    count = 1
    for start, stop, step in piece.region:
        count *= -(-(stop - start) // step)
    return count * DTYPE_BITS[checkpoint.tensors[piece.tensor].dtype] // 8


def _tables(
    draft: Draft, spec: ModelSpec, share: RankPieces, chosen: RankPieces, part: _Part, seconds: Mapping[int, float]
) -> None:
    resident: dict[str, int] = {}
    for storage in chosen.storages:
        found = part.weights.storages[storage.name].nbytes
        resident[storage.role] = resident.get(storage.role, 0) + found
    planned = chosen.bytes_by_role()
    draft.table(
        "memory",
        (
            {
                "role": role,
                "rank_bytes": nbytes,
                "layers_planned_bytes": planned.get(role, 0),
                "layers_resident_bytes": resident.get(role, 0),
            }
            for role, nbytes in share.bytes_by_role().items()
        ),
    )
    draft.table("layers", _layer_rows(spec, chosen, seconds))


def _layer_rows(spec: ModelSpec, chosen: RankPieces, seconds: Mapping[int, float]) -> Iterator[dict[str, Any]]:
    for index in range(*chosen.layers):
        layer = spec.layers[index]
        yield {
            "layer": index,
            "mixer": layer.mixer.words() if layer.mixer is not None else "none",
            "feed_forward": layer.ffn.words() if layer.ffn is not None else "none",
            "bytes": sum(storage.nbytes for storage in chosen.storages if storage.layer == index),
            "forward_s": seconds.get(index),
        }


def _usage(message: str, expected: str, found: str) -> Refused:
    return Refused(fatal("usage", message, expected=expected, found=found, next="choose another, or another mesh"))
