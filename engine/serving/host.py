"""Engine hosts: started, found again, asked how they are, and stopped. The engine runs in other processes. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from firstlight.engine.errors import Occupied, RankFailure, Refused
from firstlight.engine.findings import fatal
from firstlight.engine.inputs import side_files
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.parallel.constraints import refuse_impossible
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.api import Health
from firstlight.engine.serving.board import BOARD
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.health import Failure
from firstlight.engine.serving.options import EngineOptions, HostOptions
from firstlight.engine.serving.stream import EngineFailed
from firstlight.engine.serving.supervisor import HANDLE, HOST_LOG, UNWRITTEN, Handle, Order, is_worthless
from firstlight.engine.serving.waiting import until
from firstlight.engine.settings import child_environment, read_settings

POLL_S = 0.02
STOP_GRACE_S = 5.0
VERDICT_S = 2.0
MOST_RANKS = 256  # of one machine: each is a process, with a line to the supervisor
CHILD_VARIABLES = {
    "OPENBLAS_NUM_THREADS": "1",  # forking wants a process without threads
    **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),  # ranks of one machine talk on loopback
}
Watcher = Callable[[Health], None]


class Host:
    """One running host: `url`, `token`, `pids` of its ranks, `run_dir` with its logs and its handle (`host.json`)."""

    def __init__(
        self,
        run_dir: str | Path,
        process: subprocess.Popen[bytes] | None = None,
        kept_fd: int | None = None,
        is_temporary: bool = False,
    ) -> None:
        self.run_dir = Path(run_dir)
        self._is_temporary, self._is_cleared, self._is_stopped = is_temporary, False, False
        self.handle = read_handle(self.run_dir)
        self._process = process
        self._kept_fd = kept_fd  # it closes with this process, which tells the supervisor
        self._client: EngineClient | None = None

    @classmethod
    def start(
        cls,
        checkpoint: str | Path,
        mesh: Mesh | None = None,
        *,
        run_dir: str | Path | None = None,
        detached: bool = False,
        http: HostOptions | None = None,
        make_token: bool = True,
        **options: Any,
    ) -> Host:
        """Start the ranks and return as soon as they are being watched; `wait_ready` waits for the engine.

        `run_dir` gets logs and handle (default: a new folder in the runtime directory, which goes with the host unless
        it failed or is detached). A host that is not `detached` ends with this process. `options` are those of
        `EngineOptions`; `http` says where to listen and how to watch; a token is made up unless there is one or
        `make_token` is off. Raises `Refused`.
        """
        settings = read_settings()
        http = http or HostOptions()
        if http.token is None and (settings.token or make_token):
            http = msgspec.structs.replace(http, token=settings.token or secrets.token_urlsafe(24))
        engine = EngineOptions(checkpoint=str(checkpoint), mesh=mesh or Mesh(), **{"warm_up": True, **options})
        _refuse_layout(engine)
        directory = _new_directory(settings.runtime_dir) if run_dir is None else Path(run_dir)
        directory.mkdir(parents=True, exist_ok=True)
        is_temporary = run_dir is None and not detached
        process: subprocess.Popen[bytes] | None = None
        kept_fd = None
        try:
            with _taken(directory) as folder_fd:
                (directory / HANDLE).unlink(missing_ok=True)
                process, kept_fd = _spawn(engine, http, directory, folder_fd, detached, is_temporary)
            _await_handle(directory, process)
            return cls(directory, process, kept_fd, is_temporary)
        except BaseException as error:  # interrupted, say: nothing is left
            if process is not None:
                process.kill()
                process.wait()
            if kept_fd is not None:
                os.close(kept_fd)
            if is_temporary and not isinstance(error, RankFailure):
                shutil.rmtree(directory, ignore_errors=True)
            raise

    @classmethod
    def attach(cls, run_dir: str | Path) -> Host:
        """The host whose handle is in `run_dir` (or is that file); `Refused` if there is none or it has ended."""
        path = Path(run_dir)
        host = cls(path.parent if path.name == HANDLE else path)
        if host.handle.status in ("stopped", "failed") or not host.is_alive():
            raise Refused(
                fatal(
                    "not-available",
                    "the host has ended",
                    file=str(host.run_dir / HANDLE),
                    expected="a running host",
                    found=str(host.handle.failure or host.handle.status),
                    next="start a new one",
                )
            )
        return host

    @property
    def url(self) -> str:
        """Where it listens; waits for the moment it does."""
        while (url := self.refresh().url) is None:
            self._raise_if_over()
            time.sleep(POLL_S)
        return url

    @property
    def token(self) -> str | None:
        return self.handle.token

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, in order; none before they were started."""
        return self.refresh().pids

    def refresh(self) -> Handle:
        """The handle as it is now, or as it was when the host, or its run directory, went.

        Raises `Refused` (not-found) where it went before it said where the host listens: nobody will learn that then.
        """
        if not self._is_cleared:
            try:
                self.handle = read_handle(self.run_dir)
            except Refused:
                if self.handle.url is None and self.is_alive():
                    raise
        return self.handle

    def client(self) -> EngineClient:
        """The engine over HTTP."""
        if self._client is None:
            self._client = EngineClient(self.url, self.token, board=self.run_dir / BOARD)
        return self._client

    def health(self) -> Health:
        """How the engine is: by its own word or, where it cannot speak, by its supervisor's."""
        handle = self.refresh()
        over = self._over(handle)
        if over is not None:
            return over
        if handle.url is None:
            return Health(status="starting", stage="spawn")
        found = self.client().health()
        return found if found.status != "failed" else self._verdict() or found

    def wait_ready(self, timeout_s: float | None = None, progress: Watcher | None = None) -> EngineClient:
        """Wait until the engine answers; `progress` gets its health meanwhile.

        Raises `Refused` if the checkpoint, the plan or the memory was at fault, `RankFailure` if a rank was.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            health = self.health()
            if progress is not None:
                progress(health)
            if health.is_ready:
                return self.client()
            if health.status in ("failed", "stopped"):
                self._raise(health)
            if until_s is not None and time.monotonic() > until_s:
                raise RankFailure(None, health.stage, f"not ready after {timeout_s:g} s", self.log_file(None))
            time.sleep(POLL_S if progress is None else 5 * POLL_S)

    def is_alive(self) -> bool:
        """Whether its supervisor lives."""
        return self.handle.is_alive if self._process is None else self._process.poll() is None

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End it: ask the engine, then the supervisor, then kill. Nothing is left when this returns."""
        with contextlib.suppress(Refused):  # its run directory is gone, and it goes now
            self.refresh()
        handle = self.handle
        if self.is_alive() and handle.status == "ready" and handle.url is not None:
            with contextlib.suppress(Refused, EngineFailed), EngineClient(handle.url, handle.token) as client:
                client.stop()
            self._await_end(grace_s)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self.is_alive():
                break
            os.kill(handle.pid, number)
            self._await_end(grace_s)
        if self._process is not None:
            self._process.wait()
        if self._kept_fd is not None:
            os.close(self._kept_fd)
            self._kept_fd = None
        if self._client is not None:
            self._client.close()
            self._client = None
        self._is_stopped = True
        if self._is_temporary and not self._is_cleared:
            self._is_cleared = is_worthless(self.refresh())
            if self._is_cleared:
                shutil.rmtree(self.run_dir, ignore_errors=True)

    def release(self) -> None:
        """Let go of a detached host, which goes on; `attach` finds it again."""
        if self._process is not None:
            self._process.returncode = 0  # no longer ours to wait for, so its going on is no warning
            self._process = None
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, rank: int) -> str:
        """What a rank wrote to its standard output and error."""
        path = self.log_file(rank)
        return "" if path is None else Path(path).read_text(errors="replace")

    def log_file(self, rank: int | None) -> str | None:
        """Where a rank, or with None the supervisor, wrote that; None where it wrote nothing, or it is gone."""
        path = self.run_dir / (HOST_LOG if rank is None else f"rank{rank}.log")
        return str(path) if path.exists() else None

    def _await_end(self, grace_s: float) -> None:
        until(lambda: not self.is_alive(), grace_s)

    def _over(self, handle: Handle) -> Health | None:
        """Health of a host that has ended, or whose supervisor has."""
        if handle.status == "failed":
            return Health(status="failed", stage="", failure=handle.failure)
        if handle.status == "stopped":
            return Health(status="stopped", stage="")
        if not self.is_alive():
            handle = self.refresh()
            if handle.status in ("failed", "stopped"):
                return self._over(handle)
            if self._is_stopped:  # it had no time to write so, or no place
                return Health(status="stopped", stage="")
            failure = Failure(rank=None, phase="watch", reason=f"the supervisor ended{self._last_words()}")
            return Health(status="failed", stage="", failure=failure)
        return None

    def _verdict(self) -> Health | None:
        """The supervisor's word on an engine that does not answer: moments after its death it knows which rank died."""
        return until(lambda: self._over(self.refresh()), VERDICT_S)

    def _last_words(self) -> str:
        return _last_words(self.run_dir, self._process)

    def _raise_if_over(self) -> None:
        over = self._over(self.handle)
        if over is not None:
            self._raise(over)

    def _raise(self, health: Health) -> None:
        failure = health.failure
        if failure is None:
            raise RankFailure(None, health.stage, f"the host is {health.status}", self.log_file(None))
        if failure.findings:
            raise Refused(failure.findings)
        raise RankFailure(failure.rank, failure.phase, failure.reason, self.log_file(failure.rank))


