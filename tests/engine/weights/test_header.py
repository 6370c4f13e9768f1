"""Headers: what is right is read exactly; what is wrong is refused or found, named, and costs no more than it holds."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import safe_open

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding
from firstlight.engine.weights.files import header as header_module
from firstlight.engine.weights.files.header import DTYPE_BITS, Header, read_header
from tests.costs import read_bytes, within
from tests.engine.weights.files import entries, entry, raw, shard


def read(home: Path, data: bytes) -> Header:
    path = home / "x.safetensors"
    path.write_bytes(data)
    return read_header(path)


def refused(home: Path, data: bytes) -> Finding:
    with pytest.raises(Refused) as caught:
        read(home, data)
    (finding,) = caught.value.findings
    assert finding.severity == "fatal"
    assert finding.file == "x.safetensors"
    assert finding.message
    assert finding.expected
    assert finding.found
    assert finding.next
    return finding


def found(home: Path, data: bytes) -> Finding:
    """The one finding of a file that can be read but is wrong."""
    (finding,) = read(home, data).findings
    assert finding.expected
    assert finding.found
    assert finding.next
    return finding


# What is right


def test_places_are_those_of_the_library(tmp_path: Path) -> None:
    shapes = {"a": [2, 3], "scalar": [], "empty": [0, 4], "b": [5], "name with space": [1, 1, 2]}
    path = shard(tmp_path / "x.safetensors", shapes)
    header = read_header(path)
    assert header.findings == ()
    assert header.file_bytes == path.stat().st_size
    data = path.read_bytes()
    with safe_open(path, "numpy") as theirs:
        assert {tensor.name for tensor in header.tensors} == set(theirs.keys()) == set(shapes)
        for tensor in header.tensors:
            mine = data[tensor.offset_bytes : tensor.offset_bytes + tensor.nbytes]
            assert list(tensor.shape) == shapes[tensor.name]
            assert mine == theirs.get_tensor(tensor.name).tobytes()


@pytest.mark.parametrize("dtype", DTYPE_BITS)
def test_every_dtype_has_its_size(dtype: str, tmp_path: Path) -> None:
    header = read(tmp_path, raw({"a": entry(dtype, [4, 6], 0)}, 24 * DTYPE_BITS[dtype] // 8))
    assert header.findings == ()
    assert header.tensors[0].nbytes == 24 * DTYPE_BITS[dtype] // 8


@pytest.mark.parametrize("length", [640, 1152, 0x0380, 0x0580])
def test_a_length_that_looks_like_a_pickle_is_a_length(length: int, tmp_path: Path) -> None:
    """640 is 80 02 in bytes, as a pickle of protocol 2 begins."""
    text = json.dumps(entries({"a": [2]})).encode().ljust(length)
    assert [tensor.name for tensor in read(tmp_path, raw(text, 8)).tensors] == ["a"]


def test_tensors_need_not_be_aligned(tmp_path: Path) -> None:
    listed = {"a": entry("U8", [3], 0), "b": entry("F32", [2], 3), "c": entry("F64", [1], 11)}
    header = read(tmp_path, raw(listed, 19))
    assert header.findings == ()
    assert [tensor.nbytes for tensor in header.tensors] == [3, 8, 8]


def test_empty_tensors_may_be_listed_in_any_order(tmp_path: Path) -> None:
    listed = {"a": entry("F32", [2], 0), "b": entry("F32", [2], 8), "z": entry("F32", [0, 7], 8)}
    assert read(tmp_path, raw(listed, 16)).findings == ()


@pytest.mark.parametrize(
    "metadata", [{"format": "pt"}, {"shape": "[2]", "dtype": "F32"}, {"data_offsets": "0"}, {}, {"note": 'a "quoted"'}]
)
def test_metadata_is_no_tensor(metadata: dict[str, str], tmp_path: Path) -> None:
    header = read(tmp_path, raw({"__metadata__": metadata, **entries({"a": [2]})}, 8))
    assert header.findings == ()
    assert [tensor.name for tensor in header.tensors] == ["a"]


def test_names_may_be_spelt_with_escapes(tmp_path: Path) -> None:
    header = read(tmp_path, raw(rb'{"\u0061\/\"b\"":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8))
    assert header.findings == ()
    assert header.tensors[0].name == 'a/"b"'


# Files that are something else


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"\x80\x02}q\x00(X\x05\x00\x00\x00" + bytes(50), "pickle"),
        (b"\x80\x04\x95\x1b\x00\x00\x00\x00\x00\x00\x00}" + bytes(50), "pickle"),
        (b"GGUF\x03\x00\x00\x00" + b"{" + bytes(50), "GGUF"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 9\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"<html><body>404</body></html>", "web page"),
        (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "XML"),
        (b'{"error":{"message":"x"}}', "JSON"),
        (b"\x1f\x8b\x08\x00" + bytes(50), "gzip"),
        (b"\x93NUMPY\x01\x00" + bytes(50), "numpy"),
        (b"\x89HDF\r\n\x1a\n" + bytes(50), "HDF5"),
        (b"", "empty"),
        (b"\x02\x00\x00", "3 bytes"),
        (bytes(4096), "zeros: it was never written"),
        (b"just some text, nothing else", "the words 'just some text, '"),
        (b"\xfd7zXZ\x00" + bytes(50), "xz"),
        (b"\x28\xb5\x2f\xfd" + bytes(50), "zstd"),
        (bytes(range(1, 99)), "byte 9"),
    ],
)
def test_other_formats_are_named(data: bytes, words: str, tmp_path: Path) -> None:
    finding = refused(tmp_path, data)
    assert finding.code == "not-safetensors"
    assert words in str(finding.found)
    assert words in finding.message


def test_a_directory_and_a_pipe_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    os.mkfifo(tmp_path / "y.safetensors")
    for name, words in (("x.safetensors", "a directory"), ("y.safetensors", "no regular file")):
        with pytest.raises(Refused, match=words) as caught:
            read_header(tmp_path / name)
        assert caught.value.findings[0].code == "not-safetensors"


def test_a_dangling_link_names_its_target(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to("../blobs/abc")
    with pytest.raises(Refused, match=r"\.\./blobs/abc") as caught:
        read_header(tmp_path / "x.safetensors")
    assert caught.value.findings[0].code == "missing-shard"


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").symlink_to(tmp_path / "x.safetensors")
    with pytest.raises(Refused) as caught:
        read_header(tmp_path / "x.safetensors")
    assert caught.value.findings[0].code in ("missing-shard", "read-failed")


# Lengths


def test_nine_bytes_that_claim_a_terabyte(tmp_path: Path) -> None:
    tracemalloc.start()
    finding = refused(tmp_path, struct.pack("<Q", 2**40) + b"{")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert finding.code == "header-too-large"
    assert "1,099,511,627,776 bytes" in finding.message
    assert "in a file of 9" in str(finding.found)
    assert peak < 1 << 20


def test_a_header_that_is_longer_than_the_file(tmp_path: Path) -> None:
    finding = refused(tmp_path, raw(b'{"a":', length=1000))
    assert finding.code == "truncated-shard"
    assert "within its header" in finding.message
    assert (finding.expected, finding.found) == ("1,008 bytes of header, then the tensors", "13 bytes")
    assert finding.next == "fetch x.safetensors again, from byte 13 to its end"


def test_a_sparse_header_costs_only_what_it_holds(tmp_path: Path) -> None:
    """A download that reserved its file and stopped: 900 MiB of header, all but a hundred bytes of it a hole."""
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write(raw(b'{"a":{"dtype":"F32"', length=900 << 20))
        stream.truncate(1 << 40)
    tracemalloc.start()
    before = read_bytes()
    with pytest.raises(Refused, match="a zero byte at byte 27") as caught:
        read_header(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert caught.value.findings[0].code == "header-invalid"
    assert peak < 4 * header_module.STEP_BYTES
    assert read_bytes() - before < 4 * header_module.STEP_BYTES


@pytest.mark.parametrize("part", [b'"a":{},', b'"a":{"shape":[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]},'])
def test_text_that_swells_in_memory_is_refused(part: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "DENSE_FROM_BYTES", 4096)
    text = b"{" + part * 2000 + b'"b":{}}'
    tracemalloc.start()
    finding = refused(tmp_path, raw(text))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert finding.code == "header-invalid"
    assert "no list of tensors" in finding.message
    assert peak < 20 * len(text)
    shortest = {chr(0x61 + i % 26) * (1 + i // 26): entry("U8", [], i) for i in range(200)}
    assert read(tmp_path, raw(json.dumps(shortest, separators=(",", ":")).encode(), 200)).findings == ()


def test_over_the_librarys_cap_is_read_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "LIBRARY_CAP_BYTES", 100)
    finding = found(tmp_path, raw(entries({f"t{i}": [2] for i in range(9)}), 72))
    assert finding.code == "header-too-large"
    assert finding.severity == "warning"
    assert "9 tensors" in finding.message


# Sizes against the file


def test_a_truncated_file_names_the_missing_bytes_and_the_tensors_cut(tmp_path: Path) -> None:
    data = raw(entries({"a": [4], "b": [1000], "c": [1000]}), 16 + 8000)
    finding = found(tmp_path, data[:-4096])
    assert finding.code == "truncated-shard"
    assert finding.tensors == ("b", "c")
    assert "lacks its last 4,096 bytes" in finding.message
    assert finding.next == f"fetch bytes {len(data) - 4096}-{len(data) - 1} of x.safetensors again"


def test_trailing_bytes_are_counted(tmp_path: Path) -> None:
    finding = found(tmp_path, raw(entries({"a": [4]}), 16 + 5))
    assert finding.code == "trailing-bytes"
    assert "5 bytes that no tensor claims" in finding.message


# Contents


def at(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "body", "words"),
    [
        ({"a": at(0, 8), "b": at(4, 12)}, 12, "'b': overlaps"),
        ({"a": at(0, 8), "b": at(12, 20)}, 20, "'b': leaves a gap"),
        ({"a": at(8, 16)}, 16, "'a': leaves a gap"),
        ({"a": at(0, 8), "b": at(0, 8)}, 8, "'b': overlaps"),
        ({"a": at(-8, 0)}, 8, "'a': Expected `int` >= 0"),
        ({"a": at(0, 8, [-2])}, 8, "'a': Expected `int` >= 0"),
        ({"a": at(0, 16, [-2, -2])}, 16, "'a': Expected `int` >= 0"),
        ({"a": at(8, 0)}, 8, "a length that is not its shape's"),
        ({"a": at(0, 12)}, 12, "a length that is not its shape's"),
        ({"a": at(0, 8, [2**70, 2**70])}, 8, "a length that is not its shape's"),
        ({"a": at(2**64, 2**64 + 4)}, 8, "a length that is not its shape's"),
        ({"a": at(0, 8, dtype="F33")}, 8, "an unknown dtype"),
        ({"a": at(0, 8, dtype="f32")}, 8, "an unknown dtype"),
        ({"a": at(0, 8, dtype=None)}, 8, "an entry without dtype"),
        ({"a": at(0, 8, dtype=7)}, 8, "Expected `str"),
        ({"a": at(0, 8, [2.0])}, 8, "got `float`"),
        ({"a": at(0, 8, [True, 2])}, 8, "got `bool`"),
        ({"a": at(0, 8, ["2"])}, 8, "got `str`"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "an entry without data_offsets"),
        ({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, 4, "an entry without shape"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}, 8, "length 2, got 1"),
        ({"a": 5}, 8, "'a': Expected `object`, got `int`"),
        ({"a": None}, 8, "'a': Expected `object`, got `null`"),
        ({"a": at(0, 2, [3], "F4")}, 2, "ends inside a byte"),
        ({"a": at(0, 8, [1] * 65 + [2])}, 8, "too many dims"),
        ({"a": at(0, 8, [9 * 10**18] * 500)}, 8, "too many dims"),
    ],
)
def test_entries_that_cannot_be_are_named(header: dict[str, Any], body: int, words: str, tmp_path: Path) -> None:
    finding = found(tmp_path, raw(header, body))
    assert finding.code == "header-invalid"
    assert finding.severity == "fatal"
    assert words in finding.message
    assert finding.tensors[0] in header


@pytest.mark.parametrize(
    "text",
    [
        b"{",
        b"{}}",
        b'{"a":',
        b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},}',
        b"{'a':{}}",
        b'{"a\xff":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{1:{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{null:{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
        b'{"a":' + b"[" * 100_000,
        b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}',
        b"{} garbage",
    ],
)
def test_text_that_is_no_json_is_refused(text: bytes, tmp_path: Path) -> None:
    assert refused(tmp_path, raw(text, 8)).code == "header-invalid"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"I32","shape":[2],"data_offsets":[0,8]}}',
            "a",
        ),
        (
            rb'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
            rb'"\u0061":{"dtype":"I32","shape":[2],"data\u005foffsets":[0,8]}}',
            "a",
        ),
        (b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', "dtype"),
    ],
)
def test_of_two_equal_keys_none_wins_in_silence(text: bytes, key: str, tmp_path: Path) -> None:
    finding = found(tmp_path, raw(text, 8))
    assert finding.code == "header-invalid"
    assert finding.tensors == (key,)
    assert "occurs twice" in finding.message


def test_a_thousand_equal_problems_are_one_finding(tmp_path: Path) -> None:
    header = {f"t{i}": at(8 * i, 8 * i + 8, dtype="F33") for i in range(1000)}
    finding = found(tmp_path, raw(header, 8000))
    assert len(finding.tensors) == 1000
    assert "'t0', and 999 tensors more: an unknown dtype" in finding.message


def test_a_message_that_a_person_can_act_on(tmp_path: Path) -> None:
    finding = found(tmp_path, raw({"a": at(0, 8), "b": at(8, 20, [2, 2])}, 20))
    assert str(finding) == (
        "header-invalid: the header of x.safetensors is inconsistent: 'b': a length that is not its shape's\n"
        "  file: x.safetensors\n"
        "  tensors: b\n"
        "  expected: 16 bytes for F32 [2, 2]; found: 12 bytes\n"
        "  next: fetch the file again, or report it to whoever wrote it"
    )


# Anything at all

_sizes = st.one_of(st.integers(-3, 20), st.integers(-(2**70), 2**70), st.floats(), st.none(), st.text(max_size=3))
_entries = st.one_of(
    st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.one_of(st.sampled_from(sorted(DTYPE_BITS)), st.text(max_size=5), st.integers()),
            "shape": st.one_of(st.lists(_sizes, max_size=5), st.integers(), st.none()),
            "data_offsets": st.one_of(st.lists(_sizes, max_size=3), st.none()),
            "extra": st.recursive(st.none(), st.lists, max_leaves=5),
        },
    ),
    st.none(),
    st.integers(),
    st.text(max_size=5),
)
_headers = st.dictionaries(st.one_of(st.text(max_size=8), st.sampled_from(["__metadata__", "a"])), _entries, max_size=6)


def hold(path: Path) -> None:
    """A header is read or refused; what is read without a fatal finding lies inside the file, each byte once."""
    try:
        header = read_header(path)
    except Refused:
        return
    for finding in header.findings:
        assert str(finding)
    if not any(finding.severity == "fatal" for finding in header.findings):
        data_bytes = sum(tensor.nbytes for tensor in header.tensors)
        starts = {tensor.offset_bytes for tensor in header.tensors if tensor.nbytes}
        assert len(starts) == sum(tensor.nbytes > 0 for tensor in header.tensors)
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == 8 + length + data_bytes


@given(_headers, st.integers(0, 64))
def test_any_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: dict[str, Any], body: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(raw(header, body))
    hold(path)


@given(st.binary(max_size=200), st.one_of(st.none(), st.integers(0, 2**64 - 1), st.integers(0, 300)))
@example(b"{", 2**63)
@example(b'{"__metadata__":{}}', None)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, length: int | None
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(raw(text, length=length))
    hold(path)


@given(st.data())
def test_one_byte_changed_is_never_an_accident(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    good = raw(entries({"a": [4], "b.weight": [2, 3], "c": []}), 44)
    place = data.draw(st.integers(0, len(good) - 1))
    value = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(good[:place] + bytes([value]) + good[place + 1 :])
    hold(path)


# Speed


def test_twenty_thousand_tensors_cost_little_beside_plain_json(tmp_path: Path) -> None:
    """A ratio, since machines differ: headers and all checks against `json.loads` alone (0.6 in quiet)."""
    count = 20_000
    text = json.dumps(
        {f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.w1.weight": entry("F32", [2], 8 * i) for i in range(count)}
    ).encode()
    path = tmp_path / "x.safetensors"
    with path.open("wb") as stream:
        stream.write(raw(text))
        stream.truncate(8 + len(text) + 8 * count)
    assert len(read_header(path).tensors) == count
    within(3, lambda: read_header(path), lambda: json.loads(text))


@pytest.mark.parametrize("step_bytes", [1, 16, 4 << 20])
def test_blanks_inside_and_behind_a_header_are_read_over(
    step_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole steps of blanks at the end are not kept; those before something else are."""
    monkeypatch.setattr(header_module, "STEP_BYTES", step_bytes)
    text = json.dumps(entries({"a": [2], "b": [3]})).replace(', "b"', "," + " " * 70 + '"b"').encode() + b" " * 90
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw(text, 20))
    found = read_header(path)
    assert (found.findings, [tensor.name for tensor in found.tensors]) == ((), ["a", "b"])
    assert found.tensors[1].offset_bytes == 8 + len(text) + 8
    path.write_bytes(raw(text + b"\0", 20))
    with pytest.raises(Refused) as caught:
        read_header(path)
    assert f"a zero byte at byte {8 + len(text)}" in caught.value.findings[0].message
