"""An S3-compatible server (moto) in a process of its own on loopback."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[Any]:
    """A boto3 client of the server; the server ends with the `with`, or with this process."""
    import boto3

    process = subprocess.Popen(
        [sys.executable, "-c", SERVE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="someone",
            aws_secret_access_key="secret",
        )
        started_s = time.monotonic()
        while True:
            try:
                client.list_buckets()
                break
            except OSError:
                assert time.monotonic() - started_s < 120
                time.sleep(0.05)
        yield client
        client.close()
    finally:
        process.kill()
        process.communicate()
