"""An engine whose ranks Ray started on several hosts; what `Host` offers to those who use one. No torch."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from firstlight.engine.errors import RankFailure, Refused
from firstlight.engine.parallel.cluster import RayRanks
from firstlight.engine.serving.api import Health
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.health import Failure
from firstlight.engine.serving.options import EngineOptions, HostOptions, is_loopback
from firstlight.engine.serving.stream import EngineFailed
from firstlight.engine.serving.waiting import until
from firstlight.engine.settings import read_settings

MODULE = "firstlight.engine.serving.launched"
POLL_S = 0.2


class RayHost:
    """Ranks on the hosts of `options.hosts`; rank 0 listens on the address that Ray knows its host by."""

    def __init__(self, ranks: RayRanks, http: HostOptions, pids: tuple[int, ...], run_dir: Path) -> None:
        self.run_dir, self.pids = run_dir, pids
        self.url = f"http://{http.host}:{http.port}"
        self.token = http.token
        self.hosts = tuple(name for _, name, _ in ranks.places)
        self._ranks = ranks
        self._client = EngineClient(self.url, http.token)
        self._last = Health(status="starting", stage="spawn")

    @classmethod
    def start(
        cls, engine: EngineOptions, http: HostOptions | None = None, run_dir: str | Path | None = None
    ) -> RayHost:
        """Place the ranks and start them. Raises `Refused` if Ray, the hosts or the room for the ranks are lacking."""
        http = http or HostOptions()
        gpus = engine.device == "cuda"
        ranks = RayRanks(engine.mesh, engine.hosts, gpus)
        try:
            address = ranks.places[0][0] if is_loopback(http.host) else http.host
            token = http.token or read_settings().token or secrets.token_urlsafe(24)
            http = msgspec.structs.replace(http, host=address, port=http.port or ranks.free_port(), token=token)
            engine = msgspec.structs.replace(engine, checkpoint=str(Path(engine.checkpoint).absolute()))
            given = msgspec.json.encode({"engine": engine, "host": http})
            pids = ranks.start(MODULE, given, gpus)
        except BaseException:
            ranks.end()
            raise
        reachable = address if address not in ("0.0.0.0", "::") else ranks.places[0][0]
        http = msgspec.structs.replace(http, host=reachable)
        return cls(ranks, http, pids, Path.cwd() if run_dir is None else Path(run_dir))

    def client(self) -> EngineClient:
        """The engine over HTTP."""
        return self._client

    def health(self) -> Health:
        """How the engine is: by rank 0's word while it can speak, else by what became of the processes."""
        if self._last.status in ("failed", "stopped"):
            return self._last
        found = self._client.health()
        if found.status != "failed" or found.ranks:
            self._last = found
            return found
        statuses = self._ranks.statuses()
        ended = [rank for rank, status in enumerate(statuses) if status is not None]
        if not ended and self._last.status == "starting":
            return self._last  # it does not listen yet
        self._last = self._over(statuses, ended, found)
        return self._last

    def _over(self, statuses: list[int | None], ended: list[int], found: Health) -> Health:
        """Rank 0 does not answer, or some rank has ended."""
        if ended and all(statuses[rank] == 0 for rank in ended):
            return Health(status="stopped", stage=self._last.stage)
        failure = found.failure
        if ended:
            rank = next(rank for rank in ended if statuses[rank] != 0)
            words = self._ranks.said(rank).strip().splitlines()
            reason = f"ended with status {statuses[rank]}" + (f": {words[-1]}" if words else "")
            failure = Failure(rank=rank, phase=self._last.stage, reason=reason, machine=self.hosts[rank])
        return Health(status="failed", stage=self._last.stage, failure=failure)

    def wait_ready(
        self, timeout_s: float | None = None, progress: Callable[[Health], None] | None = None
    ) -> EngineClient:
        """Wait until the engine answers; `progress` gets its health meanwhile. Raises `Refused` or `RankFailure`."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not (health := self.health()).is_ready:
            if progress is not None:
                progress(health)
            failure = health.failure
            if failure is not None:
                if failure.findings:
                    raise Refused(failure.findings)
                raise RankFailure(failure.rank, failure.phase, failure.reason)
            if health.status == "stopped" or (until_s is not None and time.monotonic() > until_s):
                raise RankFailure(None, health.stage, f"not ready: {health.status}")
            time.sleep(POLL_S)
        return self._client

    def stop(self, grace_s: float = 5.0) -> None:
        """Ask the engine to stop, then end what is left and give the places back to Ray."""
        if self._last.is_ready:
            with contextlib.suppress(Refused, EngineFailed):
                self._client.stop()
            until(lambda: None not in self._ranks.statuses(), grace_s, POLL_S)
        self._client.close()
        self._ranks.end()

    def __enter__(self) -> RayHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def log(self, rank: int) -> str:
        """What a rank wrote to its standard output and error."""
        return self._ranks.said(rank)

    def log_file(self, rank: int | None) -> str | None:
        """Nowhere on this machine: Ray has it."""
        return None
