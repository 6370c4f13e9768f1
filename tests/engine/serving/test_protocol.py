"""Requests that never come whole, and bytes that are no HTTP: bounded in time, answered in JSON.

The server's clock is turned by the tests: nothing here depends on how fast the machine is.
"""

import asyncio
import json
import queue
import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

import h11
import pytest
import uvicorn
from fastapi.testclient import TestClient

from firstlight.engine.errors import Refused
from firstlight.engine.serving.desk import Desk
from firstlight.engine.serving.gate import may_enter
from firstlight.engine.serving.health import Pulse
from firstlight.engine.serving.options import HostOptions
from firstlight.engine.serving.protocol import BODY_BYTES_PER_S, Protocol, protocol_of
from firstlight.engine.serving.server import create_app
from tests.waiting import PATIENCE_S, until

HEAD_S, BODY_S = 4.0, 8.0
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


class Turned(asyncio.SelectorEventLoop):
    """An event loop whose time passes when it is told to."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def turn(self, seconds: float) -> None:
        """From another thread: so much time has passed."""
        self.call_soon_threadsafe(self._turn, seconds)

    def _turn(self, seconds: float) -> None:
        self.now_s += seconds


class Served:
    """Where the server listens, its clock, and what it knows of a connection."""

    def __init__(self, port: int, loop: Turned, server: uvicorn.Server) -> None:
        self.loop = loop
        self._port = port
        self._server = server

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE_S)

    def has(self, connection: socket.socket, nbytes: int, waits_for: Any = h11.IDLE) -> None:
        """Returns when the server has taken so many bytes from a connection and waits for more of a head or body."""

        def look() -> bool:
            (found,) = [one for one in self._server.server_state.connections if one.client == name] or [None]
            return isinstance(found, Protocol) and found._waits_for is waits_for and found._taken >= nbytes

        name = connection.getsockname()
        until(look, "the server does not have it")

    def told(self, *pieces: bytes) -> bytes:
        """What comes back until the server hangs up, while no time passes."""
        with self.connect() as connection:
            for piece in pieces:
                connection.sendall(piece)
            return rest(connection)


def rest(connection: socket.socket) -> bytes:
    return b"".join(iter(lambda: connection.recv(65536), b""))


def is_silent(connection: socket.socket) -> bool:
    """Nothing has come, nor has the other side hung up."""
    return not select.select([connection], [], [], 0.02)[0]


async def count(scope: Any, receive: Any, send: Any) -> None:
    """An application that says how many bytes came."""
    taken, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        taken, more = taken + len(message["body"]), message["more_body"]
    body = str(taken).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    listener, loop = socket.create_server(("127.0.0.1", 0)), Turned()
    protocol = protocol_of(HEAD_S, BODY_S)
    config = uvicorn.Config(
        count, http=protocol, log_config=None, lifespan="off", ws="none", timeout_keep_alive=1_000_000
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: loop.run_until_complete(server.serve(sockets=[listener])))
    thread.start()
    yield Served(listener.getsockname()[1], loop, server)
    server.should_exit = True
    while thread.is_alive():
        loop.turn(1.0)  # it looks now and then, by its own clock
        thread.join(0.02)
    loop.close()


def error_in(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("half", [b"GET /hea", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: a"])
def test_half_a_head_is_waited_for_so_long(server: Served, half: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(half)
        server.has(connection, len(half))
        server.loop.turn(0.9 * HEAD_S)
        assert is_silent(connection)
        server.loop.turn(0.2 * HEAD_S)
        assert error_in(rest(connection)) == (408, "request_timeout")


def test_a_head_that_dribbles_has_no_more_time(server: Served) -> None:
    with server.connect() as connection:
        for number, piece in enumerate((b"G", b"E", b"T", b" "), start=1):
            connection.sendall(piece)
            server.has(connection, number)
            server.loop.turn(0.24 * HEAD_S)
        assert is_silent(connection)
        server.loop.turn(0.1 * HEAD_S)
        assert error_in(rest(connection)) == (408, "request_timeout")


@pytest.mark.parametrize("half", [b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"])
def test_half_a_body_is_waited_for_so_long(server: Served, half: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(POST + half)
        server.has(connection, 0, h11.SEND_BODY)
        server.loop.turn(0.9 * BODY_S)
        assert is_silent(connection)
        server.loop.turn(0.2 * BODY_S)
        assert error_in(rest(connection)) == (408, "request_timeout")


def test_a_connection_that_says_nothing_is_let_go(server: Served) -> None:
    with server.connect() as connection:
        server.has(connection, 0)
        server.loop.turn(0.9 * HEAD_S)
        assert is_silent(connection)
        server.loop.turn(0.2 * HEAD_S)
        assert rest(connection) == b""


def test_who_is_slow_but_not_silent_is_served(server: Served) -> None:
    with server.connect() as connection:
        for _ in range(2):  # the second request on a connection that was kept: its head has a time of its own
            connection.sendall(b"GET /health HTTP/1.1\r\nHos")
            server.has(connection, 1)
            server.loop.turn(0.7 * HEAD_S)
            connection.sendall(b"t: 127.0.0.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b"\r\n\r\n0"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
    piece = b"x" * (4 * BODY_BYTES_PER_S)
    with server.connect() as connection:
        connection.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % (3 * len(piece)))
        for number in (1, 2):
            connection.sendall(piece)
            server.has(connection, number * len(piece), h11.SEND_BODY)
            server.loop.turn(0.7 * BODY_S)  # 1.4 of its time in all: the bytes that came have bought more
        connection.sendall(piece)
        assert rest(connection).endswith(b"\r\n\r\n%d" % (3 * len(piece)))


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00",
        b"HELLO\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        POST + b"Content-Length: many\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_told_so_in_json(server: Served, junk: bytes) -> None:
    assert error_in(server.told(junk)) == (400, "bad_http")


@pytest.mark.parametrize(
    ("header", "enters"),
    [
        ("Bearer s3cret", True),
        ("bearer s3cret", True),
        ("BEARER  s3cret", True),
        ("Bearers3cret", False),
        ("Bearer S3CRET", False),
        ("Basic s3cret", False),
        ("Bearer ", False),
        ("", False),
    ],
)
def test_the_name_of_the_scheme_is_read_in_any_case_and_the_token_in_its_own(header: str, enters: bool) -> None:
    assert may_enter(HostOptions(token="s3cret"), header) == enters


def test_what_can_be_looked_at_answers_head_as_well() -> None:
    """Probes ask so: the same status and headers, no body."""
    app = create_app(Desk(Pulse(), HostOptions()))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        for path in ("/health", "/admin/health", "/v1/models", "/metrics", "/admin/info"):
            asked, looked = client.get(path), client.head(path)
            assert (looked.status_code, looked.headers["content-type"]) == (503, asked.headers["content-type"])
        assert client.head("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    "where", [{"port": 99999}, {"port": -1}, {"host": "no.such.host.invalid"}, {"host": "x" * 70}], ids=str
)
def test_a_place_that_cannot_be_listened_on_is_told_not_waited_for(where: dict[str, Any]) -> None:
    told: queue.Queue[object] = queue.Queue()
    Desk(Pulse(), HostOptions(token="secret", **where)).open(told.put, told.put)
    reason = told.get(timeout=PATIENCE_S)
    assert isinstance(reason, Refused), reason
    assert "cannot listen" in str(reason)
