"""Our own C++, compiled once per machine into the user's cache: the compiler, the place, the name. No torch."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMPILERS = ("g++", "clang++", "c++")


class BuildError(RuntimeError):
    """The compiler refused, or there is none; the message holds what it said."""


def user_cache(base: str | None = None) -> Path:
    """The folder for what can be made again: in `base`, by default in the user's `~/.cache`."""
    return Path(base or Path.home() / ".cache") / "firstlight"


def find_compiler() -> str | None:
    """The first compiler of C++ there is."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def digest(sources: Iterable[Path], *words: str) -> str:
    """A short hash of files and words, for the name of what is made from them: another of any is another library."""
    found = hashlib.sha256()
    for path in sources:
        found.update(path.read_bytes())
    found.update("\n".join(words).encode())
    return found.hexdigest()[:16]


@contextmanager
def made_at_once(path: Path) -> Iterator[Path]:
    """A file to write in a folder of its own, which is moved to `path` when it is whole.

    Processes that make the same library together do no harm to each other. Raises `OSError`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        yield made
        made.replace(path)


def run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side; the first that fails is a `BuildError` with what it said. Raises `OSError`."""
    started = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for command in commands
    ]
    said = [process.communicate()[1] for process in started]
    for command, process, words in zip(commands, started, said, strict=True):
        if process.returncode != 0:
            raise BuildError(f"{' '.join(command)}\n{words.decode(errors='replace')}")
