"""Our own C++, compiled once per machine into the user's cache: the compiler, the place, the name. No torch."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

COMPILERS = ("g++", "clang++", "c++")
WHILE_THE_PIPE_IS_OPEN = """exec 3<&0
"$@" </dev/null 3<&- & made=$!
{ read -r _ <&3; kill -KILL -$$; } >/dev/null 2>&1 & watch=$!
wait $made; status=$?
kill $watch
exit $status
"""


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


def cpu_lines() -> list[str]:
    """What Linux says about the model and the instructions of the CPU; nothing elsewhere."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return sorted({line for line in lines if re.match(r"(model name|flags|Features)\b", line)})


def of_one_file(source: Path, name: str, flags: Sequence[str], cache_dir: Path) -> ctypes.CDLL | None:
    """What one C++ file without dependencies is compiled to, from `cache_dir` or now, which takes about a second.

    None where there is none to be had: on other systems than Linux, without a compiler, with an odd one, in a folder
    that cannot be written to.
    """
    if platform.system() != "Linux":
        return None
    words = [*flags, platform.machine(), *platform.libc_ver(), *(cpu_lines() if "-march=native" in flags else ())]
    path = cache_dir / f"{name}-{digest([source], *words)}.so"
    try:
        if not path.exists():
            make_once(path, lambda made: compile_one(source, flags, made))
        return ctypes.CDLL(str(path))
    except (OSError, BuildError):
        return None


def compile_one(source: Path, flags: Sequence[str], path: Path) -> None:
    """Raises `OSError` and `BuildError`."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler (looked for {', '.join(COMPILERS)})")
    run_together([[compiler, *flags, str(source), "-o", str(path)]])


def make_once(path: Path, build: Callable[[Path], None]) -> None:
    """Have `build` write a file in a folder of its own, which is moved to `path` when it is whole.

    Of the processes that want the same library one makes it and the others wait for it; whoever was killed over it
    leaves a folder to the next. Raises `OSError`, and what `build` raises.
    """
    scratch = path.with_name(path.name + ".making")
    with _alone_in(scratch):
        if not path.exists():
            for left in scratch.iterdir():
                shutil.rmtree(left, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=scratch) as own:
                made = Path(own) / path.name
                build(made)
                made.replace(path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """A folder that one process or thread at a time has, and that goes when it is done."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except (FileExistsError, FileNotFoundError):
            if _is_no_folder(folder):
                raise
            continue  # who had it is done just now
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(folder, descriptor):
                try:
                    yield
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return
        finally:
            os.close(descriptor)


def _is_no_folder(path: Path) -> bool:
    """Whether something else than a folder is there, a link for one."""
    try:
        return not stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _is_at(folder: Path, descriptor: int) -> bool:
    """Whether a folder is still the one that was opened."""
    try:
        return os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def run_together(commands: Sequence[Sequence[str]]) -> None:
    """Run commands side by side; the first that fails is a `BuildError` with what it said. Raises `OSError`.

    However this process ends, they end with it, and what they started: a shell beside each waits for the end of a pipe.
    """
    reading, writing = os.pipe()
    try:
        started = [
            subprocess.Popen(
                ["/bin/sh", "-c", WHILE_THE_PIPE_IS_OPEN, "sh", *command],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            for command in commands
        ]
        said = [process.communicate()[1] for process in started]
    finally:
        os.close(writing)
        os.close(reading)
    for command, process, words in zip(commands, started, said, strict=True):
        if process.returncode != 0:
            raise BuildError(f"{' '.join(command)}\n{words.decode(errors='replace')}")
