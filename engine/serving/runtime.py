"""The engine: requests in, tokens out. `Engine.step` is the whole of serving; everything else feeds or follows it."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.build import Model
from firstlight.engine.parallel.comm import Comms
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.api import EngineInfo, Health, PictureSource, Prompt, RankMemory
from firstlight.engine.serving.board import Board
from firstlight.engine.serving.boot import bring_up
from firstlight.engine.serving.control import Control
from firstlight.engine.serving.frontend import Frontend
from firstlight.engine.serving.health import Failure, Pulse, Status
from firstlight.engine.serving.inquest import FAULT, MOST_TOKENS, Found, InquestCommand, verdict
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.serving.profile_data import RankProfile, profile_command
from firstlight.engine.serving.request import (
    Arrays,
    Completion,
    Delta,
    FinishReason,
    Request,
    SamplingParams,
    TokenLogprob,
    Usage,
)
from firstlight.engine.serving.scheduler import Scheduler, Step
from firstlight.engine.serving.sight import Sight
from firstlight.engine.serving.stats import Counters, Ended, EngineStats
from firstlight.engine.serving.steps import Sampled, StepPlan, StepResult
from firstlight.engine.serving.stream import EngineFailed, Listener, Stream, completion_of
from firstlight.engine.serving.trace import assemble, generated, trace_command
from firstlight.engine.serving.worker import Command, MemoryCommand, Stop, Tick, Worker
from firstlight.engine.weights.ledger import Ledger

Result = TypeVar("Result")


class Engine:
    """A model that serves. One thread steps it: the caller of `generate`, or a host's main loop (`run`).

    `submit`, `abort`, `health` and what waits for results may be called from any thread.
    """

    def __init__(self, worker: Worker, control: Control, pulse: Pulse) -> None:
        rank = worker.rank
        self.worker = worker
        self.pulse = pulse
        self.frontend = Frontend(rank.checkpoint, rank.spec, None if isinstance(rank.model, Model) else rank.model)
        self.scheduler = Scheduler(rank.limits, self.frontend.eos_ids, Sight.of(rank.spec).whole)
        self.status: Status = "starting"
        self.failure: Failure | None = None
        self._control = control
        self._counters = Counters()
        self._streams: dict[int, Stream] = {}
        self._coming: dict[int, Stream] = {}  # submitted, and not yet taken in by the engine's thread
        self._numbers = itertools.count(1)
        self._inbox: deque[Callable[[], None]] = deque()
        self._arrived = threading.Event()
        self._stepping = threading.RLock()
        self._is_driven = False  # by `run`; else by whoever waits for a result
        self._has_to_leave = False
        self._fault: str | None = None  # why numbers were not finite, once that was looked for

    @classmethod
    def start(cls, checkpoint: str, mesh: Mesh | None = None, *, pulse: Pulse | None = None, **options: Any) -> Engine:
        """An engine in this process, on one rank; `options` are those of `EngineOptions`. Raises `Refused`.

        `pulse` is told the stages of the start as they come.
        """
        settings = EngineOptions(checkpoint=str(checkpoint), mesh=mesh or Mesh(), **options)
        if settings.mesh.world_size != 1:
            raise Refused(
                fatal(
                    "usage",
                    "an engine in this process has one rank",
                    expected="a mesh of one rank",
                    found=settings.mesh.describe(),
                    next="start a host for several ranks (Host.start)",
                )
            )
        pulse = pulse or Pulse()
        comms = Comms.alone()
        engine = cls(Worker(bring_up(settings, comms, pulse), pulse), Control(comms.control), pulse)
        engine.get_ready(settings.warm_up)
        return engine

    def get_ready(self, warm_up: bool) -> None:
        """The last stages of a start: a collective over every axis, one text token, one picture; then ready."""
        if warm_up:
            self.pulse.enter("warm-up text")
            self._first_token([0])
            if (stream := self.worker.rank.weights.stream) is not None:
                there, whole = stream.there_bytes(), stream.whole_bytes
                self.pulse.say(f"{there:,} of {whole:,} bytes of weights were there with the first token")
            vision = self.worker.rank.spec.vision
            blank = vision.blank() if vision is not None else {}
            if vision and blank and sum(vision.counts(blank)) + 2 <= self.scheduler.limits.max_context:
                self.pulse.enter("warm-up image")
                self._first_token(*self.frontend.blank_picture())
        self._counters.forget_ended()
        if self.worker.rank.choices is not None:  # layers that come and go were not prepared before the first token
            self.worker.rank.choices.keep()
        self.pulse.enter("ready")
        self.pulse.at("idle")
        self.status = "ready"

    # What clients call

    def submit(
        self,
        prompt: Prompt,
        pictures: Sequence[PictureSource] = (),
        params: SamplingParams | None = None,
        chat: bool = True,
        listener: Listener | None = None,
        clip: bool = False,
    ) -> Stream:
        """Queue a request; its deltas come out of the stream, or go to `listener` from the engine's thread.

        `clip` shortens the answer to what the context has room for, instead of refusing. Raises `Refused` for what
        cannot be served: a bad picture, too long a prompt, an engine that drains.
        """
        self._refuse_unless_open()
        self.frontend.refuse_endless(prompt, self.scheduler.limits.max_context)
        number = next(self._numbers)
        request = self.frontend.request(number, prompt, pictures, params, chat)
        room = self.scheduler.limits.max_context - len(request.prompt_ids)
        if clip and 0 < room < request.params.max_new_tokens:
            shorter = msgspec.structs.replace(request.params, max_new_tokens=room)
            request = msgspec.structs.replace(request, params=shorter)
        return self.submit_request(request, listener, self.frontend.has_tokenizer)

    def submit_request(self, request: Request, listener: Listener | None = None, with_text: bool = True) -> Stream:
        """Queue a request that is ready to run; `with_text` False gives token ids alone and needs no tokenizer."""
        self.scheduler.fits(request)
        if request.params.seed is None:
            params = msgspec.structs.replace(request.params, seed=secrets.randbits(63))
            request = msgspec.structs.replace(request, params=params)
        stream = Stream(request, self.frontend.detokenizer(request) if with_text else None, listener, self._count)

        def add() -> None:
            self._streams[request.number] = stream
            self._coming.pop(request.number, None)
            self.scheduler.add(request)

        self._coming[request.number] = stream
        self._tell(add)
        if self.failure is not None:  # it failed meanwhile: nobody will look into the inbox again
            stream.end("error", str(self.failure))
        return stream

    def abort(self, stream: Stream) -> None:
        """End a request whose answer nobody wants any more; its pages are free before the next step."""

        def drop() -> None:
            if self.scheduler.finish(stream.request.number):
                self._streams.pop(stream.request.number, None)
                stream.end("abort")

        self._tell(drop)

    def generate(
        self,
        prompt: Prompt,
        pictures: Sequence[PictureSource] = (),
        params: SamplingParams | None = None,
        chat: bool = True,
    ) -> Iterator[Delta]:
        """See `EngineLike.generate`. Closing the iterator aborts the request."""
        stream = self.submit(prompt, pictures, params, chat)
        return self._read(stream)

    def complete(
        self,
        prompt: Prompt,
        pictures: Sequence[PictureSource] = (),
        params: SamplingParams | None = None,
        chat: bool = True,
    ) -> Completion:
        """See `EngineLike.complete`."""
        return completion_of(self.generate(prompt, pictures, params, chat))

    def trace(
        self,
        input_ids: np.ndarray,
        attention_mask: np.ndarray | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        layers: tuple[int, int] | None = None,
        inputs: Mapping[str, np.ndarray] | None = None,
        steps: int = 0,
        blocks: bool = False,
    ) -> dict[str, np.ndarray]:
        """See `EngineLike.trace`."""
        rank = self.worker.rank
        command = trace_command(rank.spec, input_ids, attention_mask, tensors, layers, inputs, blocks)
        if steps and command.images and not isinstance(rank.model, Model):  # whose picture is whose, it alone knows
            command, steps = msgspec.structs.replace(command, steps=steps), 0
        greedy = self.frontend.greedy(command, steps, self._numbers) if steps else ()
        answers = self.call(lambda: self._ask(command))
        shares = [
            (rank.mesh.coordinates(index).dp, msgspec.msgpack.decode(answer, type=Arrays))
            for index, answer in enumerate(answers)
        ]
        shown = assemble(command, rank.mesh.dp, shares)
        if greedy:
            streams = [self.submit_request(request, with_text=False) for request in greedy]
            shown |= generated([completion_of(self._read(stream)) for stream in streams])
        return shown

    def profile(self, prompt_tokens: int = 128, decode_steps: int = 8, batch: int = 1) -> tuple[RankProfile, ...]:
        """Where the time of prefill and decode goes, on every rank; `Refused` for what the context cannot hold."""
        command = profile_command(self.scheduler.limits, prompt_tokens, decode_steps, batch)
        answers = self.call(lambda: self._ask(command))
        return tuple(msgspec.msgpack.decode(answer, type=RankProfile) for answer in answers)

    def memory(self, pools: bool = False) -> tuple[RankMemory, ...]:
        """What every rank holds; `pools`: and how they are backed, for which all steps wait 0.1 s and more."""
        answers = self.call(lambda: self._ask(MemoryCommand(pools)))
        return tuple(msgspec.msgpack.decode(answer, type=RankMemory) for answer in answers)

    def ledger(self) -> Ledger:
        return self.worker.rank.ledger

    def info(self) -> EngineInfo:
        return self.frontend.info(self.worker.rank)

    def health(self) -> Health:
        return Health(
            status=self.status,
            stage=self.pulse.stage,
            stages=tuple(self.pulse.stages),
            done=self.pulse.done,
            total=self.pulse.total,
            failure=self.failure,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
        )

    def stats(self) -> EngineStats:
        """Counters since the start and gauges of now; any thread may ask, and nothing waits for a step."""
        limits = self.scheduler.limits
        return self._counters.snapshot(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            free_pages=self.scheduler.free_pages,
            num_pages=limits.num_pages * limits.replicas,
            page_size=limits.page_size,
            sample=self.worker.sample,
        )

    def ended(self, since: int = 0) -> tuple[Ended, ...]:
        """Requests that are over, but for the first `since` ones: as many as are kept."""
        return self._counters.last_ended(since)

    def drain(self) -> None:
        """See `EngineLike.drain`."""
        if self.status == "ready":
            self.status = "draining"
        while self._streams or self._inbox:
            if self._is_driven:
                time.sleep(0.01)
            else:
                with self._stepping:
                    self.step()

    def close(self) -> None:
        """Stop: running requests end with an error, the other ranks leave."""
        if self.status in ("stopped", "failed"):
            return
        self.status = "stopped"
        if self._is_driven:
            self._has_to_leave = True
            self._arrived.set()
            return
        with self._stepping:
            self._leave()
        self.worker.rank.weights.close()

    def fail(self, failure: Failure) -> None:
        """The engine cannot go on: every running request ends with the reason, new ones are refused. Any thread."""
        if self.failure is not None:
            return
        self.failure = failure
        self.status = "failed"
        self.pulse.fail()
        for stream in (*self._streams.values(), *self._coming.values()):  # a step that hangs takes nobody in any more
            stream.end("error", str(failure))
        self._arrived.set()

    # What the engine's thread does

    def step(self) -> bool:
        """Advance every running sequence by one step; False when there is nothing to do."""
        self._take_in()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        started_s = time.perf_counter()
        result = self._execute(plan)
        self._counters.stepped(plan, time.perf_counter() - started_s, len(result.sampled))
        self._collect(self.scheduler.apply(plan, result), result)
        return True

    def run(self, tick_s: float = 0.5, board: Board | None = None) -> None:
        """A host's main loop: step while there is work, tick while there is none, until closed or failed.

        What is counted is laid out on `board` now and then, for whoever takes readings.
        """
        self._is_driven = True
        while not self._has_to_leave and self.failure is None:
            if self.step():
                if board is not None:
                    board.offer(self.stats)
                continue
            if board is not None:
                board.show(self.stats())
            self._control.tell(_encode(Tick()))
            if self._arrived.wait(tick_s):
                self._arrived.clear()
        if self.failure is None:
            self._leave()

    def call(self, action: Callable[[], Result]) -> Result:
        """Run something between two steps, in the engine's thread; its result or error comes back here."""
        if not self._is_driven:
            with self._stepping:
                self._refuse_unless_open(draining=True)
                return action()
        future: Future[Result] = Future()

        def carry_out() -> None:
            try:
                future.set_result(action())
            except Refused as error:
                future.set_exception(error)
            except BaseException as error:  # the engine's own fault: whoever waits is told, and the loop ends
                future.set_exception(EngineFailed(f"{type(error).__name__}: {error}"))
                raise

        self._refuse_unless_open(draining=True)
        self._tell(carry_out)
        while True:
            try:
                return future.result(timeout=0.5)
            except TimeoutError:
                if self.failure is not None:
                    raise EngineFailed(str(self.failure), self.failure) from None

    def _execute(self, plan: StepPlan) -> StepResult:
        for part in plan.replicas:
            for admission in part.admitted:
                self._streams[admission.number].started()
        if not self._control.is_alone:
            self._control.tell(_encode(plan))
        return self.worker.execute(plan)

    def _collect(self, steps: Sequence[Step], result: StepResult) -> None:
        """Hand the new tokens to their streams, and end what a stop string or a fault ended."""
        sampled = {one.number: one for one in result.sampled}
        for step in steps:
            stream, free = self._streams[step.number], partial(self._free, step.number)
            if step.token < 0:
                free()
                stream.end("error", self._fault_of(stream.request))
            else:
                stream.push(step.token, _logprob_of(sampled[step.number]), step.finish, free)

    def _fault_of(self, request: Request) -> str:
        """Why numbers are not finite: the block and the rank, looked for once, by the first request that shows it."""
        if self._fault is None:
            self._fault = FAULT
            pictures = {name: array.numpy() for name, array in request.images.items()}
            if len(request.prompt_ids) <= MOST_TOKENS:
                ids = np.array([request.prompt_ids], dtype=np.int64)
                with contextlib.suppress(Refused):  # what cannot be traced; the fault itself is told
                    batch = trace_command(self.worker.rank.spec, ids, None, pictures)
                    answers = self._ask(InquestCommand(batch))
                    self._fault = verdict([msgspec.msgpack.decode(answer, type=Found) for answer in answers])
        return self._fault

    def _free(self, number: int) -> None:
        """A request is over; whoever is told so finds that it holds nothing any more."""
        self.scheduler.finish(number)
        del self._streams[number]

    def _count(self, request: Request, finish: FinishReason, usage: Usage) -> None:
        self._counters.ended(finish, request.number, usage, len(request.image_spans))

    def _take_in(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _tell(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        self._arrived.set()

    def _ask(self, command: Command) -> tuple[bytes, ...]:
        """Have every rank carry out a command; the answers in the order of ranks."""
        self._control.tell(_encode(command))
        return self._control.collect(self.worker.answer(command))

    def _leave(self) -> None:
        self._take_in()
        for stream in list(self._streams.values()):
            self.scheduler.finish(stream.request.number)
            stream.end("error", "the engine was stopped before the answer was complete")
        self._streams.clear()
        self._control.tell(_encode(Stop()))
        self.status = "stopped"

    def _read(self, stream: Stream) -> Iterator[Delta]:
        """Deltas of a stream; this thread steps the engine where no host does."""
        try:
            while True:
                delta = stream.read(0.5 if self._is_driven else 0)
                if delta is None:
                    if not self._is_driven:
                        with self._stepping:
                            self.step()
                    continue
                yield delta
                if delta.finish is not None:
                    return
        finally:
            if not stream.is_over:
                self.abort(stream)
                if not self._is_driven:
                    with self._stepping:
                        self._take_in()

    def _first_token(self, ids: Sequence[int], images: Arrays | None = None) -> None:
        number = next(self._numbers)
        request = self.frontend.bare(number, tuple(ids), images or {})
        completion_of(self._read(self.submit_request(request, with_text=False)))

    def _refuse_unless_open(self, draining: bool = False) -> None:
        if self.failure is not None:
            raise EngineFailed(str(self.failure), self.failure)
        if self.status in ("stopped",) or (self.status == "draining" and not draining):
            raise Refused(
                fatal("not-available", f"the engine is {self.status}", next="send the request to another engine")
            )


def _logprob_of(sampled: Sampled) -> TokenLogprob | None:
    if sampled.logprob is None:
        return None
    return TokenLogprob(token=sampled.token, logprob=sampled.logprob, top=sampled.top)


_encode = msgspec.msgpack.encode
