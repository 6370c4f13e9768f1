"""Reads checkpoint files from a web server by range requests. There is no listing: names come from the index.

Source of the protocol: RFC 9110, sections 13 to 15 (range requests, conditional requests, status codes).
"""

from __future__ import annotations

import base64
import ipaddress
import netrc
import os
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.weights.sources.base import (
    FileStat,
    ReadShape,
    Usage,
    absent,
    changed,
    ended_early,
    read_rows_at_once,
)
from firstlight.engine.weights.sources.retry import Arrived, Interrupted, Pace, Patience, Retry, Target, fill

if TYPE_CHECKING:
    from httpcore import NetworkStream

HTTP_SHAPE = ReadShape(chunk_bytes=8 << 20, smallest_bytes=2 << 20, gap_bytes=64 << 10, in_flight=16)
MOST_REDIRECTS = 5
REMEMBER_S = 60.0  # how long the end of a redirect is used without asking again: signed addresses expire
CONNECT_S = 10.0  # a server that is there answers that much sooner
UNWANTED = "nobody wants it any longer"
CHECK = "check the network, the server and any proxy of the environment (HTTPS_PROXY, HTTP_PROXY, NO_PROXY)"
LOOK = "open the address in a browser"
ELSEWHERE = "download the checkpoint and name its directory, or use a server that states sizes and serves ranges"
TRUST = "name the certificate of who vouches for it: SSL_CERT_FILE=FILE.pem; check the host's name and this clock"
PLAIN = ("", "identity", "aws-chunked")  # encodings of an answer whose bytes are those of the file
TRY_AGAIN = (408, 425, 429, 500, 502, 503, 504)


