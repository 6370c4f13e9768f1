"""A web server of the test that serves a directory by ranges and, when told to, fails in the ways of real ones."""

from __future__ import annotations

import gzip
import re
import socket
import ssl
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

Fault = Callable[["Handler", bytes], bool]  # answers the request itself, or returns False to have it answered


class Web:
    """What the server does: `faults` for a name are used up one a request; `asked` are the ranges asked for by name."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.always: dict[str, Fault] = {}
        self.otherwise: Fault | None = None  # for what is not there, instead of 404
        self.asked: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.versions: dict[str, str] = {}
        self.lock = threading.Lock()
        self.over = threading.Event()
        self.url = ""
        self.open = 0
        self.most_open = 0

    def version(self, name: str) -> str:
        return self.versions.get(name, f'"{name}-1"')

    def next_fault(self, name: str) -> Fault | None:
        with self.lock:
            waiting = self.faults[name]
            return waiting.pop(0) if waiting else self.always.get(name)


class Handler(BaseHTTPRequestHandler):
    web: Web
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        web = self.web
        with web.lock:
            web.open += 1
            web.most_open = max(web.most_open, web.open)
        try:
            self._answer()
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            self.close_connection = True
        finally:
            with web.lock:
                web.open -= 1

    def _answer(self) -> None:
        name = self.path.rpartition("/")[2]
        path = self.web.home / name
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        content = path.read_bytes() if path.is_file() else b""
        self.first, self.last = (int(found[1]), int(found[2])) if found else (0, len(content) - 1)
        self.name, self.total = name, len(content)
        with self.web.lock:
            self.web.asked[name].append((self.first, self.last))
        fault = self.web.next_fault(name)
        if fault is not None and fault(self, content):
            return
        if not path.is_file():
            if self.web.otherwise is None or not self.web.otherwise(self, content):
                self.plain(404)
            return
        self.part(content[self.first : self.last + 1])

    def plain(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def part(
        self,
        data: bytes,
        promised: int | None = None,
        first: int | None = None,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """A 206 with `data` in it that says it has `promised` bytes; fewer, and the connection is cut."""
        first = self.first if first is None else first
        last = min(self.last, self.total - 1)
        self.send_response(206)
        if version := self.web.version(self.name):
            self.send_header("ETag", version)
        for key, value in more.items():
            self.send_header(key, value)
        self.send_header("Content-Range", f"bytes {first}-{last}/{self.total}")
        self.send_header("Content-Length", str(len(data) if promised is None else promised))
        self.end_headers()
        self.wfile.write(data)
        self.wfile.flush()
        if promised is not None and promised != len(data):
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""


class Server(ThreadingHTTPServer):
    request_queue_size = 128  # connections that come at once; a refused one waits a second
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has left is no error."""


def cut(after: int) -> Fault:
    """The connection breaks after some bytes of what was asked for."""

    def fault(handler: Handler, content: bytes) -> bool:
        wanted = content[handler.first : handler.last + 1]
        handler.part(wanted[:after], promised=len(wanted))
        return True

    return fault


