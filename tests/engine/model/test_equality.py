"""One rank gives what transformers gives, for every family and every key of a configuration that changes the result."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.weights.files.safetensors_file import read, write
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.workbench.golden import Golden
from tests import families
from tests.checkpoints import TINY, edit_config, inputs
from tests.engine.direct import Direct, flatten
from tests.families.verified import tell

LIMIT = 2e-5  # float32, relative to the largest value of the reference


@pytest.mark.parametrize("name", TINY)
def test_one_rank_equals_transformers(
    name: str, checkpoint: Callable[[str], Path], golden_file: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    golden = Golden.read(golden_file(name))
    given = golden.inputs()
    expected = {key: value for key, value in golden.outputs.items() if key not in ("generated", "unnormed")}
    model = Direct(checkpoint(name))
    found = model.run(given)
    _, mask = flatten(given)
    assert set(found) == set(expected)
    assert model.ledger.complete
    errors = {}
    for key, ours in found.items():
        theirs = expected[key] if key == "image_features" else expected[key][mask]
        assert ours.shape == theirs.shape
        errors[key] = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    assert max(errors.values()) <= LIMIT, errors
    assert np.abs(expected["logits"]).max() > 0.5, "logits too small to tell anything"
    tell(request, checkpoint(name), "image" if "image_features" in found else "text", max(errors.values()))


def test_kimi_k2_is_deepseek_v3(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    home = tmp_path / "kimi"
    shutil.copytree(checkpoint("deepseek_v3"), home)
    edit_config(home, model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], num_local_experts=None)
    given = inputs("deepseek_v3")
    expected = Direct(checkpoint("deepseek_v3")).run(given)
    np.testing.assert_array_equal(Direct(home).run(given)["logits"], expected["logits"])


def rewrite(home: Path, into: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A copy of a checkpoint with all its tensors in one file, changed."""
    shutil.copytree(home, into, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {name: tensor for file in sorted(home.glob("*.safetensors")) for name, tensor in read(file).items()}
    write(into / "model.safetensors", change(tensors))
    return into


def as_in_memory(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names that transformers 5 has in memory for LLaVA."""
    found = {}
    for name, tensor in tensors.items():
        name = name.replace("language_model.lm_head", "lm_head").replace(
            "language_model.model.", "model.language_model."
        )
        name = re.sub(r"^(vision_tower|multi_modal_projector)", r"model.\1", name)
        found[name] = tensor
    return found


def as_of_old(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names that the first LLaVA releases have."""
    return {name.replace("vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()}


def fused(tensors: dict[str, Any]) -> dict[str, Any]:
    """Experts stacked, gate and up in one tensor."""
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    groups: dict[str, dict[str, list[Any]]] = {}
    for name in sorted(tensors, key=lambda name: [int(n) for n in re.findall(r"\d+", name)]):
        match = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.\d+\.(\w+)\.weight", name)
        if match:
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(match[2], match[2])
            groups.setdefault(match[1], {}).setdefault(part, []).append(tensors[name])
    for layer, parts in groups.items():
        gate, up, down = (np.stack(parts[part]) for part in ("gate_proj", "up_proj", "down_proj"))
        found[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate((gate, up), axis=1)
        found[f"{layer}.mlp.experts.down_proj"] = down
    return {name.replace("block_sparse_moe.gate", "mlp.gate"): tensor for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llava-clip", as_in_memory),
        ("llava-clip", as_of_old),
        ("llava-siglip", as_in_memory),
        ("qwen3_moe", fused),
        ("mixtral", fused),
        ("deepseek_v3", fused),
    ],
)
def test_other_names_for_the_same_tensors(
    name: str, change: Callable[[dict[str, Any]], dict[str, Any]], checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    given = inputs(name)
    expected = Direct(checkpoint(name)).run(given)
    found = Direct(rewrite(checkpoint(name), tmp_path / "renamed", change)).run(given)
    np.testing.assert_array_equal(found["logits"], expected["logits"])


STEPPED = ("llama", "mistral", "gemma2", "deepseek_v3", "llama-rope-yarn", "qwen3_moe-step", *families.STEPPED)


@pytest.mark.parametrize("name", STEPPED)
def test_chunks_and_single_steps_give_what_one_pass_gives(
    name: str, checkpoint: Callable[[str], Path], request: pytest.FixtureRequest
) -> None:
    """A prompt in two chunks, then token by token, over the cache: the same logits as all tokens at once."""
    ids = inputs(name, batch=1)["input_ids"][0]
    model = Direct(checkpoint(name))
    whole = model.run({"input_ids": ids[None]})["logits"]
    cache = tuple(model.fresh(spec, 2, len(ids)) for spec in model.model.cache_specs)
    cuts = [0, 9, 21, *range(22, len(ids) + 1)]
    for start, stop in pairwise(cuts):
        batch = model.batch([stop - start], ids[start:stop])
        meta = AttentionMeta.build([stop - start], [stop], [[1]], len(ids))
        positions = torch.arange(start, stop)
        logits = model.model.forward(replace(batch, attention=meta, cache=cache, positions_T=positions, rope_lens=None))
        assert logits is not None
        np.testing.assert_allclose(logits.numpy(), whole[start:stop], atol=2e-5 * float(np.abs(whole).max()))
    tell(request, checkpoint(name), "steps")
