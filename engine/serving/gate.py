"""Who is let in, and with how much: the layers around the HTTP application. Plain ASGI, no web framework."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

import msgspec

from firstlight.engine.serving.openai import error_body
from firstlight.engine.serving.options import HostOptions

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
ASGIApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """Lets in who has the token; without a token, only requests that name this machine (a page in a browser cannot)."""

    def __init__(self, app: ASGIApp, options: HostOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            headers = dict(scope["headers"])
            if not may_enter(self._options, headers.get(b"authorization", b"").decode("latin-1")):
                body = error_body("this engine wants a bearer token", "authentication_error", "invalid_api_key")
                await _refuse(send, 401, body)
                return
            if self._options.token is None:
                stranger = _stranger(headers)
                if stranger:
                    body = error_body(f"{stranger!r} is not this machine", "invalid_request_error", "bad_host")
                    await _refuse(send, 403, body)
                    return
        await self._app(scope, receive, send)


def _stranger(headers: dict[bytes, bytes]) -> str | None:
    """The name in Host or Origin that is not this machine: a page elsewhere that a browser here has opened."""
    host = headers.get(b"host", b"").decode("latin-1")
    origin = headers.get(b"origin", b"").decode("latin-1").partition("://")[2]
    for name in (host, origin) if b"origin" in headers else (host,):
        if name.rsplit(":", 1)[0].lower() not in LOOPBACK_NAMES:
            return name or "no name"
    return None


def may_enter(options: HostOptions, authorization: str) -> bool:
    """Whether the header carries the token, if there is one; compared in constant time.

    The scheme's name is read in any case, with one space or more behind it (RFC 9110, section 11.4).
    """
    if options.token is None:
        return True
    scheme, _, token = authorization.partition(" ")
    is_same = hmac.compare_digest(token.lstrip(" ").encode("latin-1"), options.token.encode())
    return is_same and scheme.lower() == "bearer"


class BodyLimit:
    """Refuses bodies over the limit of their path: at once if the length is announced, else when they grow past it."""

    def __init__(self, app: ASGIApp, limit_of: Callable[[str], int]) -> None:
        self._app = app
        self._limit_of = limit_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limit_of(scope["path"])
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > limit:
            await _refuse(send, 413, _too_large(limit, announced.decode("latin-1")))
            return
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise _TooLarge
            return message

        try:
            await self._app(scope, bounded, send)
        except _TooLarge:
            await _refuse(send, 413, _too_large(limit, f"more than {limit}"))


class _TooLarge(Exception):
    """A body grew past its limit."""


def _too_large(limit: int, found: str) -> dict[str, Any]:
    message = f"the request's body is too large: at most {limit} bytes, found {found} bytes"
    return error_body(message, "invalid_request_error", "body_too_large")


async def _refuse(send: Send, status: int, body: dict[str, Any]) -> None:
    data = msgspec.json.encode(body)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
