"""Presents a checkpoint at a URL as a local directory: side files are fetched, weights stay remote.

The directory lies in the cache, keyed by the address and by what every file was (size, etag): another version of the
release is another directory, and so is every look at files of which the server states no version. In it a pointer
says where the weights are, so whoever is given the directory, another rank's process as well, reads from the same
source and holds every answer against the same sizes and etags.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal, note, several
from firstlight.engine.settings import read_settings
from firstlight.engine.weights.sources.base import AnyPath, ByteSource, FileStat, SourcePath
from firstlight.engine.weights.sources.kept import FarFiles, KeptFiles, fetch_all
from firstlight.engine.weights.sources.local import LocalFiles
from firstlight.engine.weights.sources.retry import PATIENCE_S, Retry

T = TypeVar("T")

POINTER = ".firstlight-source.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ".safetensors"
# A web server lists nothing: these names are asked for, and the shards that the index names.
USUAL_NAMES = (
    "config.json", INDEX, "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model",
    "spiece.model", "tiktoken.model", "tekken.json", "chat_template.jinja", "chat_template.json",
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json", "quantize_config.json",
    "quant_config.json", "hf_quant_config.json",
)  # fmt: skip
NOT_FETCHED = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".zip", ".gz", ".tar")
SIDE_FILE_LIMIT_BYTES = 256 << 20
SMALL_BYTES = 512 << 20  # all side files together
UNFINISHED = "unfinished-"  # what a folder is called until it is complete
JUST_NOW_S = 60.0  # a folder may be made and not held yet


class Pointer(msgspec.Struct, frozen=True):
    """Where the weights of a directory are, and what every file was when it was first looked at.

    `keep`: what is read stays. `patience_s`: how long a source that gives no byte is asked again.
    """

    url: str
    files: dict[str, tuple[int, str | None]]
    keep: bool = False
    patience_s: float = PATIENCE_S

    @property
    def pinned(self) -> dict[str, FileStat]:
        return {name: FileStat(*stat) for name, stat in self.files.items()}


def is_url(source: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(source)


def mirror(
    url: str,
    keep: bool = False,
    whole: bool = False,
    cache: Path | None = None,
    patience_s: float | None = None,
) -> Path:
    """The directory for the checkpoint at `url`; fetches its side files. `Refused` for what cannot be read.

    With `keep` the weights that are read stay in the directory; with `whole` all of them are fetched now. A source that
    gives no byte is asked again for `patience_s`, now and by whoever reads from the directory.
    """
    url = _checked(url)
    if url.startswith("file://"):
        return Path(urlsplit(url).path)
    patience_s = PATIENCE_S if patience_s is None else patience_s
    far = _open_url(url, {}, Retry(patience_s=patience_s))
    names = far.names() or _found_by_name(far)
    stats = {name: far.stat(name) for name in names}
    files = {name: (stat.nbytes, stat.version) for name, stat in stats.items()}
    home = (cache or read_settings().cache_dir) / "remote"
    directory = home / _folder(url, files)
    try:
        if not _is_complete(directory, files):
            _fetch_side_files(far, url, files, directory)
        before = read_pointer(directory)
        wanted = Pointer(url, files, keep or whole or (before is not None and before.keep), patience_s)
        if before != wanted:
            _write(directory, wanted)
    except OSError as error:
        raise _unwritable(home, error) from error
    if whole:
        complete(directory)
    return directory


def open_source(directory: Path, retry: Retry | None = None) -> ByteSource:
    """Where the files of a checkpoint's directory are read from: the directory, or what its pointer says."""
    pointer = read_pointer(directory)
    if pointer is None:
        return LocalFiles(directory)
    retry = retry or Retry(patience_s=pointer.patience_s)
    return KeptFiles(_open_url(pointer.url, pointer.pinned, retry), directory, pointer.keep)


def complete(directory: Path) -> None:
    """Fetch what weights of a mirrored checkpoint are not here yet, for those who read files; else nothing."""
    pointer = read_pointer(directory)
    if pointer is not None:
        shards = tuple(name for name in pointer.files if name.endswith(WEIGHTS))
        far = _open_url(pointer.url, pointer.pinned, Retry(patience_s=pointer.patience_s))
        fetch_all(KeptFiles(far, directory, keep=True), shards)


def read_pointer(directory: Path) -> Pointer | None:
    """What a mirror's directory says of where it comes from; None for any other directory."""
    path = directory / POINTER
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=Pointer)
    except (msgspec.DecodeError, OSError) as error:
        raise Refused(
            fatal(
                "side-file-invalid",
                f"{path} cannot be read: {error}",
                file=str(path),
                next=f"delete {directory} and name the URL again",
            )
        ) from error


