"""Real ranks for tests: processes over gloo that run models by hand, many checkpoints and meshes in one start.

Starting processes is what costs, so `run_everything` starts as many as the largest mesh needs, once, and works through
a list of jobs; ranks that a mesh does not need sit the job out.
"""

from __future__ import annotations

import multiprocessing
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np

from firstlight.engine.parallel.mesh import Mesh
from tests.engine.direct import Arrays

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Job:
    """One checkpoint on one mesh, run on the inputs of an .npz file; every rank leaves what it saw in `out`.

    `exchange`: how tokens meet experts of other ranks.
    """

    checkpoint: Path
    mesh: Mesh
    inputs: Path
    out: Path
    exchange: str = "auto"

    def results(self) -> Arrays:
        """What the ranks saw, joined; ranks that saw the same thing must agree."""
        found: Arrays = {}
        for rank in range(self.mesh.world_size):
            with np.load(self.out / f"{rank}.npz") as seen:
                for name in seen.files:
                    if name in found:
                        np.testing.assert_allclose(seen[name], found[name], atol=1e-5, err_msg=f"rank {rank}: {name}")
                    found[name] = seen[name]
        return found

    def operations(self) -> list[dict[str, int]]:
        """Collectives of each rank, `operation axis`, and how often each was called."""
        return [
            msgspec.json.decode((self.out / f"{rank}.calls.json").read_bytes()) for rank in range(self.mesh.world_size)
        ]

    def storages(self) -> list[dict[str, list[int]]]:
        """Shapes of the storages of each rank."""
        return [msgspec.json.decode((self.out / f"{rank}.json").read_bytes()) for rank in range(self.mesh.world_size)]


def run_everything(jobs: Sequence[Job], store: Path) -> None:
    """Run all jobs in one set of processes; any rank's error is the test's error."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "tests.engine.direct"])
    world = max(job.mesh.world_size for job in jobs)
    failures = context.SimpleQueue()
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
    assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]


def _rank(rank: int, jobs: list[Job], store: Path, failures: multiprocessing.SimpleQueue[str]) -> None:
    import traceback

    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)  # memory that was not written is NaN here as well
    warnings.simplefilter("ignore")
    try:
        for number, job in enumerate(jobs):
            if rank < job.mesh.world_size:
                _work(rank, number, job, store)
    except BaseException:
        failures.put(
            f"rank {rank}, {jobs[number].checkpoint.name}, {jobs[number].mesh.describe()}:\n" + traceback.format_exc()
        )
        raise


def _work(rank: int, number: int, job: Job, store: Path) -> None:
    import torch.distributed as dist

    from firstlight.engine.parallel.comm import Comms
    from tests.engine.direct import Direct

    shared = dist.FileStore(str(store), -1)
    shared.set_timeout(timedelta(seconds=DEADLINE_S))
    comms = Comms.connect(job.mesh, rank, dist.PrefixStore(f"job{number}", shared), "gloo", DEADLINE_S, job.exchange)
    comms.recorder.on = True
    with np.load(job.inputs) as given:
        inputs = {name: given[name] for name in given.files}
    model = Direct(job.checkpoint, job.mesh, rank, comms)
    job.out.mkdir(parents=True, exist_ok=True)
    np.savez(job.out / f"{rank}.npz", **model.run(inputs))
    shapes = {name: list(tensor.shape) for name, tensor in model.weights.storages.items()}
    (job.out / f"{rank}.json").write_bytes(msgspec.json.encode(shapes))
    calls = Counter(f"{record.operation} {record.axis}" for record in comms.recorder.records)
    (job.out / f"{rank}.calls.json").write_bytes(msgspec.json.encode(calls))
    comms.world.barrier()
    Comms.disconnect()