def read_handle(run_dir: Path) -> Handle:
    """The handle in a run directory; `Refused` (not-found) where there is none."""
    path = run_dir / HANDLE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Handle)
    except msgspec.DecodeError as error:
        raise Refused(
            fatal(
                "not-found",
                f"the handle of an engine host cannot be read: {error}",
                file=str(path),
                expected="what a host wrote",
                found="something else",
                next="name the run directory of an engine that runs",
            )
        ) from error
    except (FileNotFoundError, NotADirectoryError):
        raise Refused(
            fatal(
                "not-found",
                "no engine host was started here",
                file=str(path),
                expected=HANDLE,
                found="no such file",
                next="start one, or name the run directory of one that runs",
            )
        ) from None


def refuse_too_many(mesh: Mesh) -> None:
    """Refuses more ranks than one machine is asked to run."""
    if mesh.world_size > MOST_RANKS:
        raise Refused(
            fatal(
                "usage",
                f"{mesh.world_size:,} ranks are too many for one machine",
                expected=f"at most {MOST_RANKS} ranks",
                found=mesh.describe(),
                next="use a smaller mesh, or start the ranks on several machines through a launcher (torchrun)",
            )
        )


def _refuse_layout(engine: EngineOptions) -> None:
    """Refuses what no rank could do before there are any: each would be a process that finds it out by itself."""
    mesh = engine.mesh
    refuse_too_many(mesh)
    try:
        spec, _ = FAMILIES.describe(side_files.read_json(Path(engine.checkpoint) / side_files.CONFIG))
    except Refused:
        return  # the ranks know more: the other files, and who else may compute it
    refuse_impossible(spec, mesh)


