"""`python -m tests.fuzz.keep`: takes the shortest of what fuzzing found that reach all it reached into the corpus."""

from __future__ import annotations

import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.targets import CORPUS, TARGETS, home

MOST_FILES = 60  # a target; each reaches some line that shorter ones do not


def steps(target: Callable[[bytes], None], data: bytes) -> set[tuple[str, int, int]]:
    """Every step from one line of this project to another that a run of the target takes."""
    found: set[tuple[str, int, int]] = set()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if "/tests/" in frame.f_code.co_filename or "firstlight" not in frame.f_globals.get("__name__", ""):
            return None
        before = 0

        def line(inner: FrameType, event: str, _: Any) -> Any:
            nonlocal before
            if event == "line":
                found.add((inner.f_code.co_filename, before, inner.f_lineno))
                before = inner.f_lineno
            return line

        return line

    sys.settrace(trace)
    try:
        target(data)
    finally:
        sys.settrace(None)
    return found


def main() -> None:
    for name, target in TARGETS.items():
        home(name)
        files = [path for place in (CORPUS / name, Path("build/fuzz") / name) for path in place.glob("*")]
        seen: set[tuple[str, int, int]] = set()
        kept: set[str] = set()
        for data in sorted({path.read_bytes() for path in files}, key=lambda data: (len(data), data)):
            new = steps(target, data) - seen
            if new and len(kept) < MOST_FILES:
                own = f"{sha256(data).hexdigest()[:16]}.bin"
                kept.add(own)
                (CORPUS / name / own).write_bytes(data)
            seen |= new
        for path in (CORPUS / name).glob("*.bin"):
            if len(path.stem) == 16 and path.name not in kept:  # files with names in words were faults, and stay
                path.unlink()
        print(f"{name}: {len(kept)} of {len(files)} files reach {len(seen):,} steps")


if __name__ == "__main__":
    main()
