"""Files are those of the safetensors library, byte for byte, and are there whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from firstlight.engine.errors import Refused
from firstlight.engine.weights.files import safetensors_file
from firstlight.engine.weights.files.safetensors_file import Tagged, bfloat16, read, read_metadata, write

SHAPES = hnp.array_shapes(min_dims=0, min_side=0, max_side=4)
BIT_DTYPES = [("BF16", torch.bfloat16), ("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)]
DTYPES = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8", "c8"]
ARRAYS = {
    "input_ids": np.arange(12, dtype=np.int64).reshape(3, 4),
    "pixel_values": np.linspace(-1, 1, 24, dtype=np.float32).reshape(1, 2, 3, 4),
    "ü": np.array([True, False, True]),
    "scalar": np.array(3.5, dtype=np.float16),
    "empty": np.zeros((0, 5), dtype=np.int32),
    "bytes": np.arange(7, dtype=np.uint8),
}


def same(ours: Any, theirs: Any) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(ours[name], array)


def test_the_bytes_are_those_of_the_library(tmp_path: Path) -> None:
    write(tmp_path / "ours", ARRAYS, {"format": "pt"})
    safetensors.numpy.save_file(ARRAYS, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert read_metadata(tmp_path / "ours") == {"format": "pt"}
    same(read(tmp_path / "theirs"), ARRAYS)
    same(safetensors.numpy.load_file(tmp_path / "ours"), ARRAYS)


@settings(max_examples=60)
@given(
    tensors=st.dictionaries(
        st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda name: name != "__metadata__"),
        st.sampled_from(DTYPES).flatmap(
            lambda form: hnp.arrays(form, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
        ),
        max_size=6,
    )
)
def test_any_tensors_both_ways(tmp_path: Path, tensors: dict[str, np.ndarray]) -> None:
    write(tmp_path / "ours", tensors)
    same(read(tmp_path / "ours"), tensors)
    if not any(array.dtype == np.complex64 for array in tensors.values()):  # the library's numpy door has none
        same(safetensors.numpy.load_file(tmp_path / "ours"), tensors)
        safetensors.numpy.save_file(tensors, tmp_path / "theirs")
        same(read(tmp_path / "theirs"), tensors)


def test_the_header_is_aligned_and_so_is_every_tensor(tmp_path: Path) -> None:
    write(tmp_path / "file", ARRAYS)
    data = (tmp_path / "file").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    for name, info in json.loads(data[8 : 8 + length]).items():
        assert info["data_offsets"][0] % ARRAYS[name].itemsize == 0, name


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.int64).reshape(4, 6)
    views = {"t": base.T, "step": base[::2, ::-1], "big": base.astype(">i8")}
    write(tmp_path / "file", views)
    for name, array in read(tmp_path / "file").items():
        np.testing.assert_array_equal(array, views[name])


@pytest.mark.parametrize(("tag", "dtype"), BIT_DTYPES)
def test_dtypes_numpy_lacks_travel_as_bits(tmp_path: Path, tag: str, dtype: torch.dtype) -> None:
    values = torch.randn(3, 5).to(dtype)
    bits = values.view(torch.uint16 if values.itemsize == 2 else torch.uint8).numpy()
    write(tmp_path / "ours", {"w": Tagged(tag, bits), "n": np.arange(3)})
    loaded = safetensors.torch.load_file(tmp_path / "ours")["w"]
    assert loaded.dtype == dtype
    assert torch.equal(loaded.float(), values.float())
    safetensors.torch.save_file({"w": values}, tmp_path / "theirs")
    back = read(tmp_path / "theirs")["w"]
    assert isinstance(back, Tagged)
    assert back.tag == tag
    np.testing.assert_array_equal(back.bits, bits)
    if tag == "BF16":
        np.testing.assert_array_equal(back.float32(), values.float().numpy())


@settings(max_examples=200)
@given(value=st.floats(width=32))
def test_bfloat16_rounds_as_torch_does(value: float) -> None:
    ours = bfloat16(np.array([value], dtype=np.float32)).float32()
    theirs = torch.tensor([value], dtype=torch.float32).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(ours, theirs)


def test_a_file_is_replaced_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write(path, {"a": np.zeros(3)})
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write(path, {"a": np.ones(3)})
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["file"]
    monkeypatch.undo()
    write(path, {"a": np.ones(3)})
    assert path.read_bytes() != before
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("value", [np.array(["text"]), np.array([object()]), np.zeros(2, dtype=np.complex128)])
def test_dtypes_the_format_lacks(tmp_path: Path, value: np.ndarray) -> None:
    with pytest.raises(TypeError, match="no dtype"):
        write(tmp_path / "file", {"a": value})
    with pytest.raises(TypeError, match="needs bits"):
        write(tmp_path / "file", {"a": Tagged("BF16", np.zeros(2, dtype=np.uint8))})
    assert not list(tmp_path.iterdir())


def raw(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entry(start: int, stop: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [stop - start] if shape is None else shape, "data_offsets": [start, stop]}


BROKEN = {
    "empty": (b"", "not-safetensors"),
    "long header": (raw(b"{", length=2**40), "header-too-large"),
    "pickle": (b"PK\x03\x04" + b"\x00" * 40, "not-safetensors"),
    "not JSON": (raw(b"{nope}"), "not-safetensors"),
    "list": (raw([]), "not-safetensors"),
    "no offsets": (raw({"a": {"dtype": "U8", "shape": [1]}}), "header-invalid"),
    "negative": (raw({"a": entry(-1, 1)}, b"xx"), "header-invalid"),
    "hole": (raw({"a": entry(0, 1), "b": entry(2, 3)}, b"xxx"), "header-invalid"),
    "overlap": (raw({"a": entry(0, 2), "b": entry(1, 3)}, b"xxx"), "header-invalid"),
    "short": (raw({"a": entry(0, 8)}, b"xxx"), "truncated-shard"),
    "long": (raw({"a": entry(0, 1)}, b"xxx"), "trailing-bytes"),
    "shape": (raw({"a": entry(0, 4, "F32", [2])}, b"xxxx"), "truncated-shard"),
    "dtype": (raw({"a": entry(0, 4, "F4", [8])}, b"xxxx"), "unsupported-format"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, name: str) -> None:
    data, code = BROKEN[name]
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(Refused) as caught:
        read(tmp_path / "file")
    assert caught.value.findings[0].code == code
    assert caught.value.findings[0].file == str(tmp_path / "file")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        safetensors_file.read(tmp_path / "none")
    assert caught.value.findings[0].code == "not-found"
