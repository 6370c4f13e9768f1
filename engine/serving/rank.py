"""The life of one rank's process: join the mesh, come up, serve or follow, leave. Rank 0 also serves HTTP."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from firstlight.engine.parallel.cluster import Place, backend_of, place_from_environment
from firstlight.engine.parallel.comm import CommFailure, Comms
from firstlight.engine.serving.boot import bring_up, device_of, ping
from firstlight.engine.serving.control import Control
from firstlight.engine.serving.desk import Desk
from firstlight.engine.serving.health import Pulse, Watch, failure_of, start_beating
from firstlight.engine.serving.line import Line, Note
from firstlight.engine.serving.options import EngineOptions, HostOptions
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.supervisor import Order
from firstlight.engine.serving.worker import Worker, follow

STORE_TIMEOUT = timedelta(seconds=60)
MEET_TIMEOUT = timedelta(hours=3)


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
    return RankProcess(order.engine, order.host, place, line).run()


def serve_launched(engine: EngineOptions, host: HostOptions) -> int | None:
    """Be the rank that a launcher (torchrun, srun, ...) started this process as, until the engine is stopped.

    Returns the exit status; None if no launcher did. Rank 0 prints the url and watches the others.
    """
    place = place_from_environment(engine.mesh.world_size)
    return None if place is None else RankProcess(engine, host, place, None).run()


class RankProcess:
    """One rank, with a supervisor at the other end of `line` or, started by a launcher, without one."""

    def __init__(self, engine: EngineOptions, host: HostOptions, place: Place, line: Line | None) -> None:
        self.engine = engine
        self.host = host
        self.place = place
        self.line = line
        self.pulse = Pulse(place.rank)
        self.desk = Desk(self.pulse, host) if place.rank == 0 else None
        self._verdict = threading.Event()
        if line is not None:
            line.listen(self._take, lambda: os._exit(1))

    def run(self) -> int:
        """Come up and work until told to stop; the exit status."""
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - the process ends here; who watches it is told why
            traceback.print_exc()
            return self._end(error)
        return 0

    def _work(self) -> None:
        kept = self._store(keep=True) if self.place.keeps_store else None
        start_beating(self.pulse, self._store(), self.host.beat_period_s)
        if self.desk is not None:
            self._open_desk(self.desk)
        self.pulse.enter("mesh")
        store = self._store()
        mesh = self.engine.mesh
        device = device_of(self.engine.device, self.place.local_rank)
        comms = Comms.connect(
            mesh, self.place.rank, PrefixStore("mesh", store), backend_of(device), self.engine.comm_deadline_s
        )
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
        store.set(f"left/{self.place.rank}", "1")
        if kept is not None:  # the others still talk to it
            kept.wait([f"left/{rank}" for rank in range(mesh.world_size)], STORE_TIMEOUT)
        Comms.disconnect()

    def _serve(self, desk: Desk, engine: Engine) -> None:
        desk.engine = engine
        engine.get_ready(self.engine.warm_up)
        self._say(Note(status="ready"))
        engine.run()
        if engine.failure is not None:
            self._verdict.wait()
            time.sleep(self.host.linger_s)
            raise CommFailure("world", "serve", (), str(engine.failure))
        desk.close()

    def _open_desk(self, desk: Desk) -> None:
        watch_store = self._store()
        watch = Watch(
            self.place.world_size, self.host.deadline_s, self.host.stage_deadlines_s, self.host.step_deadline_s
        )

        def look() -> None:
            """Show the beats of all ranks; without a supervisor, judge them as well."""
            while True:
                try:
                    watch.look(watch_store)
                except RuntimeError:
                    return
                desk.beats = tuple(watch.beats.values())
                failure = watch.judge() if self.line is None else None
                if failure is not None:
                    self._take(Note(failure=failure))
                    time.sleep(self.host.linger_s)
                    os._exit(1)
                time.sleep(self.host.beat_period_s)

        threading.Thread(target=look, name="watch", daemon=True).start()
        desk.open(lambda url: self._say(Note(url=url)), self._refused)

    def _refused(self, error: Exception) -> None:
        """HTTP cannot be served: there is no use in going on."""
        self._say(Note(failure=failure_of(self.place.rank, "http", error)))
        if self.line is None:
            traceback.print_exception(error)
            os._exit(2)

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
        if self.line is not None:
            self.line.send(note)
        elif note.url is not None:
            print(note.url, file=sys.stderr, flush=True)

    def _store(self, keep: bool = False) -> TCPStore:
        """A connection of its own: a waiting call must not hold up a beat. `keep`: the store itself is here."""
        return TCPStore(
            self.place.address,
            self.place.port,
            is_master=keep,
            wait_for_workers=False,
            timeout=STORE_TIMEOUT,
        )
