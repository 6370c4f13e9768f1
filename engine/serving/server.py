"""HTTP: the OpenAI routes, health, and the admin routes, over one engine that another thread steps.

Nothing here computes. Handlers turn bodies into requests (in worker threads), and the engine's thread hands each token
back through the event loop. Every error has a body as OpenAI writes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

import msgspec
import safetensors.numpy
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from firstlight.engine.errors import FirstlightError, Refused
from firstlight.engine.findings import fatal
from firstlight.engine.model.foreign import ForeignSpec
from firstlight.engine.serving.api import Prompt
from firstlight.engine.serving.desk import Desk
from firstlight.engine.serving.gate import BodyLimit, Gate, may_enter
from firstlight.engine.serving.metrics import CONTENT_TYPE, exposition
from firstlight.engine.serving.openai import Ask, Writer, error_body, model_body, read_chat, read_text
from firstlight.engine.serving.options import HostOptions
from firstlight.engine.serving.protocol import protocol_of
from firstlight.engine.serving.request import Delta
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.serving.stream import EngineFailed, Stream
from firstlight.engine.serving.wire import read_generation, refuse_large_trace, trace_arguments
from firstlight.engine.weights.accounts.wire import plain

SHOWN = 200  # characters of what a client sent, in an answer about it
LOOKS = ["GET", "HEAD"]  # the second has the first's status and headers and no body (RFC 9110, section 9.3.2)
STATUS_OF_CODE = {"not-available": 503}
Result = TypeVar("Result")


class HttpServer:
    """uvicorn in the calling thread; the port is bound at once, so `url` is known before the first request."""

    def __init__(self, desk: Desk) -> None:
        options = desk.options
        self._socket = _listen(options)
        host, port = self._socket.getsockname()[:2]
        shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
        self.url = f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"
        config = uvicorn.Config(
            create_app(desk),
            http=protocol_of(options.head_deadline_s, options.body_deadline_s),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=5,
            server_header=False,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until `stop`."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        self._server.should_exit = True


def _listen(options: HostOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except (OSError, OverflowError, UnicodeError) as error:  # taken or absent; no port at all; no host name at all
        listener.close()
        raise Refused(
            fatal(
                "usage",
                f"cannot listen on {options.host} port {options.port}: {getattr(error, 'strerror', None) or error}",
                expected="a free port of this machine",
                found=f"{options.host}:{options.port}",
                next="choose another --port (0: any free one) or --host",
            )
        ) from error
    listener.listen(1024)
    return listener


def create_app(desk: Desk) -> FastAPI:
    """The application; `desk` leads to the engine."""
    app = FastAPI(title="firstlight", docs_url=None, redoc_url=None, openapi_url=None)
    _openai_routes(app, desk)
    _asking_routes(app, desk)
    _telling_routes(app, desk)
    _measuring_routes(app, desk)
    _ending_routes(app, desk)
    app.add_exception_handler(FirstlightError, _on_error)
    app.add_exception_handler(Exception, _on_fault)
    app.add_exception_handler(RequestValidationError, _on_query)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(404, _on_missing)
    app.add_exception_handler(405, _on_missing)
    app.add_middleware(BodyLimit, limit_of=lambda path: _limit_of(path, desk.options))
    app.add_middleware(Gate, options=desk.options)
    return app


def _openai_routes(app: FastAPI, desk: Desk) -> None:
    created = int(time.time())

    @app.api_route("/admin/health", methods=LOOKS)
    @app.api_route("/health", methods=LOOKS)
    async def health(request: Request) -> Response:
        now = desk.health()
        shown: dict[str, Any] = msgspec.to_builtins(now)
        if not may_enter(desk.options, request.headers.get("authorization", "")):
            del shown["ranks"]  # probes need no token; machines and process ids are not for everyone
        if now.failure is not None:  # what is asked for first stands on top
            shown |= {"rank": now.failure.rank, "phase": now.failure.phase, "since_s": now.failure.since_s}
        return _json(shown, 200 if now.is_ready else 503)

    @app.api_route("/v1/models", methods=LOOKS)
    async def models() -> Response:
        return _json({"object": "list", "data": [_model(desk, created)]})

    @app.api_route("/v1/models/{name:path}", methods=LOOKS)
    async def model(name: str) -> Response:
        found = _model(desk, created)
        return _json(found) if name == found["id"] else _no_model(name, found["id"])

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(desk, request, read_chat)

    @app.post("/v1/completions")
    async def text(request: Request) -> Response:
        return await _answer(desk, request, read_text)


def _asking_routes(app: FastAPI, desk: Desk) -> None:
    """A prompt as our own clients send it: messages, text or token ids, answered delta by delta."""

    @app.post("/admin/generate")
    async def generate(request: Request) -> Response:
        engine, body = _engine(desk), await request.body()
        handed = _Handed()

        def submit() -> Stream:
            asked = read_generation(body)
            return engine.submit(cast(Prompt, asked.prompt), asked.pictures, asked.params, asked.chat, handed.take)

        stream = await _in_thread(submit)
        return StreamingResponse(_lines(engine, stream, handed.queue), media_type="application/x-ndjson")


def _telling_routes(app: FastAPI, desk: Desk) -> None:
    """What the engine is, holds and has counted; nothing is computed for it."""

    @app.api_route("/admin/info", methods=LOOKS)
    async def info() -> Response:
        return _json(_engine(desk).info())

    @app.api_route("/admin/ledger", methods=LOOKS)
    async def ledger() -> Response:
        return _json(_engine(desk).ledger())

    @app.api_route("/admin/stats", methods=LOOKS)
    async def stats() -> Response:
        return _json(_engine(desk).stats())

    @app.api_route("/admin/requests", methods=LOOKS)
    async def requests(since: int = 0) -> Response:
        return _json(_engine(desk).ended(max(0, since)))

    @app.api_route("/metrics", methods=LOOKS)
    async def metrics() -> Response:
        engine = _engine(desk)
        return Response(exposition(engine.stats(), _name(desk, engine)), media_type=CONTENT_TYPE)

    @app.api_route("/admin/memory", methods=LOOKS)
    async def memory(pools: bool = False) -> Response:
        return _json(await _in_thread(lambda: _engine(desk).memory(pools)))


def _measuring_routes(app: FastAPI, desk: Desk) -> None:
    """Steps that are run to be looked at: their times, and what every layer computes."""

    @app.post("/admin/profile")
    async def profile(prompt_tokens: int = 128, decode_steps: int = 8, batch: int = 1) -> Response:
        return _json(await _in_thread(lambda: _engine(desk).profile(prompt_tokens, decode_steps, batch)))

    @app.post("/admin/trace")
    async def trace(request: Request) -> Response:
        body, query = await request.body(), dict(request.query_params)
        engine = _engine(desk)

        def run() -> bytes:
            arguments = trace_arguments(body, query)
            refuse_large_trace(
                engine.info(), arguments, desk.options.trace_limit_bytes, desk.options.trace_limit_tokens
            )
            return safetensors.numpy.save(engine.trace(**arguments))

        return Response(await _in_thread(run), media_type="application/octet-stream")


def _ending_routes(app: FastAPI, desk: Desk) -> None:
    """No further requests, or none at all."""

    @app.post("/admin/drain")
    async def drain() -> Response:
        await _in_thread(_engine(desk).drain)
        return _json({"status": "draining"})

    @app.post("/admin/stop")
    async def stop() -> Response:
        _engine(desk).close()
        return _json({"status": "stopped"})


async def _answer(desk: Desk, request: Request, read: Callable[[bytes, int], Ask]) -> Response:
    """One completion of either kind, streamed or whole. A client that goes away ends its request."""
    engine = _engine(desk)
    if engine.status == "draining":
        raise Refused(fatal("not-available", "the engine is draining", next="send the request to another engine"))
    body = await request.body()
    ask = await run_in_threadpool(read, body, desk.options.default_max_tokens)
    name = _name(desk, engine)
    if ask.model != name:
        return _no_model(ask.model, name)
    handed = _Handed()
    stream = await run_in_threadpool(_submit, engine, ask, handed.take)
    queue = handed.queue
    writer = Writer(ask, engine.frontend.token_bytes)
    if ask.stream:
        return StreamingResponse(_events(engine, stream, queue, writer), media_type="text/event-stream")
    return await _whole(engine, stream, queue, writer, request)


class _Handed:
    """Deltas on their way from the engine's thread to the event loop that made this."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Delta] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def take(self, delta: Delta) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody reads any more
            self._loop.call_soon_threadsafe(self.queue.put_nowait, delta)


