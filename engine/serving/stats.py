"""What an engine counts while it serves. No torch.

Counters only grow; whoever samples them twice has rates. A share of the steps is timed inside (`StepSample`): layers
and collectives of rank 0, with the number of the step, so that what hardware shows can be laid beside it.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import msgspec

from firstlight.engine.serving.request import FinishReason, Usage
from firstlight.engine.serving.steps import StepPlan

KEPT_REQUESTS = 128  # ended ones, for whoever asks later


class CollectiveTime(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one kind of collective in a step, as rank 0 saw them; the time holds waiting for other ranks."""

    axis: str
    operation: str
    calls: int
    nbytes: int
    total_ms: float


class StepSample(msgspec.Struct, frozen=True, kw_only=True):
    """One step seen from inside, on rank 0; on GPUs the device was awaited between layers, which slows that step."""

    step: int
    time_s: float
    phase: str
    tokens: int
    total_ms: float
    layers_ms: dict[str, float]
    collectives: tuple[CollectiveTime, ...]


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A request that is over, as its client was told; `number` is by arrival, `order` by ending, from 1."""

    number: int
    order: int
    ended_s: float
    finish: FinishReason
    usage: Usage
    pictures: int = 0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start and gauges of now. `busy_s`: time spent in steps. `requests`: ended ones, by reason."""

    time_s: float
    step: int
    running: int
    waiting: int
    free_pages: int
    num_pages: int
    page_size: int
    prompt_tokens: int
    generated_tokens: int
    busy_s: float
    last_step_ms: float
    requests: dict[str, int]
    sample: StepSample | None = None


class Counters:
    """The counting itself: steps by one thread (the engine's), ends by any; any thread may read."""

    def __init__(self) -> None:
        self.step = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.busy_s = 0.0
        self.last_step_ms = 0.0
        self.requests: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._ended: deque[Ended] = deque(maxlen=KEPT_REQUESTS)
        self._ending = threading.Lock()

    def stepped(self, plan: StepPlan, seconds: float, generated: int) -> None:
        """A step was computed."""
        self.step = plan.number
        self.prompt_tokens += sum(
            len(chunk.tokens) for part in plan.replicas for chunk in part.chunks if chunk.draws <= 0
        )
        self.generated_tokens += generated
        self.busy_s += seconds
        self.last_step_ms = 1e3 * seconds

    def ended(self, reason: FinishReason, number: int, usage: Usage, pictures: int) -> None:
        """A request is over. It is kept before it is counted: who has seen the count finds the request."""
        with self._ending:
            order = sum(self.requests.values()) + 1
            self._ended.append(
                Ended(number=number, order=order, ended_s=time.time(), finish=reason, usage=usage, pictures=pictures)
            )
            self.requests[reason] = self.requests.get(reason, 0) + 1

    def forget_ended(self) -> None:
        """What has ended so far was nobody's: the start's own requests."""
        self._ended.clear()

    def last_ended(self, since: int) -> tuple[Ended, ...]:
        """The requests that ended after the first `since` ones, of those that are still kept."""
        return tuple(one for one in tuple(self._ended) if one.order > since)

    def snapshot(
        self,
        *,
        running: int,
        waiting: int,
        free_pages: int,
        num_pages: int,
        page_size: int,
        sample: StepSample | None,
    ) -> EngineStats:
        return EngineStats(
            time_s=time.time(),
            step=self.step,
            running=running,
            waiting=waiting,
            free_pages=free_pages,
            num_pages=num_pages,
            page_size=page_size,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            busy_s=self.busy_s,
            last_step_ms=self.last_step_ms,
            requests=dict(self.requests),
            sample=sample,
        )
