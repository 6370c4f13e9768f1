"""Ranks on several hosts read copies of one checkpoint: whether the copies are the same, before any weight is read."""

from __future__ import annotations

import hashlib
import json
import socket

import msgspec
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.parallel.comm import Comm
from firstlight.engine.weights.checkpoint import Checkpoint

PARTS = ("config.json", "the headers of the shards", "the bytes of the shards")
PLACES = 16  # of a shard that are looked at
SAMPLE_BYTES = 4096
NAME_BYTES = 64


def refuse_other_files(checkpoint: Checkpoint, control: Comm) -> None:
    """Compares this rank's checkpoint with that of every other; all ranks must call it.

    Raises `Refused` (differing-copies) on every rank, with the hosts that differ from rank 0's. Configuration, headers
    and sizes are compared whole, the weights by `PLACES` samples of each shard.
    """
    mine = b"".join(_digests(checkpoint))
    host = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
    sent = torch.frombuffer(bytearray(mine + host), dtype=torch.uint8)
    rows = [bytes(row.tolist()) for row in control.all_gather(sent.unsqueeze(0), 0)]
    size = len(mine)
    others = {rank: row for rank, row in enumerate(rows) if row[:size] != rows[0][:size]}
    if not others:
        return
    each = size // len(PARTS)
    first = next(iter(others.values()))
    parts = [name for i, name in enumerate(PARTS) if first[i * each :][:each] != rows[0][i * each :][:each]]
    hosts = dict.fromkeys(row[size:].rstrip(b"\0").decode() for row in others.values())
    raise Refused(
        fatal(
            "differing-copies",
            f"the checkpoint on host {', '.join(hosts)} (rank {', '.join(map(str, others))}) is not the one that rank "
            f"0 has: {' and '.join(parts)} differ",
            file=checkpoint.directory,
            expected="the same files on every host",
            found=f"{parts[0]} of another checkpoint",
            next="copy the checkpoint anew, or name a folder that all hosts share",
        )
    )


def _digests(checkpoint: Checkpoint) -> tuple[bytes, ...]:
    """One digest for each of `PARTS`."""
    config = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    headers, samples = hashlib.sha256(), hashlib.sha256()
    for name in sorted(checkpoint.tensors):
        headers.update(msgspec.json.encode(checkpoint.tensors[name]))
    for shard in sorted(checkpoint.shards):
        size = checkpoint.source.stat(shard).nbytes
        headers.update(f"{shard} {size}".encode())
        file, sample = checkpoint.source.open(shard), bytearray(min(SAMPLE_BYTES, size))
        try:
            for place in range(PLACES):
                file.read_into((size - len(sample)) * place // (PLACES - 1), [memoryview(sample)])
                samples.update(sample)
        finally:
            file.close()
    return config.digest(), headers.digest(), samples.digest()