async def _lines(engine: Engine, stream: Stream, queue: asyncio.Queue[Delta]) -> AsyncIterator[bytes]:
    """Deltas as lines of JSON; when the client is gone this is cancelled, and the request with it."""
    try:
        while True:
            delta = await queue.get()
            yield msgspec.json.encode(delta) + b"\n"
            if delta.finish is not None:
                return
    finally:
        if not stream.is_over:
            engine.abort(stream)


def _submit(engine: Engine, ask: Ask, listener: Callable[[Delta], None]) -> Stream:
    return engine.submit(ask.prompt, ask.pictures, ask.params, chat=False, listener=listener, clip=ask.default_tokens)


async def _events(engine: Engine, stream: Stream, queue: asyncio.Queue[Delta], writer: Writer) -> AsyncIterator[bytes]:
    """Server-sent events; when the client is gone this is cancelled, and the request with it."""
    try:
        while True:
            delta = await queue.get()
            if delta.finish == "error":
                yield _event(error_body(delta.error or "the engine failed", "server_error", "engine_failed"))
                return
            chunk = writer.chunk(delta)
            if chunk is not None:
                yield _event(chunk)
            if delta.finish is not None:
                if writer.ask.include_usage and delta.usage is not None:
                    yield _event(writer.last_chunk(delta.usage))
                yield b"data: [DONE]\n\n"
                return
    finally:
        if not stream.is_over:
            engine.abort(stream)


