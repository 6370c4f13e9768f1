"""The rung `load`: every rank's weights read into reserved memory, one rank after the other in this process.

Nothing computes and no rank talks to another, so a layout of many ranks can be checked on one machine: the ledger, the
bytes that were planned, read and are resident, the rate, and memory by role.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.parallel.constraints import refuse_impossible
from firstlight.engine.parallel.kept import SUFFIXES, Wish
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import RankPieces, rank_pieces
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.header import DTYPE_BITS
from firstlight.engine.weights.formats.fp8 import block_words
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.loading.pages import Pages, reserve
from firstlight.engine.weights.sources.local import LocalFiles, Method
from firstlight.workbench import fallback_rungs
from firstlight.workbench.describe import span
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.resident import kept_here
from firstlight.workbench.side_files import absent_side_files
from firstlight.workbench.source_limit import source_limit

if TYPE_CHECKING:
    from firstlight.engine.weights.loader import LoadProgress, Weights


AFTER_LAYERS = 1 << 20  # from this number on it is behind the last layer; below 0 it is before the first
HELD_S, HELD_SHARE = 0.5, 0.1  # so long, and so much of the reading: its rate then says nothing
_ELSEWHERE = ("before the layers", "after the layers")


def load(
    source: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress | None = None,
    reader: Method = "auto",
    hashes: bool = False,
    limit: bool = True,
    packed: Wish = "auto",
) -> Report:
    """Loads the weights of every rank of `mesh` and reports what came where.

    `reader`: how local files are read. `hashes`: also the SHA-256 of every parameter as it is in memory. `limit`: also
    what the source gives at best. `packed`: whether quantized weights stay packed (`kept_here`). Raises `Refused`
    before the first byte when files are broken, the ledger has a gap or the mesh is impossible.
    """
    mesh, progress, began_s = mesh or Mesh(), progress or Progress(), time.perf_counter()
    checkpoint = Checkpoint.open(source)
    checkpoint.refuse_if_broken()
    if isinstance(checkpoint.source, LocalFiles):
        checkpoint.source.method = reader
    spec, matcher = FAMILIES.describe(checkpoint.config)
    refuse_impossible(spec, mesh)
    run_dtype = spec.dtype if dtype == "auto" else dtype
    if isinstance(spec, ForeignSpec):
        draft = Draft("load", f"{checkpoint.name}, {spec.family}", began_s)
        draft.find((*checkpoint.findings, *spec.findings))
        return fallback_rungs.loaded(draft, checkpoint, spec, run_dtype, _device(device), progress)
    ledger = account(checkpoint, spec, matcher)
    ledger.refuse_if_incomplete()
    draft = Draft("load", f"{checkpoint.name}, {mesh.describe()}", began_s)
    draft.find((*checkpoint.findings, *spec.findings, *ledger.findings))
    draft.find(absent_side_files(checkpoint.directory, spec.vision is not None))
    _both_sides(draft, ledger)
    kind = "cpu" if _is_cpu(device) else _device(device).type
    keep = kept_here(spec, mesh, range(mesh.world_size), run_dtype, ledger, packed, kind)
    all_ranks = _AllRanks(mesh, hashes)
    for rank in range(mesh.world_size):
        pieces = rank_pieces(spec, mesh, rank, run_dtype, ledger, keep_packed=keep.roles, kinds=keep.kinds)
        _load_and_add(all_ranks, checkpoint, pieces, device, threads, progress)
    all_ranks.tell(draft, ledger, run_dtype, keep.why)
    if limit:
        progress("measure the source")
    all_ranks.tell_rates(draft, checkpoint, threads or checkpoint.source.shape.in_flight, limit)
    return draft.close()


def _load_and_add(
    all_ranks: _AllRanks,
    checkpoint: Checkpoint,
    pieces: RankPieces,
    device: str,
    threads: int | None,
    progress: Progress,
) -> None:
    """One rank's weights: loaded, added up, and gone before the next rank's are."""
    progress(_phase("reserve memory", pieces.rank, all_ranks.mesh.world_size))
    listen = _Listener(progress, pieces.rank, all_ranks.mesh.world_size)
    started_s = time.perf_counter()
    weights = _load_rank(checkpoint, pieces, device, threads, listen, _early(device, pieces))
    all_ranks.add(pieces, weights, listen, time.perf_counter() - started_s)
    del weights
    gc.collect()


class _AllRanks:
    """What came where on each rank, added up."""

    def __init__(self, mesh: Mesh, hashes: bool) -> None:
        self.mesh, self._hashes = mesh, hashes
        self._rows: list[dict[str, Any]] = []
        self._layers: list[dict[str, Any]] = []
        self._hashed: list[dict[str, Any]] = []
        self._roles: dict[str, list[int]] = {}
        self._held: dict[tuple[str, str], list[int]] = {}
        self._unpacked: dict[tuple[str, str, str], int] = {}
        self._origin = ""

    def add(self, pieces: RankPieces, weights: Weights, listen: _Listener, took_s: float) -> None:
        """A rank's weights, which are not kept."""
        self._rows.append({**_rank_row(self.mesh, pieces, weights), "load_s": took_s, "held_s": listen.held_s})
        self._layers += listen.rows
        self._origin = weights.origin
        _add_roles(self._roles, pieces, weights)
        _add_packed(self._held, pieces)
        _add_unpacked(self._unpacked, pieces)
        if self._hashes:
            self._hashed += hash_rows(pieces, weights)

    def tell(self, draft: Draft, ledger: Ledger, dtype: str, why: str) -> None:
        """Bytes and memory; `why` weights stay packed or do not."""
        _ranks(draft, self._rows, dtype)
        _memory(draft, self._rows, self._roles)
        _packed(draft, ledger, self._held, why)
        _unpacked(draft, self._unpacked)

    def tell_rates(self, draft: Draft, checkpoint: Checkpoint, threads: int, limit: bool) -> None:
        """The rate beside that of the source, layer by layer, and the hashes if they were asked for."""
        rate = _against_limit(draft, self._rows, checkpoint, self._origin, threads, limit)
        draft.table("by_layer", (_with_rate(row, rate, _is_held(self._rows)) for row in self._layers))
        if self._hashes:
            draft.table("hashes", self._hashed)


