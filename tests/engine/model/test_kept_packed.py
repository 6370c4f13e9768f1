"""Weights that stay packed: what is kept, what it takes, and that products are those of what is unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.layers.access import packed_matrix
from firstlight.engine.parallel.kept import ROLES, SCALE, UNWANTED, Keep, Room, Share, Wish, settled, usually, way_of
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces
from firstlight.engine.serving.options import EngineOptions
from firstlight.engine.serving.runtime import Engine
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.formats.grid import Packing
from firstlight.engine.weights.formats.packed_int import PackedInt
from firstlight.engine.weights.ledger import Ledger, account
from firstlight.engine.weights.loader import load as load_rank
from firstlight.engine.weights.loading import placing
from firstlight.kernels.packed import codes, reference
from firstlight.kernels.packed.kinds import KINDS
from firstlight.workbench.load import load
from firstlight.workbench.verify import verify
from tests.checkpoints import inputs
from tests.engine.direct import Direct
from tests.engine.weights.quantized import CONFIGS, compressed, quantize
from tests.engine.weights.test_formats_load import written
from tests.workbench.test_verify_formats import made

Get = Callable[[str], Path]
EVERY = ROLES
FP8 = {"quant_method": "fp8", "weight_block_size": [8, 16]}
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16)
FORMS: Mapping[str, Mapping[str, Any]] = {
    "fp8": FP8,
    "int4": INT4,
    "int4-rows": compressed("pack-quantized", num_bits=4, type="int", strategy="channel"),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "fp8-rows": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "mxfp8": compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group", group_size=32),
    "fp8-tensor": {"quant_method": "fp8"},
    "nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "nvfp4-modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.mlp.gate"]},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
}
GPT_OSS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3_moe", "int4"), ("qwen3_moe", "fp8"), ("qwen3_moe", "int8"), ("deepseek_v3", "fp8"), ("llama", "int4-rows"),
     ("llama", "fp8-rows"), ("llama", "mxfp8"), ("llama", "fp8-tensor"), ("llama", "awq"), ("llama", "gptq")],
)  # fmt: skip
def test_products_are_those_of_the_unpacked_weights(name: str, form: str, checkpoint: Get, tmp_path: Path) -> None:
    quantize(checkpoint(name), FORMS[form], tmp_path / "packed", tmp_path / "plain")
    given = inputs(name)
    kept, unpacked = Direct(tmp_path / "packed", keep=EVERY), Direct(tmp_path / "packed", keep=())
    packings = kept.weights.pieces.packings
    assert len(packings) >= (4 if name == "deepseek_v3" else 6), sorted(packings)
    assert not any("kv_b" in home or "router" in home for home in packings), "read by more than products"
    assert not unpacked.weights.pieces.packings
    assert kept.weights.nbytes == kept.weights.pieces.nbytes < unpacked.weights.nbytes
    np.testing.assert_allclose(kept.run(given)["logits"], unpacked.run(given)["logits"], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "form", "mesh"),
    [("qwen3_moe", "fp8", Mesh(tp=2)), ("qwen3_moe", "int4", Mesh(tp=2, ep=2)), ("qwen3_moe", "nvfp4", Mesh(ep=2)),
     ("llama", "gptq", Mesh(tp=2))],
    ids=str,
)  # fmt: skip
def test_verified_with_everything_packed(name: str, form: str, mesh: Mesh, checkpoint: Get, tmp_path: Path) -> None:
    home, golden = made(name, FORMS[form], checkpoint, tmp_path)
    report = verify(EngineOptions(checkpoint=str(home), mesh=mesh, threads=1, packed="always"), golden)
    assert report.status == "passed", [one for one in report.checks if one.status == "failed"]


def test_what_stays_packed_is_said_and_counted(checkpoint: Get, tmp_path: Path) -> None:
    form = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
    quantize(checkpoint("qwen3_moe"), form, tmp_path / "packed", tmp_path / "plain")
    found = {wish: load(tmp_path / "packed", packed=wish, limit=False) for wish in ("auto", "always", "never")}  # type: ignore[arg-type]
    for report in found.values():
        assert report.status == "passed"
        assert all(row["planned_bytes"] == row["resident_bytes"] for row in report.tables["memory"])
    sizes = {wish: report.metrics["largest_rank_bytes"].value for wish, report in found.items()}
    assert sizes["always"] < sizes["auto"] < sizes["never"]
    assert {row["role"] for row in found["auto"].tables["packed"]} == {"expert"}
    assert "attention" in {row["role"] for row in found["always"].tables["packed"]}
    assert found["never"].metrics["packed_bytes"].value == 0
    assert "as asked for" in found["never"].metrics["packed_bytes"].detail
    for row in found["always"].tables["packed"]:
        assert row["form"] == "int4, groups of 8"
        elements = row["unpacked_bytes"] // 4  # the toy runs in float32
        least = elements // 2 + elements // 8 * 2
        assert least <= row["resident_bytes"] < 1.25 * least, "a last word and a last group may be part empty"


@pytest.mark.parametrize(("tp", "block"), [(1, 8), (2, 8), (4, 4), (8, 2)])
def test_a_share_that_cuts_a_block_has_smaller_blocks(tp: int, block: int, checkpoint: Get, tmp_path: Path) -> None:
    """48 columns of the way down, eight a word and a group: quarters of them are a group and a half."""
    form = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
    quantize(checkpoint("llama"), form, tmp_path / "packed", tmp_path / "plain")
    opened = Checkpoint.open(tmp_path / "packed")
    spec, matcher = FAMILIES.describe(opened.config)
    assert opened.config["intermediate_size"] == 48
    ledger = account(opened, spec, matcher)
    held = rank_pieces(spec, Mesh(tp=tp), 0, "F32", ledger, keep_packed=("mlp",))
    name, shapes = "layers.0.ffn.down.weight", {storage.name: storage.shape for storage in held.storages}
    assert held.packings[name].block == (1, block)
    assert shapes[name] == (shapes[name][0], 24 // tp)
    assert shapes[name + SCALE] == (shapes[name][0], 48 // tp // block)


@pytest.mark.parametrize(("columns", "words"), [((2, 4, 1), "more memory than numbers"), ((7, 14, 1), "inside a byte")])
def test_a_share_that_cuts_too_finely_is_unpacked_and_says_so(columns: tuple[int, int, int], words: str) -> None:
    """Float32 scales of two columns each; and half a byte."""
    share = Share(PackedInt(bits=4, group=32), ("I32", "F32", "I32"), (0, 8, 1), columns, (8, 14))
    assert words in str(way_of([(share,)]))


def every_home_is(home: Path, ledger: Ledger, mesh: Mesh) -> list[Packing]:
    """How the weights of the first and the last rank stay packed, each of the very numbers that it is unpacked."""
    opened, found = Checkpoint.open(home), []
    spec, _ = FAMILIES.describe(opened.config)
    for rank in sorted({0, mesh.world_size - 1}):
        kept, plain = (
            load_rank(opened, rank_pieces(spec, mesh, rank, "F32", ledger, keep_packed=roles)) for roles in (EVERY, ())
        )
        assert kept.nbytes == kept.pieces.nbytes
        assert kept.bytes_read >= kept.bytes_needed
        for name, packing in kept.pieces.packings.items():
            matrix, wanted = packed_matrix(kept.storages, name, packing), plain.storages[name]
            assert torch.equal(reference.unpack(matrix), wanted), (name, mesh)
            each = [matrix] if wanted.dim() == 2 else [matrix.of_expert(one) for one in range(wanted.shape[0])]
            assert torch.equal(
                torch.stack([codes.unpack(one) for one in each]), wanted.view(len(each), *wanted.shape[-2:])
            )
            found.append(packing)
    return found


@pytest.mark.parametrize("name", [*CONFIGS, "packed-int2", "gptq-int2"])
def test_every_format_is_the_same_numbers_packed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one rank all that products read, and where shares cut blocks, words and groups; in little staging memory."""
    more = {
        "packed-int2": compressed(
            "pack-quantized", num_bits=2, type="int", strategy="group", group_size=16, symmetric=False
        ),
        "gptq-int2": {"quant_method": "gptq", "bits": 2, "group_size": 32, "desc_act": False, "sym": False},
    }
    monkeypatch.setattr(placing, "STAGING_BYTES", 8000)
    ledger, _ = written("qwen3_moe", {**CONFIGS, **more}[name], tmp_path)
    assert len(every_home_is(tmp_path, ledger, Mesh())) == 8
    assert len(every_home_is(tmp_path, ledger, Mesh(tp=4, ep=2))) >= 6


