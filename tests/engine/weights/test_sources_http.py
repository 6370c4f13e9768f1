"""Weights over HTTP: exactly the bytes that were asked for, or a refusal that says why; from a server that fails."""

from __future__ import annotations

import dataclasses
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.weights.loading.readers import Cancelled, Job, read_jobs, read_pieces
from firstlight.engine.weights.sources import http
from firstlight.engine.weights.sources.base import FileStat
from firstlight.engine.weights.sources.http import HttpFiles
from firstlight.engine.weights.sources.retry import Retry
from tests.engine.weights import far
from tests.waiting import PATIENCE_S, until

QUICK = Retry(attempts=3, patience_s=0.0, first_s=0.001, most_s=0.01, stall_s=2 * PATIENCE_S)  # nothing here is slow
NAME = "model.safetensors"


@pytest.fixture(scope="module")
def content() -> bytes:
    return random.Random(1).randbytes(3_000_000)


@pytest.fixture
def web(tmp_path: Path, content: bytes) -> Iterator[far.Web]:
    (tmp_path / NAME).write_bytes(content)
    with far.served(tmp_path) as web:
        yield web


@pytest.fixture
def source(web: far.Web) -> Iterator[HttpFiles]:
    source = HttpFiles(web.url, retry=QUICK)
    yield source
    source.close()


def read(source: HttpFiles, first: int, nbytes: int, name: str = NAME) -> bytes:
    target = bytearray(nbytes)
    read_pieces([(name, first, memoryview(target))], 4, source=source)
    return bytes(target)


def refusal(source: HttpFiles, first: int = 0, nbytes: int = 1000, name: str = NAME) -> Finding:
    with pytest.raises(Refused) as caught:
        read(source, first, nbytes, name)
    (finding,) = caught.value.findings
    assert finding.file
    assert name in finding.file
    assert finding.next
    return finding


def test_only_what_is_needed_is_asked_for(web: far.Web, source: HttpFiles, content: bytes) -> None:
    """Near pieces are one request, far ones are not fetched along."""
    spans = [(10, 100), (200, 300), (2_000_000, 50), (2_100_000, 50)]
    targets = [bytearray(count) for _, count in spans]
    pieces = [(NAME, at, memoryview(one)) for (at, _), one in zip(spans, targets, strict=True)]
    read_pieces(pieces, 4, source=source)
    assert [bytes(one) for one in targets] == [content[at : at + count] for at, count in spans]
    first, *others = web.asked[NAME]
    assert first == (0, 0), "the size was asked for"
    assert sorted(others) == [(10, 499), (2_000_000, 2_000_049), (2_100_000, 2_100_049)]
    assert source.usage["requests"] == 4
    assert source.usage["fetched"] == 490 + 50 + 50


def test_a_large_piece_is_several_requests_at_once(web: far.Web, source: HttpFiles, content: bytes) -> None:
    assert read(source, 5, len(content) - 5) == content[5:]
    assert len(web.asked[NAME]) == 3, "its size, and two parts"
    assert web.most_open <= 4


@pytest.mark.parametrize(
    "fault",
    [
        far.cut(100_000), far.cut(0), far.short, far.other_range, far.too_much,
        far.status(503), far.status(429, Retry_After="0"), far.status(500),
    ],
    ids=["cut", "cut at once", "short", "other range", "too much", "503", "429", "500"],
)  # fmt: skip
def test_what_failed_is_asked_for_again(web: far.Web, source: HttpFiles, content: bytes, fault: far.Fault) -> None:
    source.stat(NAME)
    web.faults[NAME] += [fault, fault]
    assert read(source, 1000, 500_000) == content[1000:501_000]
    assert source.usage["retries"] == 2


def test_what_came_before_a_cut_is_not_fetched_again(web: far.Web, source: HttpFiles, content: bytes) -> None:
    source.stat(NAME)
    web.faults[NAME] += [far.cut(300_000), far.cut(100_000)]
    assert read(source, 0, 500_000) == content[:500_000]
    firsts = [first for first, _ in web.asked[NAME][1:]]
    assert firsts[0] == 0
    assert 0 < firsts[1] <= 300_000, "what had arrived was kept"
    assert firsts[1] < firsts[2] <= 400_000


