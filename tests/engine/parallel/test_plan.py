"""Plans: published totals, bytes that are those of the ranks, the fewest devices, and what is said of misfits."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import ModelSpec
from firstlight.engine.parallel.constraints import violations
from firstlight.engine.parallel.hardware import Cluster, Device, parse_cluster
from firstlight.engine.parallel.layouts import Layouts
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces, stages
from firstlight.engine.parallel.plan import Plan, active_parameters, make_plan, totals
from firstlight.engine.weights.formats.fp8 import Fp8
from firstlight.engine.weights.formats.plain import Plain
from firstlight.engine.weights.formats.registry import Quantized, StoredFormat, stored_format
from firstlight.engine.weights.formats.scheme import Group, Modules, Scheme
from tests.checkpoints import TINY
from tests.engine.weights.files import LLAMA

SUPPORTED = (
    "deepseek-v3",
    "kimi-k2",
    "llama-3.1-405b",
    "mixtral-8x22b",
    "qwen3-235b-a22b",
    "qwen3-235b-a22b-fp8",
)


QWEN_FP8_NARROW = 94 * (4096 * 128 * (64 + 4 + 4 + 64) + 128 * 3 * 4096 * 1536)
QWEN_FP8_BYTES = QWEN_FP8_NARROW * (1 + 4 / 128**2) + 2 * (235_093_634_560 - QWEN_FP8_NARROW)


def facts(name: str) -> tuple[ModelSpec, StoredFormat]:
    raw = json.loads(resources.files("firstlight.data").joinpath("models", f"{name}.json").read_bytes())
    spec, matcher = FAMILIES.describe(raw)
    return spec, stored_format(raw, spec.dtype, matcher.rules)


def fp8_blocks(rows: int, columns: int, kept: tuple[str, ...] = ()) -> Quantized:
    """Linear modules in FP8 blocks, but for those kept; named as llama's are."""
    scheme = Scheme("fp8", (Group(Fp8(block=(rows, columns))),), Modules(kept))
    return Quantized("BF16", scheme, FAMILIES.describe(LLAMA)[1].rules)


def tiny(name: str, **more: Any) -> ModelSpec:
    return FAMILIES.describe({**TINY[name].config, **more})[0]


def cluster(count: int, memory_bytes: int, per_node: int = 8) -> Cluster:
    nodes, rest = divmod(count, per_node)
    if rest:
        nodes, per_node = 1, count
    return Cluster(
        nodes=nodes, per_node=per_node, device=Device(name="X", memory_bytes=memory_bytes, per_node=per_node)
    )


# Totals of releases


@pytest.mark.parametrize(
    ("name", "parameters", "active", "kv_bytes", "checkpoint_bytes"),
    [
        # Llama 3.1 405B: arXiv 2407.21783; two bytes a parameter; K and V of 8 heads x 128 in 126 layers.
        ("llama-3.1-405b", 405_853_388_800, 405_853_388_800 - 128_256 * 16_384, 2 * 8 * 128 * 126 * 2, 811_706_777_600),
        # Qwen3-235B-A22B: arXiv 2505.09388, 22B active; 4 heads x 128 in 94 layers.
        ("qwen3-235b-a22b", 235_093_634_560, 21_568_433_664, 2 * 4 * 128 * 94 * 2, 470_187_269_120),
        # ... in FP8: one byte and a scale of four a 128 x 128 block, embedding, head, norms and routers in bf16.
        ("qwen3-235b-a22b-fp8", 235_093_634_560, 21_568_433_664, 2 * 4 * 128 * 94 * 2, QWEN_FP8_BYTES),
        # DeepSeek-V3: arXiv 2412.19437, 671B and 37B active; (512 + 64) elements in 61 layers.
        ("deepseek-v3", 671_026_419_200, 36_625_618_432, 576 * 61 * 2, 688_574_839_360),
        ("mixtral-8x22b", 140_620_634_112, 38_955_423_744, 2 * 8 * 128 * 56 * 2, 281_241_268_224),
        ("kimi-k2", 1_026_408_232_448, 31_687_095_808, 576 * 61 * 2, None),
    ],
)
def test_totals_of_releases(
    name: str, parameters: int, active: int, kv_bytes: int, checkpoint_bytes: int | None
) -> None:
    spec, stored = facts(name)
    found = totals(spec, stored)
    assert found.parameters == parameters
    assert found.active_parameters == active
    assert found.kv_bytes_per_token == kv_bytes
    assert found.state_bytes_per_sequence == 0
    assert sum(found.by_role.values()) == parameters
    if checkpoint_bytes is not None:
        assert found.checkpoint_bytes == checkpoint_bytes