def hash_rows(pieces: RankPieces, weights: Weights) -> Iterator[dict[str, Any]]:
    """The SHA-256 of every parameter of a rank as it is in memory, row-major, little-endian.

    Of a tensor that was read whole and as it is stored, this is the hash of the stored tensor.
    """
    import torch

    def digest(param: str) -> str:
        values = weights.params[param].contiguous().cpu().reshape(-1).view(torch.uint8)
        return hashlib.sha256(values.numpy().data).hexdigest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = pool.map(digest, (piece.param for piece in pieces.pieces))
        for piece, sha256 in zip(pieces.pieces, found, strict=True):
            dtype = str(weights.params[piece.param].dtype).removeprefix("torch.")
            yield {
                "rank": pieces.rank,
                "parameter": piece.param,
                "tensor": piece.tensor,
                "region": [list(bounds) for bounds in piece.region],
                "dtype": dtype,
                "sha256": sha256,
            }


def _early(device: str, pieces: RankPieces) -> Pages | None:
    """Memory that the system backs while torch is being imported, where it is sure to be memory of the CPU."""
    return reserve(storage.nbytes for storage in pieces.storages) if _is_cpu(device) else None


def _is_cpu(device: str) -> bool:
    """Whether the CPU is sure to be meant; asks without torch."""
    return device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists())


def _load_rank(
    checkpoint: Checkpoint,
    pieces: RankPieces,
    device: str,
    threads: int | None,
    listen: _Listener,
    reserved: Pages | None,
) -> Weights:
    import numpy  # noqa: F401 - before torch, which imports it where an interrupt is lost

    from firstlight.engine.weights.loader import load as load_rank

    listen.begin()
    return load_rank(checkpoint, pieces, _device(device), threads, listen, reserved, by_layer=True)


def _both_sides(draft: Draft, ledger: Ledger) -> None:
    """The account, which had to be complete for anything to be read."""
    counts = ledger.summary()
    used = counts["tensors_consumed"] + counts["tensors_left_out"]
    reasons = f"{counts['tensors_left_out']:,} left out with a reason" if counts["tensors_left_out"] else ""
    draft.check(
        "every tensor is accounted for", True, value=used, limit=counts["tensors"], unit="tensors", detail=reasons
    )
    draft.check(
        "every parameter is filled",
        True,
        value=counts["parameters_filled"],
        limit=counts["parameters"],
        unit="parameters",
    )


def _device(name: str) -> Any:
    import torch

    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refused(
            fatal("not-available", "no CUDA device is here", expected="a GPU", found="none", next="use --device cpu")
        )
    return torch.device("cuda", 0)


def _phase(name: str, rank: int, world_size: int) -> str:
    return name if world_size == 1 else f"{name}, rank {rank} of {world_size}"


