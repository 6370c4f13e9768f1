"""The life of one rank's process: join the mesh, come up, serve or follow, leave. Rank 0 also serves HTTP."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]

from firstlight.engine.parallel.cluster import Place, backend_of
from firstlight.engine.parallel.comm import CommFailure, Comms
from firstlight.engine.serving.board import open_board
from firstlight.engine.serving.boot import bring_up, device_of, ping
from firstlight.engine.serving.control import Control
from firstlight.engine.serving.desk import Desk
from firstlight.engine.serving.health import Awake, Failure, Pulse, Store, Watch, failure_of, start_beating
from firstlight.engine.serving.line import Line, Note
from firstlight.engine.serving.options import EngineOptions, HostOptions
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.supervisor import Order
from firstlight.engine.serving.worker import Worker, follow

STORE_TIMEOUT = timedelta(seconds=60)
MEET_TIMEOUT = timedelta(hours=3)
FIRST_LOOKS_S = 0.1  # how often rank 0 looks for the others until it has seen each of them


def run_rank(order: Order, index: int, line: Line) -> int:
    """A rank under a supervisor; the exit status of its process."""
    first = next(line.notes(), None)
    if first is None or first.store_port is None:
        return 1
    place = Place(
        rank=index,
        world_size=order.engine.mesh.world_size,
        local_rank=index,
        local_world_size=order.engine.mesh.world_size,
        address="127.0.0.1",
        port=first.store_port,
    )
    return RankProcess(order.engine, order.host, place, line, run_dir=order.run_dir).run()


class RankProcess:
    """One rank, with a supervisor at the other end of `line` or, started by a launcher, without one.

    `leave` is called when there is nothing to be saved; without a supervisor rank 0 itself judges the others.
    """

    def __init__(
        self,
        engine: EngineOptions,
        host: HostOptions,
        place: Place,
        line: Line | None,
        leave: Callable[[int], object] = os._exit,
        run_dir: str | None = None,
    ) -> None:
        self.engine = engine
        self.host = host
        self.place = place
        self.line = line
        self.pulse = Pulse(place.rank)
        self.url: str | None = None  # where rank 0 listens, from the moment it does
        self._leave = leave
        self._run_dir = run_dir
        self.desk = Desk(self.pulse, host) if place.rank == 0 else None
        self._verdict, self._over = threading.Event(), threading.Event()
        self._all_seen = threading.Event()  # each rank has said at least once where it is
        self._awake = Awake.of_period(host.beat_period_s)
        self._heard_s = self._awake()
        if line is not None:
            line.listen(self._take, lambda: os._exit(1))

    def run(self) -> int:
        """Come up and work until told to stop; the exit status."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the process ends here; who watches it is told why
            traceback.print_exc()
            return self._end(error)
        finally:
            self._over.set()
        return 0

    def _work(self) -> None:
        start_beating(self.pulse, self._store(), self.host.beat_period_s, self._over)
        if self.desk is not None:
            self._open_desk(self.desk)
        self.pulse.enter("mesh")
        store = self._store()
        mesh = self.engine.mesh
        device = device_of(self.engine.device, self.place.local_rank)
        try:
            comms = Comms.connect(
                mesh,
                self.place.rank,
                PrefixStore("mesh", store),
                backend_of(device),
                self.engine.comm_deadline_s,
                self.engine.expert_exchange,
            )
        except RuntimeError as error:  # somebody did not come: who, the beats tell
            raise CommFailure("world", "connect", tuple(range(mesh.world_size)), str(error).splitlines()[0]) from error
        comms.recorder.phase = self.pulse.collective
        self.pulse.enter("ping")
        ping(comms, device)

        def meet() -> None:
            store.set(f"up/{self.place.rank}", "1")
            store.wait([f"up/{rank}" for rank in range(mesh.world_size)], MEET_TIMEOUT)

        rank = bring_up(self.engine, comms, self.pulse, self.place.local_rank, self.place.local_world_size, meet)
        worker, control = Worker(rank, self.pulse), Control(comms.control)
        if self.desk is not None:
            self._serve(self.desk, Engine(worker, control, self.pulse))
        else:
            self.pulse.enter("ready")
            self.pulse.at("idle")
            follow(worker, control)
        Comms.disconnect()

    def _serve(self, desk: Desk, engine: Engine) -> None:
        desk.engine = engine
        self._all_seen.wait(self.host.deadline_s)  # whoever is told that it is ready is told of every rank
        engine.get_ready(self.engine.warm_up)
        self._say(Note(status="ready"))
        board = open_board(self._run_dir)
        engine.run(board=board)
        if board is not None:
            board.close()
        if engine.failure is not None:
            self._verdict.wait()
            time.sleep(self.host.linger_s)
            raise CommFailure("world", "serve", (), str(engine.failure))
        self._over.set()  # the others leave: their silence means nothing any more
        desk.close()

    def _open_desk(self, desk: Desk) -> None:
        watch_store = self._store()
        watch = Watch(
            self.place.world_size,
            self.host.deadline_s,
            self.host.stage_deadlines_s,
            self.host.step_deadline_s,
            self._awake,
        )

        def look() -> None:
            """Show the beats of all ranks."""
            while not self._over.is_set():
                try:
                    watch.look(watch_store)
                    self._hear(watch_store)
                except RuntimeError:
                    return
                self._heard_s = self._awake()
                desk.beats = tuple(beat for _, beat in sorted(watch.beats.items()))
                if len(desk.beats) == self.place.world_size:
                    self._all_seen.set()
                time.sleep(self.host.beat_period_s if self._all_seen.is_set() else FIRST_LOOKS_S)

        def judge() -> None:
            """Without a supervisor: find who is lost. An answer of the store that never comes holds up `look` alone."""
            while (failure := self._deaf() or watch.judge()) is None and not self._verdict.is_set():
                if self._over.wait(self.host.beat_period_s):
                    return
            if failure is not None:
                self._take(Note(failure=failure))
            time.sleep(self.host.linger_s)
            self._leave(1)

        threading.Thread(target=look, name="watch", daemon=True).start()
        if self.line is None:
            threading.Thread(target=judge, name="judge", daemon=True).start()
        desk.open(lambda url: self._say(Note(url=url)), self._refused)

    def _hear(self, store: Store) -> None:
        """What a rank without a supervisor said before it ended."""
        if self.line is None and store.check(["failed"]):
            self._take(Note(failure=msgspec.json.decode(store.get("failed"), type=Failure)))

    def _deaf(self) -> Failure | None:
        silent_s = self._awake() - self._heard_s
        if silent_s <= self.host.deadline_s:
            return None
        reason = f"the store at {self.place.address}:{self.place.port} has not answered for {silent_s:.1f} s"
        return Failure(rank=0, phase=self.pulse.beat().phase, reason=reason, since_s=silent_s)

    def _refused(self, error: Exception) -> None:
        """HTTP cannot be served: there is no use in going on."""
        self._say(Note(failure=failure_of(self.place.rank, "http", error)))
        if self.line is None:
            traceback.print_exception(error)
            self._take(Note(failure=failure_of(self.place.rank, "http", error)))
            self._leave(2)

    def _take(self, note: Note) -> None:
        if note.failure is not None and self.desk is not None:
            self.desk.fail(note.failure)
            self._verdict.set()

    def _end(self, error: BaseException) -> int:
        """Say what happened. A broken collective is another's fault: whoever watches knows whose, and is awaited."""
        if isinstance(error, CommFailure) and self.place.world_size > 1:
            self._verdict.wait(self.host.deadline_s + 5.0)
            if self._verdict.is_set():
                time.sleep(self.host.linger_s)
                return 1
        failure = failure_of(self.place.rank, self.pulse.beat().phase, error)
        self._say(Note(failure=failure))
        if self.desk is not None:
            self.desk.fail(failure)
            time.sleep(self.host.linger_s)
        return 1

    def _say(self, note: Note) -> None:
        self.url = note.url or self.url
        if self.line is not None:
            self.line.send(note)
        elif note.failure is not None and self.desk is None:
            with contextlib.suppress(RuntimeError):  # rank 0 has gone as well
                self._store().set("failed", msgspec.json.encode(note.failure).decode())

    def _store(self) -> TorchStore:
        """A connection of its own: a waiting call must not hold up a beat."""
        store = TCPStore(
            self.place.address,
            self.place.port,
            is_master=False,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
        )
        return PrefixStore(self.place.prefix, store) if self.place.prefix else store
