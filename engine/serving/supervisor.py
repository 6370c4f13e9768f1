"""The process that starts the ranks of this machine by forking, watches them and ends them; it computes nothing.

It imports torch once and forks, so N ranks do not import it N times. Its owner is the process that started it: when the
owner is gone, and the host was not started detached, every rank is killed. When the supervisor itself is killed, the
system kills the ranks (Linux: a parent-death signal; elsewhere the end of the line does).

A host is found by its handle alone. It follows a run directory that is moved, and writes the handle again where that
was removed; once the directory itself is removed, a host that is detached, or whose owner does not know its url yet,
ends: nobody could reach or stop it any more. Otherwise its owner knows all there is to know, and it goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import socket
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

import msgspec
import psutil

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.health import Awake, Failure, Status, Store, Watch
from firstlight.engine.serving.line import Line, Note, line_pair
from firstlight.engine.serving.options import EngineOptions, HostOptions

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

HANDLE = "host.json"
HOST_LOG = "host.log"
DRAFT = "host.draft"
LOOK_PERIOD_S = 0.1
HANDLE_LOOKS = 5  # looks at the ranks for one at the handle
UNWRITTEN_S = 5.0  # that a start goes on while its handle cannot be written, on a disk that is full, say
UNWRITTEN = 73  # the exit status of a host that was given up for that; a word to its owner is not to be written either
SAME_BIRTH_S = 2.0  # the boot time, which births are counted from, is told in whole seconds
PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What a supervisor is told to do; `owner_pid` and `owner_fd` are None when it is detached.

    `folder_fd` is the run directory, open and locked: the lock lasts as long as this host, and keeps others out.
    `is_temporary`: the run directory was made for this host alone and goes with it.
    """

    engine: EngineOptions
    host: HostOptions
    run_dir: str
    folder_fd: int
    owner_pid: int | None = None
    owner_fd: int | None = None
    is_temporary: bool = False