def test_the_files_of_deepseek_v3_are_payload_and_headers() -> None:
    """688,586,727,753 bytes in 163 files: what the payload leaves is 129 bytes of header for each tensor."""
    spec, stored = facts("deepseek-v3")
    assert isinstance(stored, Quantized)
    tensors = 0
    for param in (*spec.parameters(), *spec.mtp_parameters()):
        scaled = stored.nbytes(param, param.shape) not in (2 * param.elements, 4 * param.elements)
        tensors += 2 if scaled else 1
    assert tensors == 91_991
    headers = 688_586_727_753 - totals(spec, stored).checkpoint_bytes
    assert 125 < headers / tensors < 135
    assert totals(spec, stored).mtp_parameters == 13_463_426_304


def test_releases_of_packed_experts() -> None:
    """gpt-oss: the `total_size` of its index. Kimi K2.5: codes of half a byte, bf16 scales of 32, and its shape."""
    assert totals(*facts("gpt-oss-120b")).checkpoint_bytes == 65_248_815_744
    spec, stored = facts("kimi-k2.5")
    experts = [param for param in spec.parameters() if param.expert is not None]
    one = 7168 * 2048 // 2 + 7168 * 2048 // 32 * 2 + 2 * 4
    assert len(experts) == 60 * 384 * 3
    assert {stored.nbytes(param, param.shape) for param in experts[:6]} == {one}
    rest = [param for param in spec.parameters() if param.expert is None and len(param.shape) == 2]
    assert all(stored.nbytes(param, param.shape) == 2 * param.elements for param in rest if param.dtype is None)


@pytest.mark.parametrize("name", TINY)
def test_totals_are_the_sums_over_parameters(name: str) -> None:
    """The census that totals are made from against a plain loop."""
    spec = tiny(name)
    params = [param for param in spec.parameters() if not (spec.tied_head and param.name == "head.weight")]
    found = totals(spec, Plain("BF16"))
    assert found.parameters == sum(param.elements for param in params)
    assert found.checkpoint_bytes == sum(
        param.elements * (2 if param.widened else {"F32": 4, "I64": 8}.get(param.dtype or "", 2)) for param in params
    )
    active = 0.0
    for param in spec.parameters():
        if param.role in ("vision", "projector", "embedding"):
            continue
        ffn: Any = spec.layers[param.layer].experts if param.expert is not None else None
        active += param.elements * (ffn.router.top_k / ffn.num_experts if ffn else 1.0)
    assert active_parameters(spec) == round(active)


def test_a_window_is_state_and_no_cache_that_grows() -> None:
    found = totals(tiny("mistral"), Plain("BF16"))
    assert found.kv_bytes_per_token == 0
    assert found.state_bytes_per_sequence == 3 * 2 * 2 * 8 * 7 * 2, "3 layers, K and V, 2 heads of 8, 7 tokens, 2 bytes"
    half = totals(tiny("gemma2"), Plain("BF16"), cache_dtype="F8_E4M3")
    assert half.kv_bytes_per_token == 1 * 2 * 2 * 12
    assert half.state_bytes_per_sequence == 2 * 2 * 2 * 12 * 8


# Bytes of ranks


@pytest.mark.parametrize("name", [name for name in TINY if "rope" not in name])
def test_a_plan_holds_what_the_ranks_will_hold(name: str) -> None:
    """Planned bytes by role against the storages that loading reserves, for every mesh that is possible."""
    spec = tiny(name)
    meshes = [Mesh(tp=tp, pp=pp, ep=ep) for tp in (1, 2, 3, 4) for pp in (1, 2, 3) for ep in (1, 2, 4, 8)]
    meshes += [Mesh(tp=4, pp=pp, attention="whole") for pp in (1, 2)]
    tried = 0
    for mesh in meshes:
        if mesh.pp > spec.num_layers or violations(spec, mesh):
            continue
        tried += 1
        found = make_plan(spec, Plain("BF16"), cluster(mesh.world_size, 1 << 30), mesh, context=10, concurrency=3)
        for rank in found.ranks:
            held = rank_pieces(spec, mesh, rank.rank, "BF16")
            assert rank.weights == held.bytes_by_role(), mesh.describe()
            assert rank.weight_bytes == held.nbytes
            assert rank.layers == held.layers
            assert rank.at == held.at
        assert found.weight_bytes_per_device == max(rank.weight_bytes for rank in found.ranks)
    assert tried >= 4


