"""Directories: every way in which files, index and headers disagree is found, named, and told apart."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firstlight.engine.errors import Refused
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.index import INDEX
from tests.costs import read_bytes, within
from tests.engine.weights.files import LLAMA, directory, raw, shard, write_index
from tests.engine.weights.opening import codes, complete, only, refused

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
SHARDS = {
    FIRST: {"model.embed_tokens.weight": [32, 8], "model.layers.0.mlp.up_proj.weight": [12, 8]},
    SECOND: {
        "model.layers.1.mlp.up_proj.weight": [12, 8],
        "model.layers.2.mlp.up_proj.weight": [12, 8],
        "lm_head.weight": [32, 8],
    },
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return directory(tmp_path / "model", SHARDS)


def test_a_sound_directory_has_no_findings(home: Path) -> None:
    checkpoint = Checkpoint.open(str(home))
    assert checkpoint.findings == ()
    assert checkpoint.config == LLAMA
    assert checkpoint.shards == (FIRST, SECOND)
    assert set(checkpoint.tensors) == {name for shapes in SHARDS.values() for name in shapes}
    assert checkpoint.payload_bytes == 4 * (2 * 32 * 8 + 3 * 12 * 8)
    assert checkpoint.side_files == ("config.json", INDEX)
    checkpoint.refuse_if_broken()


def test_bytes_are_those_of_the_file(home: Path) -> None:
    checkpoint = Checkpoint.open(home)
    tensor = checkpoint.tensors["model.layers.2.mlp.up_proj.weight"]
    data = (home / SECOND).read_bytes()[tensor.offset_bytes :][: tensor.nbytes]
    assert checkpoint.read_bytes(tensor.name) == data
    assert checkpoint.read_bytes(tensor.name, 8, 16) == data[8:24]
    os.truncate(home / SECOND, tensor.offset_bytes + 10)
    with pytest.raises(Refused, match="374 bytes from byte"):
        checkpoint.read_bytes(tensor.name)
    (home / SECOND).unlink()
    with pytest.raises(Refused, match="is not there"):
        checkpoint.read_bytes(tensor.name)


# Configuration


def test_pickles_and_code_beside_weights_are_notes(home: Path) -> None:
    (home / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    (home / "modeling_x.py").write_text("raise SystemExit")
    assert codes(home) == [("unsafe-file", "note"), ("remote-code", "note")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "it is empty"),
        (b"\0\0\0", "it holds zeros alone"),
        (b'{"a": {"b"', "it breaks off after 10 bytes"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe", "the byte order mark of UTF-16; save it as UTF-8"),
        ("{}".encode("utf-32"), "the byte order mark of UTF-32; save it as UTF-8"),
        ("{}".encode("utf-16-le"), "it looks like UTF-16"),
        (b'{"a":' * 200_000, "nested too deeply"),
        (b"version https://git-lfs.github.com/spec/v1", "but a Git LFS pointer"),
        (b"<html>", "but a web page"),
        (b"\x1f\x8b\x08", "but a gzip archive"),
        (b"// mine\n{}", "but JSON with comments"),
        (b'{\n"a": 1,\n}', "not JSON: trailing comma in object, at byte 10 (line 3)"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "holds a number of more than 4,300 digits"),
        (b'{"a": "\\ud800"}', "half of a pair of surrogates"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_json_that_is_none(name: str, text: bytes, words: str, home: Path) -> None:
    (home / name).write_bytes(text)
    finding = refused(home)
    assert finding.code == "side-file-invalid"
    assert finding.file == name
    assert words in finding.message


def test_a_huge_configuration_is_not_read(home: Path) -> None:
    os.truncate(home / "config.json", 1 << 40)
    before = read_bytes()
    finding = refused(home)
    assert read_bytes() - before < 1 << 20
    assert finding.code == "side-file-invalid"
    assert "1,099,511,627,776 bytes" in finding.message


def test_of_two_values_for_one_key_none_wins_in_silence(home: Path) -> None:
    text = json.dumps(LLAMA)
    (home / "config.json").write_text(text[:-1] + ', "rms_norm_eps": 1e-05}')
    assert codes(home) == [], "the same value twice is harmless"
    for spelt in ('"num_hidden_layers": 3', '"num_hidden_layers"\n: 3', '"num_hidden\\u005flayers":3'):
        (home / "config.json").write_text(f"{text[:-1]}, {spelt}}}")
        finding = only(home)
    assert finding.code == "conflicting-flag"
    assert finding.severity == "fatal"
    assert "num_hidden_layers" in finding.message


def test_a_configuration_may_hold_what_python_writes(home: Path) -> None:
    (home / "config.json").write_text(json.dumps({**LLAMA, "time_step_limit": [0.0, float("inf")]}))
    assert "Infinity" in (home / "config.json").read_text()
    assert Checkpoint.open(home).config["time_step_limit"] == [0.0, float("inf")]
    (home / "config.json").write_text('{"a": Infinity')
    assert refused(home).code == "side-file-invalid"


# Index and files


def test_a_missing_shard_names_what_it_held(home: Path) -> None:
    (home / SECOND).unlink()
    finding = only(home)
    assert (finding.code, finding.severity, finding.file) == ("missing-shard", "fatal", SECOND)
    assert finding.message == f"{SECOND} is not there, which holds 3 tensors: 2 of layers 1 to 2, 1 of no layer"
    assert finding.tensors == tuple(sorted(SHARDS[SECOND]))
    assert finding.next == f"fetch {SECOND}"
    with pytest.raises(Refused):
        Checkpoint.open(home).refuse_if_broken()


def test_an_unfinished_download_is_named(home: Path) -> None:
    (home / SECOND).rename(home / f"{SECOND}.incomplete")
    assert only(home).found == f"an unfinished download: {SECOND}.incomplete"


def test_a_tensor_that_the_index_does_not_list(home: Path) -> None:
    listed = {tensor: file for file, shapes in SHARDS.items() for tensor in shapes}
    del listed["model.layers.1.mlp.up_proj.weight"]
    write_index(home, listed)
    finding = only(home)
    assert (finding.code, finding.severity) == ("unlisted-tensor", "warning")
    assert finding.tensors == ("model.layers.1.mlp.up_proj.weight",)
    assert "present in shard, unlisted" in str(finding.found)
    assert "model.layers.1.mlp.up_proj.weight" in Checkpoint.open(home).tensors


def test_a_tensor_that_no_header_has(home: Path) -> None:
    listed = {tensor: file for file, shapes in SHARDS.items() for tensor in shapes}
    write_index(home, {**listed, "model.layers.3.mlp.up_proj.weight": SECOND})
    finding = only(home)
    assert (finding.code, finding.severity, finding.file) == ("stale-index", "fatal", SECOND)
    assert "1 tensor of layer 3" in finding.message


def test_a_tensor_in_another_shard_than_listed(home: Path) -> None:
    listed = {tensor: file for file, shapes in SHARDS.items() for tensor in shapes}
    write_index(home, {**listed, "lm_head.weight": FIRST})
    finding = only(home)
    assert (finding.code, finding.severity) == ("stale-index", "warning")
    assert finding.expected == f"lm_head.weight in {FIRST}"
    assert Checkpoint.open(home).tensors["lm_head.weight"].file == SECOND


def test_a_whole_shard_of_the_series_that_the_index_does_not_list(home: Path) -> None:
    write_index(home, dict.fromkeys(SHARDS[FIRST], FIRST))
    assert codes(home) == [("stale-index", "warning"), ("unlisted-tensor", "warning")]
    assert "lm_head.weight" in Checkpoint.open(home).tensors, "headers are the truth"


def test_a_shard_that_is_neither_listed_nor_there(home: Path) -> None:
    write_index(home, dict.fromkeys(SHARDS[FIRST], FIRST))
    (home / SECOND).unlink()
    finding = only(home)
    assert (finding.code, finding.severity) == ("stale-index", "warning")
    assert SECOND in finding.message


def test_duplicates_are_settled_by_the_index_alone(home: Path) -> None:
    shard(home / SECOND, {**SHARDS[SECOND], "model.embed_tokens.weight": [32, 8]})
    finding = only(home)
    assert (finding.code, finding.severity) == ("duplicate-tensor", "warning")
    assert Checkpoint.open(home).tensors["model.embed_tokens.weight"].file == FIRST
    listed = {tensor: file for file, shapes in SHARDS.items() for tensor in shapes}
    write_index(home, {**listed, "model.embed_tokens.weight": SECOND})
    assert Checkpoint.open(home).tensors["model.embed_tokens.weight"].file == SECOND
    (home / INDEX).unlink()
    finding = only(home)
    assert (finding.code, finding.severity) == ("duplicate-tensor", "fatal")
    assert "not guessed" in str(finding.next)


def test_a_consolidated_copy_is_one_finding(home: Path) -> None:
    shard(
        home / "consolidated.safetensors", {name: shape for shapes in SHARDS.values() for name, shape in shapes.items()}
    )
    finding = only(home)
    assert (finding.code, finding.severity) == ("shadowed-file", "warning")
    assert f"what is read is {FIRST} to {SECOND}" in finding.message
    (home / INDEX).unlink()
    assert only(home).message == finding.message.replace("the index does not list", "by its name a second copy")
    assert Checkpoint.open(home).shards == (FIRST, SECOND)
    (home / SECOND).unlink()
    assert codes(home) == [("shadowed-file", "warning"), ("missing-shard", "fatal")], "a copy does not fill in"


def test_a_single_file_beside_a_stale_index(tmp_path: Path) -> None:
    everything = {name: shape for shapes in SHARDS.values() for name, shape in shapes.items()}
    home = directory(tmp_path / "model", {"model.safetensors": everything}, index=dict.fromkeys(SHARDS[FIRST], FIRST))
    assert codes(home) == [("missing-shard", "fatal"), ("stale-index", "warning"), ("shadowed-file", "warning")]
    assert f"delete {INDEX} if model.safetensors is the whole model" in str(Checkpoint.open(home).findings[-1].next)


def test_a_single_file_beside_others_without_an_index(tmp_path: Path) -> None:
    home = directory(
        tmp_path / "model", {"model.safetensors": {"a": [2]}, "adapter.safetensors": {"b": [2]}}, index=False
    )
    finding = only(home)
    assert (finding.code, finding.file) == ("shadowed-file", "adapter.safetensors")
    assert set(Checkpoint.open(home).tensors) == {"a"}


def test_many_files_that_are_left_aside_are_one_finding(tmp_path: Path) -> None:
    others = {f"model-0000{n}-of-00005.safetensors": {"a": [2]} for n in range(1, 6)}
    home = directory(tmp_path / "model", {"model.safetensors": {"a": [2]}, **others}, index=False)
    finding = only(home)
    assert (finding.code, finding.severity) == ("shadowed-file", "warning")
    assert "and 2 more (beside the whole model); what is read is model.safetensors" in finding.message


@pytest.mark.parametrize(
    ("present", "absent"),
    [
        (["model-00001-of-00003", "model-00003-of-00003"], ["model-00002-of-00003"]),
        (["model-00001-of-000003", "model-00002-of-000003"], ["model-00003-of-000003"]),
        (["model-1-of-3", "model-3-of-3"], ["model-2-of-3"]),
        (["model-00000-of-00003", "model-00002-of-00003"], ["model-00001-of-00003"]),
        (["model-00001-of-00002", "other-00002-of-00002"], ["model-00002-of-00002", "other-00001-of-00002"]),
        (
            ["model-00001-of-00002", "model-00001-of-00003"],
            [f"model-0000{n}" for n in ("2-of-00002", "2-of-00003", "3-of-00003")],
        ),
    ],
)
def test_without_an_index_the_names_count(present: list[str], absent: list[str], tmp_path: Path) -> None:
    shards = {f"{name}.safetensors": {f"t{n}": [2]} for n, name in enumerate(present)}
    home = directory(tmp_path / "model", shards, index=False)
    found = Checkpoint.open(home).findings
    assert [finding.file for finding in found] == [f"{name}.safetensors" for name in absent]
    assert {(finding.code, finding.severity) for finding in found} == {("missing-shard", "fatal")}


def test_an_absurd_total_is_one_finding(tmp_path: Path) -> None:
    home = directory(tmp_path / "model", {"model-00001-of-999999999.safetensors": {"a": [2]}}, index=False)
    assert only(home).code == "missing-shard"


@pytest.mark.parametrize(
    "file",
    ["/etc/passwd", "../other/model.safetensors", "..", "", ".", "a/../../b.safetensors", "C:\\x.safetensors", "..\\x"],
)
def test_an_index_that_leaves_the_directory(file: str, home: Path) -> None:
    write_index(home, {"lm_head.weight": file})
    finding = refused(home)
    assert finding.code == "unsafe-file"
    assert "outside the directory" in finding.message


def test_an_index_into_a_folder_says_so(home: Path) -> None:
    write_index(home, {"lm_head.weight": "weights/model.safetensors"})
    assert "into a folder of the directory" in refused(home).message


def test_an_index_of_pickles(home: Path) -> None:
    write_index(home, {"lm_head.weight": "pytorch_model.bin"})
    (home / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    finding = next(finding for finding in Checkpoint.open(home).findings if finding.severity == "fatal")
    assert finding.code == "unsafe-file"
    assert "in pytorch_model.bin, which is no safetensors file" in finding.message


@pytest.mark.parametrize("weight_map", [None, [], {"a": 5}, {"a": None}, "x", {"a": {"file": FIRST}}])
def test_an_index_without_a_map(weight_map: Any, home: Path) -> None:
    (home / INDEX).write_text(json.dumps({} if weight_map is None else {"weight_map": weight_map}))
    assert refused(home).code == "stale-index"


def test_an_index_that_lists_a_tensor_twice(home: Path) -> None:
    text = (home / INDEX).read_text()
    (home / INDEX).write_text(text.replace('"lm_head.weight"', f'"lm_head.weight": "{FIRST}", "lm_head.weight"'))
    finding = only(home)
    assert (finding.code, finding.severity) == ("stale-index", "fatal")
    assert finding.tensors == ("lm_head.weight",)


def test_the_sum_of_the_index_is_a_note(home: Path) -> None:
    listed = {tensor: file for file, shapes in SHARDS.items() for tensor in shapes}
    write_index(home, listed, metadata={"total_size": 3200})
    assert codes(home) == []
    write_index(home, listed, metadata={"total_size": 999})
    assert only(home).severity == "note"


# Files that cannot be read


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"PK\x03\x04" + bytes(64), "not-safetensors"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "not-safetensors"),
        (b"", "not-safetensors"),
        (raw(b'{"a":', length=99), "truncated-shard"),
        (raw(b"{nonsense"), "header-invalid"),
        ((2**40).to_bytes(8, "little") + b"{", "header-too-large"),
    ],
)
def test_a_shard_that_cannot_be_read_names_what_it_held(data: bytes, code: str, home: Path) -> None:
    (home / SECOND).write_bytes(data)
    finding = only(home)
    assert (finding.code, finding.severity, finding.file) == (code, "fatal", SECOND)
    assert finding.tensors == tuple(sorted(SHARDS[SECOND]))
    assert "the index places 3 tensors: 2 of layers 1 to 2, 1 of no layer in it" in finding.message


def test_a_truncated_shard(home: Path) -> None:
    size = (home / SECOND).stat().st_size
    os.truncate(home / SECOND, size - 500)
    finding = only(home)
    assert (finding.code, finding.file) == ("truncated-shard", SECOND)
    assert finding.tensors == ("lm_head.weight",)
    assert finding.next == f"fetch bytes {size - 500}-{size - 1} of {SECOND} again"


@pytest.mark.parametrize("ending", [".aria2", ".st"])
def test_a_download_of_full_size_that_is_not_done(ending: str, home: Path) -> None:
    """aria2 and axel reserve the whole file first: its header and size are right long before its bytes are."""
    (home / (SECOND + ending)).write_bytes(b"\0\1")
    finding = only(home)
    assert (finding.code, finding.severity, finding.file) == ("unwritten-bytes", "fatal", SECOND)
    assert finding.found == SECOND + ending


def test_a_shard_that_was_written_in_part(home: Path) -> None:
    data = (home / SECOND).read_bytes()
    with (home / SECOND).open("r+b") as stream:
        stream.truncate(0)
        stream.write(data[:1000])
        stream.truncate(len(data) + (1 << 20))
        if os.lseek(stream.fileno(), 0, os.SEEK_HOLE) == len(data) + (1 << 20):
            pytest.skip("the file system knows no holes")
    found = {finding.code: finding for finding in Checkpoint.open(home).findings}
    assert found["unwritten-bytes"].severity == "warning"
    start = int(str(found["unwritten-bytes"].found).split()[4].replace(",", ""))
    assert 1000 <= start < len(data) + (1 << 20)


def test_a_shard_that_is_replaced_after_its_header_was_read(home: Path) -> None:
    """By one of the same size, with other tensors at the same places: bytes of one would be read as another's."""
    checkpoint = Checkpoint.open(home)
    (home / "new").write_bytes((home / SECOND).read_bytes().replace(b"layers.1", b"layers.7"))
    (home / "new").replace(home / SECOND)
    with pytest.raises(Refused, match="changed while it was being read"):
        checkpoint.read_bytes("model.layers.1.mlp.up_proj.weight")
    assert "model.layers.7.mlp.up_proj.weight" in Checkpoint.open(home).tensors