class HttpFiles:
    """Files below `url`. `pinned` holds size and version of those that were looked at before, maybe by others."""

    shape = HTTP_SHAPE

    def __init__(self, url: str, pinned: Mapping[str, FileStat] | None = None, retry: Retry | None = None) -> None:
        self.url = url.rstrip("/")
        self.usage = Usage()
        self.retry = retry or Retry()
        self._pinned = dict(pinned or {})
        self._ends: dict[str, tuple[httpx.URL, float]] = {}
        self._lock = threading.Lock()
        self._links: weakref.WeakSet[NetworkStream] = weakref.WeakSet()  # every connection there is
        self._heads = Heads(max(self.retry.stall_s, self.retry.patience_s))
        self._credentials = OfNetrc()
        self._forbids_absent: bool | None = None
        self._client = self._connections(
            timeout=httpx.Timeout(self.retry.stall_s, pool=None, connect=min(self.retry.stall_s, CONNECT_S)),
            limits=httpx.Limits(
                max_connections=2 * HTTP_SHAPE.in_flight, max_keepalive_connections=HTTP_SHAPE.in_flight
            ),
            headers={"Accept-Encoding": "identity"},
            follow_redirects=False,
            auth=self._credentials,
        )
        weakref.finalize(self, self._client.close)  # a checkpoint that is dropped leaves no connection

    def _connections(self, **options: Any) -> httpx.Client:
        """A client as the environment has it: certificates and proxies that cannot be used are `Refused`."""
        way = "correct or unset SSL_CERT_FILE and SSL_CERT_DIR: the certificates of those who may vouch for a server"
        try:
            return httpx.Client(**options)
        except OSError as error:  # ssl.SSLError too
            found = f"the certificates that the environment names: {error.strerror or error}"
            raise self._refused("", found, "certificates in PEM", way) from error
        except (httpx.InvalidURL, ValueError, ImportError) as error:
            way = "correct or unset HTTPS_PROXY, HTTP_PROXY and ALL_PROXY, or name the host in NO_PROXY"
            found = f"the proxy that the environment names: {str(error).partition('. ')[0]}"
            raise self._refused("", found, "http://HOST:PORT", way) from error

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._pinned))

    def stat(self, name: str) -> FileStat:
        """Size and etag, by asking for the first byte: whether ranges are served shows at once."""
        found = self.look(name)
        if found is None:
            raise absent(self.address(name))
        return found

    def look(self, name: str) -> FileStat | None:
        """As `stat`; None for a file that is not there."""
        if name not in self._pinned:
            found = self._attempts(name)
            if found is None:
                return None
            self._pinned[name] = found
        return self._pinned[name]

    def open(self, name: str) -> HttpFile:
        return HttpFile(self, name, self.stat(name))

    def address(self, name: str) -> str:
        return f"{self.url}/{quote(name)}"

    def describe(self) -> str:
        counts = self.usage.counts()
        retries = f", {counts['retries']} of them again" if counts.get("retries") else ""
        return f"{counts.get('fetched', 0) / 1e6:,.0f} MB in {counts.get('requests', 0):,} range requests{retries}"

    def close(self) -> None:
        self._client.close()

    @contextmanager
    def answer(self, name: str, first: int, last: int, stop: threading.Event | None = None) -> Iterator[httpx.Response]:
        """The answer to a request for bytes [first, last], redirects followed within bounds. Raises `Interrupted`.

        `stop` ends the wait for it, once the connections are cut as well.
        """

        def follow(event: str, info: Mapping[str, Any]) -> None:
            if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
                with self._lock:
                    self._links.add(info["return_value"])
                self._heads.bound(info["return_value"])
            elif event == "http11.receive_response_headers.started" and stop is not None and stop.is_set():
                raise Interrupted(UNWANTED)

        try:
            url = self._where(name)
            for _ in range(MOST_REDIRECTS + 1):
                ranges, extensions = {"Range": f"bytes={first}-{last}"}, {"trace": follow}
                request = self._client.build_request("GET", url, headers=ranges, extensions=extensions)
                with self._heads.awaited():
                    response = self._client.send(request, stream=True)
                try:
                    if not response.has_redirect_location:
                        self._remember(name, url)
                        yield response
                        return
                    url = self._follow(url, response.headers["location"])
                finally:
                    response.close()
        except httpx.UnsupportedProtocol as error:
            raise self._refused(name, str(error), "an address of a web server") from error
        except (httpx.InvalidURL, UnicodeError) as error:  # the latter of a host's name
            found = f"no address of a web server: {error}"
            raise self._refused(name, found, "an address of a web server", "correct the address") from error
        except httpx.TransportError as error:
            if (why := distrusted(error)) is not None:
                raise self._refused(name, why, "a certificate that holds for this host", TRUST) from error
            if "WRONG_VERSION_NUMBER" in str(error) or "HTTP_REQUEST" in str(error):
                raise self._refused(name, "what answers speaks no TLS", "https", "try http://") from error
            raise Interrupted(str(error) or type(error).__name__) from error
        raise self._refused(name, f"more than {MOST_REDIRECTS} redirects", "an answer")

    def cut_all(self) -> None:
        """End every connection: what is asked for on one of them by anybody else is asked for again."""
        with self._lock:
            links = list(self._links)
        for link in links:
            cut(link)

    def judge(self, name: str, response: httpx.Response) -> None:
        """Raise what a status other than 200, 206 and 416 means: `Refused`, or `Interrupted` if it may pass."""
        status = response.status_code
        if status in (200, 206, 416):
            packed = response.headers.get("content-encoding", "identity").strip().lower()
            if packed not in PLAIN:
                way = "download the checkpoint and name its directory, or have the server send files as they are"
                raise self._refused(name, f"Content-Encoding: {packed}", "the bytes of the file, as asked for", way)
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind == "multipart/byteranges":  # with boundaries between the bytes of the file
                raise self._refused(name, f"Content-Type: {kind}", "one part, as asked for", ELSEWHERE)
            return
        if status in (401, 403, 410) and self._forget(name):
            raise Interrupted(f"status {status} at the end of a redirect that may have expired")
        if status in TRY_AGAIN:
            pause_s = seconds_of(response.headers.get("retry-after"))
            asked = "" if pause_s is None else f", and a wait of {pause_s:,.0f} s was asked for"
            raise Interrupted(f"status {status} {response.reason_phrase}{asked}", pause_s)
        if status in (404, 410):
            raise absent(self.address(name))
        way = self._credentials.way if status in (401, 403) else LOOK
        raise self._refused(name, f"status {status} {response.reason_phrase}", "status 206", way)

    def _attempts(self, name: str) -> FileStat | None:
        patience = Patience(self.retry)
        while True:
            try:
                return self._look_once(name)
            except Interrupted as error:
                self.usage.add("retries")
                if patience.ends():
                    found = f"{error}, {patience.failures} times in {patience.waited_s:.1f} s"
                    way = f"{CHECK}; --patience SECONDS tries for longer"
                    raise self._refused(name, found, "an answer", way) from error
                patience.pause(error.pause_s)

    def _look_once(self, name: str) -> FileStat | None:
        with self.answer(name, 0, 0) as response:
            self.usage.add("requests")
            is_remembered = str(response.url) != self.address(name)  # 410: what signed it may have expired
            if response.status_code == 404 or (response.status_code == 410 and not is_remembered):
                return None
            if response.status_code == 403 and self._pinned and self._hides_absence():
                return None
            self.judge(name, response)
            if response.status_code == 206:
                return FileStat(_total(self.address(name), response), version_of(response))
            if response.status_code == 416:  # an empty file has no first byte
                ranges = response.headers.get("content-range", "bytes */0")
                if ranges != "bytes */0":
                    raise self._refused(name, f"status 416 to its first byte, and {ranges}", "status 206", ELSEWHERE)
                return FileStat(0, version_of(response))
            size = response.headers.get("content-length")
            if size is None or not size.isdecimal():
                raise self._refused(name, "no Content-Length", "the size of the file", ELSEWHERE)
            return FileStat(int(size), version_of(response))

    def _hides_absence(self) -> bool:
        """Whether the server forbids what it does not have, as stores do whose contents may be read but not listed."""
        if self._forbids_absent is None:
            with self.answer(f"{os.urandom(8).hex()}.json", 0, 0) as response:
                self._forbids_absent = response.status_code == 403
        return self._forbids_absent

    def _where(self, name: str) -> httpx.URL:
        with self._lock:
            url, until_s = self._ends.get(name, (None, 0.0))
        return url if url is not None and time.monotonic() < until_s else httpx.URL(self.address(name))

    def _remember(self, name: str, url: httpx.URL) -> None:
        if str(url) != self.address(name):
            with self._lock:
                self._ends.setdefault(name, (url, time.monotonic() + REMEMBER_S))

    def _forget(self, name: str) -> bool:
        with self._lock:
            return self._ends.pop(name, None) is not None

    def _follow(self, url: httpx.URL, location: str) -> httpx.URL:
        """Where a redirect leads: to http or https, never from https to http, never from outside into this network."""
        try:
            target = url.join(location)
        except httpx.InvalidURL as error:
            raise self._refused("", f"{url.host} redirects to what is no address: {error}", "an address") from error
        leaves = target.scheme not in ("http", "https") or (url.scheme == "https" and target.scheme == "http")
        inward = target.host != url.host and _is_inside(target.host) and not _is_inside(url.host)
        if leaves or inward:
            what = "into a private network" if inward else f"to {target.scheme}"
            raise Refused(
                fatal(
                    "unsafe-file",
                    f"{url.host} redirects {what}",
                    file=str(url.copy_with(query=None)),
                    expected="a redirect to a web server that is as public and as secure",
                    found=f"{target.scheme}://{target.host}",
                    next="name the address itself if you trust it",
                )
            )
        return target

    def _refused(self, name: str, found: str, expected: str, way: str = LOOK) -> Refused:
        file = self.address(name) if name else self.url
        return Refused(
            fatal("read-failed", f"{file} cannot be read: {found}", file=file, expected=expected, found=found, next=way)
        )