def test_cache_bytes_by_hand() -> None:
    """Two K/V heads of 8 in three layers: cut for tp 2, held twice for tp 4, shared out by sequences over dp."""
    spec, kv = tiny("llama"), 2 * 8 * 2  # K and V of one head, bf16
    plain = Plain("BF16")
    one = make_plan(spec, plain, cluster(1, 1 << 30), Mesh(), context=100, concurrency=5).ranks[0]
    assert (one.cache, one.state) == (3 * 2 * kv * 100 * 5, 0)
    for tp, heads in ((2, 1), (4, 1)):
        found = make_plan(spec, plain, cluster(tp, 1 << 30), Mesh(tp=tp), context=100, concurrency=5)
        assert {rank.cache for rank in found.ranks} == {3 * heads * kv * 100 * 5}
    whole = make_plan(spec, plain, cluster(4, 1 << 30), Mesh(tp=4, attention="whole"), context=100, concurrency=5)
    assert {rank.cache for rank in whole.ranks} == {one.cache}
    pp = make_plan(spec, plain, cluster(3, 1 << 30), Mesh(pp=3), context=100, concurrency=5)
    assert [rank.cache for rank in pp.ranks] == [2 * kv * 100 * 5] * 3
    dp = make_plan(spec, plain, cluster(2, 1 << 30), Mesh(dp=2), context=100, concurrency=5)
    assert [rank.cache for rank in dp.ranks] == [3 * 2 * kv * 100 * 3] * 2, "the fuller replica has three of five"
    window = make_plan(tiny("mistral"), plain, cluster(1, 1 << 30), Mesh(), context=100)
    assert (window.ranks[0].cache, window.ranks[0].state) == (0, 3 * 2 * kv * 7)
    short = make_plan(tiny("mistral"), plain, cluster(1, 1 << 30), Mesh(), context=4)
    assert short.ranks[0].state == 3 * 2 * kv * 4
    full = make_plan(tiny("mistral"), plain, cluster(1, 1 << 30), Mesh(), context=100, full_window=True)
    assert (full.ranks[0].cache, full.ranks[0].state) == (3 * 2 * kv * 100, 0)


@pytest.mark.parametrize("name", ["llama-tied", "qwen3_moe", "deepseek_v3", "gemma2", "llava-siglip"])
def test_the_fullest_rank_without_looking_at_every_rank(name: str) -> None:
    """The search asks for the largest only; it must be the largest of all ranks."""
    spec = tiny(name)
    for stored in (Plain("BF16"), fp8_blocks(8, 16)):
        layouts = Layouts(spec, stored, cluster(8, 1 << 30), 1 << 29, 50, 2, False)
        for mesh in (Mesh(), Mesh(tp=2), Mesh(tp=4), Mesh(pp=2), Mesh(tp=2, pp=2), Mesh(pp=3)):
            if violations(spec, mesh) or mesh.pp > spec.num_layers:
                continue
            ranks = layouts.ranks(mesh, 4)
            assert layouts.largest((mesh.tp, mesh.ep, mesh.pp), 4) == max(rank.total for rank in ranks)


# Quantization blocks


def fp8(intermediate: int, hidden: int = 256, **more: Any) -> ModelSpec:
    sizes = {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }
    return FAMILIES.describe({**LLAMA, **sizes, **more})[0]


def test_a_partial_last_block_has_a_scale() -> None:
    """[192, 256] in blocks of 128 x 128 has 2 x 2 scales."""
    stored = fp8_blocks(128, 128)
    (gate,) = [param for param in fp8(192).parameters() if param.name == "layers.0.ffn.gate.weight"]
    assert gate.shape == (192, 256)
    assert stored.nbytes(gate, gate.shape) == 192 * 256 + 4 * 4


