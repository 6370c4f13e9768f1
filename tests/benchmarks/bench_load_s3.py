"""Reading from an S3-compatible server on loopback, beside a plain client that gets the same ranges in parallel.

The server (moto) is Python and is what limits both; the plain client asks for whole chunks with as many threads, over
kept connections, and does nothing with what it gets but put it into its place.
"""

from __future__ import annotations

import argparse
import http.client
import threading
import time
from functools import partial
from urllib.parse import urlsplit

from tests.benchmarks.common import machine, median, show, spread, take_turns
from tests.engine.weights.s3 import s3_server

CHUNK_BYTES = 8 << 20


def plain(url: str, nbytes: int, threads: int) -> float:
    """Seconds of `http.client` with range requests straight into memory."""
    target = memoryview(bytearray(nbytes))
    parts, todo, lock = urlsplit(url), iter(range(0, nbytes, CHUNK_BYTES)), threading.Lock()

    def work() -> None:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80)
        while True:
            with lock:
                start = next(todo, None)
            if start is None:
                connection.close()
                return
            end = min(start + CHUNK_BYTES, nbytes)
            connection.request("GET", parts.path, headers={"Range": f"bytes={start}-{end - 1}"})
            response, done = connection.getresponse(), start
            while done < end:
                done += response.readinto(target[done:end])
            response.read()

    started_s = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started_s


def ours(url: str, nbytes: int, threads: int) -> float:
    """Seconds of the source for object stores, etag checks and all."""
    from firstlight.engine.weights.loading.readers import read_pieces
    from firstlight.engine.weights.sources.objects import ObjectStore

    source = ObjectStore(url.rpartition("/")[0])
    source.stat(url.rpartition("/")[2])
    target = memoryview(bytearray(nbytes))
    started_s = time.perf_counter()
    read_pieces([(url.rpartition("/")[2], 0, target)], threads, source=source)
    return time.perf_counter() - started_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    nbytes = given.megabytes * 1_000_000
    import pytest

    with s3_server() as client, pytest.MonkeyPatch.context() as patch:
        endpoint = client.meta.endpoint_url
        for key, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            patch.setenv(key, value)
        client.create_bucket(Bucket="models")
        client.put_object(Bucket="models", Key="m/shard", Body=bytes(range(256)) * (nbytes // 256), ACL="public-read")
        size = nbytes // 256 * 256
        figures = take_turns(
            {
                "firstlight (obstore)": partial(ours, "s3://models/m/shard", size, given.threads),
                "plain range GETs": partial(plain, f"{endpoint}/models/m/shard", size, given.threads),
            },
            given.repeats,
        )
    base = median(figures["plain range GETs"])
    rows = [
        {
            "client": name,
            "ms": round(median(values) * 1e3, 1),
            "lowest to highest": spread([value * 1e3 for value in values]),
            "MB/s": round(size / median(values) / 1e6, 1),
            "of plain": round(base / median(values), 2),
        }
        for name, values in figures.items()
    ]
    show(f"S3 on loopback, {given.megabytes} MB in ranges of 8 MiB", rows, machine(given.threads))


if __name__ == "__main__":
    main()
