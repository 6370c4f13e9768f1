"""Kimi K3, which no library here has: the native family against the plain implementation in tests/reference."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.spec import MLA, AttentionResidual, GatedDelta, MoE, MoonViT
from firstlight.engine.parallel.hardware import parse_cluster
from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.parallel.pieces import rank_pieces, stages
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.ledger import account
from firstlight.engine.weights.loader import load
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.workbench.golden import Golden
from firstlight.workbench.plan import plan
from tests.engine.direct import Arrays, Direct, flatten
from tests.engine.ranks import Job, run_everything
from tests.families.verified import tell
from tests.kimi_k3 import golden_inputs, tiny_config, write_checkpoint, write_golden
from tests.reference.kimi_k3 import KimiK3

LIMIT = 1e-4  # of the reference's largest value, float32, whatever the mesh
CUT = 3  # where two pipeline stages meet in the tiny model: test_the_cuts_are_where_they_are_meant_to_be
MESHES = (  # what is run, and on which checkpoint: the cut at the edge of a residual block, or inside one
    ("at a block", Mesh(tp=2)),
    ("at a block", Mesh(ep=2)),
    ("at a block", Mesh(pp=2)),
    ("inside a block", Mesh(pp=2)),
    ("inside a block", Mesh(tp=2, pp=2, ep=2)),
)
BLOCKS = {"at a block": CUT, "inside a block": 2}


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kimi_k3")
    return {
        name: write_checkpoint(root / name.replace(" ", "-"), tiny_config({"attn_res_block_size": size}))
        for name, size in BLOCKS.items()
    }


@pytest.fixture(scope="module")
def goldens(homes: dict[str, Path]) -> dict[str, Golden]:
    return {name: Golden.read(write_golden(home, home.with_suffix(".golden"))) for name, home in homes.items()}


@pytest.fixture(scope="module")
def jobs(
    homes: dict[str, Path], goldens: dict[str, Golden], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Job]:
    """All meshes in one set of eight processes."""
    root = tmp_path_factory.mktemp("meshes")
    for name, golden in goldens.items():
        np.savez(root / f"{name}.npz", **golden.inputs())
    made = {
        (name, mesh.describe()): Job(homes[name], mesh, root / f"{name}.npz", root / f"{name} {mesh.describe()}")
        for name, mesh in MESHES
    }
    run_everything(list(made.values()), root / "store")
    return made


def errors(found: Arrays, golden: Golden) -> dict[str, float]:
    """The largest difference of each output, as a share of the reference's largest value."""
    expected = {name: value for name, value in golden.outputs.items() if name != "generated"}
    assert set(found) == set(expected)
    result = {}
    for name, ours in found.items():
        theirs = expected[name] if name == "image_features" else expected[name][golden.mask]
        assert ours.shape == theirs.shape, name
        result[name] = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    return result


@pytest.mark.parametrize("name", BLOCKS)
def test_one_rank_equals_the_reference(
    name: str, homes: dict[str, Path], goldens: dict[str, Golden], request: pytest.FixtureRequest
) -> None:
    model = Direct(homes[name])
    found = errors(model.run(goldens[name].inputs()), goldens[name])
    assert max(found.values()) <= LIMIT
    assert model.ledger.complete
    for what in ("text", "image") if "image_features" in found else ("text",):
        tell(request, homes[name], what, max(found.values()))


@pytest.mark.parametrize(("name", "mesh"), [(name, mesh.describe()) for name, mesh in MESHES])
def test_a_mesh_equals_the_reference(
    name: str,
    mesh: str,
    jobs: dict[tuple[str, str], Job],
    goldens: dict[str, Golden],
    request: pytest.FixtureRequest,
) -> None:
    assert max(errors(jobs[name, mesh].results(), goldens[name]).values()) <= LIMIT
    tell(request, jobs[name, mesh].checkpoint, mesh)