def test_progress_renews_patience(web: far.Web, source: HttpFiles, content: bytes) -> None:
    """Many cuts are no end as long as bytes come between them."""
    source.stat(NAME)
    web.faults[NAME] += [far.cut(70_000)] * 6
    assert read(source, 0, 500_000) == content[:500_000]


def test_a_few_bytes_now_and_then_are_no_progress(web: far.Web, source: HttpFiles) -> None:
    """Else a server that breaks off after each kilobyte would hold a load for hours."""
    source.stat(NAME)
    web.always[NAME] = far.cut(1000)
    finding = refusal(source, 0, 500_000)
    assert finding.code == "read-failed"
    assert "bytes 3000 to 499999" in finding.message
    assert len(web.asked[NAME]) == 1 + QUICK.attempts


def test_a_stalled_connection_is_given_up_and_gone_on_with(web: far.Web, content: bytes) -> None:
    source = HttpFiles(web.url, retry=dataclasses.replace(QUICK, patience_s=PATIENCE_S, stall_s=0.3))
    source.stat(NAME)
    web.faults[NAME].append(far.stall)
    assert read(source, 0, 400_000) == content[:400_000]
    assert source.usage["retries"] >= 1
    source.close()


def test_bytes_that_drip_are_no_progress_either(web: far.Web, content: bytes) -> None:
    """No single byte is late, and the whole would take a hundred days in earnest; 20 s here."""
    pinned = {NAME: FileStat(len(content), web.version(NAME))}
    source = HttpFiles(web.url, pinned, dataclasses.replace(QUICK, patience_s=0.2, stall_s=0.2))
    web.always[NAME] = far.drip
    assert refusal(source, 0, 2000).code == "read-failed"
    source.close()


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("fault", [far.drip_head, far.drip_notices])
def test_the_head_of_an_answer_has_a_time_of_its_own(fault: far.Fault, is_known: bool, web: far.Web) -> None:
    """No byte of it is late either: lines that never end, or announcements of an answer, one after the other."""
    pinned = {NAME: FileStat(3_000_000, web.version(NAME))} if is_known else {}
    source = HttpFiles(web.url, pinned, dataclasses.replace(QUICK, attempts=2, patience_s=0.1, stall_s=0.1))
    web.always[NAME] = fault
    assert refusal(source, 0, 2000).code == "read-failed"
    assert len(web.asked[NAME]) >= 2, "it is asked again, on another connection"
    source.close()


def test_a_server_that_never_recovers_is_refused_after_bounded_attempts(web: far.Web, source: HttpFiles) -> None:
    source.stat(NAME)
    web.always[NAME] = far.status(503)
    finding = refusal(source)
    assert finding.code == "read-failed"
    assert "503" in finding.message
    assert len(web.asked[NAME]) == 1 + QUICK.attempts
    assert "bytes 0 to 999" in finding.message
    assert "--patience" in str(finding.next)


def test_patience_is_counted_from_the_last_byte_in_seconds(web: far.Web, content: bytes) -> None:
    """However many attempts that is: pauses are no longer than what is left of it."""
    web.always[NAME] = far.cut(0)
    source = HttpFiles(web.url, {NAME: FileStat(len(content), web.version(NAME))}, Retry(patience_s=0.6, first_s=0.05))
    started_s = time.monotonic()
    finding = refusal(source)
    assert time.monotonic() - started_s > 0.55
    assert len(web.asked[NAME]) >= 2
    found = re.search(r"(\d+) attempts in (\d+\.\d) s gave 0 bytes", finding.message)
    assert found is not None
    assert int(found[1]) == len(web.asked[NAME])
    assert float(found[2]) >= 0.6
    source.close()