async def _whole(
    engine: Engine, stream: Stream, queue: asyncio.Queue[Delta], writer: Writer, request: Request
) -> Response:
    """All deltas in one body, unless the client leaves first."""

    async def collect() -> list[Delta]:
        deltas = [await queue.get()]
        while deltas[-1].finish is None:
            deltas.append(await queue.get())
        return deltas

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    collecting, leaving = asyncio.ensure_future(collect()), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)
        deltas = collecting.result()
    finally:
        collecting.cancel()
        leaving.cancel()
        if not stream.is_over:
            engine.abort(stream)
    if deltas[-1].finish == "error":
        return _json(error_body(deltas[-1].error or "the engine failed", "server_error", "engine_failed"), 500)
    return _json(writer.whole(deltas))


def _limit_of(path: str, options: HostOptions) -> int:
    return options.trace_limit_bytes if path == "/admin/trace" else options.body_limit_bytes


async def _on_error(request: Request, error: Exception) -> Response:
    if isinstance(error, Refused):
        finding = error.findings[0]
        status = STATUS_OF_CODE.get(finding.code, 400)
        kind = "invalid_request_error" if status == 400 else "server_error"
        body = error_body(str(error), kind, finding.code)
        body["error"]["findings"] = error.findings
        return _json(body, status)
    if isinstance(error, EngineFailed):
        return _json(error_body(str(error), "server_error", "engine_failed"), 503)
    return _json(error_body(str(error), "server_error"), 500)


async def _on_fault(request: Request, error: Exception) -> Response:
    return _json(
        error_body(f"{type(error).__name__} in {request.url.path}; see the log of rank 0", "server_error"), 500
    )


async def _on_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it: the client left in the middle of its own request


async def _on_query(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(f"{one['loc'][-1]}: {one['msg']}" for one in error.errors())
    return _json(error_body(f"the query cannot be used: {wrong}", "invalid_request_error", "bad-request"), 400)


async def _on_missing(request: Request, error: Exception) -> Response:
    status = getattr(error, "status_code", 404)
    return _json(
        error_body(f"{request.method} {request.url.path[:SHOWN]} is not served", "invalid_request_error"), status
    )


async def _in_thread(call: Callable[[], Result]) -> Result:
    return await run_in_threadpool(call)


def _engine(desk: Desk) -> Engine:
    if desk.engine is None or desk.engine.status == "starting":
        health = desk.health()
        if health.failure is not None:
            raise EngineFailed(str(health.failure), health.failure)
        raise Refused(
            fatal("not-available", f"the engine is starting: {health.stage}", next="wait until /health says ready")
        )
    return desk.engine


def _model(desk: Desk, created: int) -> dict[str, Any]:
    """What clients are told of the one model there is."""
    engine = _engine(desk)
    rank = engine.worker.rank
    by = rank.spec.by if isinstance(rank.spec, ForeignSpec) else None
    return model_body(_name(desk, engine), created, rank.limits.max_context, by)


def _no_model(asked: str, name: str) -> Response:
    message = f"there is no model {asked[:SHOWN]!r} here; it is {name!r}"
    return _json(error_body(message, "invalid_request_error", "model_not_found"), 404)


def _name(desk: Desk, engine: Engine) -> str:
    return desk.options.model_name or engine.worker.rank.checkpoint.name


class _Json(JSONResponse):
    """msgspec's JSON: structs as they are, mappings of every kind as objects, never NaN (null instead)."""

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content, enc_hook=plain)


def _json(content: Any, status: int = 200) -> JSONResponse:
    return _Json(content, status)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
