"""Storage formats against the packages that write and read them: compressed-tensors and transformers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from compressed_tensors.utils.match import match_targets
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from firstlight.engine.errors import Refused
from firstlight.engine.weights.files.header import TensorInfo
from firstlight.engine.weights.formats.announced import announced
from firstlight.engine.weights.formats.awq import Awq
from firstlight.engine.weights.formats.compressed import compressed_tensors
from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.gptq import Gptq
from firstlight.engine.weights.formats.grid import Format
from firstlight.engine.weights.formats.mxfp4 import MxFp4, MxFp4Blocks
from firstlight.engine.weights.formats.packed_int import PackedInt
from firstlight.engine.weights.formats.refusing import Options
from firstlight.engine.weights.loading.placing import STORED_DTYPES
from firstlight.engine.weights.packed import fitting
from tests.engine.weights.quantized import compressed, part_of, whole

SHAPE = (48, 96)
GROUP = {"strategy": "group", "group_size": 32}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("pack-quantized", {"num_bits": 4, "type": "int", **GROUP}),
    "int4-zero": ("pack-quantized", {"num_bits": 4, "type": "int", "symmetric": False, **GROUP}),
    "int4-channel": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "int8-channel-zero": ("pack-quantized", {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "channel"}),
    "int2": ("pack-quantized", {"num_bits": 2, "type": "int", **GROUP}),
    "w4a8": ("int-quantized", {"num_bits": 4, "type": "int", **GROUP}),
    "w8a8": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "w8a8-zero": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}),
    "w8a8-tensor": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "tensor"}),
    "fp8-channel": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8-tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8-block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "scale_dtype": "torch.uint8", **GROUP}),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, "type": "float", "scale_dtype": "torch.uint8", **GROUP}),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}


def theirs(layout: str, options: dict[str, Any], weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What compressed-tensors stores for a weight, and what it reads from that, in float32."""
    args = QuantizationArgs(**options)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(layout)
    state = {"weight": weight, **scales(weight, args)}
    stored = compressor.compress(state, scheme)
    if "weight_global_scale" in stored:  # its own decompress rounds to bfloat16 on the way
        codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        both = stored["weight_scale"].float(), args, stored["weight_global_scale"]
        return stored, dequantize(codes, both[0], args=both[1], global_scale=both[2], dtype=torch.float32)
    read = {name: tensor.float() if tensor.dtype == torch.bfloat16 else tensor for name, tensor in stored.items()}
    return stored, compressor.decompress(read, scheme)["weight"].float()


def scales(weight: Tensor, args: QuantizationArgs) -> dict[str, Tensor]:
    rows, columns = args.block_structure if args.strategy == "block" else (1, args.group_size or weight.shape[1])
    if args.strategy == "tensor":
        rows, columns = weight.shape
    blocks = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    outer = generate_gparam(low.amin(), high.amax()) if args.strategy == "tensor_group" else None
    scale, zero = calculate_qparams(low, high, args, global_scale=outer)
    found = {"weight_scale": scale.reshape(low.shape), "weight_zero_point": zero.reshape(low.shape).to(torch.int8)}
    if args.strategy == "tensor":
        found = {name: tensor.reshape(1) for name, tensor in found.items()}
    if outer is not None:
        found["weight_global_scale"] = outer.reshape(1)
    return found


def test_compressed_tensors_chooses_the_same_group() -> None:
    """Names before expressions, these by the alphabet, and both before classes, wherever the groups stand."""
    targets = ["Linear", "re:.*down_proj$", "re:.*layers\\.1\\..*", "model.layers.1.mlp.down_proj"]
    int4 = {"num_bits": 4, "type": "int", "strategy": "group"}
    groups = {
        f"group_{size}": {"targets": [target], "weights": {**int4, "group_size": size}}
        for size, target in enumerate(targets, 1)
    }
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    scheme = announced({"quantization_config": said})
    for layer in (0, 1):
        for part in ("mlp.down_proj", "mlp.up_proj"):
            module = f"model.layers.{layer}.{part}"
            format_ = scheme.of(module)
            assert isinstance(format_, PackedInt)
            theirs = match_targets(module, torch.nn.Linear(1, 1), targets)[0]
            assert format_.group == targets.index(theirs) + 1, module