@pytest.mark.parametrize("is_known", [False, True], ids=["a new connection", "one that served before"])
def test_a_server_that_accepts_and_says_nothing_holds_nobody(is_known: bool, web: far.Web, content: bytes) -> None:
    """What stops a read ends the wait for an answer of which not even the first byte has come."""
    pinned = {NAME: FileStat(len(content), web.version(NAME))}
    source = HttpFiles(web.url, pinned, Retry(stall_s=20 * PATIENCE_S, patience_s=20 * PATIENCE_S))
    if is_known:
        assert read(source, 0, 1000) == content[:1000]
    web.always[NAME] = far.silent
    before, file, refused = len(web.asked[NAME]), source.open(NAME), threading.Event()

    def attempt() -> None:
        with pytest.raises(Refused):
            file.read_into(0, [memoryview(bytearray(1000))])
        refused.set()

    threading.Thread(target=attempt, daemon=True).start()
    until(lambda: len(web.asked[NAME]) > before)
    file.stop()
    assert refused.wait(PATIENCE_S)
    source.close()


def test_the_first_failure_ends_what_other_readers_are_trying(web: far.Web, content: bytes) -> None:
    """One of them was told that it will not pass; another waits for a server that says nothing for long."""
    (web.home / "gone").write_bytes(content)
    pinned = {name: FileStat(len(content), web.version(name)) for name in (NAME, "gone")}
    source = HttpFiles(web.url, pinned, Retry(patience_s=3 * PATIENCE_S, stall_s=3 * PATIENCE_S))  # beyond this test's
    web.always[NAME] = far.stall
    served = far.status(404)

    def fault(handler: far.Handler, content: bytes) -> bool:
        until(lambda: web.asked[NAME])  # the other one has begun
        return served(handler, content)

    web.always["gone"] = fault
    targets = [memoryview(bytearray(1000)) for _ in range(2)]
    with pytest.raises(Refused) as caught:
        read_pieces([(NAME, 0, targets[0]), ("gone", 0, targets[1])], 2, source=source)
    assert caught.value.findings[0].code == "missing-shard"
    assert not [one for one in threading.enumerate() if one.name.startswith("read-")]
    source.close()


def test_a_failed_read_names_the_tensors_that_it_is_of_and_no_others(web: far.Web, source: HttpFiles) -> None:
    source.stat(NAME)
    web.always[NAME] = far.status(503)
    spans = {"a": (0, 1000), "b": (1000, 500), "far": (2_000_000, 100)}
    pieces = [(NAME, at, memoryview(bytearray(count))) for at, count in spans.values()]
    with pytest.raises(Refused) as caught:
        for _ in read_jobs([Job(pieces, tensors=tuple(spans))], source, 1):
            pass
    (finding,) = caught.value.findings
    assert finding.tensors in (("a", "b"), ("far",))
    assert NAME in str(finding.file)


def test_a_server_without_ranges_is_refused_with_what_to_do(web: far.Web, source: HttpFiles, content: bytes) -> None:
    web.always[NAME] = far.whole_file
    finding = refusal(source)
    assert finding.code == "not-available"
    assert "download" in str(finding.next)
    (web.home / "config.json").write_bytes(content[:900])
    web.always["config.json"] = far.whole_file
    assert read(source, 0, 900, "config.json") == content[:900], "all of a file is no part"


def test_bytes_that_were_packed_on_the_way_are_not_taken_for_those_of_the_file(
    web: far.Web, source: HttpFiles, content: bytes
) -> None:
    """They are of another number, so that the rest would be asked for behind them, and fit to the byte."""
    (web.home / NAME).write_bytes(bytes(len(content)))
    source.stat(NAME)
    web.always[NAME] = far.packed
    finding = refusal(source, 0, len(content))
    assert finding.code == "read-failed"
    assert finding.found == "Content-Encoding: gzip"
    assert len(web.asked[NAME]) <= 3, "it is not tried again"


def test_one_part_among_boundaries_is_not_taken_for_the_bytes_of_the_file(web: far.Web, source: HttpFiles) -> None:
    """Under the range that was asked for, and of its length."""
    source.stat(NAME)
    web.always[NAME] = far.in_parts
    assert "multipart/byteranges" in refusal(source, 1000, 5000).message
    assert len(web.asked[NAME]) == 2, "it is not tried again"


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75])
def test_a_connection_that_is_reset_on_the_way_is_gone_on_with(
    share: float, web: far.Web, source: HttpFiles, content: bytes
) -> None:
    source.stat(NAME)
    web.faults[NAME] += [far.reset(share)]
    assert read(source, 1000, 400_000) == content[1000:401_000]