class _Listener:
    """Tells how a rank's load goes on, and keeps a row a layer: its bytes, and after how many seconds they were there.

    Layers are read ahead of the one that is told of, many at once, so a layer has no time of its own. Whoever is told
    may hold the load there, as a view does that goes layer by layer: `held_s`, which does not count.
    """

    def __init__(self, progress: Progress, rank: int, world_size: int) -> None:
        self.rows: list[dict[str, Any]] = []
        self.held_s = 0.0
        self._progress = progress
        self._rank = rank
        self._phase = _phase("read weights", rank, world_size)
        self._done = 0

    def begin(self) -> None:
        """Reading begins: rates count from here, and whoever looks sees it though the first layer is not there yet."""
        self._progress(self._phase)

    def __call__(self, now: LoadProgress) -> None:
        name = f"layer {now.layer}" if 0 <= now.layer < AFTER_LAYERS else _ELSEWHERE[now.layer > 0]
        if not self.rows or self.rows[-1]["layer"] != name:
            self.rows.append({"rank": self._rank, "layer": name, "read_bytes": 0, "done_bytes": 0, "done_s": 0.0})
        row = self.rows[-1]
        row["read_bytes"] += now.bytes_done - self._done
        row["done_bytes"], row["done_s"] = now.bytes_done, now.elapsed_s - self.held_s
        started_s = time.perf_counter()
        self._progress(self._phase, now.bytes_done, now.bytes_total, "B", name)
        held_s = time.perf_counter() - started_s
        self.held_s += held_s
        self._done = now.bytes_done


def _is_held(rows: list[dict[str, Any]]) -> bool:
    """Whether so much of the time went to whoever was told that the rates say nothing about reading."""
    return any(row["held_s"] > max(HELD_S, HELD_SHARE * row["read_s"]) for row in rows)


def _with_rate(row: Mapping[str, Any], limit: float | None, is_held: bool) -> dict[str, Any]:
    """A row of a layer with the rate of all that was there by then, and its share of the source's; none if held."""
    rate = row["done_bytes"] / row["done_s"] if row["done_s"] > 0 and not is_held else None
    return {**row, "rate_bytes_per_s": rate, "share_of_limit": rate / limit if rate and limit else None}


def _rank_row(mesh: Mesh, pieces: RankPieces, weights: Weights) -> dict[str, Any]:
    at = {axis: pieces.at.on(axis) for axis in ("dp", "pp", "ep", "tp") if mesh.size(axis) > 1}
    pool = weights.pool
    return {
        "rank": pieces.rank,
        **at,
        "layers": span(pieces.layers[0], pieces.layers[1] - pieces.layers[0]),
        **{f"{role}_bytes": nbytes for role, nbytes in pieces.bytes_by_role().items()},
        "planned_bytes": pieces.nbytes,
        "resident_bytes": weights.nbytes,
        "read_bytes": weights.bytes_read,
        "read_s": weights.read_s,
        "reserved_bytes": pool.reserved_bytes,
        "reserve_s": pool.reserve_s,
        "waited_s": pool.waited_s,
        "backed_bytes": pool.backed_bytes,
        "huge_page_bytes": pool.huge_page_bytes,
        "huge_page_reason": pool.huge_page_reason,
    }


def _ranks(draft: Draft, rows: list[dict[str, Any]], dtype: str) -> None:
    wrong = [row["rank"] for row in rows if row["planned_bytes"] != row["resident_bytes"]]
    draft.check(
        "resident bytes are those planned, on every rank",
        not wrong,
        value=sum(row["resident_bytes"] for row in rows),
        limit=sum(row["planned_bytes"] for row in rows),
        unit="B",
        detail=f"ranks {', '.join(map(str, wrong))} differ" if wrong else "",
    )
    read_bytes, read_s = sum(row["read_bytes"] for row in rows), sum(row["read_s"] for row in rows)
    draft.metric("ranks", len(rows), "ranks", "one after the other in this process")
    draft.metric("read_bytes", read_bytes, "B", f"kept as {dtype}")
    is_held, held_s = _is_held(rows), sum(row["held_s"] for row in rows)
    draft.metric(
        "read_rate",
        read_bytes / read_s if read_s > 0 and not is_held else None,
        "B/s",
        f"none: the load was held between layers for {held_s:.1f} s" if is_held else "reading, cutting and converting",
    )
    draft.metric("read_s", read_s, "s")
    draft.metric(
        "reserve_s", sum(row["reserve_s"] for row in rows), "s", "memory backed, ahead of what is read into it"
    )
    draft.metric("waited_s", sum(row["waited_s"] for row in rows), "s", "of it, reading stood still for")
    draft.metric("load_s", sum(row["load_s"] for row in rows), "s", "all of it, importing torch for the first rank too")
    draft.metric("largest_rank_bytes", max(row["resident_bytes"] for row in rows), "B")
    huge = [row["huge_page_bytes"] for row in rows]
    known = [count for count in huge if count is not None]
    draft.metric(
        "huge_page_bytes",
        sum(known) if len(known) == len(huge) else None,
        "B",
        next((row["huge_page_reason"] for row in rows if row["huge_page_reason"]), "of the memory reserved"),
    )
    draft.table("ranks", (_for_table(row) for row in rows))


