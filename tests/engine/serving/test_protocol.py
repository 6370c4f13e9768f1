"""Requests that never come whole, and bytes that are no HTTP: bounded in time, answered in JSON."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from firstlight.engine.serving.protocol import protocol_of

HEAD_S, BODY_S = 0.4, 0.8
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"


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
def port() -> Iterator[int]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(count, http=protocol_of(HEAD_S, BODY_S), log_config=None, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
    thread.start()
    yield listener.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def told(port: int, *pieces: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    """What comes back until the server hangs up, and after how long."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        began_s = time.monotonic()
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        return answer, time.monotonic() - began_s


def error_in(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize("half", [b"GET /hea", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: a"])
def test_half_a_head_is_waited_for_so_long(port: int, half: bytes) -> None:
    answer, seconds = told(port, half)
    assert error_in(answer) == (408, "request_timeout")
    assert 0.9 * HEAD_S < seconds < 10 * HEAD_S


def test_a_head_that_dribbles_has_no_more_time(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.settimeout(HEAD_S / 4)
        for byte in b"GET /health HTTP/1.1":
            try:
                connection.sendall(bytes([byte]))
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            except TimeoutError:
                continue
            except ConnectionError:  # it hung up while the byte was on its way, which can cost us the answer
                return
            assert error_in(answer) == (408, "request_timeout")
            return
    pytest.fail("it was waited for all along")


@pytest.mark.parametrize("half", [b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"])
def test_half_a_body_is_waited_for_so_long(port: int, half: bytes) -> None:
    answer, seconds = told(port, POST + half)
    assert error_in(answer) == (408, "request_timeout")
    assert 0.9 * BODY_S < seconds < 10 * BODY_S


def test_a_connection_that_says_nothing_is_let_go(port: int) -> None:
    answer, seconds = told(port)
    assert answer == b""
    assert 0.9 * HEAD_S < seconds < 10 * HEAD_S


def test_who_is_slow_but_not_silent_is_served(port: int) -> None:
    long = b"x" * 60_000
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for _ in range(2):  # the second request on a connection that was kept
            connection.sendall(b"GET /health HTTP/1.1\r\nHos")
            time.sleep(HEAD_S / 2)
            connection.sendall(b"t: 127.0.0.1\r\n\r\n")
            answer = b""
            while not answer.endswith(b"\r\n\r\n0"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")
    answer, seconds = told(
        port, POST + b"Connection: close\r\nContent-Length: 180000\r\n\r\n", long, long, long, pause_s=0.4
    )
    assert answer.endswith(b"\r\n\r\n180000")
    assert seconds > BODY_S, "the bytes that came have bought time"


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
def test_what_is_no_http_is_told_so_in_json(port: int, junk: bytes) -> None:
    answer, seconds = told(port, junk)
    assert error_in(answer) == (400, "bad_http")
    assert seconds < HEAD_S