@pytest.mark.parametrize("fault", [far.in_chunks, far.until_the_end])
def test_answers_without_a_length_are_taken_for_what_their_range_says(
    fault: far.Fault, web: far.Web, source: HttpFiles, content: bytes
) -> None:
    """In chunks, or by HTTP/1.0 up to where the connection ends."""
    web.always[NAME] = fault
    assert read(source, 1000, 40_000) == content[1000:41_000]


def test_an_answer_that_does_not_say_its_version_is_asked_for_again(
    web: far.Web, source: HttpFiles, content: bytes
) -> None:
    source.stat(NAME)

    def without(handler: far.Handler, content: bytes) -> bool:
        web.versions[NAME] = ""
        handler.part(content[handler.first : handler.last + 1])
        del web.versions[NAME]
        return True

    web.faults[NAME] = [without]
    assert read(source, 100, 900) == content[100:1000]
    assert source.usage.counts()["retries"] == 1
    web.always[NAME] = without
    assert "which version" in str(refusal(source))


def test_a_time_is_no_other_version_of_an_etag(web: far.Web, source: HttpFiles, content: bytes) -> None:
    """A proxy left the etag out once; the time of the last change says nothing of it."""
    source.stat(NAME)

    def timed(handler: far.Handler, content: bytes) -> bool:
        web.versions[NAME] = ""
        modified = {"Last-Modified": "Mon, 30 Nov 2026 00:00:00 GMT"}
        handler.part(content[handler.first : handler.last + 1], more=modified)
        del web.versions[NAME]
        return True

    web.faults[NAME] = [timed]
    assert read(source, 100, 900) == content[100:1000]
    assert source.usage.counts()["retries"] == 1


def test_a_file_is_empty_only_where_its_size_says_so(web: far.Web, source: HttpFiles, tmp_path: Path) -> None:
    (tmp_path / "nothing.txt").write_bytes(b"")
    web.always["nothing.txt"] = far.status(416, Content_Range="bytes */0")
    assert source.stat("nothing.txt").nbytes == 0
    web.always[NAME] = far.status(416, Content_Range="bytes */3000000")
    with pytest.raises(Refused, match=r"416 to its first byte, and bytes \*/3000000"):
        source.stat(NAME)