@pytest.mark.parametrize("name", LAYOUTS)
def test_compressed_tensors_reads_the_same_numbers(name: str) -> None:
    layout, options = LAYOUTS[name]
    torch.manual_seed(0)
    weight = (torch.randn(SHAPE) * torch.exp2(torch.randint(-3, 3, (SHAPE[0], 1)))).to(torch.bfloat16).float()
    stored, expected = theirs(layout, options, weight)
    announced = compressed_tensors(Options(compressed(layout, **options)), {}).of("model.layers.0.mlp.up_proj")
    assert announced is not None
    format_ = as_found(announced, stored)
    parts = {part.role: stored[part.suffix] for part in format_.parts}
    assert {part.suffix for part in format_.parts} == stored.keys(), "every tensor is a part"
    assert format_.problem(parts, SHAPE) is None
    found = format_.unpack(parts, whole(SHAPE), SHAPE)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert (found - weight).abs().max() < 0.6 * weight.abs().max(), "and it is the weight that was stored"
    box = ((5, 41), (13, 70))
    torch.testing.assert_close(part_of(format_, parts, box, SHAPE), found[5:41, 13:70], rtol=0, atol=0)


def as_found(format_: Format, stored: dict[str, Tensor]) -> Format:
    """The spelling that headers show, as an account finds it."""
    tags = {dtype: tag for tag, dtype in STORED_DTYPES.items()}
    infos = {
        name: TensorInfo(f"up_proj.{name}", tags[tensor.dtype], tuple(tensor.shape), "", 0, tensor.nbytes)
        for name, tensor in stored.items()
    }
    main = next(infos[part.suffix] for part in format_.parts[:1])
    found = fitting(format_, main, infos)
    assert isinstance(found, Format), found
    return found


@pytest.mark.parametrize("scale", [torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("block", [(16, 32), (128, 128), (48, 96), (1, 32)], ids=str)
def test_transformers_reads_the_same_numbers_from_fp8(block: tuple[int, int], scale: torch.dtype) -> None:
    torch.manual_seed(1)
    shape = (block[0] * 3, block[1] * 2)
    codes = torch.randn(shape).mul_(50).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2).mul_(0.01) if scale == torch.float32 else torch.randint(110, 130, (3, 2), dtype=scale)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    found = Fp8(block=block).unpack({"codes": codes, "scale": scales}, whole(shape), shape)
    torch.testing.assert_close(found, theirs, rtol=0, atol=0)


def test_transformers_reads_the_same_numbers_from_packed_fp4() -> None:
    """DeepSeek-V4's experts: two codes in an int8, a scale in E8M0 for each 32 inputs."""
    torch.manual_seed(2)
    codes = torch.randint(-128, 128, (24, 32), dtype=torch.int8)
    scales = torch.randint(110, 130, (24, 2), dtype=torch.uint8)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)
    stored = {"codes": codes, "scale": scales.view(torch.float8_e8m0fnu)}
    found = MxFp4(names=("weight", "scale")).unpack(stored, whole((24, 64)), (24, 64))
    torch.testing.assert_close(found, theirs, rtol=0, atol=0)


def test_transformers_reads_the_same_numbers_from_gpt_oss() -> None:
    """[E, F, G, 16] blocks become [E, H, F] there: this engine unpacks [E, F, H] and lets the loader turn it."""
    torch.manual_seed(3)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 10, 2), dtype=torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    found = MxFp4Blocks().unpack({"codes": blocks, "scale": scales}, whole((3, 10, 64)), (3, 10, 64))
    torch.testing.assert_close(found.mT, theirs, rtol=0, atol=0)


def gptq_formula(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, bits: int, offset: int) -> Tensor:
    """AutoGPTQ's: unpack the zeros along columns and the codes along rows, then scale x (code - zero) by group."""
    zeros, codes = stream(qzeros, bits) + offset, stream(qweight.T, bits).T
    return (scales[g_idx].float() * (codes - zeros[g_idx])).T


def stream(words: Tensor, bits: int) -> Tensor:
    """Codes of rows of words, each row as one number of which code i is the digit with the weight 2^(bits x i)."""
    rows = [int.from_bytes(row.numpy().tobytes(), "little") for row in words.contiguous()]
    count = words.shape[1] * 32 // bits
    return torch.tensor([[row >> bits * index & (1 << bits) - 1 for index in range(count)] for row in rows])