def _for_table(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("huge_page_reason", "held_s")}


def _add_roles(roles: dict[str, list[int]], pieces: RankPieces, weights: Weights) -> None:
    """Per role, bytes planned and bytes that tensors really have, over all ranks."""
    for storage in pieces.storages:
        total = roles.setdefault(storage.role, [0, 0])
        total[0] += storage.nbytes
        total[1] += weights.storages[storage.name].nbytes


def _add_packed(held: dict[tuple[str, str], list[int]], pieces: RankPieces) -> None:
    """Of weights that stay packed, by role and form: bytes they take, and bytes they would take unpacked."""
    sizes = {storage.name: storage.nbytes for storage in pieces.storages}
    for storage in pieces.storages:
        packing = pieces.packings.get(storage.name)
        if packing is not None:
            total = held.setdefault((storage.role, f"{packing.code}, {block_words(packing.block)}"), [0, 0])
            elements = math.prod(storage.shape[:-1]) * packing.columns
            total[0] += sum(sizes[storage.name + SUFFIXES[role]] for role in packing.roles)
            total[1] += elements * DTYPE_BITS[pieces.dtype] // 8


def _packed(draft: Draft, ledger: Ledger, held: Mapping[tuple[str, str], list[int]], why: str) -> None:
    """What stays packed, and why that; nothing of a checkpoint without packed weights."""
    if all(source.packed is None for source in ledger.sources.values()):
        return
    draft.metric("packed_bytes", sum(packed for packed, _ in held.values()), "B", why)
    draft.table(
        "packed",
        (
            {"role": role, "form": form, "resident_bytes": packed, "unpacked_bytes": unpacked}
            for (role, form), (packed, unpacked) in held.items()
        ),
    )


def _add_unpacked(unpacked: dict[tuple[str, str, str], int], pieces: RankPieces) -> None:
    """Of weights that are stored packed and do not stay so, by role, format and reason: bytes that they take now."""
    roles = {storage.name: storage.role for storage in pieces.storages}
    for piece in pieces.pieces:
        why = pieces.unpacked.get(piece.param)
        if why is not None and piece.packed is not None:
            key = (roles[piece.storage], piece.packed.format.describe(), why)
            nbytes = math.prod(piece.shape) * DTYPE_BITS[pieces.dtype] // 8
            unpacked[key] = unpacked.get(key, 0) + nbytes


def _unpacked(draft: Draft, unpacked: Mapping[tuple[str, str, str], int]) -> None:
    """What does not stay packed, and why; nothing where all does."""
    if unpacked:
        draft.table(
            "unpacked",
            (
                {"role": role, "form": form, "resident_bytes": nbytes, "why": why}
                for (role, form, why), nbytes in unpacked.items()
            ),
        )


def _memory(draft: Draft, rows: list[dict[str, Any]], roles: dict[str, list[int]]) -> None:
    """Predicted beside actual, by role, and what the system says is there."""
    draft.table(
        "memory",
        (
            {"role": role, "planned_bytes": planned, "resident_bytes": resident}
            for role, (planned, resident) in roles.items()
        ),
    )
    backed = [row["backed_bytes"] for row in rows if row["backed_bytes"] is not None]
    planned = sum(row["planned_bytes"] for row in rows)
    draft.metric("backed_bytes", sum(backed) if backed else None, "B", f"really in memory; planned were {planned:,} B")


def _against_limit(
    draft: Draft, rows: list[dict[str, Any]], checkpoint: Checkpoint, origin: str, threads: int, wanted: bool
) -> float | None:
    """Adds the rate beside what the source gives, which is returned in bytes a second if it is known."""
    draft.metric("source", checkpoint.source.url or checkpoint.directory, "", origin)
    rate, words = source_limit(checkpoint, threads) if wanted else (None, "not asked for")
    draft.metric("source_limit", rate, "B/s", words)
    read_s = sum(row["read_s"] for row in rows)
    is_known = bool(rate) and read_s > 0 and not _is_held(rows)
    share = sum(row["read_bytes"] for row in rows) / read_s / rate if rate and is_known else None
    draft.metric("share_of_limit", share, "share", "rate of reading, cutting and converting over that of the source")
    return rate
