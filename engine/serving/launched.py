"""Ranks that a launcher (torchrun, srun, ...) started, on one machine or several.

Rank 0 runs the verb. Whenever it wants an engine it writes an order into the store that all meet at; the other ranks
carry orders out, one after the other, until the last one. Everybody watches: rank 0 all ranks, the others rank 0, so
that whatever is lost, a process or a whole host, the rest find out within the deadline and end.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import msgspec
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from firstlight.engine.errors import RankFailure, Refused
from firstlight.engine.parallel.cluster import Place, place_from_environment, use_route_to
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.api import Health
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.health import BEAT_PERIOD_S, DEADLINE_S, STAGE_DEADLINES_S, Awake, Failure, Pulse, Store
from firstlight.engine.serving.options import EngineOptions, HostOptions
from firstlight.engine.serving.rank import RankProcess
from firstlight.engine.serving.stream import EngineFailed
from firstlight.engine.serving.supervisor import die_with_parent
from firstlight.engine.serving.waiting import until

POLL_S = 0.05
LAST_WORDS_S = 10.0  # that rank 0 waits for the others to leave, where the store is its own
LAST_WORDS_OF_A_FAILED_S = 2.0  # ... where one of them may be lost
WITHOUT_LAUNCHER_S = 30.0  # that rank 0 has to tell what became of its engine when its launcher was killed
Result = TypeVar("Result")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the other ranks are to do next: be ranks of an engine, or (`engine` None) leave."""

    engine: EngineOptions | None = None
    host: HostOptions = HostOptions()


@contextmanager
def leading(place: Place) -> Iterator[None]:
    """Rank 0, for as long as it may give orders: it shows that it lives, and tells the others when it is through.

    Where its launcher held the store and was killed, this process ends as well: nobody is left who waits for it.
    """
    kept = _connect(place, keep=True) if place.keeps_store else None
    store, deaf = _connect(place), threading.Event()

    def live() -> None:
        try:
            beats = _connect(place)
            for count in itertools.count(1):
                beats.set("alive", str(count))
                if deaf.wait(BEAT_PERIOD_S):
                    return
        except (RuntimeError, RankFailure):  # the launcher that held the store has gone
            pass
        if not deaf.wait(WITHOUT_LAUNCHER_S):
            _say(place, f"the launcher that held the store at {place.address}:{place.port} has gone")
            os._exit(1)

    threading.Thread(target=live, name="alive", daemon=True).start()
    use_route_to(place.address, place.port)
    try:
        yield
    finally:
        _dismiss(store, place, LAST_WORDS_S)
        deaf.set()
        del kept


def _dismiss(store: PrefixStore, place: Place, within_s: float) -> None:
    """Tell the others to leave, and where the store goes with this process, wait until they have heard it.

    No longer than `within_s` altogether: the store may be on a host that is lost, and a call to it never end.
    """

    def tell() -> None:
        _give(store, Order())
        keys = [f"gone/{rank}" for rank in range(1, place.world_size)]
        if place.keeps_store:
            until(lambda: store.check(keys), within_s, POLL_S)

    with suppress(RankFailure):
        _within(within_s, tell, place)


def obey(place: Place, checkpoint: str | None = None) -> int:
    """Any other rank: carry out orders until rank 0 gives no more; the exit status.

    `checkpoint` is where this machine has it, if not where rank 0 has it.
    """
    store = _connect(place)
    sentry = Sentry(place, _connect(place))
    use_route_to(place.address, place.port)
    number = 0
    while True:
        while not store.check([f"order/{number}"]):
            time.sleep(POLL_S)
        order = msgspec.json.decode(store.get(f"order/{number}"), type=Order)
        if order.engine is None:
            store.set(f"gone/{place.rank}", "1")
            return 0
        sentry.deadline_s = order.host.deadline_s
        engine = order.engine if checkpoint is None else msgspec.structs.replace(order.engine, checkpoint=checkpoint)
        process = RankProcess(engine, order.host, _of_order(place, number), None)
        sentry.pulse = process.pulse
        process.run()  # what failed, rank 0 knows
        number += 1


