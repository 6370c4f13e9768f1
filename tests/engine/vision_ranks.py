"""Traces of golden files on real ranks over gloo: many checkpoints and meshes in one start of processes."""

from __future__ import annotations

import multiprocessing
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np

from firstlight.engine.parallel.mesh import Mesh

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class TraceJob:
    """A checkpoint on a mesh, its golden file, and where the ranks leave what they saw.

    `forced`: each layer runs alone on the golden hidden state instead of on what came before.
    """

    checkpoint: Path
    golden: Path
    mesh: Mesh
    out: Path
    forced: bool = False

    def results(self) -> dict[str, np.ndarray]:
        """What all ranks saw, as padded arrays by the names of golden files."""
        from firstlight.engine.serving.request import Arrays
        from firstlight.engine.serving.trace import assemble

        shares = [
            (self.mesh.coordinates(rank).dp, msgspec.msgpack.decode((self.out / f"{rank}").read_bytes(), type=Arrays))
            for rank in range(self.mesh.world_size)
        ]
        return assemble(_command(self), self.mesh.dp, shares)


def run_traces(jobs: Sequence[TraceJob], store: Path) -> None:
    """Run all jobs in one set of processes; any rank's error is the test's error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "firstlight.engine.serving.trace"])
    failures = context.SimpleQueue()
    world = max(job.mesh.world_size for job in jobs)
    ranks = [context.Process(target=_rank, args=(rank, list(jobs), store, failures)) for rank in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=240)
    stuck = [process for process in ranks if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    assert failures.empty(), failures.get()
    assert not stuck, "ranks did not end"


def _command(job: TraceJob):  # type: ignore[no-untyped-def]
    from firstlight.engine.model.families import FAMILIES
    from firstlight.engine.serving.trace import trace_command
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.workbench.golden import Golden

    golden = Golden.read(job.golden)
    spec, _ = FAMILIES.describe(Checkpoint.open(job.checkpoint).config)
    given = {name: value for name, value in golden.outputs.items() if name.startswith("hidden.")}
    return trace_command(
        spec, golden.input_ids, golden.mask.astype(np.int64), golden.pictures, inputs=given if job.forced else None
    )


def _rank(rank: int, jobs: list[TraceJob], store: Path, failures: multiprocessing.SimpleQueue[str]) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        for number, job in enumerate(jobs):
            if rank < job.mesh.world_size:
                _work(rank, number, job, store)
    except BaseException:
        failures.put(f"rank {rank}, {jobs[number].checkpoint.name}, {jobs[number].mesh}:\n" + traceback.format_exc())
        raise


def _work(rank: int, number: int, job: TraceJob, store: Path) -> None:
    import torch.distributed as dist

    from firstlight.engine.parallel.comm import Comms
    from firstlight.engine.serving.boot import bring_up
    from firstlight.engine.serving.health import Pulse
    from firstlight.engine.serving.options import EngineOptions
    from firstlight.engine.serving.trace import run_trace

    shared = dist.FileStore(str(store), -1)
    shared.set_timeout(timedelta(seconds=DEADLINE_S))
    comms = Comms.connect(job.mesh, rank, dist.PrefixStore(f"job{number}", shared), "gloo", DEADLINE_S)
    options = EngineOptions(checkpoint=str(job.checkpoint), mesh=job.mesh, device="cpu", dtype="F32", max_context=128)
    seen = run_trace(bring_up(options, comms, Pulse()), _command(job))
    job.out.mkdir(parents=True, exist_ok=True)
    (job.out / f"{rank}").write_bytes(msgspec.msgpack.encode(seen))
    comms.world.barrier()
    Comms.disconnect()