def test_a_block_that_is_cut_keeps_its_scale_on_both_ranks_and_the_plan_says_so() -> None:
    """384 channels over 4 ranks are 96 each: rows 96 to 191 touch two blocks of 128."""
    spec, stored = fp8(384), fp8_blocks(128, 128)
    found = make_plan(spec, stored, cluster(4, 1 << 30), Mesh(tp=4))
    (finding,) = [finding for finding in found.findings if finding.code == "cut-block"]
    assert finding.severity == "note"
    assert "layers.*.ffn.gate.weight" in finding.message
    assert "layers.*.ffn.down.weight" in finding.message
    assert "--tp 1" in str(finding.next)
    blocks = [1, 2, 2, 1]  # rows 0-95 | 96-191 | 192-287 | 288-383
    for rank, touched in zip(found.ranks, blocks, strict=True):
        scales = 2 * 3 * touched * 2 * 4  # layers, matrices, blocks x (256 / 128), bytes
        assert rank.weights["mlp"] == 2 * 3 * 96 * 256 + scales
    whole = make_plan(fp8(384 * 4), stored, cluster(4, 1 << 30), Mesh(tp=4))
    assert not [f for f in whole.findings if f.code == "cut-block" and "ffn" in f.message]


def test_inputs_whose_groups_are_listed_keep_all_scales_and_the_plan_says_so() -> None:
    """64 inputs of an ordered weight in 4 groups: each of two ranks holds 32 inputs and the scales of all groups."""
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}}
    spec, stored = fp8(64, 64), stored_format(config, "BF16")
    found = make_plan(spec, stored, cluster(2, 1 << 30), Mesh(tp=2))
    (finding,) = [finding for finding in found.findings if finding.code == "cut-block"]
    assert "keeps all scales" in finding.message
    assert "layers.*.ffn.down.weight" in finding.message
    assert "layers.*.ffn.gate.weight" not in finding.message, "its rows are divided"
    (down,) = [param for param in spec.parameters() if param.name == "layers.0.ffn.down.weight"]
    whole, half = stored.nbytes(down, (64, 64)), stored.nbytes(down, (64, 32), (0, 32))
    assert (whole, half) == (64 * 32 + 4 * 32 + 4 * 128 + 64 * 4, 64 * 16 + 4 * 32 + 4 * 128 + 32 * 4)


def test_the_largest_tp_between_blocks_is_named() -> None:
    spec, stored = facts("qwen3-235b-a22b-fp8")
    found = make_plan(spec, stored, parse_cluster("8xH200"), Mesh(tp=8))
    (finding,) = found.findings
    assert "layers.*.ffn.experts.*.gate.weight" in finding.message, "1536 / 8 = 192 is one block and a half"
    assert "--tp 4" in str(finding.next)
    assert make_plan(spec, stored, parse_cluster("8xH200"), Mesh(tp=4)).findings == ()


@pytest.mark.parametrize(
    ("kept", "whole"),
    [
        ((), 0),
        (("model.layers.1.mlp.up_proj", "lm_head"), 1),
        (("model.layers.1.mlp",), 3),
        (("model.layers.1.mlp.gate", "model.layers.1.input_layernorm"), 0),  # a router is no gate of an MLP
        (("model.layers.11.mlp.up_proj",), 0),
    ],
)
def test_modules_that_stay_unquantized_are_counted_so(kept: tuple[str, ...], whole: int) -> None:
    stored, spec = fp8_blocks(128, 128, kept), fp8(256)
    found = make_plan(spec, stored, cluster(2, 1 << 30), Mesh(pp=2))
    first, second = (rank.weights["mlp"] for rank in found.ranks)
    assert first == 3 * (256 * 256 + 16)
    assert second == (3 - whole) * (256 * 256 + 16) + whole * 2 * 256 * 256
    assert totals(spec, stored).checkpoint_bytes == sum(stored.nbytes(p, p.shape) for p in spec.parameters())


# The fewest devices