def test_credentials_go_to_the_host_that_they_are_for_alone(
    web: far.Web, content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine 127.0.0.1 login me password secret\ndefault login any password body\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (web.home / "blob").write_bytes(content)
    seen: dict[str, str | None] = {}

    def ask(handler: far.Handler, content: bytes) -> bool:
        seen[str(handler.headers["Host"]).partition(":")[0]] = handler.headers["Authorization"]
        return False

    def away(handler: far.Handler, content: bytes) -> bool:
        ask(handler, content)
        handler.plain(302, Location=f"http://localhost:{web.url.split(':')[2].split('/')[0]}/blob")
        return True

    web.always = {NAME: away, "blob": ask}
    source = HttpFiles(web.url, retry=QUICK)
    assert read(source, 0, 300) == content[:300]
    source.close()
    assert seen == {"127.0.0.1": "Basic bWU6c2VjcmV0", "localhost": None}


def test_credentials_that_cannot_be_read_are_said_where_they_are_missed(
    web: far.Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    web.always[NAME] = far.status(401)
    source = HttpFiles(web.url, retry=QUICK)
    finding = refusal(source)
    source.close()
    assert "which cannot be read" in str(finding.next)
    assert "secret" not in str(finding)


@pytest.mark.parametrize("size", ["9" * 5000, "*", "-1"])
def test_a_size_that_is_none_is_refused(web: far.Web, source: HttpFiles, size: str) -> None:
    def odd(handler: far.Handler, content: bytes) -> bool:
        handler.plain(206, Content_Range=f"bytes 0-0/{size}", ETag='"1"')
        return True

    web.always[NAME] = odd
    assert refusal(source).code == "read-failed"


@pytest.mark.parametrize(
    ("said", "least", "most"), [("7", 7, 7), ("Fri, 31 Dec 2100 23:59:59 GMT", 1e6, 1e11), ("x", 0, 0)]
)
def test_how_long_a_server_wants_to_be_left_alone_is_seconds_or_a_date(said: str, least: float, most: float) -> None:
    assert least <= (http.seconds_of(said) or 0) <= most


def test_another_etag_is_an_error_that_names_the_file(web: far.Web, source: HttpFiles) -> None:
    source.stat(NAME)
    web.versions[NAME] = '"model-2"'
    finding = refusal(source)
    assert finding.code == "changed-file"
    assert '"model-2"' in str(finding.found)


def test_another_size_is_an_error_even_under_the_same_etag(web: far.Web, source: HttpFiles, content: bytes) -> None:
    source.stat(NAME)
    (web.home / NAME).write_bytes(content + b"x")
    assert refusal(source).code == "changed-file"


def test_sizes_of_before_hold_for_a_process_that_did_not_look_itself(web: far.Web, content: bytes) -> None:
    source = HttpFiles(web.url, {NAME: FileStat(len(content), '"model-0"')}, QUICK)
    assert refusal(source).code == "changed-file"
    assert len(web.asked[NAME]) == 1
    source.close()


@pytest.mark.parametrize(("code", "kind"), [(404, "missing-shard"), (403, "read-failed"), (401, "read-failed")])
def test_a_status_that_will_not_pass_is_not_tried_again(web: far.Web, source: HttpFiles, code: int, kind: str) -> None:
    source.stat(NAME)
    web.always[NAME] = far.status(code)
    assert refusal(source).code == kind
    assert len(web.asked[NAME]) == 2


def test_a_read_beyond_the_end_is_refused_without_a_request(web: far.Web, source: HttpFiles, content: bytes) -> None:
    source.stat(NAME)
    assert refusal(source, len(content) - 10, 1000).code == "truncated-shard"
    assert len(web.asked[NAME]) == 1


def test_redirects_within_http_are_followed_and_remembered(web: far.Web, source: HttpFiles, content: bytes) -> None:
    (web.home / "blob").write_bytes(content)
    web.versions["blob"] = web.version(NAME)
    web.always[NAME] = far.status(302, Location="/elsewhere/blob")
    assert read(source, 0, 300) == content[:300]
    assert read(source, 300, 300) == content[300:600]
    assert len(web.asked[NAME]) == 1, "the end of the redirect was asked from then on"


@pytest.mark.parametrize("location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "gopher://127.0.0.1/"])
def test_redirects_to_other_schemes_are_refused(web: far.Web, source: HttpFiles, location: str) -> None:
    web.always[NAME] = far.status(302, Location=location)
    with pytest.raises(Refused) as caught:
        read(source, 0, 10)
    assert caught.value.findings[0].code == "unsafe-file"


@pytest.mark.parametrize(
    ("start", "location"),
    [
        ("https://files.example.org/a", "http://files.example.org/a"),
        ("https://files.example.org/a", "https://169.254.169.254/latest/meta-data"),
        ("https://files.example.org/a", "https://localhost/a"),
        ("https://files.example.org/a", "https://10.0.0.7/a"),
    ],
)
def test_redirects_that_lose_safety_are_refused(source: HttpFiles, start: str, location: str) -> None:
    with pytest.raises(Refused) as caught:
        source._follow(httpx.URL(start), location)
    assert caught.value.findings[0].code == "unsafe-file"


def test_redirects_in_circles_end(web: far.Web, source: HttpFiles) -> None:
    web.always[NAME] = far.status(302, Location=NAME)
    assert "redirects" in refusal(source).message


def test_cancelling_ends_readers_and_memory_in_hand_is_bounded(web: far.Web, source: HttpFiles, content: bytes) -> None:
    cancel = threading.Event()
    made = 0

    def jobs() -> Iterator[Job]:
        nonlocal made
        for start in range(0, 2_900_000, 100_000):
            made += 1
            yield Job([(NAME, start, memoryview(bytearray(100_000)))], start)

    taken = read_jobs(jobs(), source, 2, cancel=cancel, ahead_bytes=250_000)
    assert next(taken).payload == 0
    assert made <= 4
    cancel.set()
    with pytest.raises(Cancelled):
        list(taken)
    assert not [one for one in threading.enumerate() if one.name.startswith("read-")]
    assert made <= 4, "nothing is begun after that"
