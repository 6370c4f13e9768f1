"""Linear layers: every implementation is as near to the truth as torch's own, and the choice among them is recorded."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from firstlight.kernels.linear import measured, native, onednn, reference
from firstlight.kernels.linear.measured import MeasuredLinear
from firstlight.kernels.native.build import available
from firstlight.kernels.registry import choose
from firstlight.kernels.signatures import PrepareLinear
from firstlight.kernels.testing import nan_filled

needs_native = pytest.mark.skipif(not available()[0], reason=available()[1])
needs_onednn = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN does not compute in bfloat16 on this CPU"
)
PREPARE = [
    pytest.param(native.prepare, marks=needs_native, id="native"),
    pytest.param(onednn.prepare, marks=needs_onednn, id="onednn"),
    pytest.param(reference.prepare, id="reference"),
]
SHAPES = [(1, 1), (3, 31), (4, 32), (5, 33), (7, 100), (576, 576), (130, 1536), (1001, 64)]


def made(out: int, width: int, rows: int, bias: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    random = torch.Generator().manual_seed(out * 10_007 + width * 101 + rows)
    weight_FH = (torch.randn(out, width, generator=random) / width**0.5).bfloat16()
    bias_F = torch.randn(out, generator=random).bfloat16() if bias else None
    return weight_FH, bias_F, torch.randn(rows, width, generator=random).bfloat16()


def error(got: Tensor, x_TH: Tensor, weight_FH: Tensor, bias_F: Tensor | None) -> float:
    """Root mean square of the distance from the product in float64."""
    true = F.linear(x_TH.double(), weight_FH.double(), None if bias_F is None else bias_F.double())
    return float((got.double() - true).square().mean().sqrt())


@pytest.mark.parametrize("prepare", PREPARE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_near_to_the_truth_as_torch(prepare: PrepareLinear, shape: tuple[int, int], bias: bool) -> None:
    for rows in (1, 2, 5, 6, 7, 13, 16, 24, 25, 64):
        weight_FH, bias_F, x_TH = made(*shape, rows, bias)
        with nan_filled():
            got = prepare(weight_FH, bias_F, (1, 16))(x_TH)
        assert got.shape == (rows, shape[0])
        assert got.dtype == torch.bfloat16
        ours = error(got, x_TH, weight_FH, bias_F)
        torchs = error(F.linear(x_TH, weight_FH, bias_F), x_TH, weight_FH, bias_F)
        assert ours <= 1.02 * torchs + 1e-6, f"{rows} rows: {ours} from the truth, torch {torchs}"


@needs_native
def test_native_gives_a_row_the_same_bits_in_any_batch_on_any_number_of_threads() -> None:
    weight_FH, bias_F, x_TH = made(963, 1000, 70, bias=True)
    linear = native.prepare(weight_FH, bias_F)
    whole = linear(x_TH)
    for rows in (1, 2, 5, 16, 31, 69):
        assert torch.equal(linear(x_TH[-rows:]), whole[-rows:])
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert torch.equal(linear(x_TH), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("prepare", PREPARE)
def test_any_leading_dims_and_strides(prepare: PrepareLinear) -> None:
    weight_FH, bias_F, x_TH = made(40, 64, 30, bias=True)
    linear = prepare(weight_FH, bias_F)
    want = linear(x_TH)
    assert torch.equal(linear(x_TH.view(2, 15, 64)), want.view(2, 15, 40))
    wide = torch.cat((x_TH, x_TH), dim=1)
    assert torch.equal(linear(wide[:, :64]), want)
    assert linear(x_TH[:0]).shape == (0, 40)


@needs_native
def test_native_refuses_what_it_would_misread() -> None:
    weight_FH, _, x_TH = made(8, 64, 3, bias=False)
    with pytest.raises(ValueError, match="bfloat16 and contiguous"):
        native.prepare(weight_FH.float())
    with pytest.raises(ValueError, match="bfloat16 and contiguous"):
        native.prepare(weight_FH.t())
    with pytest.raises(AssertionError):
        native.prepare(weight_FH)(x_TH.float())
    with pytest.raises(AssertionError):
        native.prepare(weight_FH)(x_TH[:, :32].contiguous())


def test_float32_is_torchs_own_product_bit_for_bit() -> None:
    ops = choose("cpu", torch.float32)
    weight_FH, bias_F, x_TH = (tensor.float() for tensor in made(33, 65, 9, bias=True) if tensor is not None)
    assert torch.equal(ops.linear(weight_FH, bias_F, (1, 16))(x_TH), F.linear(x_TH, weight_FH, bias_F))
    assert ops.record()["linear"] == "reference"


@needs_onednn
class TestMeasured:
    def test_a_choice_is_made_once_a_shape_and_can_be_replayed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        candidates, timed, time = ("reference", "onednn"), [], measured._time
        monkeypatch.setattr(
            measured, "_time", lambda ready, x_TH, evict: timed.append((*ready, len(x_TH))) or time(ready, x_TH, evict)
        )
        linear = MeasuredLinear(candidates)
        for out in (64, 64, 32):
            weight_FH, bias_F, x_TH = made(out, 64, 3, bias=True)
            got = linear(weight_FH, bias_F, (1, 16))(x_TH)
            torch.testing.assert_close(got, F.linear(x_TH, weight_FH, bias_F), atol=0.05, rtol=0.02)
        record = json.loads(json.dumps(linear.record()))
        assert set(record) == {"bfloat16 64x64", "bfloat16 32x64"}
        assert timed == [(*candidates, rows) for _ in record for rows in (1, 16)]

        forced = dict.fromkeys(record, "onednn")
        again = MeasuredLinear(candidates)
        again.replay(forced)
        again(made(64, 64, 1, bias=False)[0], None, (1, 16))
        assert again.record() == forced
        assert len(timed) == 4

    def test_a_record_of_another_machine_is_not_followed_in_silence(self) -> None:
        with pytest.raises(ValueError, match="recorded as native; here there are reference"):
            MeasuredLinear(("reference",)).replay({"bfloat16 64x64": "native"})

    def test_measuring_leaves_the_number_of_threads_alone(self) -> None:
        threads = torch.get_num_threads()
        MeasuredLinear(("reference", "onednn"))(made(64, 64, 1, bias=False)[0], None, (1,))
        assert torch.get_num_threads() == threads


def test_a_later_candidate_must_be_clearly_faster_over_all_row_counts() -> None:
    pick = measured._pick
    assert pick({"native": {1: 10.0, 16: 20.0}, "reference": {1: 9.0, 16: 18.0}}) == "native"
    assert pick({"native": {1: 10.0, 16: 20.0}, "reference": {1: 5.0, 16: 15.0}}) == "reference"
    assert pick({"native": {1: 10.0, 16: 90.0}, "reference": {1: 11.0, 16: 30.0}}) == "reference"
    assert pick({"native": {1: 10.0}, "reference": {1: 7.9}, "onednn": {1: 7.0}}) == "reference"


def test_the_registry_measures_bfloat16_and_says_why_the_others_wait() -> None:
    ops = choose("cpu", torch.bfloat16)
    rows = {row.implementation: row for row in ops.report() if row.operator == "linear"}
    assert set(rows) == {"measured", "native", "onednn", "reference"}
    assert [name for name, row in rows.items() if row.chosen] == (
        ["measured"] if available()[0] or torch.ops.mkldnn._is_mkldnn_bf16_supported() else ["reference"]
    )
    assert isinstance(ops.linear, MeasuredLinear)
    assert choose("cpu", torch.bfloat16).linear is not ops.linear, "what one engine learns is not another's"
