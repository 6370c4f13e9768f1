"""The rung `load`: every rank's weights read into reserved memory, one rank after the other in this process.

Nothing computes and no rank talks to another, so a layout of many ranks can be checked on one machine: the ledger, the
bytes that were planned, read and are resident, the rate, and memory by role.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy  # noqa: F401 - before torch, which imports it where an interrupt is lost
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.constraints import refuse_impossible
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import RankPieces, rank_pieces
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.loader import LoadProgress, Weights
from firstlight.engine.weights.loader import load as load_rank
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report
from firstlight.workbench.side_files import absent_side_files


def load(
    source: str | os.PathLike[str],
    mesh: Mesh | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    threads: int = 4,
    progress: Progress | None = None,
) -> Report:
    """Loads the weights of every rank of `mesh` and reports what came where. Raises `Refused` before the first byte
    when files are broken, the ledger has a gap or the mesh is impossible."""
    mesh, progress = mesh or Mesh(), progress or Progress()
    checkpoint = Checkpoint.open(source)
    checkpoint.refuse_if_broken()
    spec, matcher = FAMILIES.describe(checkpoint.config)
    refuse_impossible(spec, mesh)
    ledger = account(checkpoint, spec, matcher)
    ledger.refuse_if_incomplete()
    draft = Draft("load", f"{checkpoint.name}, {mesh.describe()}")
    draft.find((*checkpoint.findings, *spec.findings, *ledger.findings))
    draft.find(absent_side_files(checkpoint.directory, spec.vision is not None))
    _both_sides(draft, ledger)
    run_dtype = spec.dtype if dtype == "auto" else dtype
    rows = []
    for rank in range(mesh.world_size):
        pieces = rank_pieces(spec, mesh, rank, run_dtype, ledger)
        weights = load_rank(checkpoint, pieces, _device(device), threads, _listener(progress, rank, mesh.world_size))
        rows.append(_rank_row(mesh, pieces, weights))
        del weights
        gc.collect()
    _ranks(draft, rows, run_dtype)
    return draft.close()


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


def _device(name: str) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise Refused(
            fatal("not-available", "no CUDA device is here", expected="a GPU", found="none", next="use --device cpu")
        )
    return torch.device("cuda", 0)


def _listener(progress: Progress, rank: int, world_size: int) -> Any:
    phase = "read weights" if world_size == 1 else f"read weights, rank {rank} of {world_size}"

    def listen(now: LoadProgress) -> None:
        progress(phase, now.bytes_done, now.bytes_total, "B", f"layer {now.layer}" if 0 <= now.layer < 1 << 20 else "")

    return listen


def _rank_row(mesh: Mesh, pieces: RankPieces, weights: Weights) -> dict[str, Any]:
    at = {axis: pieces.at.on(axis) for axis in ("dp", "pp", "ep", "tp") if mesh.size(axis) > 1}
    pool = weights.pool
    return {
        "rank": pieces.rank,
        **at,
        "layers": f"{pieces.layers[0]} to {pieces.layers[1] - 1}",
        **{f"{role}_bytes": nbytes for role, nbytes in pieces.bytes_by_role().items()},
        "planned_bytes": pieces.nbytes,
        "resident_bytes": weights.nbytes,
        "read_bytes": weights.bytes_read,
        "read_s": weights.read_s,
        "reserved_bytes": pool.reserved_bytes,
        "reserve_s": pool.reserve_s,
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
    draft.metric("read_rate", read_bytes / read_s if read_s > 0 else None, "B/s", "reading, cutting and converting")
    draft.metric("read_s", read_s, "s")
    draft.metric("reserve_s", sum(row["reserve_s"] for row in rows), "s", "memory reserved and backed by pages")
    draft.metric("largest_rank_bytes", max(row["resident_bytes"] for row in rows), "B")
    huge = [row["huge_page_bytes"] for row in rows]
    known = [count for count in huge if count is not None]
    draft.metric(
        "huge_page_bytes",
        sum(known) if len(known) == len(huge) else None,
        "B",
        next((row["huge_page_reason"] for row in rows if row["huge_page_reason"]), "of the memory reserved"),
    )
    draft.table("ranks", (_without_reason(row) for row in rows))


def _without_reason(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "huge_page_reason"}


def ledger_rows(ledger: Ledger) -> Iterator[dict[str, Any]]:
    """The account, tensor by tensor: where each went, or why nowhere."""
    for tensor, params in ledger.consumed.items():
        yield {"tensor": tensor, "fills": list(params)}
    for tensor, reason in ledger.left_out.items():
        yield {"tensor": tensor, "left_out": reason}