def test_the_cuts_are_where_they_are_meant_to_be() -> None:
    for name, size in BLOCKS.items():
        spec, _ = FAMILIES.describe(tiny_config({"attn_res_block_size": size}))
        assert stages(spec, 2) == ((0, CUT), (CUT, 6))
        assert (CUT % size == 0) == (name == "at a block")
        assert spec.stream_shape(CUT) == (1 + -(-CUT // size), 64)


def test_packed_experts_give_what_their_numbers_in_bfloat16_give(homes: dict[str, Path], tmp_path: Path) -> None:
    name = "at a block"
    twin = write_checkpoint(tmp_path / "twin", tiny_config({"attn_res_block_size": BLOCKS[name]}), packed=False)
    inputs = {key: value.numpy() for key, value in golden_inputs(twin, tokens=30, pictures=False).items()}
    np.testing.assert_array_equal(Direct(twin).run(inputs)["logits"], Direct(homes[name]).run(inputs)["logits"])


@pytest.mark.parametrize(("width", "tp", "group"), [(32, 1, 32), (64, 2, 32), (32, 2, 16), (96, 2, 16)])
def test_experts_stay_packed_wherever_a_cut_falls(width: int, tp: int, group: int, tmp_path: Path) -> None:
    """A rank of whole groups of 32 columns keeps codes and scales as they are; another one has smaller groups."""
    home = write_checkpoint(tmp_path / "cut", tiny_config({"moe_intermediate_size": width}))
    checkpoint = Checkpoint.open(str(home))
    spec, matcher = FAMILIES.describe(checkpoint.config)
    held = rank_pieces(spec, Mesh(tp=tp), tp - 1, "BF16", account(checkpoint, spec, matcher), keep_packed=("expert",))
    storages = {storage.name: (storage.dtype, storage.shape) for storage in held.storages}
    rows, columns = 2 * width // tp, width // tp
    assert storages["layers.1.ffn.experts.gate_up"] == ("U8", (8, rows, 16))
    assert storages["layers.1.ffn.experts.down_scale"] == ("U8", (8, 32, columns // group))
    planned = plan(home, parse_cluster("8xB300"), Mesh(tp=tp))
    assert planned.metrics["loaded_weight_bytes_per_device"].value == held.nbytes == load(checkpoint, held).nbytes
    assert (planned.metrics["weight_bytes_per_device"].value == held.nbytes) == (width != 96), "a scale more is held"


def test_chunks_and_single_steps_give_what_one_pass_gives(
    homes: dict[str, Path], request: pytest.FixtureRequest
) -> None:
    """The delta rule in chunks and token by token, latents from the cache: the same logits as all tokens at once."""
    ids = golden_inputs(homes["at a block"], tokens=150, pictures=False)["input_ids"][0].numpy()  # crosses two chunks
    model = Direct(homes["at a block"])
    whole = model.run({"input_ids": ids[None]})["logits"]
    cache = tuple(model.fresh(spec, 2, len(ids)) for spec in model.model.cache_specs)
    for start, stop in pairwise([0, 70, 139, *range(140, len(ids) + 1)]):
        batch = model.batch([stop - start], ids[start:stop])
        meta = AttentionMeta.build([stop - start], [stop], [[1]], len(ids))
        step = replace(batch, attention=meta, cache=cache, positions_T=torch.arange(start, stop), slots=(1,))
        logits = model.model.forward(step)
        assert logits is not None
        np.testing.assert_allclose(logits.numpy(), whole[start:stop], atol=5e-5 * float(np.abs(whole).max()))
    tell(request, next(iter(homes.values())), "steps")


def rewritten(home: Path, into: Path, changed: Mapping[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint in one file, with some tensors changed."""
    into.mkdir()
    tensors = {name: tensor for file in sorted(home.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    assert changed.keys() <= tensors.keys()
    save_file({**tensors, **changed}, into / "model.safetensors")
    (into / "config.json").write_text((home / "config.json").read_text())
    return into


A_LOG = "language_model.model.layers.1.self_attn.A_log"


def test_padding_of_a_tensor_is_said_and_must_be_zero(homes: dict[str, Path], tmp_path: Path) -> None:
    good = Direct(homes["at a block"]).ledger
    said = [finding for finding in good.findings if finding.code == "padded-tensor"]
    assert [finding.severity for finding in said] == ["note"]
    assert len(said[0].tensors) == 4
    full = torch.zeros(16)
    full[:4], full[11] = torch.rand(4), 1e-30
    with pytest.raises(Refused) as caught:
        Direct(rewritten(homes["at a block"], tmp_path / "full", {A_LOG: full}))
    (finding,) = [finding for finding in caught.value.findings if finding.code == "padded-tensor"]
    assert (finding.severity, finding.tensors) == ("fatal", (A_LOG,))


def test_a_tensor_without_padding_is_as_good(homes: dict[str, Path], tmp_path: Path) -> None:
    """Releases that cut the padding off, and tensors too short or of another shape."""
    whole = load_file(homes["at a block"] / "model-00001-of-000004.safetensors")
    name = A_LOG.replace("layers.1", "layers.0")
    inputs = {key: value.numpy() for key, value in golden_inputs(homes["at a block"], 20, pictures=False).items()}
    cut = Direct(rewritten(homes["at a block"], tmp_path / "cut", {name: whole[name][:4].clone()}))
    np.testing.assert_array_equal(cut.run(inputs)["logits"], Direct(homes["at a block"]).run(inputs)["logits"])
    for shape in ((3,), (16, 2), (1, 16)):
        changed = {name: torch.zeros(shape)}
        with pytest.raises(Refused) as caught:
            Direct(rewritten(homes["at a block"], tmp_path / "x".join(map(str, shape)), changed))
        assert {finding.code for finding in caught.value.findings} == {"shape-mismatch"}


@pytest.mark.parametrize(
    ("text", "linear"),
    [
        ({"latent_moe_use_norm": False}, {}),
        ({"mla_use_output_gate": False}, {}),
        ({"activation_situ_beta": 1.5, "activation_situ_linear_beta": 0.7}, {}),
        ({"first_k_dense_replace": 3, "moe_renormalize": False}, {}),
        ({}, {"gate_lower_bound": None}),
        ({}, {"gate_lower_bound": -0.5}),
        ({}, {"head_dim": 4, "num_heads": 6}),
    ],
    ids=lambda changed: ", ".join(f"{key}={value}" for key, value in changed.items()) or "-",
)
def test_every_key_of_the_mathematics_is_followed(text: dict[str, Any], linear: dict[str, Any], tmp_path: Path) -> None:
    """Keys of the mathematics at other values, each against the reference; none is passed over."""
    home = write_checkpoint(tmp_path / "changed", tiny_config(text, linear), packed=False)
    inputs = golden_inputs(home, tokens=24, pictures=False)
    with torch.inference_mode():
        expected = KimiK3.open(home).run(inputs)
    found = Direct(home).run({key: value.numpy() for key, value in inputs.items()})
    _, mask = flatten({key: value.numpy() for key, value in inputs.items()})
    logits = expected["logits"].numpy()[mask]
    # Heads of four channels amplify roundings: the reference itself is 7e-5 away from its own result in float64.
    assert float(np.abs(found["logits"] - logits).max() / np.abs(logits).max()) <= 3 * LIMIT


@pytest.mark.parametrize("bare", [False, True], ids=["no tower", "the text's own configuration and names"])
def test_a_release_of_the_text_alone(bare: bool, homes: dict[str, Path], tmp_path: Path) -> None:
    source, home = homes["at a block"], tmp_path / "text"
    home.mkdir()
    tensors = {name: one for file in sorted(source.glob("*.safetensors")) for name, one in load_file(file).items()}
    tensors = {name: one for name, one in tensors.items() if name.startswith("language_model.")}
    config = json.loads((source / "config.json").read_text())
    del config["vision_config"], config["media_placeholder_token_id"]
    if bare:
        tensors = {name.removeprefix("language_model."): one for name, one in tensors.items()}
        config = config["text_config"]
    save_file(tensors, home / "model.safetensors")
    (home / "config.json").write_text(json.dumps(config))
    inputs = {key: value.numpy() for key, value in golden_inputs(source, 20, pictures=False).items()}
    model = Direct(home)
    assert model.ledger.complete
    assert not [finding for finding in model.ledger.findings if finding.severity == "fatal"]
    np.testing.assert_array_equal(model.run(inputs)["logits"], Direct(source).run(inputs)["logits"])


def test_spec_of_the_release() -> None:
    """What the release's configuration says, block by block; nothing in it is passed over."""
    facts = json.loads((Path(__file__).parents[3] / "data/models/kimi-k3.json").read_text())
    spec, _ = FAMILIES.describe(facts)
    assert [finding.code for finding in spec.findings] == ["no-positions"]
    assert [i + 1 for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, MLA)] == [*range(4, 93, 4), 93]
    delta, latent, moe = spec.layers[1].mixer, spec.layers[3].mixer, spec.layers[1].ffn
    assert isinstance(delta, GatedDelta)
    assert isinstance(latent, MLA)
    assert isinstance(moe, MoE)
    assert (delta.decay_bound, delta.gate_rank, delta.decay_rank, delta.decay_padding) == (-5.0, None, 128, 32)
    assert latent.gated
    assert latent.rope is None
    assert latent.scale == pytest.approx(192**-0.5)
    assert moe.latent is not None
    assert (moe.latent.width, moe.router.top_k, moe.num_experts, moe.activation) == (3584, 16, 896, "situ(4,25)")
    assert spec.residual == AttentionResidual(block_size=12, eps=1e-5)
    assert [spec.residual.planes(layer) for layer in (0, 1, 12, 13, 84, 92, 93)] == [1, 2, 2, 3, 8, 9, 9]
    assert isinstance(spec.vision, MoonViT)
    assert (spec.vision.hidden, len(spec.vision.layers), spec.vision.interpolation) == (1024, 27, "bilinear")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda c: c["text_config"].update(hidden_act="silu"), "unsupported-block"),
        (lambda c: c["text_config"].update(moe_router_activation_func="softmax"), "unsupported-block"),
        (lambda c: c["text_config"].update(num_nextn_predict_layers=1), "unsupported-block"),
        (lambda c: c["text_config"].update(mla_use_nope=False), "unsupported-block"),
        (lambda c: c["text_config"]["linear_attn_config"].update(gate_lower_bound=2.0), "config-invalid"),
        (lambda c: c["text_config"]["linear_attn_config"].update(kda_layers=[1, 2]), "config-invalid"),
        (lambda c: c["text_config"].pop("activation_situ_beta"), "config-invalid"),
        (lambda c: c.pop("media_placeholder_token_id"), "config-invalid"),
        (lambda c: c["vision_config"].update(merge_type="mean"), "unsupported-block"),
        (lambda c: c["vision_config"].update(mm_projector_type="resampler"), "unsupported-block"),
        (lambda c: c["vision_config"].update(qkv_hidden_size=50), "config-invalid"),
        (lambda c: c["vision_config"].update(text_hidden_size=32), "config-invalid"),
    ],
)
def test_mathematics_without_a_block_is_refused(change: Callable[[dict[str, Any]], Any], code: str) -> None:
    config = tiny_config()
    change(config)
    with pytest.raises(Refused) as caught:
        FAMILIES.describe(config)
    assert caught.value.findings[0].code == code