def unversioned(directory: Path) -> Iterator[Finding]:
    """A note on shards of which the server states no version: a change while they are read would not be seen."""
    pointer = read_pointer(directory)
    files = pointer.files if pointer is not None else {}
    shards = [name for name, (_, version) in files.items() if version is None and name.endswith(WEIGHTS)]
    if pointer is not None and shards:
        yield note(
            "changed-file",
            f"{pointer.url} states no version of {several(len(shards), 'shard', 'shards')}: a change of the same size "
            "while weights are read would not be seen",
            file=f"{pointer.url}/{shards[0]}",
            expected="an ETag or a Last-Modified of every file",
            found="neither",
            next="nothing, if nobody writes there; scan --against compares what came with another copy's hashes",
        )


def with_remote(directory: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Of a directory's files those of the checkpoint, and those that are at its source alone; sorted."""
    pointer = read_pointer(directory)
    return tuple(sorted(names if pointer is None else pointer.files))


def paths_of(directory: Path, source: ByteSource, files: Iterable[str]) -> list[AnyPath]:
    """Where each file's header is read from: the directory, or the source where it is not there."""
    if isinstance(source, LocalFiles):
        return [directory / file for file in files]
    return [directory / file if (directory / file).is_file() else SourcePath(source, file) for file in files]


def in_turn(do: Callable[[AnyPath], T], paths: Sequence[AnyPath]) -> Iterator[T]:
    """What `do` returns for each path, in order; files from afar side by side, each waits for an answer."""
    far = any(isinstance(path, SourcePath) for path in paths)
    if not far:
        yield from map(do, paths)
        return
    with _Threads(16) as pool:
        yield from pool.map(do, paths)


def _checked(url: str) -> str:
    """The URL without a slash at its end; credentials and queries in it are refused, they would end up in files."""
    from firstlight.engine.weights.sources.objects import SCHEMES

    try:
        parts = urlsplit(url)
        _ = parts.port  # out of range, or no number
    except ValueError as error:
        why = "its port is no number below 65536" if "ort" in str(error) else "its host is none"
        raise Refused(
            fatal(
                "usage", f"{told(url)} is no address: {why}", expected="https://HOST/PATH", next="correct the address"
            )
        ) from None
    known = ("http", "https", "file", *SCHEMES)
    if parts.scheme not in known:
        raise Refused(
            fatal(
                "not-available",
                f"{parts.scheme}:// is not read",
                expected=", ".join(f"{one}://" for one in known),
                found=parts.scheme,
                next="name a directory, or a URL of these kinds",
            )
        )
    if parts.scheme != "file" and not parts.hostname:
        raise Refused(
            fatal(
                "usage",
                f"{told(url)} names no host",
                expected=f"{parts.scheme}://HOST/PATH",
                found=told(url),
                next="correct the address",
            )
        )
    is_container = parts.scheme in ("abfs", "abfss") and not parts.password  # abfs://CONTAINER@ACCOUNT...
    if (parts.username and not is_container) or parts.password or parts.query or parts.fragment:
        raise Refused(
            fatal(
                "usage",
                "a URL with credentials or a query in it is not taken: it would be written into reports",
                expected=f"{parts.scheme}://HOST/PATH",
                found=f"{parts.scheme}://{parts.hostname}{parts.path} and more",
                next="put credentials where the provider's tools look for them (environment, ~/.netrc)",
            )
        )
    return f"{parts.scheme}{url[len(parts.scheme) :]}".rstrip("/")


def told(url: str) -> str:
    """An address as it may be shown, whole or not: without what is before an @ or behind a question mark."""
    scheme, _, rest = re.split(r"[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


class _Threads(ThreadPoolExecutor):
    """Threads that ask servers; who interrupts them need not wait for servers that do not answer."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        self.shutdown(wait=not is_interrupted, cancel_futures=kind is not None)


def _open_url(url: str, pinned: Mapping[str, FileStat], retry: Retry) -> FarFiles:
    if url.startswith(("http://", "https://")):
        from firstlight.engine.weights.sources.http import HttpFiles

        return HttpFiles(url, pinned, retry)
    from firstlight.engine.weights.sources.objects import ObjectStore

    return ObjectStore(url, pinned, retry)


def _found_by_name(far: ByteSource) -> tuple[str, ...]:
    """Which of the usual names a web server has, and the shards that its index names."""
    from firstlight.engine.weights.sources.http import HttpFiles

    if not isinstance(far, HttpFiles):
        raise _nothing(far.url, "no objects in this folder itself")
    if far.look("config.json") is None:  # alone: from a server that is not there nothing else is awaited
        raise _nothing(far.url, "no config.json there")
    with _Threads(8) as pool:
        usual = [name for name, stat in zip(USUAL_NAMES, pool.map(far.look, USUAL_NAMES), strict=True) if stat]
        shards = _indexed(far) if INDEX in usual else ()
        there = [name for name, stat in zip(shards, pool.map(far.look, shards), strict=True) if stat]
    return tuple(sorted({*usual, *there}))


def _indexed(far: ByteSource) -> tuple[str, ...]:
    """Plain file names in the index; what else it names is judged where the index is read."""
    try:
        weight_map = msgspec.json.decode(_read(far, INDEX, SIDE_FILE_LIMIT_BYTES))["weight_map"]
        return tuple(sorted({file for file in weight_map.values() if re.fullmatch(r"[\w.-]+\.safetensors", file)}))
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return ()


def _fetch_side_files(far: ByteSource, url: str, files: Mapping[str, tuple[int, str | None]], directory: Path) -> None:
    """Into a directory of another name first: what bears the right one is complete."""
    small = [name for name in files if not name.endswith((WEIGHTS, *NOT_FETCHED)) and not name.startswith(".")]
    total = sum(files[name][0] for name in small)
    if "config.json" not in small:
        raise _nothing(url, f"{len(files)} files without a config.json")
    if total > SMALL_BYTES:
        largest = max(small, key=lambda name: files[name][0])
        raise Refused(
            fatal(
                "side-file-invalid",
                f"the side files of {url} are {total:,} bytes, {largest} is the largest",
                file=f"{url}/{largest}",
                expected=f"at most {SMALL_BYTES:,} bytes beside the weights",
                found=f"{total:,} bytes",
                next="name the folder of one checkpoint",
            )
        )
    home = directory.parent.parent
    home.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=home))
    held = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _lock(held)
        _clear_unfinished(home)
        with _Threads(8) as pool:
            for name, data in zip(
                small, pool.map(lambda one: _read(far, one, SIDE_FILE_LIMIT_BYTES), small), strict=True
            ):
                (scratch / name).write_bytes(data)
        _write(scratch, Pointer(url, dict(files)))
        if directory.exists():  # a broken one of before; shards that were kept stay
            for path in scratch.iterdir():
                path.replace(directory / path.name)
        else:
            _take_name(scratch, directory)
    finally:
        os.close(held)
        shutil.rmtree(scratch, ignore_errors=True)


def _clear_unfinished(home: Path) -> None:
    """Take away what processes that were killed left unfinished: nobody holds it, and it is not from just now."""
    for path in home.glob(f"{UNFINISHED}*"):
        with suppress(OSError):  # it is gone, or not ours
            if time.time() - path.stat().st_mtime < JUST_NOW_S:
                continue
            found = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if _lock(found):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(found)


def _lock(folder: int) -> bool:
    """Hold an open folder as long as it is open; whether that could be, and nobody else does."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # somebody does, or the file system has no locks
        return False
    return True


def _take_name(scratch: Path, directory: Path) -> None:
    directory.parent.mkdir(exist_ok=True)
    try:
        scratch.rename(directory)
    except OSError:
        if not directory.is_dir():  # else another process was faster, with the same files
            raise


def _read(far: ByteSource, name: str, limit_bytes: int) -> bytes:
    nbytes = far.stat(name).nbytes
    if nbytes > limit_bytes:
        raise Refused(
            fatal(
                "side-file-invalid",
                f"{name} is too large to be what its name says",
                file=f"{far.url}/{name}",
                expected=f"at most {limit_bytes:,} bytes",
                found=f"{nbytes:,} bytes",
                next=f"look at {far.url}/{name}",
            )
        )
    data = bytearray(nbytes)
    if nbytes:
        opened = far.open(name)
        try:
            opened.read_into(0, [memoryview(data)])
        finally:
            opened.close()
    return bytes(data)


def _is_complete(directory: Path, files: Mapping[str, tuple[int, str | None]]) -> bool:
    pointer = read_pointer(directory)
    if pointer is None or pointer.files != files:
        return False
    small = (name for name in files if not name.endswith((WEIGHTS, *NOT_FETCHED)) and not name.startswith("."))
    return all((directory / name).is_file() and (directory / name).stat().st_size == files[name][0] for name in small)


def _write(directory: Path, pointer: Pointer) -> None:
    scratch = directory / f"{POINTER}.{os.getpid()}"
    scratch.write_bytes(msgspec.json.encode(pointer))
    scratch.replace(directory / POINTER)


def _folder(url: str, files: Mapping[str, tuple[int, str | None]]) -> str:
    unknown = any(version is None for _, version in files.values())
    key = [url, sorted(files.items()), os.urandom(8).hex() if unknown else ""]
    digest = hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]
    return f"{digest}/{re.sub(r'[^A-Za-z0-9._-]', '_', url.rpartition('/')[2]).lstrip('.') or 'checkpoint'}"


def _unwritable(home: Path, error: OSError) -> Refused:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return Refused(
        fatal(
            "not-available",
            f"the cache of remote checkpoints cannot be written: {error.strerror or error}",
            file=str(error.filename or home),
            expected="a directory with room in it" if is_full else "a directory that may be written",
            found=str(error.strerror or error),
            next=("make room" if is_full else "allow writing") + " there, or set FIRSTLIGHT_CACHE to another directory",
        )
    )


def _nothing(url: str, found: str) -> Refused:
    way = "name the folder that holds config.json"
    if "huggingface.co/" in url and "/resolve/" not in url:
        way = "name the files' own address: https://huggingface.co/OWNER/NAME/resolve/REVISION"
    return Refused(
        fatal(
            "not-found",
            f"{url} is not a checkpoint",
            file=url,
            expected="config.json and .safetensors files",
            found=found,
            next=way,
        )
    )
