"""The rung `doctor`: packages, devices, folders, and the choice of every operator with the reasons."""

from __future__ import annotations

import importlib.metadata
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from firstlight.engine.parallel.kept import usually
from firstlight.engine.settings import Settings, read_settings
from firstlight.engine.weights.loader import TORCH_DTYPES
from firstlight.kernels.registry import Row, choose
from firstlight.workbench.progress import Progress
from firstlight.workbench.report import Draft, Report

NEEDED = (
    "torch",
    "numpy",
    "msgspec",
    "safetensors",
    "tokenizers",
    "jinja2",
    "pillow",
    "httpx",
    "fastapi",
    "uvicorn",
    "rich",
)
EXTRAS = {
    "triton": "kernels on GPUs, interpreted on CPUs",
    "transformers": "verify against the reference",
    "jupyterlab": "notebooks",
    "ipywidgets": "live views in notebooks",
    "panel": "the dashboard",
    "openai": "a client for firstlight serve",
}


def doctor(
    checkpoint: str | None = None,
    dtype: str = "BF16",
    bandwidth: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Looks at this machine. `checkpoint`: operators are chosen for its sizes; `bandwidth` measures memory reads."""
    progress = progress or Progress("doctor")
    draft = Draft("doctor", "this machine")
    settings = read_settings()
    _packages(draft)
    _torch_works(draft)
    _folders(draft, settings)
    draft.metric("threads", settings.threads, "threads", "for all ranks of this machine together")
    draft.metric("huge_pages", _huge_pages(), "", "transparent huge pages, for weights and cache on CPUs")
    draft.table("devices", _devices())
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        progress(f"choose operators for {device}")
        chosen = choose(device, TORCH_DTYPES[dtype], _shapes(checkpoint, device), interpret=settings.triton_interpret)
        keep, rows = usually("auto", device, chosen.packs_faster()), chosen.rows
        draft.metric(
            f"packed_{device}", ", ".join(sorted(keep.roles)), "", f"of quantized weights: {keep.why} (--packed)"
        )
        draft.table(f"operators_{device}_{dtype.lower()}", _chosen(rows))
        draft.table(f"not_possible_{device}_{dtype.lower()}", _not_possible(rows))
    if bandwidth:
        _bandwidth(draft, progress)
    return draft.close()


def _packages(draft: Draft) -> None:
    rows = []
    for name in (*NEEDED, *EXTRAS):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        rows.append({"package": name, "version": version or "not installed", "for": EXTRAS.get(name, "always")})
    missing = [row["package"] for row in rows if row["version"] == "not installed" and row["for"] == "always"]
    draft.check("packages are installed", not missing, value=len(rows), unit="packages", detail=", ".join(missing))
    draft.table("packages", rows)


def _torch_works(draft: Draft) -> None:
    """A matrix product per device, compared with one in float64."""
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        generator = torch.Generator().manual_seed(0)
        a, b = torch.randn(64, 64, generator=generator), torch.randn(64, 64, generator=generator)
        started_s = time.perf_counter()
        got = (a.to(device) @ b.to(device)).cpu()
        elapsed_ms = (time.perf_counter() - started_s) * 1000
        error = float((got.double() - a.double() @ b.double()).abs().max())
        draft.check(f"torch multiplies on {device}", error < 1e-2, value=error, limit=1e-2, unit="max-abs",
                    detail=f"first call {elapsed_ms:.1f} ms")  # fmt: skip
    backends = [name for name in ("gloo", "nccl", "mpi") if _has_backend(name)]
    draft.check("ranks can talk", bool(backends), value=", ".join(backends) or "no backend")


def _has_backend(name: str) -> bool:
    distributed = torch.distributed
    return distributed.is_available() and bool(getattr(distributed, f"is_{name}_available")())


def _folders(draft: Draft, settings: Settings) -> None:
    for name, folder in (("cache", settings.cache_dir), ("runtime", settings.runtime_dir)):
        above = next(path for path in (folder, *folder.parents) if path.exists())
        draft.check(f"{name} folder can be written", os.access(above, os.W_OK), detail=str(folder))


def _huge_pages() -> str:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return "not offered by this system"
    return text.partition("[")[2].partition("]")[0] or text.strip()


def _devices() -> Iterator[dict[str, Any]]:
    from firstlight.workbench.environment import core_count, cpu_model, memory_bytes

    detail = f"{core_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    yield {"device": "cpu", "name": cpu_model(), "memory_bytes": memory_bytes(), "detail": detail}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        facts = torch.cuda.get_device_properties(index)
        detail = f"compute capability {facts.major}.{facts.minor}, {facts.multi_processor_count} multiprocessors"
        yield {"device": f"cuda:{index}", "name": facts.name, "memory_bytes": facts.total_memory, "detail": detail}


def _chosen(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """One row an operator: what was chosen and to what it was preferred, and what cannot serve here."""
    for operator in dict.fromkeys(row.operator for row in rows):
        mine = [row for row in rows if row.operator == operator]
        chosen = next(row for row in mine if row.chosen)
        lacking = ", ".join(row.implementation for row in mine if not row.is_possible)
        yield {
            "operator": operator,
            "chosen": chosen.implementation,
            "why": chosen.reason,
            "not_possible": lacking or None,
        }


def _not_possible(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """What cannot serve here, and why, with the operators of which that is said."""
    lacking = [row for row in rows if not row.is_possible]
    for name, reason in dict.fromkeys((row.implementation, row.reason) for row in lacking):
        of = [row.operator for row in lacking if (row.implementation, row.reason) == (name, reason)]
        yield {"implementation": name, "why": reason, "of": of}


def _shapes(checkpoint: str | None, device: str) -> dict[str, int]:
    if checkpoint is None:
        return {}
    from firstlight.engine.model.families import FAMILIES
    from firstlight.engine.serving.boot import shapes_of
    from firstlight.workbench.plan import read_config

    spec, _ = FAMILIES.describe(read_config(checkpoint)[1])
    return shapes_of(spec, spec.max_positions if device == "cpu" else 64)


def _bandwidth(draft: Draft, progress: Progress) -> None:
    from firstlight.workbench.bandwidth import read_bandwidth

    progress("measure memory bandwidth")
    draft.metric("memory_bandwidth", read_bandwidth(), "B/s", f"reads, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        draft.metric("device_memory_bandwidth", read_bandwidth("cuda", 4 << 30), "B/s", "reads, device 0")
