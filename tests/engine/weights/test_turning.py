"""AWQ's codes in words turned round in C++: to the bit what `Format.laid` makes of them, and not a byte beside."""

from __future__ import annotations

import pytest
import torch

from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import Format
from firstlight.engine.weights.loading import turning
from firstlight.kernels.native import library

pytestmark = pytest.mark.skipif(library.find_compiler() is None, reason="there is no C++ compiler")
SIZES = ((8, 32), (72, 96), (136, 128), (264, 160), (1032, 416))  # outputs, inputs: over the edges of blocks


def stored(rows: int, columns: int) -> torch.Tensor:
    """Random words of the codes of a weight, cut out of wider ones."""
    shape = (columns, rows // 8)
    generator = torch.Generator().manual_seed(rows * columns)
    wide = torch.randint(-(2**31), 2**31, (shape[0], shape[1] + 3), generator=generator).to(torch.int32)
    return wide[:, 2:-1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("odd", [0, 1])
def test_codes_are_turned_as_they_are_laid(size: tuple[int, int], odd: int) -> None:
    format_, rows, columns = Awq(), size[0], size[1] - odd
    box = ((0, rows), (0, columns))
    words = stored(rows, columns)
    wanted = format_.laid("codes", words, box).view(torch.uint8)
    around = torch.full((rows + 2, wanted.shape[1] + 9), 77, dtype=torch.uint8)
    turn = turning.turned_by(format_, box, 1)
    assert turn is not None
    turn(words, around[1:-1, 4 : 4 + wanted.shape[1]])
    assert torch.equal(around[1:-1, 4 : 4 + wanted.shape[1]], wanted)
    around[1:-1, 4 : 4 + wanted.shape[1]] = 77
    assert (around == 77).all(), "bytes beside were written"


@pytest.mark.parametrize(
    ("format_", "box", "step"),
    [
        (Gptq(), ((0, 64), (0, 64)), 1),
        (Awq(), ((4, 64), (0, 64)), 1),
        (Awq(), ((0, 64), (3, 64)), 1),
        (Awq(), ((0, 64), (0, 64)), 2),
    ],
)
def test_other_codes_and_parts_of_words_are_laid_out_plainly(
    format_: Format, box: tuple[tuple[int, int], ...], step: int
) -> None:
    assert turning.turned_by(format_, box, step) is None