def test_a_folder_of_a_cache_is_told_from_the_revisions_in_it(home: Path, tmp_path: Path) -> None:
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    home.rename(tmp_path / "models--a--b" / "snapshots" / "abc")
    assert str(refused(tmp_path / "models--a--b").next).endswith("models--a--b/snapshots/abc")


def test_a_directory_named_like_a_shard(home: Path) -> None:
    (home / SECOND).unlink()
    (home / SECOND).mkdir()
    finding = only(home)
    assert (finding.code, finding.file) == ("not-safetensors", SECOND)
    assert "a directory" in finding.message


def test_a_dangling_link(home: Path) -> None:
    (home / SECOND).unlink()
    (home / SECOND).symlink_to("../blobs/abc")
    finding = next(finding for finding in Checkpoint.open(home).findings if finding.severity == "fatal")
    assert (finding.code, finding.file) == ("missing-shard", SECOND)
    assert "../blobs/abc" in finding.message


def test_links_are_followed_and_those_that_lead_away_are_said(home: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--x" / "snapshots" / "abc"
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    shutil.copytree(home, cache)
    (cache / SECOND).rename(blobs / "123")
    (cache / SECOND).symlink_to("../../blobs/123")
    assert codes(cache) == [], "as the cache of Hugging Face has it"
    (cache / SECOND).unlink()
    (cache / SECOND).symlink_to(home / SECOND)
    assert codes(cache) == [("unsafe-file", "note")]
    assert len(Checkpoint.open(cache).tensors) == 5


@pytest.fixture
def stranger() -> Iterator[Path]:
    """A place where this process has no more rights than anyone."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o777)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    yield place
    if before == 0:
        os.seteuid(before)
    for path in (place, *place.glob("*")):
        path.chmod(0o777)
    shutil.rmtree(place)


def test_what_may_not_be_read(stranger: Path) -> None:
    home = directory(stranger / "model", SHARDS)
    (home / SECOND).chmod(0)
    finding = only(home)
    assert (finding.code, finding.file) == ("read-failed", SECOND)
    assert "Permission denied" in finding.message
    (home / "config.json").chmod(0)
    assert "Permission denied" in refused(home).message
    home.chmod(0)
    assert "Permission denied" in refused(home).message


# Anything at all

_values = st.recursive(
    st.one_of(
        st.none(), st.integers(), st.text(max_size=4), st.sampled_from([FIRST, SECOND, "../x", "pytorch_model.bin"])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@given(
    st.one_of(st.binary(max_size=60), st.fixed_dictionaries({}, optional={"weight_map": _values, "metadata": _values}))
)
def test_any_index_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, index: bytes | dict[str, Any]) -> None:
    home = tmp_path_factory.getbasetemp() / "any-index"
    if not home.exists():
        directory(home, SHARDS)
    (home / INDEX).write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    try:
        checkpoint = Checkpoint.open(home)
    except Refused as error:
        complete(error.findings[0])
        return
    for finding in checkpoint.findings:
        complete(finding)


def test_thirty_thousand_tensors_open_fast(tmp_path: Path) -> None:
    """A ratio, since machines differ (0.8 here): everything against `json.loads` of index and headers alone."""
    shards = {
        f"model-{number:05d}-of-00030.safetensors": {
            f"model.layers.{number}.mlp.experts.{i}.w1.weight": [2] for i in range(1000)
        }
        for number in range(1, 31)
    }
    home = directory(tmp_path / "model", shards)
    (home / list(shards)[-1]).unlink()
    texts = [path.read_bytes()[8:-8000] for path in home.glob("*.safetensors")] + [(home / INDEX).read_bytes()]
    finding = only(home)
    assert (finding.code, finding.file, len(finding.tensors)) == ("missing-shard", list(shards)[-1], 1000)
    within(3, lambda: Checkpoint.open(home), lambda: [json.loads(text) for text in texts])


def test_an_index_that_spells_files_otherwise_names_them(tmp_path: Path) -> None:
    home = directory(tmp_path / "m", {"a.safetensors": {"x": [2]}}, {"x": "A.SAFETENSORS"})
    found = {finding.code: finding for finding in Checkpoint.open(home).findings}
    assert found["missing-shard"].found == "a.safetensors, spelt otherwise"
    assert found["missing-shard"].next == "rename a.safetensors to A.SAFETENSORS"
