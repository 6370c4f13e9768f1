"""How fast this machine reads memory: the limit that decoding is held against."""

from __future__ import annotations

import time

import torch

BUFFER_BYTES = 256 << 20
REPEATS = 5


def read_bandwidth(device: torch.device | str = "cpu", nbytes: int = BUFFER_BYTES) -> float:
    """Bytes/s of summing a buffer far larger than the caches, the best of a few; all threads torch has.

    On Linux CPUs the buffer is backed by huge pages, as weights are.
    """
    device = torch.device(device)
    if device.type == "cpu":
        from firstlight.engine.weights.memory import Pool

        buffer = Pool.reserve(nbytes, "bandwidth", device).take((nbytes // 4,), torch.float32)
    else:
        buffer = torch.ones(nbytes // 4, dtype=torch.float32, device=device)
    best_s = float("inf")
    for _ in range(REPEATS):
        _wait(device)
        started_s = time.perf_counter()
        buffer.sum()
        _wait(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return nbytes / best_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
