"""Attention kinds where the shared tests do not reach: what transformers cannot open by name, and what is refused."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from firstlight.engine.errors import Refused
from firstlight.engine.model.families import FAMILIES
from firstlight.engine.model.layers.indexer import chosen_keys
from firstlight.engine.parallel.pieces import stages
from firstlight.kernels.attention.meta import AttentionMeta
from firstlight.workbench.reference import Reference
from tests.checkpoints import TINY, inputs, quiet, randomize
from tests.engine.direct import Direct
from tests.families.tiny import llama, rope


def test_mistral_4(tmp_path: Path) -> None:
    """Its text has no entry of its own among transformers' causal models."""
    from transformers.models.mistral4 import Mistral4Config
    from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

    sizes = {**TINY["glm4_moe_lite"].config, "n_group": 4, "topk_group": 2, "max_position_embeddings": 128}
    positions = rope(
        "yarn",
        factor=16.0,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=8,
        max_position_embeddings=128,
        llama_4_scaling_beta=0.5,
        partial_rotary_factor=0.4,
    )
    ids = np.random.default_rng(0).integers(3, 130, (1, 40))
    torch.manual_seed(1)
    with quiet(), torch.no_grad():
        model = Mistral4ForCausalLM(Mistral4Config(**{**sizes, "model_type": "mistral4", **positions})).eval()
        randomize(model)
        expected = model(torch.from_numpy(ids), use_cache=False).logits[0].numpy()
        model.save_pretrained(tmp_path)
    found = Direct(tmp_path).run({"input_ids": ids})["logits"]
    np.testing.assert_allclose(found, expected, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [
        ("phi3", "attention_bias", True),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("llama4_text", "layer_types", ["sliding_attention"] * 3),
        ("olmo3", "layer_types", ["chunked_attention"] * 3),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v32", "scoring_func", "softmax"),
        ("glm_moe_dsa", "indexer_types", ["full", "skipped", "full"]),
        ("deepseek_v4", "compress_ratios", [0, 16, 0]),
        ("granite", "rope_scaling", {"rope_type": "spiral", "factor": 2.0}),
        ("qwen3", "rope_scaling", {"rope_type": "yarn", "factor": 2.0, "llama_4_scaling_beta": 0.1}),
    ],
)
def test_mathematics_without_a_block_is_refused_by_key_and_value(model_type: str, key: str, value: object) -> None:
    base = next((case.config for case in TINY.values() if case.config["model_type"] == model_type), llama())
    config: dict[str, Any] = {**base, "model_type": model_type, "num_hidden_layers": 3}
    for name in ("layer_types", "mlp_layer_types", "indexer_types", "no_rope_layers", "rope_parameters"):
        config.pop(name, None)
    with pytest.raises(Refused) as caught:
        FAMILIES.describe({**config, "rope_theta": 10000.0, key: value})
    (finding,) = caught.value.findings
    assert finding.code == "unsupported-block"
    assert key in finding.message


def test_a_stage_may_begin_behind_the_layer_that_chose_for_it() -> None:
    spec, _ = FAMILIES.describe(TINY["glm_moe_dsa"].config)
    assert stages(spec, 2) == ((0, 2), (2, 4))
    assert [spec.chooser(layer) for layer in range(4)] == [0, 0, 0, 3]
    assert [spec.chosen_keys(layer) for layer in range(4)] == [None, (0, 10), (0, 10), None]


def test_chosen_positions_become_masks() -> None:
    meta = AttentionMeta.build([2, 1], [3, 2], [[0], [1]], 4)
    chosen = torch.tensor([[1, -1], [0, 2], [1, 0]])
    first, second = chosen_keys(chosen, meta)
    assert first.tolist() == [[False, True, False], [True, False, True]]
    assert second.tolist() == [[True, True]]


@pytest.mark.parametrize("name", ["deepseek_v4", "glm_moe_dsa", "llama4"])
def test_pages_of_any_size(name: str, checkpoint: Callable[[str], Path]) -> None:
    """Pages of five tokens in no order, which no span of three or eight divides: chunks, then single steps."""
    ids = inputs(name, batch=1)["input_ids"][0]
    model = Direct(checkpoint(name))
    whole = model.run({"input_ids": ids[None]})["logits"]
    pages = [7, 2, 5, 0, 8, 3, 1, 6]
    cache = tuple(model.fresh(spec, 9, 5) for spec in model.model.cache_specs)
    cuts = [0, 11, 28, 29, 30, len(ids)]
    for start, stop in pairwise(cuts):
        batch = model.batch([stop - start], ids[start:stop])
        meta = AttentionMeta.build([stop - start], [stop], [pages], 5)
        given = replace(batch, attention=meta, cache=cache, positions_T=torch.arange(start, stop), rope_lens=None)
        logits = model.model.forward(given)
        assert logits is not None
        np.testing.assert_allclose(logits.numpy(), whole[start:stop], atol=2e-5 * float(np.abs(whole).max()))


def test_streams_go_into_the_reference_as_they_came_out(checkpoint: Callable[[str], Path]) -> None:
    """Hidden states of several streams lie behind one another; the embedding, of which each is a copy, stands once."""
    reference, given = Reference.open(checkpoint("deepseek_v4")), inputs("deepseek_v4", batch=1)
    free = reference.run(given)
    widths = [free[f"hidden.{index}"].shape[-1] for index in range(5)]
    assert widths == [32, 96, 96, 96, 32]
    forced = reference.forced(given, free)
    assert set(forced) == set(free)
    for name, value in free.items():
        np.testing.assert_array_equal(forced[name], value)
