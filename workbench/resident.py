"""What quantized weights take once they are loaded: experts in MXFP4 stay packed, the rest is unpacked. No torch."""

from __future__ import annotations

from collections.abc import Hashable

from firstlight.engine.findings import Finding, note, warning
from firstlight.engine.model.spec import ModelSpec, Param
from firstlight.engine.parallel.census import census
from firstlight.engine.parallel.layouts import Layouts, fullest
from firstlight.engine.parallel.mesh import Coordinates, Mesh
from firstlight.engine.parallel.placement import localize
from firstlight.engine.parallel.plan import Plan
from firstlight.engine.weights.formats.grid import Format
from firstlight.engine.weights.formats.mxfp4 import GROUP, MxFp4
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.formats.registry import StoredFormat
from firstlight.engine.weights.header import DTYPE_BITS


class Resident:
    """Sizes in memory of a rank's weights: what `parallel.kept` keeps packed as it is stored, the rest in `dtype`."""

    def __init__(self, stored: StoredFormat, spec: ModelSpec, mesh: Mesh) -> None:
        self._stored, self._plain = stored, Plain(spec.dtype)
        self._keeps = _cut_between_groups(spec, mesh)

    def layer_key(self, layer: int) -> Hashable:
        return self._stored.layer_key(layer)

    def format_of(self, param: Param) -> Format | None:
        return self._stored.format_of(param) if self._is_kept(param) else None

    def is_even(self, param: Param, shape: tuple[int, ...]) -> bool:
        return not self._is_kept(param) or self._stored.is_even(param, shape)

    def nbytes(self, param: Param, shape: tuple[int, ...], start: tuple[int, ...] | None = None) -> int:
        return (self._stored if self._is_kept(param) else self._plain).nbytes(param, shape, start)

    def keeps_any(self, spec: ModelSpec) -> bool:
        """Whether any parameter stays packed."""
        return any(self._is_kept(kind.param) for kind in census(spec))

    def _is_kept(self, param: Param) -> bool:
        return self._keeps and param.role == "expert" and isinstance(self._stored.format_of(param), MxFp4)


def _cut_between_groups(spec: ModelSpec, mesh: Mesh) -> bool:
    """Whether every rank's share of every expert is rows of whole groups."""
    for kind in census(spec):
        if kind.param.role == "expert" and len(kind.param.shape) == 2:
            local = localize(kind.param.shape, kind.placements, Mesh(tp=mesh.tp), Coordinates(tp=0))
            if local is None or local.shape[-1] % GROUP:
                return False
    return True


def resident_finding(
    spec: ModelSpec, stored: StoredFormat, found: Plan, cache_dtype: str, full_window: bool
) -> tuple[int, Finding]:
    """Bytes of weights on the fullest rank of a plan once they are loaded, and what that means for it."""
    held = Resident(stored, spec, found.mesh)
    element_bytes = DTYPE_BITS[cache_dtype] // 8
    layouts = Layouts(spec, held, found.cluster, found.usable_bytes, found.context, element_bytes, full_window)
    worst = fullest(layouts.ranks(found.mesh, found.concurrency))
    fits = worst.total <= found.usable_bytes
    kept = "experts stay packed, the rest is unpacked" if held.keeps_any(spec) else "they are unpacked"
    say = note if fits else warning
    return worst.weight_bytes, say(
        "unpacked-weights",
        f"weights are counted as stored; when this engine loads them {kept} to {spec.dtype}"
        + ("" if fits else ", and then the largest rank does not fit"),
        expected=f"{found.weight_bytes_per_device:,} bytes on the largest rank, as stored",
        found=f"{worst.weight_bytes:,} bytes as loaded",
        next="nothing to do" if fits else "use more devices, or an engine that computes with packed weights",
    )
