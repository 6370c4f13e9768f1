"""The plain implementation of Kimi K3 against implementations by others, wherever the mathematics coincides."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoints import quiet, randomize
from tests.kimi_k3 import MEDIA_PAD, golden_inputs, tiny_config, write_checkpoint
from tests.reference import kimi_k3, moonvit, mxfp4
from tests.reference.kimi_k3 import KimiK3, Weights

LINEAR: Mapping[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "linear_head_dim": 12,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module")
def kimi_linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Weights]:
    """A tiny Kimi Linear by transformers, and its weights under the names of a release."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("kimi_linear", **LINEAR), dtype=torch.float32)
        torch.manual_seed(3)
        randomize(model)
        home = tmp_path_factory.mktemp("kimi_linear")
        model.eval().save_pretrained(home)
    return model.model, Weights(load_file(home / "model.safetensors"), "model.")


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5
    assert float(expected.abs().max()) > 0.05, "too small to tell anything"


@torch.no_grad()
def test_the_delta_rule_with_kimi_linears_decay_and_gate(kimi_linear: tuple[Any, Weights]) -> None:
    model, weights = kimi_linear
    x = torch.randn(1, 150, 32)  # crosses chunks of 64
    ours = kimi_k3.delta_attention(
        weights.into("layers.0.self_attn"), x[0], {"num_heads": 3, "head_dim": 12}, model.config.rms_norm_eps
    )
    close(ours, model.layers[0].self_attn(x)[0])


@torch.no_grad()
def test_latent_attention_without_positions(kimi_linear: tuple[Any, Weights]) -> None:
    model, weights = kimi_linear
    x = torch.randn(1, 40, 32)
    config = {**LINEAR, "num_heads": 4}
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    close(
        kimi_k3.latent_attention(weights.into("layers.1.self_attn"), x[0], config),
        model.layers[1].self_attn(x, attention_mask=mask)[0][0],
    )


@torch.no_grad()
def test_router_and_experts_at_full_width(kimi_linear: tuple[Any, Weights]) -> None:
    model, weights = kimi_linear
    x = torch.randn(50, 32)
    config = {
        "hidden_act": "silu",
        "num_expert_group": 1,
        "topk_group": 1,
        "num_experts_per_token": 3,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.7,
    }
    mlp = weights.into("layers.1.block_sparse_moe")
    chosen, chosen_weights = kimi_k3.route(mlp, x, config)
    _, their_weights, their_chosen = model.layers[1].mlp.gate(x)
    order, their_order = chosen.argsort(-1), their_chosen.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), their_chosen.gather(-1, their_order))
    close(chosen_weights.gather(-1, order), their_weights.gather(-1, their_order))
    close(kimi_k3.latent_moe(mlp, x, config), model.layers[1].mlp(x[None])[0])


