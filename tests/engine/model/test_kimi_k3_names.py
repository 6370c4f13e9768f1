"""The names, dtypes and shapes of Kimi K3's tensors as its release has them, from the weight rules run backwards."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.model.families import FAMILIES
from firstlight.engine.weights.synthesize import outline
from tests.kimi_k3 import FACTS

LAYERS = 4  # dense and delta attention, experts and delta attention twice, experts and latent attention
ENDS = """
model.embed_tokens.weight BF16 163840 7168
lm_head.weight BF16 163840 7168
model.norm.weight BF16 7168
model.output_attn_res_norm.weight BF16 7168
model.output_attn_res_proj.weight BF16 1 7168
"""
EVERY_LAYER = """
input_layernorm.weight BF16 7168
post_attention_layernorm.weight BF16 7168
self_attention_res_norm.weight BF16 7168
mlp_res_norm.weight BF16 7168
self_attention_res_proj.weight BF16 1 7168
mlp_res_proj.weight BF16 1 7168
self_attn.g_proj.weight BF16 12288 7168
self_attn.o_proj.weight BF16 7168 12288
"""
DELTA = """
q_proj.weight BF16 12288 7168
k_proj.weight BF16 12288 7168
v_proj.weight BF16 12288 7168
q_conv1d.weight F32 12288 1 4
k_conv1d.weight F32 12288 1 4
v_conv1d.weight F32 12288 1 4
A_log F32 128
dt_bias F32 12288
f_a_proj.weight BF16 128 7168
f_b_proj.weight BF16 12288 128
b_proj.weight BF16 96 7168
o_norm.weight F32 128
"""
LATENT = """
q_a_proj.weight BF16 1536 7168
q_a_layernorm.weight BF16 1536
q_b_proj.weight BF16 18432 1536
kv_a_proj_with_mqa.weight BF16 576 7168
kv_a_layernorm.weight BF16 512
kv_b_proj.weight BF16 24576 512
"""
DENSE = """
gate_proj.weight BF16 33792 7168
up_proj.weight BF16 33792 7168
down_proj.weight BF16 7168 33792
"""
MIXTURE = """
gate.weight BF16 896 7168
gate.e_score_correction_bias F32 896
routed_expert_down_proj.weight BF16 3584 7168
routed_expert_up_proj.weight BF16 7168 3584
routed_expert_norm.weight BF16 3584
shared_experts.gate_proj.weight BF16 6144 7168
shared_experts.up_proj.weight BF16 6144 7168
shared_experts.down_proj.weight BF16 7168 6144
"""
EXPERT = """
w1.weight_packed U8 3072 1792
w1.weight_scale U8 3072 112
w3.weight_packed U8 3072 1792
w3.weight_scale U8 3072 112
w2.weight_packed U8 3584 1536
w2.weight_scale U8 3584 96
"""
TOWER = """
vision_tower.patch_embed.proj.weight BF16 1024 3 14 14
vision_tower.patch_embed.pos_emb.weight BF16 64 64 1024
vision_tower.encoder.final_layernorm.weight BF16 1024
mm_projector.proj.0.weight BF16 4096 4096
mm_projector.proj.2.weight BF16 7168 4096
mm_projector.post_norm.weight BF16 7168
"""
TOWER_BLOCK = """
norm0.weight BF16 1024
norm1.weight BF16 1024
wqkv.weight BF16 4608 1024
wo.weight BF16 1024 1536
mlp.fc0.weight BF16 4096 1024
mlp.fc1.weight BF16 1024 4096
"""
Form = tuple[str, tuple[int, ...]]


def rows(table: str, prefix: str = "") -> Iterator[tuple[str, Form]]:
    for line in table.strip().splitlines():
        name, dtype, *shape = line.split()
        yield prefix + name, (dtype, tuple(map(int, shape)))


def released(layers: int, latent: set[int], experts: range) -> dict[str, Form]:
    """The tensors of a release of so many layers, `latent` of them (from 0) with latent attention."""
    found = {**dict(rows(ENDS, "language_model.")), **dict(rows(TOWER))}
    for block in range(27):
        found |= rows(TOWER_BLOCK, f"vision_tower.encoder.blocks.{block}.")
    for layer in range(layers):
        home = f"language_model.model.layers.{layer}."
        found |= rows(EVERY_LAYER, home)
        found |= rows(LATENT if layer in latent else DELTA, home + "self_attn.")
        if layer == 0:
            found |= rows(DENSE, home + "mlp.")
            continue
        found |= rows(MIXTURE, home + "block_sparse_moe.")
        for expert in experts:
            found |= rows(EXPERT, f"{home}block_sparse_moe.experts.{expert}.")
    return found


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    found = {key: value for key, value in json.loads(FACTS.read_text()).items() if not key.startswith("_")}
    found["text_config"]["num_hidden_layers"] = LAYERS
    found["text_config"]["linear_attn_config"] |= {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}
    return found


def test_what_the_rules_write_is_named_as_the_release_is(config: dict[str, Any], tmp_path: Path) -> None:
    outline(config, tmp_path / "k3")
    with (tmp_path / "k3" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    written = {name: (at["dtype"], tuple(at["shape"])) for name, at in header.items() if name != "__metadata__"}
    assert written == released(LAYERS, {3}, range(896))


def test_every_name_of_the_whole_release_has_its_rule() -> None:
    """497,220 names, of which the experts' differ by their number alone; the first and the last stand for them."""
    experts = range(0, 896, 895)
    names = released(93, {*range(3, 92, 4), 92}, experts)
    assert len(names) + 92 * (896 - len(experts)) * 6 == 497_220
    facts = json.loads(FACTS.read_text())
    _, matcher = FAMILIES.describe({key: value for key, value in facts.items() if not key.startswith("_")})
    unknown = [name for name in names if matcher.match(name.replace("_packed", "").replace("_scale", "")) is None]
    assert not unknown
