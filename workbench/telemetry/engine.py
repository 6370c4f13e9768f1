"""The engine's own counters: rates, batch, queue, cache, and what the last sampled step showed inside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from firstlight.engine.errors import FirstlightError
from firstlight.engine.serving.client import EngineClient
from firstlight.engine.serving.stats import Ended, EngineStats
from firstlight.workbench.events import SERVED, RequestEvent
from firstlight.workbench.readings import Reading
from firstlight.workbench.telemetry.source import FIRST, Maker, Rates

FRESH_S = 1.5  # an engine without work lays its statistics out anew twice a second
SELDOM_S = 1.0  # between questions over HTTP, which take the attention of the interpreter that steps the engine


class EngineSource:
    """Device `engine`, and one device per block and collective of the last sampled step."""

    name = "engine"
    every_s = 0.1

    def __init__(self, client: Callable[[], EngineClient | None], known: Collection[int] = ()) -> None:
        """`known`: numbers of requests that need not be told again."""
        self._client = client
        self._known = frozenset(known)
        self._ended = 0
        self._rates = Rates()
        self._sampled_step = -1
        self._seen_s = self._asked_s = self._told_s = float("-inf")
        self.step: int | None = None

    def read(self, time_s: float, step: int | None) -> Iterator[Reading | RequestEvent]:
        client = self._client()
        if client is None:
            return
        try:
            stats = self._look(client, time_s)
        except FirstlightError as error:
            make = Maker(self.name, time_s, step)
            failure = client.health().failure
            yield make.none("engine", "tokens", "tokens/s", str(failure or error), alarm=failure is not None)
            return
        if stats is None or stats.time_s <= self._seen_s:
            return  # nothing new: it is in the middle of a step
        self.step, self._seen_s = stats.step, stats.time_s
        yield from self._readings(Maker(self.name, time_s, stats.step), stats)
        yield from (_event(one) for one in self._told(client, stats, time_s) if one.number not in self._known)

    def _look(self, client: EngineClient, time_s: float) -> EngineStats | None:
        """What the engine has laid out, which costs it nothing; asked over HTTP where that is old or not to be seen."""
        seen, now_s = client.glance(), time.time()
        if seen is not None and abs(now_s - seen.time_s) < FRESH_S:
            is_idle = not seen.running and not seen.waiting
            return msgspec.structs.replace(seen, time_s=now_s) if is_idle else seen
        if seen is not None and time_s - self._asked_s < SELDOM_S:
            return None  # a long step, most likely: nothing is counted before its end
        self._asked_s = time_s
        return client.stats()

    def _told(self, client: EngineClient, stats: EngineStats, time_s: float) -> Sequence[Ended]:
        """Requests that ended since; asked for when there are any, and not at every reading."""
        total = sum(stats.requests.values())
        if total < self._ended:  # another engine
            self._ended, self._known = 0, frozenset()
        if total == self._ended or time_s - self._told_s < SELDOM_S:
            return ()
        self._told_s = time_s
        ended: Sequence[Ended] = ()
        with contextlib.suppress(FirstlightError):  # one that has just gone, or of a version that cannot say
            ended = client.ended(self._ended)
        self._ended = max(total, *(one.order for one in ended)) if ended else total
        return ended

    def _readings(self, make: Maker, stats: EngineStats) -> Iterator[Reading]:
        for metric, count in (("tokens", stats.generated_tokens), ("prompt_tokens", stats.prompt_tokens)):
            rate = self._rates.rate("engine", metric, stats.time_s, count)
            none = make.none("engine", metric, "tokens/s", FIRST)
            yield none if rate is None else make.value("engine", metric, "tokens/s", rate)
        busy = self._rates.rate("engine", "busy", stats.time_s, stats.busy_s)
        if busy is not None:
            yield make.value("engine", "busy", "%", 100 * min(1.0, busy))
        yield make.value("engine", "running", "requests", stats.running)
        yield make.value("engine", "waiting", "requests", stats.waiting)
        yield make.value("engine", "cache_used", "%", 100 * (1 - stats.free_pages / stats.num_pages))
        if stats.step:
            yield make.value("engine", "step", "ms", stats.last_step_ms)
        yield from self._sampled(stats)

    def _sampled(self, stats: EngineStats) -> Iterator[Reading]:
        sample = stats.sample
        if sample is None or sample.step == self._sampled_step:
            return
        self._sampled_step = sample.step
        make = Maker(self.name, sample.time_s, sample.step)
        for block, value_ms in sample.layers_ms.items():
            yield make.value(f"block {block}", "time", "ms", value_ms)
        for one in sample.collectives:
            yield make.value(f"{one.operation} {one.axis}", "time", "ms", one.total_ms)
            yield make.value(f"{one.operation} {one.axis}", "moved", "B", one.nbytes)


def _event(ended: Ended) -> RequestEvent:
    """A request as the engine knows it: whoever sent it, by whatever route."""
    usage = ended.usage
    record = {"number": ended.number, "pictures": ended.pictures, "queue_s": usage.queue_s}
    return RequestEvent(
        time_s=ended.ended_s,
        name=f"request {ended.number}",
        rung=SERVED,
        status=ended.finish,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        first_token_s=usage.first_token_s,
        total_s=usage.total_s,
        record=msgspec.json.encode(record).decode(),
    )


class MemorySource:
    """What every rank of the engine holds, by role; asking takes the ranks' attention, so it is done seldom."""

    name = "memory"
    every_s = 5.0

    def __init__(self, client: Callable[[], EngineClient | None]) -> None:
        self._client = client

    def read(self, time_s: float, step: int | None) -> Iterator[Reading]:
        client = self._client()
        if client is None:
            return
        make = Maker(self.name, time_s, step)
        try:
            ranks = client.memory()
        except FirstlightError as error:
            yield make.none("engine", "memory", "B", str(error))
            return
        for rank in ranks:
            device = f"rank {rank.rank}"
            for role, nbytes in rank.bytes_by_role.items():
                yield make.value(device, role, "B", nbytes)
            yield make.value(device, "resident", "B", rank.resident_bytes)
            for metric, held in (("allocated", rank.allocated_bytes), ("reserved", rank.reserved_bytes)):
                if held is None:
                    yield make.none(device, metric, "B", f"torch keeps no account of {rank.device} memory")
                else:
                    yield make.value(device, metric, "B", held)
