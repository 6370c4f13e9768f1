"""One answer on its way from the engine to whoever asked: token by token in, text deltas out. No torch."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from firstlight.engine.errors import FirstlightError
from firstlight.engine.serving.health import Failure
from firstlight.engine.serving.request import Completion, Delta, FinishReason, Request, TokenLogprob, Usage

if TYPE_CHECKING:
    from firstlight.engine.inputs.detokenizer import Detokenizer

Listener = Callable[[Delta], None]
Ending = Callable[[Request, FinishReason, Usage], None]


class EngineFailed(FirstlightError):
    """The engine stopped while a request ran; `failure` names rank and phase if they are known."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        self.failure = failure
        super().__init__(message)


class Stream:
    """Deltas of one request. The engine's thread pushes; any one thread reads, or a `listener` gets each delta.

    `ending` is called once, before the last delta is given: who has the whole answer finds it counted.
    """

    def __init__(
        self,
        request: Request,
        detokenizer: Detokenizer | None,
        listener: Listener | None = None,
        ending: Ending | None = None,
    ) -> None:
        self.request = request
        self._detokenizer = detokenizer
        self._listener = listener
        self._ending = ending
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._count = 0
        self._first_s: float | None = None
        self._started_s: float | None = None
        self._ended_s: float | None = None
        self.is_over = False

    def started(self) -> None:
        """The first step with this request begins."""
        if self._started_s is None:
            self._started_s = time.perf_counter()

    def push(
        self, token: int, logprob: TokenLogprob | None, finish: FinishReason | None, free: Callable[[], None]
    ) -> None:
        """Take in a token. Where the answer ends with it, which a stop string may decide here, `free` is called first.

        Whoever has the last delta finds that the request holds nothing any more.
        """
        if self._first_s is None:
            self._first_s = time.perf_counter()
        self._count += 1
        text = ""
        if self._detokenizer is not None and finish != "stop":  # an end-of-sequence token has no text
            text = self._detokenizer.push(token)
            if self._detokenizer.stopped:
                finish = "stop"
        if finish is not None:
            text += self._detokenizer.finish() if self._detokenizer is not None else ""
            free()
        self._give(text, (token,), () if logprob is None else (logprob,), finish)

    def end(self, finish: FinishReason, error: str | None = None) -> None:
        """End the answer from outside: aborted, or the engine failed."""
        if not self.is_over:
            self._give("", (), (), finish, error)

    def read(self, timeout_s: float | None = None) -> Delta | None:
        """The next delta; None when there is none within the time (0: now)."""
        try:
            return self._deltas.get(timeout=timeout_s) if timeout_s != 0 else self._deltas.get_nowait()
        except queue.Empty:
            return None

    def _give(
        self,
        text: str,
        tokens: tuple[int, ...],
        logprobs: tuple[TokenLogprob, ...],
        finish: FinishReason | None,
        error: str | None = None,
    ) -> None:
        delta = Delta(text=text, tokens=tokens, logprobs=logprobs)
        if finish is not None:
            self.is_over = True
            self._ended_s = time.perf_counter()
            usage, seed = self.usage(), self.request.params.seed
            delta = Delta(
                text=text, tokens=tokens, logprobs=logprobs, finish=finish, error=error, usage=usage, seed=seed
            )
            if self._ending is not None:
                self._ending(self.request, finish, usage)
        if self._listener is not None:
            self._listener(delta)
        else:
            self._deltas.put(delta)

    def usage(self) -> Usage:
        """Tokens so far and when; the time ends with the answer."""
        arrival_s = self.request.arrival_s
        return Usage(
            prompt_tokens=len(self.request.prompt_ids),
            completion_tokens=self._count,
            queue_s=(self._started_s or arrival_s) - arrival_s,
            first_token_s=None if self._first_s is None else self._first_s - arrival_s,
            total_s=(self._ended_s or time.perf_counter()) - arrival_s,
            number=self.request.number,
        )


def completion_of(deltas: Iterator[Delta]) -> Completion:
    """A whole answer from its deltas; raises `EngineFailed` if it ended with an error."""
    text: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for delta in deltas:
        text.append(delta.text)
        tokens.extend(delta.tokens)
        logprobs.extend(delta.logprobs)
        if delta.finish is not None:
            if delta.finish == "error":
                raise EngineFailed(delta.error or "the engine failed")
            assert delta.usage is not None
            return Completion(
                text="".join(text),
                tokens=tuple(tokens),
                finish=delta.finish,
                usage=delta.usage,
                logprobs=tuple(logprobs),
                seed=delta.seed,
            )
    raise EngineFailed("the answer broke off")
