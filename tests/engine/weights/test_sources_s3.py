"""Weights in an object store: a real S3-compatible server on this machine, with what it takes to find one."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loading.readers import read_pieces
from firstlight.engine.weights.sources.base import FileStat
from firstlight.engine.weights.sources.mirror import mirror, read_pointer
from firstlight.engine.weights.sources.objects import ObjectStore
from firstlight.engine.weights.sources.retry import Retry
from firstlight.engine.weights.synthesize import synthesize
from tests.checkpoints import TINY
from tests.engine.weights import far
from tests.waiting import PATIENCE_S

QUICK = Retry(attempts=2, patience_s=0.0, first_s=0.001, most_s=0.01, stall_s=2 * PATIENCE_S)  # nothing here is slow
CONTENT = random.Random(3).randbytes(2_500_000)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    """A client of the server, which listens as long as the module runs; the environment says where, as users do."""
    from tests.engine.weights.s3 import s3_server

    with s3_server() as client, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", client.meta.endpoint_url)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", "someone")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_REGION", "us-east-1")
        client.create_bucket(Bucket="models")
        yield client


@pytest.fixture
def prefix(s3: Any, request: pytest.FixtureRequest) -> str:
    """Objects of this test alone, one of them `shard`."""
    name = request.node.name.partition("[")[0]
    s3.put_object(Bucket="models", Key=f"{name}/shard", Body=CONTENT)
    return name


def store(prefix: str, pinned: dict[str, FileStat] | None = None) -> ObjectStore:
    return ObjectStore(f"s3://models/{prefix}", pinned, QUICK)


def test_ranges_are_exactly_those_of_the_object(prefix: str) -> None:
    source = store(prefix)
    assert source.names() == ("shard",)
    assert source.stat("shard").nbytes == len(CONTENT)
    spans = [(0, 1), (7, 1_000_000), (2_499_999, 1), (1_400_000, 300)]
    targets = [bytearray(count) for _, count in spans]
    read_pieces([("shard", at, memoryview(t)) for (at, _), t in zip(spans, targets, strict=True)], 3, source=source)
    assert [bytes(target) for target in targets] == [CONTENT[at : at + count] for at, count in spans]
    assert source.usage["fetched"] < 1_000_000 + 1000


def test_an_object_that_is_replaced_during_a_load_is_an_error(s3: Any, prefix: str) -> None:
    source = store(prefix)
    source.names()
    s3.put_object(Bucket="models", Key=f"{prefix}/shard", Body=CONTENT[::-1])
    with pytest.raises(Refused) as caught:
        read_pieces([("shard", 0, memoryview(bytearray(10)))], 1, source=source)
    (finding,) = caught.value.findings
    assert finding.code == "changed-file"
    assert finding.file == f"s3://models/{prefix}/shard"


@pytest.mark.parametrize(
    ("name", "offset", "code"), [("gone", 0, "missing-shard"), ("shard", 2_499_995, "truncated-shard")]
)
def test_what_is_not_there_is_named(prefix: str, name: str, offset: int, code: str) -> None:
    with pytest.raises(Refused) as caught:
        read_pieces([(name, offset, memoryview(bytearray(10)))], 1, source=store(prefix))
    assert caught.value.findings[0].code == code
    assert name in str(caught.value.findings[0].file)


def test_no_bucket_and_no_server_are_refused_in_bounded_time(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refused) as caught:
        ObjectStore("s3://no-such-bucket/x", retry=QUICK).names()
    assert caught.value.findings[0].code == "not-found"
    assert "NoSuchBucket: The specified bucket does not exist" in caught.value.findings[0].message
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Refused) as caught:
        ObjectStore("s3://models/x", retry=QUICK).names()
    assert caught.value.findings[0].code == "read-failed"


ANSWERS = (
    (503, "SlowDown", "Please reduce your request rate.", "check address", True),
    (400, "ExpiredToken", "The provided token has expired.", "renew them", False),
    (400, "AuthorizationHeaderMalformed", "expecting 'eu-west-3'", "set AWS_REGION", False),
    (301, "PermanentRedirect", "", "set AWS_REGION", False),
    (403, "RequestTimeTooSkewed", "too large", "clock", False),
    (403, "AccessDenied", "Access Denied", "AWS_SECRET_ACCESS_KEY", False),
)


@pytest.mark.parametrize(("status", "code", "message", "way", "may_pass"), ANSWERS)
def test_what_a_store_says_is_told_and_asked_again_only_where_it_may_pass(
    status: int, code: str, message: str, way: str, may_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            body = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with pytest.raises(Refused) as caught:
            ObjectStore("s3://models/x", retry=QUICK).names()
        server.shutdown()
    (finding,) = caught.value.findings
    assert status == 301 or f"{code}: {message}" in finding.message
    assert "prefix=" not in finding.message, "what stands behind a question mark may be a signature"
    assert way in str(finding.next)
    assert len(asked) > 3 if may_pass else len(asked) == 1, "the library asks three times itself"


@pytest.mark.parametrize("fault", [far.drip_head, far.drip])
def test_what_drips_ends_with_the_time_of_a_request(
    fault: far.Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library bounds each request as a whole, by 30 s unless the environment says otherwise."""
    (tmp_path / "model.safetensors").write_bytes(bytes(50_000))
    stat = FileStat(50_000, '"model.safetensors-1"')
    with far.served(tmp_path) as web:
        web.always["model.safetensors"] = fault
        monkeypatch.setenv("AWS_ENDPOINT_URL", web.url.partition("/models")[0])
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_TIMEOUT", "200ms")
        source = ObjectStore("s3://models/x", {"model.safetensors": stat}, dataclasses.replace(QUICK, attempts=1))
        with pytest.raises(Refused) as caught:
            source.open("model.safetensors").read_into(0, [memoryview(bytearray(50_000))])
    assert caught.value.findings[0].code == "read-failed"
    assert web.asked["model.safetensors"]


def test_a_prefix_without_a_checkpoint_is_refused(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        mirror(f"s3://models/{prefix}", cache=tmp_path)


def test_a_checkpoint_in_a_bucket_is_that_of_the_directory(s3: Any, tmp_path: Path) -> None:
    """Side files lie in the cache, tensors come from afar; both are the same as those of the files."""
    home = tmp_path / "tiny"
    synthesize(dict(TINY["llama"].config), home, shards=3)
    for path in home.iterdir():
        s3.put_object(Bucket="models", Key=f"there/tiny/{path.name}", Body=path.read_bytes())
    s3.put_object(Bucket="models", Key="there/tiny/original/consolidated.pth", Body=b"x")
    directory = mirror("s3://models/there/tiny/", cache=tmp_path / "cache")
    assert not list(directory.glob("*.safetensors"))
    here, far = Checkpoint.open(home), Checkpoint.open(directory)
    far.refuse_if_broken()
    assert far.name == "tiny"
    assert (far.config, far.tensors, far.shards) == (here.config, here.tensors, here.shards)
    assert far.side_files == here.side_files
    for name in list(far.tensors)[::7]:
        assert far.read_bytes(name) == here.read_bytes(name)
    pointer = read_pointer(directory)
    assert pointer is not None
    assert set(pointer.files) == {path.name for path in home.iterdir()}
    assert mirror("s3://models/there/tiny", cache=tmp_path / "cache") == directory