@pytest.mark.parametrize("fused", ["nvfp4", "packed-int4", "gpt_oss"])
def test_stacked_experts_stay_packed(fused: str, tmp_path: Path) -> None:
    """With one outer scale an expert; and as gpt-oss has them, gate and up in turns."""
    if fused == "gpt_oss":
        ledger, _ = written("gpt_oss", GPT_OSS, tmp_path)
    else:
        ledger, _ = written("qwen3_moe", CONFIGS[fused], tmp_path, fused=True)
    for mesh in (Mesh(), Mesh(tp=4, ep=2)):
        assert len(every_home_is(tmp_path, ledger, mesh)) >= 4


def test_what_cannot_stay_packed_is_said_by_name(checkpoint: Get, tmp_path: Path) -> None:
    form, words = {**FP8, "weight_scale_semantics": "inverse"}, "divided by scales"
    quantize(checkpoint("llama"), form, tmp_path / "packed", tmp_path / "plain")
    found = load(tmp_path / "packed", packed="always", limit=False)
    rows = found.tables["unpacked"]
    assert {row["role"] for row in rows if words in row["why"]} == {"attention", "mlp"}, rows
    sizes = {row["role"]: row["resident_bytes"] for row in found.tables["memory"]}
    assert not found.tables["packed"]
    for role in ("attention", "mlp"):
        own = sum(row["resident_bytes"] for row in rows if row["role"] == role)
        assert 0.9 * sizes[role] < own <= sizes[role], "all of it but norms and biases"


