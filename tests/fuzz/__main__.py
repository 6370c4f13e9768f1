"""`python -m tests.fuzz TARGET [libFuzzer options]`: searches for bytes that a target fails on, led by coverage.

Bytes that reach new code go to build/fuzz/TARGET, from where tests.fuzz.keep takes the fewest that matter over into the
corpus of the repository. What fails is left in build/fuzz. Needs the extra `fuzz`.

libFuzzer ends its process without a word to Python, so a parent removes the folder that the search works in.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

import atheris

from tests.fuzz.mutations import mutate

PACKAGES = [f"firstlight.{name}" for name in ("engine.weights", "engine.model", "engine.inputs", "workbench")]
MOST_BYTES = 1 << 14
IN_MEMORY = Path("/dev/shm")


def main() -> int:
    """Searches in a child process; its exit status."""
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=IN_MEMORY if IN_MEMORY.is_dir() else None) as place:
        child = os.fork()
        if child == 0:
            os.environ["TMPDIR"] = tempfile.tempdir = place
            search()
            os._exit(0)
        for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends the first to both
            signal.signal(number, lambda *_: os.kill(child, signal.SIGTERM))
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def search() -> None:
    """Has libFuzzer search, until it ends this process."""
    name, *options = sys.argv[1:]
    with atheris.instrument_imports(include=PACKAGES):
        from tests.fuzz import targets
    found = Path("build/fuzz") / name
    found.mkdir(parents=True, exist_ok=True)
    kept = targets.CORPUS / name
    kept.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.SEEDS[name]):
        (found / f"seed-{number}").write_bytes(seed)
    limits = [f"-max_len={MOST_BYTES}", "-timeout=10", "-rss_limit_mb=2048", f"-artifact_prefix=build/fuzz/{name}-"]
    atheris.Setup(
        [sys.argv[0], str(found), str(kept), *limits, *options],
        targets.TARGETS[name],
        custom_mutator=_shard if name == "header" else _json,
    )
    atheris.Fuzz()


def _json(data: bytes, most_bytes: int, seed: int) -> bytes:
    """Mostly another JSON; sometimes any bytes. Parts are divided by a zero byte."""
    if random.Random(seed).random() < 0.2:
        return bytes(atheris.Mutate(data, most_bytes))
    parts = data.split(b"\0")
    chosen = seed % len(parts)
    changed = mutate(parts[chosen], seed, most_bytes - len(data) + len(parts[chosen]))
    if changed is None:
        return bytes(atheris.Mutate(data, most_bytes))
    return b"\0".join((*parts[:chosen], changed, *parts[chosen + 1 :]))


def _shard(data: bytes, most_bytes: int, seed: int) -> bytes:
    """Mostly another header with the length that it has; sometimes any bytes."""
    length = int.from_bytes(data[:8], "little")
    text, body = data[8 : 8 + length], data[8 + length :]
    changed = mutate(text, seed, most_bytes - len(body) - 8)
    if changed is None or random.Random(seed).random() < 0.2:
        return bytes(atheris.Mutate(data, most_bytes))
    if seed % 3 == 0:
        body = bytes(_end(changed))[:most_bytes]
    return (len(changed).to_bytes(8, "little") + changed + body)[:most_bytes]


def _end(text: bytes) -> int:
    """Where the data of a header ends, at most 4,096 bytes on."""
    try:
        entries = json.loads(text)
        ends = [entry["data_offsets"][1] for entry in entries.values() if isinstance(entry, dict)]
        return int(max(0, min(max(ends, default=0), 4096)))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