def stall(handler: Handler, content: bytes) -> bool:
    """Half of it comes, then nothing as long as the server is there."""
    wanted = content[handler.first : handler.last + 1]
    handler.part(wanted[: len(wanted) // 2], promised=len(wanted))
    handler.web.over.wait()
    return True


def drip(handler: Handler, content: bytes) -> bool:
    """A byte now and a byte then, of all that was asked for: no silence is long."""
    wanted = content[handler.first : handler.last + 1]
    handler.part(wanted[:1], promised=len(wanted))
    for at in range(1, len(wanted)):
        if handler.web.over.wait(0.01):
            break
        handler.wfile.write(wanted[at : at + 1])
    return True


def drip_head(handler: Handler, content: bytes) -> bool:
    """The head of an answer comes byte by byte, and never all of it."""
    handler.wfile.write(b"HTTP/1.1 206 Partial Content\r\nX-Slow: ")
    while not handler.web.over.wait(0.01):
        handler.wfile.write(b"a")
    return True


def drip_notices(handler: Handler, content: bytes) -> bool:
    """Whole heads that announce an answer, one after the other, and never the answer."""
    while not handler.web.over.wait(0.01):
        handler.wfile.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
    return True


def silent(handler: Handler, content: bytes) -> bool:
    """The request is taken, and nothing is answered as long as the server is there."""
    handler.web.over.wait()
    return True


def status(code: int, **headers: str) -> Fault:
    def fault(handler: Handler, content: bytes) -> bool:
        handler.plain(code, **headers)
        return True

    return fault


def short(handler: Handler, content: bytes) -> bool:
    """A proxy that sends less than was asked for and says so: complete by its own word."""
    wanted = content[handler.first : handler.last + 1]
    handler.part(wanted[: max(1, len(wanted) // 3)])
    return True


def other_range(handler: Handler, content: bytes) -> bool:
    """Bytes from elsewhere in the file."""
    count = handler.last - handler.first + 1
    handler.part(content[1 : 1 + count], first=1)
    return True


def too_much(handler: Handler, content: bytes) -> bool:
    handler.part(content[handler.first : handler.last + 1] + b"more")
    return True


def packed(handler: Handler, content: bytes) -> bool:
    """A proxy that packs what passes: fewer bytes of something else, under the same range."""
    data = gzip.compress(content[handler.first : handler.last + 1])
    handler.part(data, more={"Content-Encoding": "gzip"})
    return True


def in_parts(handler: Handler, content: bytes) -> bool:
    """One part of several, with its boundary, where one part alone was asked for."""
    wanted = content[handler.first : handler.last + 1]
    body = (b"--x\r\nContent-Range: bytes 0-1/2\r\n\r\n" + wanted)[: len(wanted)]
    handler.part(body, more={"Content-Type": "multipart/byteranges; boundary=x"})
    return True


def in_chunks(handler: Handler, content: bytes) -> bool:
    """The length of the whole is not said beforehand."""
    wanted = content[handler.first : handler.last + 1]
    handler.wfile.write(_head(handler, "HTTP/1.1", "Transfer-Encoding: chunked"))
    for part in (wanted[:7], wanted[7:]):
        handler.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n" if part else b"")
    handler.wfile.write(b"0\r\n\r\n")
    return True


def until_the_end(handler: Handler, content: bytes) -> bool:
    """Nor here: the answer is over where the connection is."""
    handler.wfile.write(_head(handler, "HTTP/1.0", "Connection: close") + content[handler.first : handler.last + 1])
    handler.close_connection = True
    return True


def _head(handler: Handler, protocol: str, line: str) -> bytes:
    ranges = f"Content-Range: bytes {handler.first}-{handler.last}/{handler.total}"
    lines = (f"{protocol} 206 Partial Content", f"ETag: {handler.web.version(handler.name)}", ranges, line, "", "")
    return "\r\n".join(lines).encode()


def reset(share: float) -> Fault:
    """The connection is not ended but reset, when a share of what was asked for has come."""

    def fault(handler: Handler, content: bytes) -> bool:
        wanted = content[handler.first : handler.last + 1]
        handler.part(wanted[: int(len(wanted) * share)], promised=len(wanted))
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
        return True

    return fault


def whole_file(handler: Handler, content: bytes) -> bool:
    """A server that knows no ranges."""
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)
    return True


@contextmanager
def served(home: Path, secured: ssl.SSLContext | None = None) -> Iterator[Web]:
    """A server for the time of a `with`; `web.url` is where it listens. `secured`: it speaks TLS."""
    web = Web(home)
    handler = type("OfThisTest", (Handler,), {"web": web})
    server = Server(("127.0.0.1", 0), handler)
    if secured is not None:
        server.socket = secured.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    web.url = f"http{'s' if secured else ''}://127.0.0.1:{server.server_address[1]}/models/tiny"
    try:
        yield web
    finally:
        web.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