class Heads:
    """How long a thread waits for the head of an answer, all of it: bytes that drip end no wait for the next one."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._of_thread = threading.local()

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """For the time of a `with` this thread reads heads alone."""
        self._of_thread.until_s = time.monotonic() + self._most_s
        try:
            yield
        finally:
            self._of_thread.until_s = None

    def bound(self, stream: NetworkStream) -> None:
        """Have a connection that is new keep to it, whoever reads from it."""
        read = stream.read

        def read_in_time(max_bytes: int, timeout: float | None = None) -> bytes:
            until_s = getattr(self._of_thread, "until_s", None)
            if until_s is None:
                return read(max_bytes, timeout)
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise Interrupted(f"the head of the answer was not there after {self._most_s:.1f} s")
            return read(max_bytes, left_s if timeout is None else min(timeout, left_s))

        stream.read = read_in_time  # type: ignore[method-assign]


class OfNetrc(httpx.Auth):
    """Credentials of ~/.netrc, each for the host that it names alone: none goes to where a redirect leads."""

    def __init__(self) -> None:
        self.way = "credentials for this host belong in ~/.netrc"
        self._hosts = {}
        try:
            self._hosts = netrc.netrc().hosts
        except FileNotFoundError:
            pass
        except netrc.NetrcParseError as error:  # its words may hold a password
            why = f"line {error.lineno} is not understood" if error.lineno else error.msg
            self.way += f", which cannot be read: {why}"
        except (OSError, UnicodeDecodeError) as error:
            self.way += f", which cannot be read: {getattr(error, 'strerror', None) or 'it is no text'}"

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # type: ignore[override]
        found = self._hosts.get(request.url.host) if request.url.host != "default" else None
        if found is not None:
            words = base64.b64encode(f"{found[0]}:{found[2]}".encode()).decode()
            request.headers["Authorization"] = f"Basic {words}"
        yield request


class HttpFile:
    """One file; every answer is held against the size and the version that the first one stated."""

    def __init__(self, source: HttpFiles, name: str, expected: FileStat) -> None:
        self._source = source
        self._name = name
        self._expected = expected
        self._file = source.address(name)
        self._stop = threading.Event()
        self._streams: dict[int, httpx.Response | None] = {}  # answers by thread; None: it is being waited for

    def read_into(self, offset_bytes: int, buffers: list[memoryview], arrived: Arrived | None = None) -> None:
        target = Target(offset_bytes, buffers, arrived)
        end = offset_bytes + target.left
        if end > self._expected.nbytes:
            raise ended_early(self._file, self._expected.nbytes, end, target.left)
        fill(target, self._attempt, self._source.retry, self._source.usage, self._file, self._stop)

    def read_rows(self, offset_bytes: int, target: memoryview, span_bytes: int, stride_bytes: int) -> None:
        read_rows_at_once(self, offset_bytes, target, span_bytes, stride_bytes, HTTP_SHAPE.gap_bytes)

    def check(self) -> None:
        """Nothing is left to check: each answer was."""

    def stop(self) -> None:
        """Ask for nothing again, and cut the connections on which something is awaited."""
        self._stop.set()
        waited = list(self._streams.values())
        if None in waited:  # which connection it is on is not known before it comes
            self._source.cut_all()
        for response in waited:
            if response is not None and "network_stream" in response.extensions:
                cut(response.extensions["network_stream"])

    def close(self) -> None:
        """Connections belong to the source."""

    def _attempt(self, target: Target) -> None:
        first, last = target.offset_bytes, target.offset_bytes + target.left - 1
        self._streams[threading.get_ident()] = None
        try:
            with self._source.answer(self._name, first, last, self._stop) as response:
                self._source.judge(self._name, response)
                self._refuse_others(response, first, last)
                self._streams[threading.get_ident()] = response
                pace = Pace(self._source.retry)
                for part in response.iter_raw():
                    if self._stop.is_set():
                        raise Interrupted(UNWANTED)
                    target.accept(memoryview(part))
                    pace.came(len(part))
        except httpx.TransportError as error:
            raise Interrupted(str(error) or type(error).__name__) from error
        finally:
            self._streams.pop(threading.get_ident(), None)

    def _refuse_others(self, response: httpx.Response, first: int, last: int) -> None:
        """Another version, another range or the whole file is not what was asked for."""
        whole = first == 0 and last == self._expected.nbytes - 1
        found = version_of(response, self._expected.version)
        if response.status_code == 416 or (found is not None and found != self._expected.version):
            raise changed(self._file, f"version {self._expected.version}", found or "a file that is shorter")
        if response.status_code == 200:
            if whole:
                return
            raise Refused(
                fatal(
                    "not-available",
                    f"{self._file}: the server answers a request for a part with the whole file",
                    file=self._file,
                    expected="status 206: range requests are served",
                    found="status 200",
                    next="download the checkpoint and name its directory, or use a server that knows ranges",
                )
            )
        if found is None and self._expected.version is not None:
            raise Interrupted("an answer that does not say which version it is of")
        if _total(self._file, response) != self._expected.nbytes:
            raise changed(self._file, f"{self._expected.nbytes} bytes", response.headers["content-range"])
        if not response.headers["content-range"].startswith(f"bytes {first}-"):
            raise Interrupted(f"asked for bytes {first}-{last}, got {response.headers['content-range']}")


def distrusted(error: BaseException) -> str | None:
    """Why the certificate of a server does not hold, where that is what ended an attempt: no other one helps."""
    below: BaseException | None = error
    while below is not None and not isinstance(below, ssl.SSLCertVerificationError):
        below = below.__cause__ or below.__context__
    return None if below is None else f"its certificate does not hold: {below.verify_message}"


def cut(stream: NetworkStream) -> None:
    """End a connection on which another thread waits or reads."""
    held = stream.get_extra_info("socket")
    if held is not None:
        with suppress(OSError):  # it has ended already
            held.shutdown(socket.SHUT_RDWR)


def version_of(response: httpx.Response, like: str | None = None) -> str | None:
    """The etag or, without one, the time of the last change; where `like` is one of them, that one alone."""
    etag, modified = response.headers.get("etag"), response.headers.get("last-modified")
    if like is not None and (etag or modified):
        return modified if like.endswith("GMT") else etag
    return etag or modified


def _total(file: str, response: httpx.Response) -> int:
    found = re.fullmatch(r"bytes \d+-\d+/(\d{1,18})", response.headers.get("content-range", ""))
    if found is None:
        raise Refused(
            fatal(
                "read-failed",
                f"{file}: status 206 without a usable Content-Range",
                file=file,
                expected="Content-Range: bytes FIRST-LAST/SIZE",
                found=response.headers.get("content-range", "none"),
                next="download the checkpoint and name its directory",
            )
        )
    return int(found[1])


def seconds_of(text: str | None) -> float | None:
    """What `Retry-After` says: seconds, or a date (RFC 9110, 10.2.3)."""
    if text is None or text.isdecimal():
        return None if text is None else float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


def _is_inside(host: str) -> bool:
    """Whether a host is this machine or an address of a private network, as far as its name tells."""
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_private or address.is_loopback or address.is_link_local
