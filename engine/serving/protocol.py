"""The HTTP protocol as this server speaks it: uvicorn's, with a bound on how long a request may take to come.

A client that sends half a head or half a body would hold its connection for ever. What breaks the protocol is answered
as every other error is, in JSON.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from firstlight.engine.serving.openai import error_body

BODY_BYTES_PER_S = 16 << 10  # a body has its time, and a second more for as many bytes as have come


class Protocol(H11Protocol):
    """One connection. A head must end `head_s` after the connection or its first byte; a body has `body_s` and more."""

    head_s = 10.0
    body_s = 30.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for: type[h11.IDLE] | type[h11.SEND_BODY] | None = None
        self._since_s = 0.0
        self._taken = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._watch(0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._rest()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch(len(data))

    def send_400_response(self, msg: str) -> None:
        self._end(400, msg, "bad_http")

    def _watch(self, count: int) -> None:
        """Runs a clock while a head or a body is on its way: one a head or body, not one a piece of it."""
        waits_for = self.conn.their_state if self.conn.their_state in (h11.IDLE, h11.SEND_BODY) else None
        if waits_for is None or self.transport.is_closing() or self.timeout_keep_alive_task is not None:
            self._rest()
            return
        if waits_for is not self._waits_for:
            self._rest()
            self._waits_for, self._since_s, self._taken = waits_for, self.loop.time(), 0
        self._taken += count
        if self._timer is None:
            self._timer = self.loop.call_at(self._until_s, self._look)

    @property
    def _until_s(self) -> float:
        if self._waits_for is h11.IDLE:
            return self._since_s + self.head_s
        return self._since_s + self.body_s + self._taken / BODY_BYTES_PER_S

    def _look(self) -> None:
        self._timer = None
        if self.loop.time() < self._until_s:
            self._timer = self.loop.call_at(self._until_s, self._look)
            return
        what = "head" if self._waits_for is h11.IDLE else "body"
        is_silent = self._waits_for is h11.IDLE and not self.conn.trailing_data[0]
        self._rest()
        if is_silent:
            self.transport.close()
        else:
            self._end(408, f"the rest of the request's {what} did not come in time", "request_timeout")

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._waits_for = None

    def _end(self, status: int, message: str, code: str) -> None:
        """Answers where an answer is still possible, and hangs up; who reads the body finds the client gone."""
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_body(message, "invalid_request_error", code))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def protocol_of(head_s: float, body_s: float) -> type[Protocol]:
    """The protocol with these deadlines; uvicorn makes an instance a connection."""
    return type("Protocol", (Protocol,), {"head_s": head_s, "body_s": body_s})
