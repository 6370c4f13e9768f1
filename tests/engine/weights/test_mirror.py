"""A checkpoint at a URL as a directory: what is fetched, what is kept, what another version does, what is refused."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.sources import base, kept, mirror
from firstlight.engine.weights.sources.retry import Retry
from firstlight.engine.weights.synthesize import synthesize
from tests.checkpoints import TINY
from tests.engine.weights import far
from tests.waiting import PATIENCE_S

QUICK = Retry(attempts=2, patience_s=0.0, first_s=0.001, most_s=0.01, stall_s=2 * PATIENCE_S)  # nothing here is slow
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def web(tmp_path: Path) -> Iterator[far.Web]:
    synthesize(dict(TINY["llama"].config), tmp_path / "tiny", shards=2)
    (tmp_path / "tiny" / "tokenizer_config.json").write_text("{}")
    with far.served(tmp_path / "tiny") as web:
        yield web


def place(web: far.Web, tmp_path: Path, **options: bool) -> Path:
    return mirror.mirror(web.url, cache=tmp_path / "cache", **options)


def test_side_files_are_here_and_tensors_there(web: far.Web, tmp_path: Path) -> None:
    directory = place(web, tmp_path)
    assert {path.name for path in directory.iterdir()} == {
        "config.json", "model.safetensors.index.json", "tokenizer_config.json", mirror.POINTER,
    }  # fmt: skip
    here, there = Checkpoint.open(web.home), Checkpoint.open(directory)
    there.refuse_if_broken()
    assert (there.name, there.config, there.tensors) == ("tiny", here.config, here.tensors)
    assert there.side_files == here.side_files
    name = "model.layers.1.mlp.down_proj.weight"
    assert there.read(name, [slice(1, 3)]) == here.read(name, [slice(1, 3)])
    assert Checkpoint.open(directory).name == "tiny"


def test_nothing_is_fetched_twice_and_another_version_is_another_directory(web: far.Web, tmp_path: Path) -> None:
    directory = place(web, tmp_path)
    asked = len(web.asked["config.json"])
    assert place(web, tmp_path) == directory
    assert web.asked["config.json"][asked:] == [(0, 0)], "only whether it is the same was asked"
    web.versions[FIRST] = '"new"'
    assert place(web, tmp_path) != directory


def test_it_is_said_of_which_shards_no_change_would_be_seen(web: far.Web, tmp_path: Path) -> None:
    assert Checkpoint.open(place(web, tmp_path)).findings == ()
    web.versions[FIRST] = ""
    (finding,) = Checkpoint.open(place(web, tmp_path)).findings
    assert (finding.code, finding.severity, finding.file) == ("changed-file", "note", f"{web.url}/{FIRST}")
    assert "no version of 1 shard:" in finding.message


def test_what_has_no_version_is_looked_at_anew(web: far.Web, tmp_path: Path) -> None:
    """Of equal sizes nobody could tell whether a configuration, or a part of a shard, is that of before."""
    web.versions = dict.fromkeys(("config.json", FIRST), "")
    before = (place(web, tmp_path) / "config.json").read_text()
    (web.home / "config.json").write_text(before.replace("llama", "mango"))
    assert "mango" in (place(web, tmp_path) / "config.json").read_text()


def test_a_shard_that_changes_after_the_side_files_were_fetched_is_an_error(web: far.Web, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(place(web, tmp_path))
    web.versions[FIRST] = '"new"'
    name = next(name for name, tensor in checkpoint.tensors.items() if tensor.file == FIRST)
    with pytest.raises(Refused, match="changed while it was being read"):
        checkpoint.read_bytes(name)


def test_broken_shards_are_found_from_afar_as_they_are_here(web: far.Web, tmp_path: Path) -> None:
    path = web.home / FIRST
    path.write_bytes(path.read_bytes()[:-100])
    (finding,) = (one for one in Checkpoint.open(place(web, tmp_path)).findings if one.severity == "fatal")
    assert (finding.code, finding.file) == ("truncated-shard", FIRST)
    path.unlink()
    (finding,) = (one for one in Checkpoint.open(place(web, tmp_path)).findings if one.severity == "fatal")
    assert (finding.code, finding.file) == ("missing-shard", FIRST)


def read_all(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {name: checkpoint.read_bytes(name) for name in checkpoint.tensors}


def payload_asked(web: far.Web) -> int:
    return sum(last - first + 1 for name, spans in web.asked.items() if ".safetensors" in name for first, last in spans)


def test_what_is_kept_is_not_fetched_again_even_after_a_crash(
    web: far.Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A journal says which blocks are there; one that was spoilt since is fetched again, and only that one."""
    monkeypatch.setattr(kept, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(base, "STREAM_BYTES", 512)
    expected = read_all(Checkpoint.open(web.home))
    directory = place(web, tmp_path, keep=True)
    first = Checkpoint.open(directory)
    names = sorted(first.tensors)
    for name in names[: len(names) // 2]:
        assert first.read_bytes(name) == expected[name]
    (part,) = directory.glob(f"{FIRST}{kept.PART}")
    journal = directory / f"{FIRST}{kept.JOURNAL}"
    before = payload_asked(web)
    half = journal.read_bytes()
    journal.write_bytes(half + b"\1\2\3")  # the record that a crash cut
    block, _ = kept._RECORD.unpack_from(half)
    with part.open("r+b") as stream:
        stream.seek(block * 4096 + 7)
        stream.write(b"\xff\x00\xff")
    again = Checkpoint.open(directory)
    for name in names[: len(names) // 2]:
        assert again.read_bytes(name) == expected[name]
    assert again.source.usage["spoilt"] == 1
    headers = payload_asked(web) - before
    assert headers <= 4096 * 4, "the spoilt block, and headers at most"


def test_a_file_gets_its_name_when_all_of_it_is_here(web: far.Web, tmp_path: Path) -> None:
    directory = place(web, tmp_path, whole=True)
    for path in web.home.iterdir():
        assert (directory / path.name).read_bytes() == path.read_bytes(), path.name
    assert not [*directory.glob(f"*{kept.PART}"), *directory.glob(f"*{kept.JOURNAL}")]
    before = payload_asked(web)
    assert read_all(Checkpoint.open(directory)) == read_all(Checkpoint.open(web.home))
    assert payload_asked(web) == before


def test_who_is_done_gives_the_name_to_what_is_done_alone(web: far.Web, tmp_path: Path) -> None:
    """Three processes fetch a file: the part that the second finds at its end is the third's, half empty."""
    directory = place(web, tmp_path, keep=True)
    size = (web.home / FIRST).stat().st_size
    done, late, new = (mirror.open_source(directory) for _ in range(3))
    both = [source.open(FIRST) for source in (done, late)]
    for opened in both:
        opened.read_into(0, [memoryview(bytearray(size))])
    both[0].check()
    assert (directory / FIRST).read_bytes() == (web.home / FIRST).read_bytes()
    (directory / FIRST).unlink()
    third = new.open(FIRST)
    both[1].check()
    assert not (directory / FIRST).exists(), "nothing of the third's is there yet"
    third.read_into(0, [memoryview(bytearray(size))])
    third.check()
    assert (directory / FIRST).read_bytes() == (web.home / FIRST).read_bytes()
    assert not [*directory.glob(f"*{kept.PART}"), *directory.glob(f"*{kept.JOURNAL}")]


def test_a_record_that_was_cut_puts_none_behind_it_out_of_step(
    web: far.Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "BLOCK_BYTES", 4096)
    directory = place(web, tmp_path, keep=True)
    (directory / f"{FIRST}{kept.JOURNAL}").write_bytes(b"\1\2\3")
    for again in (False, True):
        source = mirror.open_source(directory)
        source.open(FIRST).read_into(0, [memoryview(bytearray(9000))])
        assert source.usage["kept"] == (3 * 4096 if again else 0)


def test_what_a_killed_process_left_unfinished_goes_with_the_next(web: far.Web, tmp_path: Path) -> None:
    home = tmp_path / "cache" / "remote"
    for name in ("unfinished-left", "unfinished-held", "unfinished-new", "kept"):
        (home / name).mkdir(parents=True)
        (home / name / "tokenizer.json").write_text("half")
        if name != "unfinished-new":
            os.utime(home / name, (0, 0))
    held = os.open(home / "unfinished-held", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    directory = place(web, tmp_path)
    os.close(held)
    left = {path.name for path in home.iterdir()} - {directory.parent.name}
    assert left == {"unfinished-held", "unfinished-new", "kept"}


def test_what_came_of_a_request_before_it_broke_off_is_kept(
    web: far.Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block that one request asks for is written down as it comes, for this process, others and later ones."""
    monkeypatch.setattr(kept, "BLOCK_BYTES", 4096)
    directory = place(web, tmp_path, keep=True)
    other = mirror.open_source(directory, QUICK)
    beside = other.open(FIRST)  # before anything was there
    web.always[FIRST] = far.cut(10_000)
    with pytest.raises(Refused):
        mirror.open_source(directory, QUICK).open(FIRST).read_into(0, [memoryview(bytearray(8 * 4096))])
    del web.always[FIRST]
    count = len(web.asked[FIRST])
    data = bytearray(8 * 4096)
    beside.read_into(0, [memoryview(data)])
    assert data == (web.home / FIRST).read_bytes()[: len(data)]
    assert web.asked[FIRST][count:] == [(QUICK.attempts * 10_000 // 4096 * 4096, 8 * 4096 - 1)]
    assert other.usage["kept"] == 4 * 4096


def test_a_cache_that_cannot_be_written_is_refused(web: far.Web, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused) as caught:
        mirror.mirror(web.url, cache=tmp_path / "file")
    (finding,) = caught.value.findings
    assert (finding.code, "FIRSTLIGHT_CACHE" in str(finding.next)) == ("not-available", True)


@pytest.mark.parametrize(("number", "way"), [(errno.ENOSPC, "make room"), (errno.EACCES, "allow writing")])
def test_weights_that_cannot_be_kept_are_refused_with_the_reason(
    number: int, way: str, web: far.Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = mirror.open_source(place(web, tmp_path, keep=True)).open(FIRST)

    def full(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(Refused) as caught:
        opened.read_into(0, [memoryview(bytearray(100))])
    (finding,) = caught.value.findings
    assert way in str(finding.next)
    assert kept.PART in str(finding.file)


def test_an_index_that_points_elsewhere_fetches_nothing_there(web: far.Web, tmp_path: Path) -> None:
    index = web.home / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["evil"] = "../../secret.safetensors"
    index.write_text(json.dumps(value))
    with pytest.raises(Refused, match="points outside"):
        Checkpoint.open(place(web, tmp_path))
    assert not any("secret" in name for name in web.asked)


def test_side_files_have_a_limit(web: far.Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "SIDE_FILE_LIMIT_BYTES", 1000)
    (web.home / "tokenizer.json").write_bytes(b" " * 1001)
    (web.home / "model.safetensors.index.json").unlink()
    with pytest.raises(Refused, match=r"tokenizer\.json is too large"):
        place(web, tmp_path)
    assert not list((tmp_path / "cache" / "remote").iterdir()), "nothing is left of what was not finished"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("ftp://host/model", "not-available"),
        ("https://user:secret@host/model", "usage"),
        ("https://host/model?signature=secret", "usage"),
        ("https://user:secret@host:99999/model", "usage"),
        ("https://user:secret@/model", "usage"),
        ("https://host:8x/model?signature=secret", "usage"),
        ("https://[::1/model#secret", "usage"),
    ],
)
def test_urls_that_are_not_taken(url: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        mirror.mirror(url, cache=tmp_path)
    assert caught.value.findings[0].code == code
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value.findings)


@pytest.mark.parametrize("status", [403, 410])
def test_what_a_store_forbids_because_it_lacks_it_is_absent(status: int, web: far.Web, tmp_path: Path) -> None:
    """Public buckets may not be listed, and forbid every name that they do not have; one that is there stays forbidden
    where other names are found to be absent."""
    web.otherwise = far.status(status)
    assert sorted(path.name for path in place(web, tmp_path).iterdir()) == [
        mirror.POINTER, "config.json", "model.safetensors.index.json", "tokenizer_config.json",
    ]  # fmt: skip
    web.otherwise = None
    web.always["config.json" if status == 410 else "tokenizer_config.json"] = far.status(403)
    with pytest.raises(Refused, match="status 403"):
        place(web, tmp_path)


def test_a_server_without_a_checkpoint_is_refused(web: far.Web, tmp_path: Path) -> None:
    (web.home / "config.json").unlink()
    with pytest.raises(Refused) as caught:
        place(web, tmp_path)
    assert caught.value.findings[0].code == "not-found"


def test_a_shard_that_goes_away_after_it_was_looked_at_is_named(web: far.Web, tmp_path: Path) -> None:
    directory = place(web, tmp_path)
    web.always[FIRST] = far.status(404)
    found = [finding for finding in Checkpoint.open(directory).findings if finding.severity == "fatal"]
    assert [(finding.code, finding.file, finding.found) for finding in found] == [
        ("missing-shard", f"{web.url}/{FIRST}", "absent")
    ]
    assert found[0].message.startswith(f"{web.url}/{FIRST} is not there;")