def _new_directory(runtime_dir: Path) -> Path:
    runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Path(tempfile.mkdtemp(prefix="host-", dir=runtime_dir))


@contextlib.contextmanager
def _taken(directory: Path) -> Iterator[int]:
    """The directory, opened and locked for a host; `Occupied` while another's is there, which this one would lose.

    The lock lasts until nobody has what is given here open any more: no file stays behind for it.
    """
    folder_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        until_s = time.monotonic() + STOP_GRACE_S  # one whose owner was killed a moment ago is about to leave
        while not _lock(folder_fd):
            handle = _handle_in(directory)
            if (handle is not None and handle.detached) or time.monotonic() > until_s:
                raise _occupied(directory, handle)
            time.sleep(POLL_S)
        yield folder_fd
    finally:
        os.close(folder_fd)


def _lock(folder_fd: int) -> bool:
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _handle_in(directory: Path) -> Handle | None:
    try:
        return read_handle(directory)
    except Refused:
        return None


def _occupied(directory: Path, handle: Handle | None) -> Occupied:
    where = f" at {handle.url}" if handle is not None and handle.url else ""
    end = f", or end it (firstlight serve --stop {shlex.quote(str(directory))})" if handle is not None else ""
    return Occupied(
        fatal(
            "not-available",
            f"an engine host runs in {directory} already: started here, another would make it unreachable",
            file=str(directory / HANDLE),
            expected="a directory whose host has ended, or none",
            found=f"process {handle.pid}, {handle.status}{where}" if handle is not None else "one that starts",
            next=f"name another --run, or attach to it (Bringup.attach){end}",
        )
    )


def _spawn(
    engine: EngineOptions, http: HostOptions, directory: Path, folder_fd: int, detached: bool, is_temporary: bool
) -> tuple[subprocess.Popen[bytes], int | None]:
    """The supervisor, in a session of its own so that an interrupt of a terminal or notebook does not reach it."""
    owner_fd, kept_fd = (None, None) if detached else os.pipe()
    if kept_fd is not None:
        os.register_at_fork(after_in_child=partial(_let_go, kept_fd, os.fstat(kept_fd)))
    order = Order(
        engine=engine,
        host=http,
        run_dir=str(directory),
        folder_fd=folder_fd,
        owner_pid=None if detached else os.getpid(),
        owner_fd=owner_fd,
        is_temporary=is_temporary,
    )
    with (directory / HOST_LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "firstlight.engine.serving.supervisor"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(folder_fd,) if owner_fd is None else (folder_fd, owner_fd),
            env=child_environment(**CHILD_VARIABLES),
        )
    if owner_fd is not None:
        os.close(owner_fd)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it ended at once; whoever waits for its handle finds out why
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.close()
    return process, kept_fd


def _let_go(kept_fd: int, was: os.stat_result) -> None:
    """In a process that the owner forked: it is none. Kept open there, the pipe would hide that the owner has gone."""
    with contextlib.suppress(OSError):  # it was closed before
        if os.path.samestat(os.fstat(kept_fd), was):
            os.close(kept_fd)


def _await_handle(directory: Path, process: subprocess.Popen[bytes]) -> None:
    while not (directory / HANDLE).exists():
        if process.poll() is not None:
            log = str(directory / HOST_LOG)
            raise RankFailure(None, "spawn", f"the host did not start{_last_words(directory, process)}", log)
        time.sleep(POLL_S)


def _last_words(directory: Path, process: subprocess.Popen[bytes] | None) -> str:
    """What a supervisor that has ended left behind, as the end of a sentence."""
    if process is not None and process.poll() == UNWRITTEN:
        why = "could not be written: is its disk full?" if directory.exists() else "was removed"
        return f": its run directory {directory} {why}"
    try:
        text = (directory / HOST_LOG).read_text(errors="replace").strip()
    except OSError:
        return ""
    return f": {text.splitlines()[-1]}" if text else ""
