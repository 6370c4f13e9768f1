"""How fast a checkpoint's source gives bytes at best, measured right after a load: what its rate is held against."""

from __future__ import annotations

import time
from collections.abc import Iterator

from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loading.pages import Pages
from firstlight.engine.weights.loading.readers import Job, read_jobs
from firstlight.engine.weights.sources.base import ByteSource
from firstlight.engine.weights.sources.local import LocalFiles

CHUNK_BYTES = 8 << 20
SCRATCH_BYTES = 128 << 20  # more than caches hold, so that bytes really go to memory
LOCAL_BYTES = 512 << 20
FAR_BYTES = 64 << 20


def source_limit(checkpoint: Checkpoint, threads: int) -> tuple[float | None, str]:
    """Bytes/s of plain parallel reads of whole chunks into memory that is there, and in words what was read how.

    What came from the page cache is held against the page cache, what came from the disk against reads past the cache
    (O_DIRECT), what came from afar against the same requests without anything done to the bytes.
    """
    source, words, most = _like_the_load(checkpoint)
    spans = list(_spans(checkpoint, most))
    nbytes = sum(count for _, _, count in spans)
    if not nbytes:
        return None, "there is nothing to read"
    scratch = Pages(min(SCRATCH_BYTES, len(spans) * CHUNK_BYTES), "limit")
    scratch.back()
    scratch.wait()
    view = memoryview(scratch.area)[scratch.start : scratch.start + scratch.nbytes]
    places = [view[at : at + CHUNK_BYTES] for at in range(0, len(view), CHUNK_BYTES)]
    jobs = [Job([(file, at, places[index % len(places)][:count])]) for index, (file, at, count) in enumerate(spans)]
    started_s = time.perf_counter()
    for _ in read_jobs(jobs, source, threads):
        pass
    taken_s = time.perf_counter() - started_s
    return nbytes / taken_s, f"{words}, {nbytes / 1e6:,.0f} MB by {threads} readers"


def _like_the_load(checkpoint: Checkpoint) -> tuple[ByteSource, str, int]:
    source = checkpoint.source
    if not isinstance(source, LocalFiles):
        return source, "range requests alone", FAR_BYTES
    cold = source.usage["direct"] + source.usage["buffered"]
    if cold > source.usage["cached"]:
        return LocalFiles(checkpoint.directory, "direct"), "the disk, past the page cache", LOCAL_BYTES
    return LocalFiles(checkpoint.directory, "buffered"), "the page cache", LOCAL_BYTES


def _spans(checkpoint: Checkpoint, most_bytes: int) -> Iterator[tuple[str, int, int]]:
    """(file, offset, bytes) of chunks spread over all shards, `most_bytes` in all."""
    per_shard = max(CHUNK_BYTES, most_bytes // max(1, len(checkpoint.shards)))
    left = most_bytes
    for file in checkpoint.shards:
        size = checkpoint.source.stat(file).nbytes
        for offset in range(0, min(size, per_shard), CHUNK_BYTES):
            count = min(CHUNK_BYTES, size - offset)
            if left < count:
                return
            left -= count
            yield file, offset, count