def test_what_cpus_would_unpack_stays_packed_where_there_is_no_room(checkpoint: Get, tmp_path: Path) -> None:
    quantize(checkpoint("qwen3_moe"), INT4, tmp_path / "packed", tmp_path / "plain")
    opened = Checkpoint.open(tmp_path / "packed")
    spec, matcher = FAMILIES.describe(opened.config)
    ledger = account(opened, spec, matcher)
    mesh, usual = Mesh(tp=2), usually("auto", "cpu")

    def nbytes_of(keep: Keep) -> int:
        return rank_pieces(spec, mesh, 0, "BF16", ledger, keep.roles, keep.kinds).nbytes

    def kept(room: Room, wish: Wish = "auto") -> Keep:
        return settled(wish, "cpu", (), nbytes_of, room)

    nbytes = nbytes_of(usual)
    assert kept(Room(nbytes)) == usual
    assert kept(Room(nbytes - 1)).is_all
    assert f"{nbytes:,} bytes, and there is room for" in kept(Room(nbytes - 1)).why
    assert "--weights-budget" in kept(Room(nbytes - 1, is_budget=True)).why
    assert kept(Room(1), "never").roles == frozenset()
    faster = settled("auto", "cpu", ("int4 in small groups",), nbytes_of, Room(nbytes))
    assert "linear layers in int4 in small groups, which" in faster.why
    assert nbytes_of(faster) < nbytes
    other = settled("auto", "cpu", ("int4",), nbytes_of, Room(nbytes))
    pieces = rank_pieces(spec, mesh, 0, "BF16", ledger, other.roles, other.kinds)
    assert pieces.nbytes == nbytes
    assert "int4 in small groups: plain numbers are multiplied by faster here" in pieces.unpacked.values()


def test_all_ranks_keep_the_same_however_their_hosts_differ() -> None:
    """A kind that is faster stays packed where it is so on all; room that one of them lacks counts for all."""
    known = [("int4", "int8"), ("int4",), ("int4", "e2m1")]
    rooms, sizes = [Room(100), Room(100), Room(60)], (90, 90, 60)

    def everyone(mine: tuple[int, ...]) -> list[tuple[int, ...]]:
        if len(mine) == 1:
            return [(sum(1 << KINDS.index(kind) for kind in kinds),) for kinds in known]
        return [(size, *room) for size, room in zip(sizes, rooms, strict=True)]

    def found() -> set[Keep]:
        each = zip(known, sizes, rooms, strict=True)
        return {settled("auto", "cpu", kinds, lambda _, n=size: n, room, everyone) for kinds, size, room in each}

    (agreed,) = found()
    assert agreed.kinds == {"int4"}
    rooms[2] = Room(59)
    (agreed,) = found()
    assert agreed.is_all
    assert "rank 2's weights would take at least 60 bytes, and there is room for 59" in agreed.why


@pytest.mark.parametrize("kind", ["resident", "streamed"])
def test_a_budget_that_only_packed_weights_keep_to_is_kept_to(kind: str, checkpoint: Get, tmp_path: Path) -> None:
    """Of layers that come and go what must be there at a time counts; with room for that all is as if resident."""
    quantize(checkpoint("llama"), INT4, tmp_path / "packed", tmp_path / "plain")

    def started(budget_bytes: int | None, wish: Wish = "auto", kind: str = kind) -> tuple[set[str], str]:
        """What an engine keeps packed, and what it says of that."""
        options = {"max_context": 32, "threads": 1, "residency": kind, "weights_budget": budget_bytes, "packed": wish}
        engine = Engine.start(str(tmp_path / "packed"), **options)
        try:
            (said,) = [one.message for one in engine.worker.rank.findings if one.code == "unpacked-weights"]
            return set(engine.worker.rank.weights.pieces.packings), said
        finally:
            engine.close()

    def least(wish: Wish) -> int:
        with pytest.raises(Refused, match="too small") as caught:
            started(1, wish)
        return int(str(caught.value.findings[0].expected).split()[2].replace(",", ""))

    low, high = least("always"), least("never")
    kept, said = started((low + high) // 2)
    assert kept
    assert "0 do not: whatever an operator can multiply by stays packed" in said
    assert "the budget for weights (--weights-budget) is" in said
    with pytest.raises(Refused, match="too small"):
        started((low + high) // 2, "never")
    assert started(high) == started(None, kind="resident")


def test_what_is_not_kept_by_choice_or_beside_another_is_said(checkpoint: Get, tmp_path: Path) -> None:
    quantize(checkpoint("deepseek_v3"), FP8, tmp_path / "packed", tmp_path / "plain")
    auto = {row["why"] for row in load(tmp_path / "packed", limit=False).tables["unpacked"]}
    always = {row["why"] for row in load(tmp_path / "packed", packed="always", limit=False).tables["unpacked"]}
    assert UNWANTED in auto
    assert UNWANTED not in always
    assert "more than a product reads it" in always
