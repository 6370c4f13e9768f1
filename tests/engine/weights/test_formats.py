"""Storage formats: exact numbers out of codes and scales, for any slice, and sizes that are the sizes of tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from firstlight.engine.weights.formats import unpacking
from firstlight.engine.weights.formats.announced import every_format
from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import WHOLE, Axis, Format
from firstlight.engine.weights.formats.int8 import Int8
from firstlight.engine.weights.formats.packed_int import PackedInt
from firstlight.engine.weights.packing import PACKERS, fp8_values, pack
from firstlight.engine.weights.published import FORMULAS, exponents, numbers
from tests.engine.weights.quantized import FORMATS, by_reference, part_of, recipe_of, tensors, whole


def weight(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """Values of very different size, so that each block has a scale of its own."""
    draw = np.random.default_rng(seed)
    size = np.exp2(draw.integers(-6, 3, (*shape[:-2], shape[-2], 1))) * np.exp2(draw.integers(-2, 3, shape[-1]))
    return (draw.standard_normal(shape) * size).astype(np.float32)


@pytest.mark.parametrize("shape", [(48, 64), (3, 16, 96)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_that_codes_and_scales_stand_for(name: str, shape: tuple[int, ...]) -> None:
    """Against the formulas of `packing`, which has them in numpy and shares no line with the unpacking."""
    format_ = FORMATS[name]
    stored, values = pack(weight(shape), format_)
    parts = tensors(stored)
    found = format_.unpack(parts, whole(shape), shape)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.from_numpy(values), rtol=0, atol=0)
    torch.testing.assert_close(by_reference(format_, parts, shape), found, rtol=0, atol=0)
    assert len(found.unique()) > 10, "the numbers must differ for this to say anything"
    assert format_.problem(parts, shape) is None


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
@settings(max_examples=25)
def test_any_box_is_that_part_of_the_whole(name: str, data: st.DataObject) -> None:
    """Cut at any row and column, in the middle of words and of blocks, shapes of partial last blocks included."""
    format_ = FORMATS[name]
    rows, columns = data.draw(st.tuples(*(st.integers(1, 5).map(lambda n, u=unit: n * u) for unit in units(format_))))
    lead = data.draw(st.sampled_from([(), (2,)]))
    shape = (*lead, rows, columns)
    stored, values = pack(weight(shape, seed=rows * columns), format_)
    bounds = st.integers(0, rows - 1), st.integers(0, columns - 1)
    starts = [data.draw(start) for start in bounds]
    stops = [data.draw(st.integers(start + 1, size)) for start, size in zip(starts, (rows, columns), strict=True)]
    box = tuple((1, 2) for _ in lead) + tuple(zip(starts, stops, strict=True))
    found = part_of(format_, tensors(stored), box, shape)
    expected = torch.from_numpy(values[tuple(slice(*bound) for bound in box)].copy())
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(by_reference(format_, tensors(stored), shape), torch.from_numpy(values), rtol=0, atol=0)


def units(format_: Format) -> tuple[int, int]:
    """What rows and columns must be multiples of: words are full, but for one format, blocks need not be."""
    if isinstance(format_, Fp8 | Int8):
        return 7, 11
    if isinstance(format_, PackedInt):
        return 5, format_.group or 9
    if isinstance(format_, Awq):
        return 8, format_.group or 9
    if isinstance(format_, Gptq):
        return 32 // format_.bits, max(format_.group, 32 // format_.bits)
    return 5, 32


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_are_those_of_the_tensors(name: str) -> None:
    """Planned bytes of a whole weight, and of shards, against the tensors that are written."""
    format_, shape = FORMATS[name], (64, 128)
    stored, _ = pack(weight(shape), format_)
    parts = tensors(stored)
    assert format_.nbytes(shape, whole(shape)) == sum(part.nbytes for part in parts.values())
    for dim in (0, 1):
        halves = [
            tuple((i * 32, i * 32 + 32) if d == dim else (0, shape[d]) for d in (0, 1)) for i in range(shape[dim] // 32)
        ]
        for box in halves:
            cut = [part.bounds(box, shape) for part in format_.parts]
            sizes = [math.prod(stop - start for start, stop in bounds) for bounds in cut]
            items = [parts[part.role].itemsize for part in format_.parts]
            assert format_.nbytes(shape, box) == sum(n * item for n, item in zip(sizes, items, strict=True))


@pytest.mark.parametrize("name", FORMATS)
def test_even_shards_take_the_same_bytes_wherever_they_start(name: str) -> None:
    format_, shape = FORMATS[name], (64, 128)
    for dim in (0, 1):
        for width in (4, 8, 16, 20, 32, 64):
            local = tuple(min(width, size) if d == dim else size for d, size in enumerate(shape))
            starts = range(0, shape[dim] - local[dim] + 1, local[dim])
            boxes = [tuple((s, s + n) if d == dim else (0, n) for d, n in enumerate(local)) for s in starts]
            sizes = {format_.nbytes(shape, box) for box in boxes}
            if format_.is_even(shape, local):
                assert len(sizes) == 1, (dim, width)


def test_a_shard_that_ends_inside_a_block_is_not_even() -> None:
    blocks = Fp8(block=(128, 128))
    assert blocks.is_even((384, 256), (128, 256))
    assert not blocks.is_even((384, 256), (96, 256))
    assert not blocks.is_even((384, 256), (384, 64))
    assert Fp8().is_even((384, 256), (96, 64))
    assert not PackedInt(bits=4, group=WHOLE).is_even((8, 64), (8, 4)), "four of the eight codes of a word"
    assert Gptq(group=16).is_even((64, 64), (64, 16)), "scales are read whole where inputs are in any order"


def test_eight_bit_floats_are_those_of_torch() -> None:
    for code, dtype in (("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)):
        table = torch.from_numpy(fp8_values(code))
        torchs = torch.arange(128, dtype=torch.uint8).view(dtype).float()
        torchs = torch.where(torchs.isfinite(), torchs, torch.nan)
        torch.testing.assert_close(torchs, table, rtol=0, atol=0, equal_nan=True)


def test_all_bytes_of_the_published_tables() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        every = torch.arange(256, dtype=torch.uint8).view(dtype)
        np.testing.assert_array_equal(numbers(every), every.float().numpy())
    np.testing.assert_array_equal(exponents(), torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float())


def test_every_format_has_a_packer_and_is_read_by_references() -> None:
    own = [kind for kind in every_format() if kind.__module__.startswith("firstlight.")]
    assert len(own) >= 8
    assert set(own) == PACKERS.keys() == {type(format_) for format_ in FORMATS.values()}
    shape = (64, 128)
    used = {recipe_of(format_, tensors(pack(weight(shape), format_)[0])).formula for format_ in FORMATS.values()}
    assert used == FORMULAS.keys()


def test_exponents_are_powers_of_two() -> None:
    """All bytes of E8M0: 2^(byte - 127), the smallest a subnormal, the last NaN (OCP MX v1.0, section 5.4.1)."""
    found = unpacking.e8m0(torch.arange(256, dtype=torch.uint8))
    expected = torch.tensor([2.0 ** (byte - 127) for byte in range(255)], dtype=torch.float64).float()
    torch.testing.assert_close(found[:255], expected, rtol=0, atol=0)
    assert math.isnan(found[255])
    theirs = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(found[:255], theirs, rtol=0, atol=0)


def test_the_sixteen_codes_of_e2m1() -> None:
    """OCP MX v1.0, table 5: sign, two bits of exponent with a bias of one, one bit of mantissa."""
    found = unpacking.e2m1(torch.arange(16, dtype=torch.uint8) << 4)[1::2]
    for code, value in enumerate(found.tolist()):
        sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        assert value == (-1) ** sign * size
    assert torch.equal(unpacking.e2m1(torch.tensor([0x2F], dtype=torch.uint8)), torch.tensor([-6.0, 1.0]))


@pytest.mark.parametrize(
    ("name", "role", "value"),
    [("packed-int4", "shape", 4), ("packed-int4-ordered", "order", 99), ("gptq", "order", -1)],
)
def test_what_says_how_to_unpack_must_fit(name: str, role: str, value: int) -> None:
    shape = (32, 32)
    parts = tensors(pack(weight(shape), FORMATS[name])[0])
    parts[role][0] = value
    problem = FORMATS[name].problem(parts, shape)
    assert problem is not None
    assert problem[0] == role
    assert str(value) in problem[2]


@pytest.mark.parametrize("name", FORMATS)
def test_every_part_says_which_of_its_dims_are_cut(name: str) -> None:
    """A weight's shape comes from its codes, and the shapes of all other parts from that."""
    format_, shape = FORMATS[name], (2, 64, 128)
    stored, _ = pack(weight(shape), format_)
    assert format_.weight_shape(tuple(tensors(stored)["codes"].shape)) == shape
    for variant in format_.variants():
        assert variant.label == format_.label
        assert any(isinstance(dim, Axis) for dim in variant.parts[0].dims)
    assert format_.variants()[0].parts[0].suffix == format_.parts[0].suffix