@torch.no_grad()
def test_moonvit_with_kimi_k25s_norms_and_projector(tmp_path: Path) -> None:
    """LayerNorm, biases, bicubic positions and a norm before the projector; pictures of one and of several frames."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    from tests.checkpoints import TINY

    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"pos_emb_height": 6, "pos_emb_width": 6}
    text = {**TINY["deepseek_v3"].config, "num_hidden_layers": 1}
    with quiet():
        config = AutoConfig.for_model(
            "kimi_k25", text_config=text, vision_config=vision, projection_hidden_size=32, image_token_id=5
        )
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        torch.manual_seed(4)
        randomize(model)
        model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")  # saved under names that are half the release's
    as_released = (("model.mm_projector", "mm_projector"), ("encoder.patch_embed", "patch_embed"))
    for theirs, released in as_released:
        stored = {name.replace(theirs, released): tensor for name, tensor in stored.items()}
    grids = torch.tensor([[1, 4, 6], [1, 6, 6], [3, 8, 4]])
    pixels = torch.randn(int(grids.prod(1).sum()), 3, 14, 14)
    ours = moonvit.image_features(
        stored,
        {"vt_num_hidden_layers": 2, "vt_num_attention_heads": 2, "merge_kernel_size": (2, 2)},
        pixels,
        grids,
    )
    with quiet():
        theirs = model.get_image_features(pixels, image_grid_thw=grids).pooler_output
    close(ours, torch.cat(tuple(theirs)))


def test_mxfp4_is_read_as_others_read_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    packed, scale = mxfp4.quantize(torch.randn(6, 96) * torch.tensor([1e-6, 1e-3, 1.0, 3.0, 50.0, 1e5]).view(6, 1))
    theirs = convert_moe_packed_tensors(packed.view(1, 6, 3, 16), scale.view(1, 6, 3), dtype=torch.float32)
    assert torch.equal(mxfp4.dequantize(packed, scale), theirs[0].T)


def test_mxfp4_rounds_to_the_nearest_magnitude() -> None:
    weight = torch.randn(4, 64)
    error = (mxfp4.dequantize(*mxfp4.quantize(weight)) - weight).abs()
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1).repeat_interleave(32, -1)
    assert float((error / largest).max()) < 0.26  # the widest gap is that from 6 to the next power of two
    exact = torch.tensor([*mxfp4.MAGNITUDES, *(-m for m in mxfp4.MAGNITUDES)]).repeat(1, 2)
    assert torch.equal(mxfp4.dequantize(*mxfp4.quantize(exact)), exact)


def test_the_decay_stays_above_its_lower_bound() -> None:
    f = torch.linspace(-50, 50, 101).view(-1, 1, 1)
    found = kimi_k3.log_decay(f, torch.tensor([0.7]), -5.0).flatten()
    assert float(found.min()) >= -5.0
    assert float(found.max()) <= 0.0
    assert torch.allclose(found[50], torch.tensor(-2.5))


def test_situ_is_silu_times_up_near_zero_and_bounded_far_out() -> None:
    config = tiny_config()["text_config"]
    small = 0.01 * torch.randn(100)
    found, plain = kimi_k3.activate(small + 0.2, small, config), torch.nn.functional.silu(small + 0.2) * small
    assert 1e-4 < float((found - plain).abs().max() / plain.abs().max()) < 2e-3  # tanh(x / 4) bends by (x / 4)^2 / 3
    assert float(kimi_k3.activate(torch.tensor(1e4), torch.tensor(1e4), config)) == pytest.approx(4.0 * 25.0)


def test_an_attention_residual_weighs_blocks_of_any_size_alike() -> None:
    """The scores come from normalised values, the output from the values themselves; no score means the mean."""
    bank, prefix = [torch.randn(5, 16), 100 * torch.randn(5, 16)], torch.randn(5, 16)
    norm = torch.rand(16) + 0.5
    flat = Weights({"r_norm.weight": norm, "r_proj.weight": torch.zeros(1, 16)})
    close(kimi_k3.attention_residual(flat, "r", prefix, bank), torch.stack([*bank, prefix]).mean(0))
    proj = torch.randn(1, 16)
    sharp = Weights({"r_norm.weight": norm, "r_proj.weight": proj * 1e4})
    chosen = torch.stack([*bank, prefix])
    scores = (chosen / chosen.pow(2).mean(-1, keepdim=True).sqrt() * norm * proj).sum(-1)
    picked = chosen[scores.argmax(0), torch.arange(5)]
    close(kimi_k3.attention_residual(sharp, "r", prefix, bank), picked)


@torch.inference_mode()
def test_every_tensor_of_the_tiny_release_matters(tmp_path: Path) -> None:
    """A tensor that is changed changes the logits: nothing in the golden file is blind to a weight."""
    home = write_checkpoint(tmp_path, tiny_config({"num_experts_per_token": 6}))
    ids = torch.tensor([[7, 300, *[MEDIA_PAD] * 2, 90, 411, 8, 33, 500, 77, 256, 19, 102, 45]])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(8, 3, 14, 14), "grid_thws": torch.tensor([[1, 2, 4]])}
    model = KimiK3.open(home)
    expected = model.run(inputs)["logits"]
    tensors = dict(model.weights.tensors)
    for name in tensors:
        if ".experts." in name and ".experts.0." not in name:  # one expert stands for all
            continue
        if ".layers.0.self_attention_res" in name:  # stored by the release; the first layer has no bank to look into
            continue
        changed = tensors[name].clone()
        changed.copy_(changed.flatten().roll(1).view_as(changed))
        found = KimiK3(model.config, {**tensors, name: changed}).run(inputs)["logits"]
        assert float((found - expected).abs().max()) > 1e-4, name


@torch.inference_mode()
def test_rows_do_not_see_their_neighbours_or_their_padding(tmp_path: Path) -> None:
    home = write_checkpoint(tmp_path)
    model = KimiK3.open(home)
    inputs = golden_inputs(home, tokens=40, pictures=False)
    both = model.run(inputs)["logits"]
    alone = model.run({"input_ids": inputs["input_ids"][1:, :30]})["logits"]
    assert torch.equal(both[1, :30], alone[0])
    assert not both[1, 30:].any()
    assert not (inputs["input_ids"] == MEDIA_PAD).any()


def test_the_tiny_release_has_the_names_and_forms_of_the_real_one(tmp_path: Path) -> None:
    home = write_checkpoint(tmp_path)
    index = json.loads((home / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for file in home.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    kda = "language_model.model.layers.0.self_attn."
    assert tensors[kda + "A_log"].shape == (16,)
    assert not tensors[kda + "A_log"][4:].any()
    expert = "language_model.model.layers.1.block_sparse_moe.experts.7.w2."
    assert tensors[expert + "weight_packed"].shape == (32, 16)
    assert tensors[expert + "weight_scale"].shape == (32, 1)
    assert tensors[expert + "weight_scale"].dtype == torch.uint8
