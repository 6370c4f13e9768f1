"""An engine at the other end of HTTP, with the methods of `EngineLike`. No torch."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, Self

import httpx
import msgspec
import numpy as np
import safetensors.numpy

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, fatal
from firstlight.engine.serving.api import EngineInfo, Health, PictureSource, Prompt, RankMemory
from firstlight.engine.serving.board import BoardReader
from firstlight.engine.serving.health import Failure
from firstlight.engine.serving.profile_data import RankProfile
from firstlight.engine.serving.request import Completion, Delta, SamplingParams
from firstlight.engine.serving.stats import Ended, EngineStats
from firstlight.engine.serving.stream import EngineFailed, completion_of
from firstlight.engine.serving.wire import trace_body, trace_query
from firstlight.engine.weights.accounts.wire import ledger_of
from firstlight.engine.weights.ledger import Ledger

CONNECT_S = 5.0


class EngineClient:
    """Talks to a host at `url`. One client may be used from several threads.

    `deadline_s` is how long rank 0 may take to answer /health before it counts as lost. `board` is where an engine of
    this machine lays out its statistics.
    """

    def __init__(
        self, url: str, token: str | None = None, deadline_s: float = 10.0, board: str | Path | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self.token = token
        self.deadline_s = deadline_s
        self._board = BoardReader(board) if board is not None else None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=16)
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            limits=limits,
            trust_env=False,
            verify=self.url.startswith("https:"),  # reading certificates takes longer than a token
        )

    def generate(
        self,
        prompt: Prompt,
        pictures: Sequence[PictureSource] = (),
        params: SamplingParams | None = None,
        chat: bool = True,
    ) -> Iterator[Delta]:
        """See `EngineLike.generate`. Closing the iterator closes the connection, which aborts the request."""
        body = msgspec.json.encode(
            {
                "prompt": prompt,
                "pictures": [_data_url(picture) for picture in pictures],
                "params": params or SamplingParams(),
                "chat": chat,
            }
        )
        request = self._http.build_request("POST", "/admin/generate", content=body, headers=_JSON)
        response = self._send(request, stream=True)
        if response.is_error:
            response.read()
            response.close()
            raise _error_of(response)
        return _deltas(response)

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
        body = trace_body(input_ids, attention_mask, tensors, inputs)
        answer = self._ask("POST", "/admin/trace", content=body, params=trace_query(layers, steps, blocks))
        return dict(safetensors.numpy.load(answer))

    def profile(self, prompt_tokens: int = 128, decode_steps: int = 8, batch: int = 1) -> tuple[RankProfile, ...]:
        """See `Engine.profile`."""
        query = {"prompt_tokens": prompt_tokens, "decode_steps": decode_steps, "batch": batch}
        return msgspec.json.decode(self._ask("POST", "/admin/profile", params=query), type=tuple[RankProfile, ...])

    def memory(self, pools: bool = False) -> tuple[RankMemory, ...]:
        """See `Engine.memory`."""
        query = {"pools": pools}
        return msgspec.json.decode(self._ask("GET", "/admin/memory", params=query), type=tuple[RankMemory, ...])

    def stats(self) -> EngineStats:
        """See `Engine.stats`."""
        return msgspec.json.decode(self._ask("GET", "/admin/stats"), type=EngineStats)

    def glance(self) -> EngineStats | None:
        """The statistics as the engine laid them out last, without asking it; None where they cannot be seen so."""
        return self._board.read() if self._board is not None else None

    def ended(self, since: int = 0) -> tuple[Ended, ...]:
        """See `Engine.ended`."""
        return msgspec.json.decode(self._ask("GET", f"/admin/requests?since={since}"), type=tuple[Ended, ...])

    def ledger(self) -> Ledger:
        return ledger_of(self._ask("GET", "/admin/ledger"))

    def info(self) -> EngineInfo:
        return msgspec.json.decode(self._ask("GET", "/admin/info"), type=EngineInfo)

    def health(self) -> Health:
        """How the engine is; if rank 0 does not answer within the deadline, that is the failure."""
        try:
            answer = self._http.get("/health", timeout=self.deadline_s)
        except httpx.HTTPError as error:
            reason = f"does not answer /health: {type(error).__name__}"
            failure = Failure(rank=0, phase="serve", reason=reason, since_s=self.deadline_s)
            return Health(status="failed", stage="serve", failure=failure)
        return msgspec.json.decode(answer.content, type=Health)

    def drain(self) -> None:
        """See `EngineLike.drain`."""
        self._ask("POST", "/admin/drain")

    def stop(self) -> None:
        """Have the engine stop; running requests are aborted."""
        self._ask("POST", "/admin/stop")

    def close(self) -> None:
        """Let go of the connection; the engine goes on."""
        self._http.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, path: str, **arguments: Any) -> bytes:
        response = self._send(self._http.build_request(method, path, **arguments))
        if response.is_error:
            raise _error_of(response)
        return response.content

    def _send(self, request: httpx.Request, stream: bool = False) -> httpx.Response:
        try:
            return self._http.send(request, stream=stream)
        except httpx.HTTPError as error:
            raise EngineFailed(f"the engine at {self.url} does not answer: {error}") from error


_JSON = {"Content-Type": "application/json"}


def _deltas(response: httpx.Response) -> Iterator[Delta]:
    """One delta a line."""
    try:
        for line in response.iter_lines():
            if line:
                yield msgspec.json.decode(line, type=Delta)
    except httpx.HTTPError as error:
        raise EngineFailed(f"the engine broke off: {error}") from error
    finally:
        response.close()


def _error_of(response: httpx.Response) -> Exception:
    """The error that the other side raised."""
    try:
        error = msgspec.json.decode(response.content)["error"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return EngineFailed(f"HTTP {response.status_code}: {response.text[:200]}")
    if error.get("findings"):
        return Refused(msgspec.convert(error["findings"], tuple[Finding, ...]))
    return EngineFailed(f"HTTP {response.status_code}: {error.get('message')}")


def _data_url(picture: PictureSource) -> str:
    """A picture as a data URL: files and bytes as they are, pictures in memory as PNG."""
    if isinstance(picture, str) and picture.startswith("data:"):
        return picture
    if isinstance(picture, str | Path):
        try:
            data = Path(picture).read_bytes()
        except OSError as error:
            code = "not-found" if isinstance(error, FileNotFoundError) else "bad-image"
            raise Refused(
                fatal(code, f"the picture cannot be read: {error.strerror}", file=str(picture), next="check its path")
            ) from None
    elif isinstance(picture, bytes):
        data = picture
    else:
        stream = BytesIO()
        picture.image.save(stream, format="PNG")
        data = stream.getvalue()
    return "data:image/*;base64," + base64.b64encode(data).decode("ascii")
