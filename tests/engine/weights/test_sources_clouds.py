"""Weights in Google's and Azure's object stores: servers on this machine that speak like them, found as users say."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.loading.readers import read_pieces
from firstlight.engine.weights.sources.mirror import _checked as checked
from firstlight.engine.weights.sources.mirror import mirror
from firstlight.engine.weights.sources.objects import ObjectStore, _etag
from firstlight.engine.weights.sources.retry import Retry
from firstlight.engine.weights.synthesize import synthesize
from tests.checkpoints import TINY
from tests.engine.weights.stores import Azure, Google, Store, serving
from tests.waiting import PATIENCE_S

QUICK = Retry(attempts=2, patience_s=0.0, first_s=0.001, most_s=0.01, stall_s=2 * PATIENCE_S)  # nothing here is slow
CONTENT = random.Random(3).randbytes(2_500_000)


@pytest.fixture(scope="module", params=[Google, Azure], ids=["google", "azure"])
def cloud(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Its server, which listens as long as the module runs; the environment says where, as users do."""
    if reason := request.param.absent():
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("cloud")
    with serving(request.param, home) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment().items():
            patch.setenv(name, value)
        yield store


@pytest.fixture
def prefix(cloud: Store, request: pytest.FixtureRequest) -> str:
    """Objects of this test alone, one of them `shard`."""
    name = request.node.name.partition("[")[0]
    cloud.put(f"{name}/shard", CONTENT)
    return name


def test_ranges_are_exactly_those_of_the_object(cloud: Store, prefix: str) -> None:
    source = ObjectStore(cloud.url(prefix), retry=QUICK)
    assert source.names() == ("shard",)
    assert source.stat("shard").nbytes == len(CONTENT)
    spans = [(0, 1), (7, 1_000_000), (2_499_999, 1), (1_400_000, 300)]
    targets = [bytearray(count) for _, count in spans]
    read_pieces([("shard", at, memoryview(t)) for (at, _), t in zip(spans, targets, strict=True)], 3, source=source)
    assert [bytes(target) for target in targets] == [CONTENT[at : at + count] for at, count in spans]
    assert source.usage["fetched"] < 1_000_000 + 1000


def test_an_object_looked_at_alone_is_of_the_version_that_a_listing_says(cloud: Store, prefix: str) -> None:
    """Listings and answers write an etag with quotes or without; it is the same."""
    listed, asked = (ObjectStore(cloud.url(prefix), retry=QUICK) for _ in range(2))
    listed.names()
    assert listed.stat("shard") == asked.stat("shard")


def test_an_object_that_is_replaced_during_a_load_is_an_error(cloud: Store, prefix: str) -> None:
    source = ObjectStore(cloud.url(prefix), retry=QUICK)
    source.names()
    cloud.put(f"{prefix}/shard", CONTENT[::-1])
    with pytest.raises(Refused) as caught:
        read_pieces([("shard", 0, memoryview(bytearray(10)))], 1, source=source)
    (finding,) = caught.value.findings
    assert finding.code == "changed-file"
    assert finding.file == cloud.url(f"{prefix}/shard")


@pytest.mark.parametrize(
    ("name", "offset", "code"), [("gone", 0, "missing-shard"), ("shard", 2_499_995, "truncated-shard")]
)
def test_what_is_not_there_is_named(cloud: Store, prefix: str, name: str, offset: int, code: str) -> None:
    source = ObjectStore(cloud.url(prefix), retry=QUICK)
    with pytest.raises(Refused) as caught:
        read_pieces([(name, offset, memoryview(bytearray(10)))], 1, source=source)
    assert caught.value.findings[0].code == code
    assert name in str(caught.value.findings[0].file)


def test_no_bucket_is_refused(cloud: Store) -> None:
    with pytest.raises(Refused) as caught:
        ObjectStore(cloud.url("x", bucket="no-such-bucket"), retry=QUICK).names()
    told = {"az": "not-found", "gs": "read-failed"}  # Google's is an error of the server that stands for it here
    assert caught.value.findings[0].code == told[cloud.scheme]


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        ("gs://bucket/model", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://container/model", "AZURE_STORAGE_ACCOUNT_NAME"),
        ("s3://bucket/model", "AWS_ENDPOINT_URL"),
    ],
)
def test_what_is_missing_in_the_environment_is_named(
    url: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:  # those of a server that runs here
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "no address")
    if not url.startswith("s3"):
        monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "nothing.json"))
    with pytest.raises(Refused) as caught:
        ObjectStore(url, retry=QUICK)
    assert variable in str(caught.value.findings[0].next)


def test_a_container_of_azure_is_no_credential() -> None:
    """abfss://CONTAINER@ACCOUNT is how its own tools write it; a password is one."""
    store = ObjectStore("abfss://models@account.dfs.core.windows.net/tiny", retry=QUICK)
    assert store.address("config.json") == "abfss://models@account.dfs.core.windows.net/tiny/config.json"
    assert checked(store.url) == store.url
    with pytest.raises(Refused, match="credentials"):
        checked("abfss://models:secret@account.dfs.core.windows.net/tiny")


def test_a_checkpoint_in_a_bucket_is_that_of_the_directory(cloud: Store, tmp_path: Path) -> None:
    home = tmp_path / "tiny"
    synthesize(dict(TINY["llama"].config), home, shards=2)
    for path in home.iterdir():
        cloud.put(f"there/tiny/{path.name}", path.read_bytes())
    directory = mirror(cloud.url("there/tiny/"), cache=tmp_path / "cache")
    assert not list(directory.glob("*.safetensors"))
    here, far = Checkpoint.open(home), Checkpoint.open(directory)
    far.refuse_if_broken()
    assert (far.config, far.tensors, far.shards) == (here.config, here.tensors, here.shards)
    for name in list(far.tensors)[::7]:
        assert far.read_bytes(name) == here.read_bytes(name)
    assert mirror(cloud.url("there/tiny"), cache=tmp_path / "cache") == directory


@pytest.mark.parametrize(
    ("found", "kept"), [("0x8DD", '"0x8DD"'), ('"abc"', '"abc"'), ('W/"abc"', 'W/"abc"'), (None, None), ("", "")]
)
def test_etags_are_kept_in_quotes(found: str | None, kept: str | None) -> None:
    assert _etag(found) == kept
