"""Loaders of checkpoints behind one face, each run in a process of its own, as a start has one.

A loader is told whether the memory that weights end up in is there before its time begins; those that bring memory of
their own cannot be. Everyone ends with every weight in memory that nobody else may change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.benchmarks.common import ROOT

Seconds = dict[str, float]
Run = Callable[[Path, int, bool], Seconds]


def firstlight(directory: Path, threads: int, ready: bool, reader: str = "auto") -> Seconds:
    """Account, plan, memory, reads. `wait_s` is what reading stood still for memory."""
    from firstlight.engine.model.families import FAMILIES
    from firstlight.engine.parallel.mesh import Mesh
    from firstlight.engine.parallel.pieces import rank_pieces
    from firstlight.engine.weights.checkpoint import Checkpoint
    from firstlight.engine.weights.ledger import account
    from firstlight.engine.weights.loader import load
    from firstlight.engine.weights.loading.pages import reserve

    started_s = time.perf_counter()
    checkpoint = Checkpoint.open(str(directory))
    checkpoint.source.method = reader  # type: ignore[attr-defined]
    spec, matcher = FAMILIES.describe(checkpoint.config)
    pieces = rank_pieces(spec, Mesh(), 0, "BF16", account(checkpoint, spec, matcher))
    pages = reserve((storage.nbytes for storage in pieces.storages), threads=threads)
    if ready:
        pages.wait()
        started_s = time.perf_counter()
    weights = load(checkpoint, pieces, threads=None if reader != "buffered" else threads, reserved=pages)
    total_s = time.perf_counter() - started_s
    return {"total_s": total_s, "read_s": weights.read_s, "reserve_s": weights.pool.reserve_s}


def parallel_pread(directory: Path, threads: int, ready: bool) -> Seconds:
    """The practical limit: whole files in chunks of 8 MiB, no tensors, no account, one range of memory.

    Bytes lie as many behind a page's start in memory as in the file here. Tensors lie on 64 bytes in memory, and in a
    file wherever its header ends; where the two differ (modulo 32), the kernel copies more slowly.
    """
    from firstlight.engine.weights.loading.pages import Pages

    files = _files(directory)
    started_s = time.perf_counter()
    pages = Pages(sum(file.stat().st_size for file in files), "limit")
    pages.back(threads)
    pages.wait()
    read_s = time.perf_counter()
    view, chunks, at = memoryview(pages.area), [], pages.start
    for file in files:
        descriptor, size = os.open(file, os.O_RDONLY), file.stat().st_size
        chunks += [(descriptor, o, at + o, min(8 << 20, size - o)) for o in range(0, size, 8 << 20)]
        at += size
    todo, lock = iter(chunks), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                chunk = next(todo, None)
            if chunk is None:
                return
            descriptor, offset, place, count = chunk
            done = 0
            while done < count:
                done += os.preadv(descriptor, [view[place + done : place + count]], offset + done)

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    now_s = time.perf_counter()
    return {
        "total_s": now_s - (read_s if ready else started_s),
        "read_s": now_s - read_s,
        "reserve_s": read_s - started_s,
    }


def load_file(directory: Path, threads: int, ready: bool) -> Seconds:
    """safetensors' load_file, then a copy of each tensor to its place."""
    from safetensors.torch import load_file

    places, started_s = _places(directory, ready)
    for file in _files(directory):
        for name, tensor in load_file(file).items():
            places[name].copy_(tensor)
    return _both(started_s)


def fastsafetensors(directory: Path, threads: int, ready: bool) -> Seconds:
    """Into its own buffers, which stay."""
    from fastsafetensors import fastsafe_open

    started_s = time.perf_counter()
    with fastsafe_open(filenames=[str(file) for file in _files(directory)], nogds=True, device="cpu") as opened:
        kept = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a mapping
        assert kept
        return _both(started_s)


def runai(directory: Path, threads: int, ready: bool) -> Seconds:
    """Through its own buffers, then a copy of each tensor to its place."""
    from runai_model_streamer import SafetensorsStreamer

    os.environ["RUNAI_STREAMER_CONCURRENCY"] = str(max(threads, 8))
    places, started_s = _places(directory, ready)
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(file) for file in _files(directory)])
        for name, tensor in streamer.get_tensors():
            places[name].copy_(tensor)
    return _both(started_s)


LOADERS: dict[str, Run] = {
    "firstlight": firstlight,
    "firstlight, buffered": lambda *given: firstlight(*given, reader="buffered"),
    "firstlight, O_DIRECT": lambda *given: firstlight(*given, reader="direct"),
    "parallel pread": parallel_pread,
    "safetensors load_file + copy": load_file,
    "fastsafetensors": fastsafetensors,
    "runai-model-streamer": runai,
}
NEEDS = {"fastsafetensors": "fastsafetensors", "runai-model-streamer": "runai_model_streamer"}


def absent(name: str) -> str | None:
    """Why a loader cannot run here: its package is not installed."""
    package = NEEDS.get(name)
    return (
        None if package is None or find_spec(package) else f"{package} is not installed (pip install firstlight[bench])"
    )


def fresh(name: str, directory: Path, threads: int, ready: bool) -> dict[str, float]:
    """Times of a load in a process of its own, and by how much it raised the peak of resident memory."""
    words = [name, str(directory), str(threads), str(int(ready))]
    command = [sys.executable, "-m", "tests.benchmarks.loaders", *words]
    output = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(output.strip().splitlines()[-1])
    return found


def cold(directory: Path) -> None:
    """Drop the checkpoint's files from the page cache."""
    for file in _files(directory):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def warm(directory: Path) -> None:
    """Have all of the checkpoint's files in the page cache."""
    for file in _files(directory):
        with file.open("rb", buffering=0) as stream:
            while stream.read(16 << 20):
                pass


def peak_bytes() -> int:
    """The most that was ever resident in this process; pages of mapped files count as well."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def _places(directory: Path, ready: bool) -> tuple[dict[str, Any], float]:
    """Memory for every tensor, asked for, and if `ready` there, before the clock starts."""
    import torch
    from safetensors import safe_open

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16}
    places = {}
    for file in _files(directory):
        with safe_open(file, "pt") as header:
            for name in header.keys():  # noqa: SIM118 - not a mapping
                cut = header.get_slice(name)
                places[name] = torch.empty(cut.get_shape(), dtype=dtypes[cut.get_dtype()])
                if ready:
                    places[name].fill_(0)
    return places, time.perf_counter()


def _both(started_s: float) -> Seconds:
    taken_s = time.perf_counter() - started_s
    return {"total_s": taken_s, "read_s": taken_s, "reserve_s": 0.0}


def main() -> None:
    """What the fresh process does."""
    name, directory, threads, ready = sys.argv[1:5]
    import safetensors.torch  # noqa: F401 - imports are not part of a load
    import torch

    import firstlight.engine.model.families.llama
    import firstlight.engine.weights.ledger
    import firstlight.engine.weights.loader  # noqa: F401

    for package in NEEDS.values():
        if find_spec(package):
            __import__(package)
    torch.set_num_threads(int(threads))
    before = peak_bytes()
    times = LOADERS[name](Path(directory), int(threads), ready == "1")
    print(json.dumps({**times, "peak_bytes": peak_bytes() - before}))


if __name__ == "__main__":
    main()