@pytest.mark.parametrize(("bits", "offset"), [(4, 1), (8, 1), (2, 0), (3, 1), (3, 0), (5, 1), (6, 0), (7, 1)])
def test_gptq_by_its_own_formula(bits: int, offset: int) -> None:
    """Groups in an order that `desc_act` made, words with the sign bit set."""
    torch.manual_seed(4)
    shape, group = (32, 64), 16
    qweight = torch.randint(-(2**31), 2**31 - 1, (shape[1] * bits // 32, shape[0])).int()
    digits = torch.randint(0, 2**bits - offset, (shape[1] // group, shape[0])).tolist()
    numbers = [sum(digit << bits * index for index, digit in enumerate(row)) for row in digits]
    qzeros = torch.tensor([list(number.to_bytes(4 * bits, "little")) for number in numbers]).to(torch.uint8)
    qzeros = qzeros.view(torch.int32)
    scales = torch.rand(shape[1] // group, shape[0]).half()
    g_idx = torch.randperm(shape[1]).div(group, rounding_mode="floor").int()
    expected = gptq_formula(qweight, qzeros, scales, g_idx, bits, offset)
    stored = {"codes": qweight, "zero": qzeros, "scale": scales, "order": g_idx}
    format_ = Gptq(bits=bits, group=group, zero_offset=offset)
    torch.testing.assert_close(format_.unpack(stored, whole(shape), shape), expected, rtol=0, atol=0)
    box = ((3, 30), (7, 50))
    torch.testing.assert_close(part_of(format_, stored, box, shape), expected[3:30, 7:50], rtol=0, atol=0)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptqmodel_borrows_for_a_zero_point_of_zero(bits: int) -> None:
    """It takes one from every place of a word as one number (`convert_gptq_v2_to_v1_format`); others lose the word."""
    torch.manual_seed(6)
    shape, group, per_word = (32, 64), 64, 32 // bits
    second, first = (
        {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form, "sym": False}
        for form in ("gptq_v2", "gptq")
    )
    words = torch.randint(-(2**31), 2**31 - 1, (1, shape[0] // per_word)).int()
    words &= ~((1 << bits) - 1)  # the first zero point of each is 0
    stored = {
        "codes": torch.randint(-(2**31), 2**31 - 1, (shape[1] // per_word, shape[0])).int(),
        "scale": torch.rand(1, shape[0]).half(),
        "order": torch.zeros(shape[1], dtype=torch.int32),
    }
    borrowed = words - sum(1 << place for place in range(0, 32, bits))
    formats = [scheme_format(raw) for raw in (second, {**first, "meta": {"quantizer": ["gptqmodel:7.7.0"]}}, first)]
    expected, found = (
        format_.unpack({**stored, "zero": zero}, whole(shape), shape)
        for format_, zero in zip(formats, (words, borrowed), strict=False)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    problems = [format_.problem({**stored, "zero": borrowed}, shape) for format_ in formats[1:]]
    assert problems[0] is None
    assert problems[1] is not None, "AutoGPTQ's word, which cannot be told from this one, is lost"


def test_gptqmodel_takes_one_from_each_zero_point_of_three_bits_alone() -> None:
    """`_shift_gptq_qzeros` of its version 7: (zero - 1) & 7, and back; no other tool writes a 7."""
    stored = {"codes": torch.zeros(3, 32, dtype=torch.int32), "scale": torch.ones(1, 32).half()}
    stored["order"] = torch.zeros(32, dtype=torch.int32)
    stored["zero"] = torch.full((1, 3), -1, dtype=torch.int32)  # sevens: zero points of 0
    first = {"quant_method": "gptq", "bits": 3, "group_size": 32, "sym": False}
    known = scheme_format({**first, "meta": {"quantizer": ["gptqmodel:7.7.0"]}})
    assert known.problem(stored, (32, 32)) is None
    assert not known.unpack(stored, whole((32, 32)), (32, 32)).any()
    assert scheme_format(first).problem(stored, (32, 32)) is not None


ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 16, "sym": False}


@pytest.mark.parametrize(
    ("packing", "form"),
    [
        (None, Gptq(group=16, ordered=False)),
        ("auto_round:auto_gptq", Gptq(group=16, ordered=False)),
        ("auto_round", Gptq(group=16, ordered=False, zero_offset=0)),
        ("auto_round:gptqmodel", Gptq(group=16, ordered=False, zero_offset=0)),
        ("auto_round:auto_awq", Awq(group=16)),
    ],
)
def test_words_of_auto_round(packing: str | None, form: Format) -> None:
    """As its QuantLinear of each name packs them; transformers' AutoRoundConfig says what none means."""
    said = {} if packing is None else {"packing_format": packing}
    found = announced({"quantization_config": {**ROUND, **said}})
    assert found.unread == ()
    assert found.of("model.layers.3.mlp.up_proj") == form


def test_settings_of_some_modules_of_auto_round() -> None:
    """Names come before expressions, which are searched for; sixteen bits are none; what no block holds stays plain."""
    changes = {
        ".*layers\\.1\\..*": {"bits": 8},
        "model.layers.1.mlp.down_proj": {"bits": 3, "sym": True},
        "layers\\.(1|2)\\.mlp\\.(up|down)_proj": {"bits": 16},
        "lm_head": {"bits": 4, "group_size": -1},
    }
    found = announced(
        {"quantization_config": {**ROUND, "extra_config": changes, "block_name_to_quantize": "model.layers"}}
    )
    usual = Gptq(group=16, ordered=False)
    wanted = {
        "model.layers.0.mlp.up_proj": usual,
        "model.layers.1.mlp.up_proj": msgspec.structs.replace(usual, bits=8),
        "model.layers.1.mlp.down_proj": msgspec.structs.replace(usual, bits=3, symmetric=True),
        "model.layers.2.mlp.down_proj": None,
        "model.layers.12.mlp.down_proj": usual,
        "lm_head": msgspec.structs.replace(usual, group=0),
        "model.vision.blocks.0.mlp.up": None,
    }
    assert {name: found.of(name) for name in wanted} == wanted
    assert found.head


@pytest.mark.parametrize(
    ("said", "code", "word"),
    [
        ({"packing_format": "auto_round:mlx"}, "unsupported-format", "Apple's MLX"),
        ({"bits": 9}, "unsupported-format", "bits = 9"),
        ({"act_bits": 8}, "unsupported-format", "act_bits"),
        ({"data_type": "mx_fp"}, "unsupported-format", "data_type"),
        ({"rotation_config": {"a": 1}}, "unsupported-format", "rotation_config"),
        ({"block_name_to_quantize": [3]}, "config-invalid", "block_name_to_quantize"),
        ({"packing_format": "auto_round:awq", "extra_config": {"a.b": {"bits": 8}}}, "unsupported-format", "bits = 8"),
        ({"extra_config": {"a.b": {"data_type": "nv_fp"}}}, "unsupported-format", "extra_config.a.b.data_type"),
        ({"quant_method": "gptq", "checkpoint_format": "gptq_p"}, "unsupported-format", "gptq_p"),
        (
            {"quant_method": "gptq", "bits": 3, "meta": {"quantizer": ["gptqmodel:5.6"]}},
            "unsupported-format",
            "version 7",
        ),
    ],
)
def test_what_auto_round_and_gptqmodel_write_otherwise_is_refused_by_name(
    said: dict[str, Any], code: str, word: str
) -> None:
    with pytest.raises(Refused) as caught:
        announced({"quantization_config": {**ROUND, **said}})
    (finding,) = caught.value.findings
    assert finding.code == code
    assert word in f"{finding.message} {finding.expected} {finding.found}"


def scheme_format(quantization: dict[str, Any]) -> Format:
    found = announced({"quantization_config": quantization}).of("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


def test_gptqmodels_scale_inv_is_what_its_name_says() -> None:
    """`quantize_fp8_weight` multiplies by it, row by row, and reads code / scale, unlike DeepSeek."""
    torch.manual_seed(7)
    weight = torch.randn(16, 32)
    inverse = 448 / weight.abs().amax(1)
    codes = (weight * inverse.unsqueeze(1)).to(torch.float8_e4m3fn)
    stored = {"weight": codes, "weight_scale_inv": inverse}
    quantization = {"quant_method": "fp8", "weight_scale_semantics": "inverse", "format": "float8_e4m3fn"}
    assert announced({"quantization_config": quantization}).unread == ()
    format_ = as_found(scheme_format(quantization), stored)
    found = format_.unpack({"codes": codes, "scale": inverse}, whole((16, 32)), (16, 32))
    torch.testing.assert_close(found, codes.float() / inverse.unsqueeze(1), rtol=0, atol=0)
    assert format_.packing("F8_E4M3") is None, "operators multiply by scales"


def test_awq_by_its_own_formula() -> None:
    """AutoAWQ's: eight codes a word along the outputs, unpacked in order, then put right by its reverse order."""
    torch.manual_seed(5)
    shape, group = (32, 64), 16
    qweight = torch.randint(-(2**31), 2**31 - 1, (shape[1], shape[0] // 8)).int()
    qzeros = torch.randint(-(2**31), 2**31 - 1, (shape[1] // group, shape[0] // 8)).int()
    scales = torch.rand(shape[1] // group, shape[0]).half()
    shifts, reverse = torch.arange(0, 32, 4), [0, 4, 1, 5, 2, 6, 3, 7]
    order = torch.arange(shape[0]).view(-1, 8)[:, reverse].reshape(-1)
    codes = (qweight[:, :, None] >> shifts).reshape(shape[1], -1)[:, order] & 15
    zeros = (qzeros[:, :, None] >> shifts).reshape(shape[1] // group, -1)[:, order] & 15
    expected = ((codes - zeros.repeat_interleave(group, 0)) * scales.float().repeat_interleave(group, 0)).T
    stored = {"codes": qweight, "zero": qzeros, "scale": scales}
    torch.testing.assert_close(Awq(group=group).unpack(stored, whole(shape), shape), expected, rtol=0, atol=0)