def brute_force(spec: ModelSpec, memory_bytes: int, context: int, most: int) -> int | None:
    """All meshes of up to `most` ranks, each rank sized by the pieces it would load, none of the planner's code."""
    best = None
    for tp in range(1, most + 1):
        for ep in range(1, most // tp + 1):
            for pp in range(1, min(spec.num_layers, most // (tp * ep)) + 1):
                mesh = Mesh(tp=tp, ep=ep, pp=pp)
                if violations(spec, mesh) or (best is not None and mesh.world_size >= best):
                    continue
                if all(
                    rank_pieces(spec, mesh, rank, "BF16").nbytes + cached(spec, mesh, rank, context) <= memory_bytes
                    for rank in range(mesh.world_size)
                ):
                    best = mesh.world_size
    return best


def cached(spec: ModelSpec, mesh: Mesh, rank: int, context: int) -> int:
    start, stop = stages(spec, mesh.pp)[mesh.coordinates(rank).pp]
    total = 0
    for layer in spec.layers[start:stop]:
        cache = layer.mixer.cache()
        tokens = min(context, cache.window or context)
        for tensor in cache.tensors:
            heads = -(-tensor.heads // mesh.tp) if tensor.divided else tensor.heads
            total += 2 * tokens * heads * tensor.dim
    return total


@pytest.mark.parametrize(
    "name", ["llama", "llama-tied", "qwen3_moe", "mixtral", "deepseek_v3", "mistral", "llava-clip"]
)
@pytest.mark.parametrize("context", [1, 200])
def test_the_fewest_devices_are_the_fewest(name: str, context: int) -> None:
    spec = tiny(name)
    alone = rank_pieces(spec, Mesh(), 0, "BF16").nbytes + cached(spec, Mesh(), 0, context)
    for share in (1.0, 0.7, 0.4, 0.2):
        memory = int(alone * share)
        found = make_plan(spec, Plain("BF16"), cluster(8, memory), headroom=0.0, context=context)
        expected = brute_force(spec, memory, context, 12)
        if expected is not None:
            assert found.devices_needed == expected, f"{share} of one device's need"
        else:
            assert found.devices_needed is None or found.devices_needed > 12


def test_headroom_and_context_count() -> None:
    spec, stored = facts("llama-3.1-405b")
    on = parse_cluster("8xH200")
    assert make_plan(spec, stored, on).devices_needed == 7
    assert make_plan(spec, stored, on, headroom=0.0).devices_needed == 6
    assert make_plan(spec, stored, on, context=131_072).devices_needed == 7
    assert make_plan(spec, stored, on, context=131_072, concurrency=8).devices_needed == 7, "one sequence"
    eight = make_plan(spec, stored, on, context=131_072, concurrency=2)
    assert eight.fits
    assert not make_plan(spec, stored, on, context=131_072, concurrency=8).fits


# Verdicts


def test_it_fits() -> None:
    spec, stored = facts("deepseek-v3")
    found = make_plan(spec, stored, parse_cluster("8xH200"))
    assert found.fits
    assert found.findings == ()
    assert found.nearest is None
    assert found.mesh == Mesh(tp=8)
    assert found.binding == "weights-memory"
    assert "usable" in found.binding_reason
    assert found.devices_needed == 6


def test_it_does_not_fit_and_the_nearest_is_named() -> None:
    spec, stored = facts("kimi-k2")
    found = make_plan(spec, stored, parse_cluster("8xH200"))
    assert not found.fits
    (finding,) = found.findings
    assert finding.code == "does-not-fit"
    assert found.nearest is not None
    assert found.nearest.world_size == found.devices_needed == 9
    assert "nearest that fits: pp 9 on 9 x H200-SXM" in str(finding.next)
    needs = "rank 0 needs 121.10 GiB (120.84 weights, 0.27 cache) of 119.85 GiB usable, 101 %"
    assert finding.message.startswith(needs)
    assert finding.message.endswith("on tp 8 of 8xH200-SXM")
    assert make_plan(spec, stored, parse_cluster("9xH200"), found.nearest).fits


def test_a_poor_wish_on_a_cluster_that_would_do() -> None:
    spec, stored = facts("llama-3.1-405b")
    found = make_plan(spec, stored, parse_cluster("8xH200"), Mesh(tp=4))
    assert not found.fits
    assert found.nearest is not None
    assert found.nearest.world_size <= 8
    assert make_plan(spec, stored, parse_cluster("8xH200"), found.nearest).fits


def test_cache_binds_when_it_is_larger() -> None:
    found = make_plan(tiny("llama"), Plain("BF16"), cluster(1, 1 << 20), Mesh(), context=64, concurrency=100)
    assert found.binding == "cache-memory"
    assert not found.fits


def test_no_layout_at_all() -> None:
    found = make_plan(tiny("llama"), Plain("BF16"), cluster(2, 100))
    assert not found.fits
    assert found.nearest is None
    assert found.devices_needed is None
    assert found.findings[0].next == "no layout of this device fits"
    assert found.mesh.world_size == 2


def test_more_ranks_than_devices_is_an_impossible_wish() -> None:
    with pytest.raises(Refused, match="has 16 ranks, the cluster 8xX 8 devices"):
        make_plan(tiny("llama"), Plain("BF16"), cluster(8, 1 << 30), Mesh(dp=16))
    with pytest.raises(Refused, match="do not divide by tp 3"):
        make_plan(tiny("llama"), Plain("BF16"), cluster(8, 1 << 30), Mesh(tp=3))


@pytest.mark.parametrize(
    "wish",
    [
        {"context": 0},
        {"context": -5},
        {"concurrency": 0},
        {"headroom": 1.0},
        {"headroom": -0.1},
        {"headroom": float("nan")},
        {"cache_dtype": "F7"},
        {"cache_dtype": "F4"},
        {"objective": "beauty"},
    ],
)
def test_impossible_wishes_are_refused(wish: dict[str, Any]) -> None:
    with pytest.raises(Refused) as caught:
        make_plan(tiny("llama"), Plain("BF16"), cluster(1, 1 << 30), **wish)
    (finding,) = caught.value.findings
    assert finding.code == "usage"
    assert str(next(iter(wish.values()))) in finding.message
    assert finding.expected


def test_more_context_than_positions_is_said() -> None:
    found = make_plan(tiny("llama"), Plain("BF16"), cluster(1, 1 << 30), context=100)
    (finding,) = found.findings
    assert (finding.code, finding.severity) == ("context-too-long", "warning")
    assert found.fits


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="'hqq' is not read here") as caught:
        stored_format({"quantization_config": {"quant_method": "hqq", "nbits": 4}}, "BF16")
    assert caught.value.findings[0].code == "unsupported-format"


# Objectives


def test_objectives() -> None:
    """A model of which two devices are needed, on eight."""
    spec, plain = tiny("llama"), Plain("BF16")
    memory = int(rank_pieces(spec, Mesh(), 0, "BF16").nbytes * 0.75)
    on = cluster(8, memory)
    options = {"headroom": 0.0, "context": 16}

    def plan(objective: Any, concurrency: int = 1) -> Plan:
        return make_plan(spec, plain, on, objective=objective, concurrency=concurrency, **options)  # type: ignore[arg-type]

    assert plan("devices").mesh.world_size == 2
    assert plan("latency").mesh == Mesh(tp=4, pp=2)
    assert plan("throughput").mesh.dp == 4
    assert plan("throughput").mesh.world_size == 8
    for objective in ("devices", "latency", "throughput"):
        assert plan(objective).fits
    many = plan("devices", concurrency=200)
    assert many.mesh.world_size > 2


def test_throughput_leaves_no_device_idle() -> None:
    """Three devices of eight hold a replica: two replicas of four beat two of three with two devices idle."""
    spec, plain = tiny("llama"), Plain("BF16")
    memory = int(rank_pieces(spec, Mesh(), 0, "BF16").nbytes * 0.45)
    plan = make_plan(spec, plain, cluster(8, memory), objective="throughput", headroom=0.0, context=16)
    assert plan.fits
    assert plan.mesh.world_size == 8


def test_wide_tp_stays_in_a_node() -> None:
    spec = FAMILIES.describe({**LLAMA, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 64})[0]
    on = Cluster(nodes=2, per_node=4, device=Device(name="X", memory_bytes=1 << 30))
    assert make_plan(spec, Plain("BF16"), on).mesh == Mesh(tp=4, pp=2)


# Speed


def test_every_release_is_planned_in_no_time() -> None:
    for name in SUPPORTED:
        spec, stored = facts(name)
        plan = make_plan(spec, stored, parse_cluster("64x8xH200"), objective="throughput", concurrency=64)
        assert plan.mesh.world_size <= 512
