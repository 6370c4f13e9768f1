"""What the rungs say of a model that the reference's own modules compute. No torch before it is loaded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.parallel.constraints import refuse_impossible
from firstlight.engine.parallel.hardware import Cluster
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report

NOT_KNOWN = "not known: the reference keeps what it wants"


def scanned(draft: Draft, checkpoint: Checkpoint, spec: ForeignSpec) -> None:
    """The figures of a scan that headers and configuration give without a family."""
    later = f"accounted for by {spec.by}, when it is loaded: firstlight load"
    draft.check("every tensor is accounted for", None, value=len(checkpoint.tensors), unit="tensors", detail=later)
    draft.check("every parameter is filled", None, detail=later)
    draft.metric("parameters", _elements(checkpoint), "parameters", "elements as stored, in all tensors")
    draft.metric("layers", spec.num_layers, "layers", f"hidden {spec.hidden:,}")
    draft.metric("vocabulary", spec.vocab_size, "tokens")
    draft.metric("max_positions", spec.max_positions, "tokens")
    draft.metric("kv_bytes_per_token", None, "B", NOT_KNOWN)
    draft.table("operators", [{"operator": "forward", "chosen": spec.by, "used_by": "the whole model (fallback)"}])


def planned(
    draft: Draft, source: str, spec: ForeignSpec, cluster: Cluster, mesh: Mesh | None, headroom: float
) -> Report:
    """A plan of one rank: the weights as they are stored; what the reference needs beside them is not known."""
    mesh = mesh or Mesh()
    refuse_impossible(spec, mesh)
    if not Path(source).expanduser().is_dir():
        raise Refused(
            fatal(
                "not-available",
                f"the sizes of {spec.family} come from a checkpoint alone, and this is a configuration",
                file=source,
                expected="a checkpoint's directory",
                found="a configuration without weights",
                next="plan with the checkpoint, or write a family file (engine/model/families)",
            )
        )
    checkpoint = Checkpoint.open(source)
    draft.title = f"{draft.title} on {cluster.describe()}, {mesh.describe()}, fallback"
    usable_bytes = int(cluster.device.memory_bytes * (1 - headroom))
    fits = checkpoint.payload_bytes <= usable_bytes
    detail = "weights alone, as stored; cache and workspace of the reference are not known"
    draft.check(
        "the largest rank fits", fits, value=checkpoint.payload_bytes, limit=usable_bytes, unit="B", detail=detail
    )
    draft.metric("parameters", _elements(checkpoint), "parameters", "elements as stored, in all tensors")
    draft.metric("checkpoint_bytes", checkpoint.payload_bytes, "B")
    draft.metric("weight_bytes_per_device", checkpoint.payload_bytes, "B", "as stored, on the one rank")
    draft.metric("kv_bytes_per_token", None, "B", NOT_KNOWN)
    draft.metric("state_bytes_per_sequence", None, "B", NOT_KNOWN)
    draft.metric("devices_needed", 1 if fits else None, "devices", "a fallback is not divided")
    draft.metric("binding_constraint", "fallback", "", f"{spec.by} computes on one rank of one device")
    return draft.close()


def loaded(
    draft: Draft, checkpoint: Checkpoint, spec: ForeignSpec, dtype: str, device: Any, progress: Progress
) -> Report:
    """The model in the reference's modules, its account on both sides, and its memory by role."""
    progress("read weights", 0, checkpoint.payload_bytes, "B")
    assert FAMILIES.foreign is not None
    model = FAMILIES.foreign.load(checkpoint, spec, dtype, device)
    counts = model.ledger.summary()
    used = counts["tensors_consumed"] + counts["tensors_left_out"]
    draft.find(model.ledger.findings)
    draft.check("every tensor is accounted for", True, value=used, limit=counts["tensors"], unit="tensors")
    draft.check(
        "every parameter is filled",
        True,
        value=counts["parameters_filled"],
        limit=counts["parameters"],
        unit="parameters",
        detail=f"in the modules of {spec.by}",
    )
    draft.metric("ranks", 1, "ranks", "a fallback is not divided")
    draft.metric("read_bytes", model.weights.bytes_read, "B", model.weights.origin)
    draft.metric("load_s", model.weights.read_s, "s")
    draft.metric("largest_rank_bytes", model.weights.nbytes, "B")
    draft.table("memory", _by_role(model.weights.pieces.bytes_by_role()))
    return draft.close()


def _by_role(roles: dict[str, int]) -> Iterator[dict[str, Any]]:
    yield from ({"role": role, "resident_bytes": nbytes} for role, nbytes in roles.items())


def _elements(checkpoint: Checkpoint) -> int:
    return sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