class Handle(msgspec.Struct, kw_only=True):
    """The state of a host, kept in its run directory (`host.json`): how to reach it, and what became of it.

    `born_s` is when the process `pid` began, counted from the boot of the machine: clocks are set, and process ids are
    used again.
    """

    status: Status
    run_dir: str
    checkpoint: str
    mesh: Mesh
    pid: int
    pids: tuple[int, ...] = ()
    url: str | None = None
    token: str | None = None
    detached: bool = False
    failure: Failure | None = None
    started_s: float = 0.0
    born_s: float | None = None

    def write(self, folder: int) -> None:
        """Replace the file in an open folder at once: readers never see half of it, and only this user may read it."""
        data = msgspec.json.format(msgspec.json.encode(self), indent=2)
        made = os.open(DRAFT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600, dir_fd=folder)
        with os.fdopen(made, "wb") as draft:
            draft.write(data)
        os.replace(DRAFT, HANDLE, src_dir_fd=folder, dst_dir_fd=folder)

    @property
    def is_alive(self) -> bool:
        """Whether the supervisor that wrote it lives: this very process, not another of its number."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            return self.born_s is None or abs(born_s(process) - self.born_s) <= SAME_BIRTH_S
        except psutil.NoSuchProcess:
            return False


def born_s(process: psutil.Process) -> float:
    """When a process began, in seconds from the boot of the machine."""
    return float(process.create_time() - psutil.boot_time())


def is_worthless(handle: Handle) -> bool:
    """Whether nobody will look into the directory of a host that ended: it did not fail, or its findings tell all."""
    return handle.failure is None or bool(handle.failure.findings)


def main() -> int:
    """Read an `Order`, one line of standard input, and carry it out; 0 when the host was stopped, 1 when it failed."""
    line = sys.stdin.buffer.readline()  # not to its end, which whatever its owner has forked meanwhile may hold off
    if not line.endswith(b"\n"):
        return 1  # the owner died while it wrote
    order = msgspec.json.decode(line, type=Order)
    supervisor = Supervisor(order)
    if not supervisor.write():  # the owner need not wait for the import
        return UNWRITTEN
    from firstlight.engine.serving import rank  # imports torch, once for all ranks

    try:
        supervisor.fork(rank.run_rank)
        return supervisor.watch()
    finally:
        supervisor.kill_all()
        if order.is_temporary and supervisor.is_alone and is_worthless(supervisor.handle):
            shutil.rmtree(order.run_dir, ignore_errors=True)  # its owner can no longer


class Supervisor:
    """One host's ranks on this machine."""

    def __init__(self, order: Order) -> None:
        self.order = order
        mesh = order.engine.mesh
        self.handle = Handle(
            status="starting",
            run_dir=order.run_dir,
            checkpoint=order.engine.checkpoint,
            mesh=mesh,
            pid=os.getpid(),
            token=order.host.token,
            detached=order.owner_pid is None,
            started_s=time.time(),
            born_s=born_s(psutil.Process()),
        )
        self._looks = 0
        self._is_known = self._is_removed = False  # its url has been written; its directory is no more
        self._is_missing = False  # the handle, at the last look
        self._unwritten_s: float | None = None  # since when the handle is not as it should be
        self._lines: dict[int, Line] = {}
        self._pids: dict[int, int] = {}  # of ranks that live
        self._left = False
        self._reported: Failure | None = None  # by a rank itself

    @property
    def is_alone(self) -> bool:
        """Whether the owner has gone."""
        return self.order.owner_pid is not None and self._owner_is_gone()

    def fork(self, run_rank: object) -> None:
        """Start every rank. Nothing here has threads yet, so a fork is a whole process."""
        host = self.order.host
        self._watch = Watch(
            self.handle.mesh.world_size,
            host.deadline_s,
            host.stage_deadlines_s,
            host.step_deadline_s,
            Awake.of_period(host.beat_period_s),
        )
        for index in range(self.order.engine.mesh.world_size):
            if self._owner_is_gone():
                break  # `watch` sees it too
            ours, theirs = line_pair()
            pid = os.fork()
            if pid == 0:
                for line in (*self._lines.values(), ours):
                    line.close()
                _become_rank(self.order, index, theirs, run_rank)
            theirs.close()
            self._lines[index], self._pids[index] = ours, pid
        self._set(pids=tuple(self._pids.values()))
        signal.signal(signal.SIGTERM, self._on_term)

    def watch(self) -> int:
        """Follow the ranks until they have left or one is lost."""
        store = _local_store()
        for line in self._lines.values():
            line.send(Note(store_port=store.port))
        while self._pids:
            self._read_lines(LOOK_PERIOD_S)
            failure = self._reported or self._exited() or self._silent(store)
            if failure is not None:
                return self._fail(failure)
            if self._owner_is_gone() or self._left:
                break
            if not self._is_to_be_found():
                self.kill_all()
                return UNWRITTEN
        self.kill_all()
        self._set(status="stopped")
        return 0

    def kill_all(self) -> None:
        """No rank survives this; a stopped process dies of SIGKILL too."""
        self._kill(tuple(self._pids))

    def _fail(self, failure: Failure) -> int:
        """One rank is lost: tell rank 0, which goes on to say so over HTTP for a while; kill the others at once."""
        self._set(status="failed", failure=failure)
        with contextlib.suppress(OSError):  # a disk that is full
            print(f"firstlight host: {failure}", file=sys.stderr, flush=True)
        can_speak = failure.rank != 0 or self._reported is not None
        survives = can_speak and 0 in self._pids and 0 in self._lines and self._lines[0].send(Note(failure=failure))
        self._kill(tuple(rank for rank in self._pids if rank != 0 or not survives))
        until_s = time.monotonic() + self.order.host.linger_s
        while self._pids and time.monotonic() < until_s and not self._owner_is_gone() and not self._left:
            self._read_lines(LOOK_PERIOD_S)
            self._exited()
        self.kill_all()
        return 1

    def _kill(self, ranks: tuple[int, ...]) -> None:
        for rank in ranks:
            os.kill(self._pids[rank], signal.SIGKILL)
        for rank in ranks:
            os.waitpid(self._pids.pop(rank), 0)

    def _read_lines(self, timeout_s: float) -> None:
        readable, _, _ = select.select(list(self._lines.values()), (), (), timeout_s)
        for line in readable:
            rank = next(index for index, own in self._lines.items() if own is line)
            notes = line.read()
            if notes is None:
                del self._lines[rank]  # its exit tells more
                continue
            for note in notes:
                self._take(note)

    def _take(self, note: Note) -> None:
        if note.url is not None:
            self._set(url=note.url)
        if note.status is not None and self.handle.status != "failed":
            self._set(status=note.status)
        if note.failure is not None:
            self._reported = self._reported or note.failure

    def _exited(self) -> Failure | None:
        """Collect ranks that have ended; a failure if one should not have."""
        for rank, pid in tuple(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            del self._pids[rank]
            code = os.waitstatus_to_exitcode(status)
            if code == 0:
                continue
            self._read_lines(0.0)
            if self._reported is not None:  # its last words
                return self._reported
            how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"exited with {code}"
            return Failure(rank=rank, phase=self._watch.phase_of(rank), reason=how)
        return None

    def _silent(self, store: Store) -> Failure | None:
        self._watch.look(store)
        failure = self._watch.judge()
        return failure if failure is not None and failure.rank in self._pids else None

    def _owner_is_gone(self) -> bool:
        """The owner's death changes our parent; a pipe that it held ends as well."""
        order = self.order
        if order.owner_pid is None:
            return False
        if os.getppid() != order.owner_pid:
            return True
        if order.owner_fd is None:
            return False
        readable, _, _ = select.select([order.owner_fd], (), (), 0)
        return bool(readable) and os.read(order.owner_fd, 1) == b""

    def _on_term(self, _signal: int, _frame: object) -> None:
        self._left = True

    def _set(self, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self.handle, name, value)
        self.write()

    def write(self) -> bool:
        """Whether the handle is written; if not, it is tried again while there is somebody to look for it."""
        try:
            self.handle.write(self.order.folder_fd)
        except OSError as error:
            self._is_removed = isinstance(error, FileNotFoundError)  # of a folder that is there a file can be made
            self._unwritten_s = self._unwritten_s or time.monotonic()
            return False
        self._is_known = self.handle.url is not None
        self._unwritten_s = None
        return True

    def _is_to_be_found(self) -> bool:
        """Whether somebody can reach this host: by its handle, or its owner, who has read it before it was lost."""
        self._looks += 1
        if self._looks % HANDLE_LOOKS:
            return True
        if self._unwritten_s is None:
            before, self._is_missing = self._is_missing, not _is_in(self.order.folder_fd)
            if not before or not self._is_missing:  # who removes a folder begins with its files: not in his way
                return True
        if self.write():
            return True
        if self._is_removed and self.handle.detached:
            return False
        assert self._unwritten_s is not None
        return self._is_known or time.monotonic() - self._unwritten_s < UNWRITTEN_S


def _is_in(folder: int) -> bool:
    """Whether the handle is in an open folder; a disk that does not answer has not lost it."""
    try:
        os.stat(HANDLE, dir_fd=folder)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return True


def _local_store() -> TCPStore:
    """The store that ranks meet at. Left to itself it would listen on every interface; the socket here does not."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )


def _become_rank(order: Order, index: int, line: Line, run_rank: object) -> NoReturn:
    """In the child: die with the supervisor, write to a log of its own, run, leave without the parent's clean-up."""
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        log = _log(order.folder_fd, f"rank{index}.log")
        for stream in (1, 2):
            os.dup2(log, stream)
        code = run_rank(order, index, line)  # type: ignore[operator]
    finally:
        with contextlib.suppress(OSError):  # a disk that is full
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _log(folder: int, name: str) -> int:
    """A file to append to; where there can be none, what a rank says is lost, and the rank is not."""
    try:
        return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600, dir_fd=folder)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def die_with_parent() -> None:
    """Have the system end this process with the one that started it."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # nothing here is worth the half second that torch takes to unload