class Sentry:
    """Ends this process when rank 0, or the store where all ranks meet, has been silent for longer than `deadline_s`.

    `store` is a connection of its own, and answers already: from its first moment on, silence is counted. Only rank 0's
    first sign may take as long as a start. One thread asks and another judges: an answer that never comes holds up the
    first alone. `pulse` says what this rank is doing, if it is.
    """

    def __init__(
        self,
        place: Place,
        store: Store,
        deadline_s: float = DEADLINE_S,
        leave: Callable[[int], object] = os._exit,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.deadline_s = deadline_s
        self.pulse: Pulse | None = None
        self._place = place
        self._store = store
        self._leave = leave
        self._awake = clock or Awake.of_period(BEAT_PERIOD_S)
        self._heard_s = self._awake()  # the store
        self._seen_s = self._heard_s + STAGE_DEADLINES_S["spawn"]  # rank 0, which may come late
        for target in (self._ask, self._judge):
            threading.Thread(target=target, name="sentry", daemon=True).start()

    @property
    def silent_s(self) -> float:
        """How long rank 0 and its store have been silent."""
        return self._awake() - min(self._heard_s, self._seen_s)

    def _ask(self) -> None:
        last = b""
        try:
            while True:
                if self._store.check(["alive"]) and (now := self._store.get("alive")) != last:
                    last, self._seen_s = now, self._awake()
                self._heard_s = self._awake()
                time.sleep(BEAT_PERIOD_S)
        except RuntimeError:
            return

    def _judge(self) -> None:
        while (silent_s := self.silent_s) <= self.deadline_s:
            time.sleep(BEAT_PERIOD_S)
        said = f"rank 0 at {self._place.address} gave no sign of life for {silent_s:.1f} s"
        phase = "waiting for orders" if self.pulse is None else self.pulse.phase
        _say(self._place, f"{said} (deadline {self.deadline_s:g} s) in phase '{phase}'; leaving")
        self._leave(1)


class LaunchedHost:
    """An engine whose rank 0 is a thread of this process; what `Host` offers to those who use one."""

    def __init__(self, process: RankProcess, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._process = process
        self._client: EngineClient | None = None
        self._thread = threading.Thread(target=process.run, name="rank 0", daemon=True)
        self._thread.start()

    @classmethod
    def start(
        cls, engine: EngineOptions, http: HostOptions | None = None, run_dir: str | Path | None = None
    ) -> LaunchedHost:
        """Have every launched rank become one of the engine. Raises `Refused` if their number is not the mesh's."""
        place = place_from_environment(engine.mesh.world_size)
        assert place is not None
        assert place.rank == 0, "only rank 0 gives orders"
        host = http or HostOptions()
        quiet = msgspec.structs.replace(host, host="127.0.0.1", token=None)  # whoever reaches the store can read it
        number = _give(_connect(place), Order(engine=engine, host=quiet))
        process = RankProcess(engine, host, _of_order(place, number), None, leave=lambda _: None)
        return cls(process, Path.cwd() if run_dir is None else Path(run_dir))

    @property
    def url(self) -> str:
        """Where it listens; waits for the moment it does."""
        while (url := self._process.url) is None:
            self._raise_if_over()
            time.sleep(POLL_S)
        return url

    @property
    def token(self) -> str | None:
        return self._process.host.token

    @property
    def mesh(self) -> Mesh:
        return self._process.engine.mesh

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the ranks, each on its own host; of those that have been heard of."""
        return tuple(beat.pid for beat in self.health().ranks)

    def client(self) -> EngineClient:
        """The engine over HTTP."""
        if self._client is None:
            self._client = EngineClient(_here(self.url), self.token)
        return self._client

    def health(self) -> Health:
        """How the engine is."""
        desk = self._process.desk
        assert desk is not None
        health = desk.health()
        if not self._thread.is_alive() and health.status not in ("failed", "stopped"):
            failure = Failure(rank=0, phase=health.stage, reason="its thread ended")
            return Health(status="failed", stage=health.stage, failure=failure)
        return health

    def wait_ready(
        self, timeout_s: float | None = None, progress: Callable[[Health], None] | None = None
    ) -> EngineClient:
        """Wait until the engine answers; `progress` gets its health meanwhile. Raises `Refused` or `RankFailure`."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (health := self.health()).is_ready:
            if progress is not None:
                progress(health)
            self._raise_if_over()
            if until_s is not None and time.monotonic() > until_s:
                raise RankFailure(None, health.stage, f"not ready after {timeout_s:g} s")
            time.sleep(POLL_S)
        return self.client()

    def stop(self, grace_s: float = 5.0) -> None:
        """Ask the engine to stop on all ranks; one that does not is left behind, and ends with this process."""
        if self._thread.is_alive() and self.health().is_ready:
            try:
                self.client().stop()
            except (Refused, EngineFailed):
                traceback.print_exc()
        self._thread.join(grace_s)
        if self._client is not None:
            self._client.close()
            self._client = None

    def log_file(self, rank: int | None) -> str | None:
        """Nowhere that is known: ranks write to where their launcher has them write."""
        return None

    def __enter__(self) -> LaunchedHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _raise_if_over(self) -> None:
        health = self.health()
        if health.status not in ("failed", "stopped"):
            return
        failure = health.failure
        if failure is None:
            raise RankFailure(None, health.stage, f"the engine is {health.status}")
        if failure.findings:
            raise Refused(failure.findings)
        raise RankFailure(failure.rank, failure.phase, failure.reason)


def serve_launched(engine: EngineOptions, host: HostOptions) -> int | None:
    """Be the rank that a launcher started this process as, until the engine is stopped.

    Returns the exit status; None if no launcher did. Rank 0 prints the url and watches the others.
    """
    place = place_from_environment(engine.mesh.world_size)
    if place is None:
        return None
    if place.rank != 0:
        return obey(place, engine.checkpoint)
    with leading(place):
        served = LaunchedHost.start(engine, host)
        try:
            print(served.url, file=sys.stderr, flush=True)
            while (health := served.health()).status not in ("failed", "stopped"):
                time.sleep(POLL_S)
            if health.failure is not None:
                print(f"firstlight: {health.failure}", file=sys.stderr, flush=True)
                time.sleep(host.linger_s)
                with suppress(RuntimeError, RankFailure):  # the launcher that held the store may have gone
                    _dismiss(_connect(place), place, LAST_WORDS_OF_A_FAILED_S)
                os._exit(1)  # a thread of ours may wait for one that will not come
            return 0
        except (Refused, RankFailure):
            traceback.print_exc()
            return 1
        finally:
            served.stop()


def _here(url: str) -> str:
    """A url that this machine reaches, where the server listens on every interface."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _give(store: PrefixStore, order: Order) -> int:
    """Write the next order; its number."""
    number = store.add("orders", 1) - 1
    store.set(f"order/{number}", msgspec.json.encode(order).decode())
    return number


def _of_order(place: Place, number: int) -> Place:
    """The place among ranks that carry out one order."""
    return msgspec.structs.replace(place, prefix=f"{place.prefix}/order {number}", keeps_store=False)


def _connect(place: Place, keep: bool = False) -> PrefixStore:
    """A connection of its own to the store; `keep`: the store itself is here, and lasts as long as what is returned.

    Raises `RankFailure` (spawn) if the store does not answer within the deadline of a spawn: other hosts may be slower.
    """
    limit_s = STAGE_DEADLINES_S["spawn"]

    def connect() -> TCPStore:
        timeout = timedelta(seconds=limit_s)
        return TCPStore(place.address, place.port, is_master=keep, wait_for_workers=False, timeout=timeout)

    return PrefixStore(place.prefix, _within(limit_s + 1.0, connect, place))


def _within(limit_s: float, call: Callable[[], Result], place: Place) -> Result:
    """What a call to the store returns. torch waits for ever for an answer that is lost on the way: this does not."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    try:
        return outcome.result(limit_s)
    except TimeoutError:
        reason = f"the store at {place.address}:{place.port} has not answered for {limit_s:g} s"
    except RuntimeError as error:  # torch's own deadline, or a connection that broke
        reason = f"the store at {place.address}:{place.port} is not to be reached: {str(error).splitlines()[0]}"
    raise RankFailure(0, "spawn", f"{reason}, from rank {place.rank} on host {socket.gethostname()}")


def _say(place: Place, message: str) -> None:
    print(f"firstlight rank {place.rank} on host {socket.gethostname()}: {message}", file=sys.stderr, flush=True)


def main() -> int:
    """A rank that Ray started: the order comes by standard input, the place by the environment."""
    die_with_parent()
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    assert order.engine is not None
    return serve_launched(order.engine, order.host) or 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)
