"""Kimi K3 (arXiv 2607.24653): Kimi Linear's layers read each other through attention residuals; experts work at a
narrower width; a bounded decay, gated outputs, SiTU; MoonViT for pictures."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families import kimi_linear
from firstlight.engine.model.families.common import TRUNK, decoder, rms
from firstlight.engine.model.families.deepseek_v3 import MLA_RULES
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import sparse_layers
from firstlight.engine.model.families.moonvit import MOONVIT_RULES, moonvit
from firstlight.engine.model.rules import rule, under
from firstlight.engine.model.spec import (
    MLP,
    AttentionResidual,
    FeedForward,
    GatedDelta,
    Latent,
    Mixer,
    ModelSpec,
    MoE,
    Norm,
)
from firstlight.kernels.gated_activation.names import named


def situ(config: Config) -> str:
    """The activation with its numbers."""
    config.only("hidden_act", "situ")
    keys = ("activation_situ_beta", "activation_situ_linear_beta")
    return named("situ", *(config.positive(key, config.need(key)) for key in keys))


def delta_attention(config: Config, norm: Norm) -> GatedDelta:
    nested = config.sub("linear_attn_config")
    heads, dim = nested.size("num_heads"), nested.size("head_dim")
    bound = nested.get("gate_lower_bound")
    if bound is not None and not float(bound) < 0:
        nested.refuse("gate_lower_bound", bound, "a number below zero")
    return GatedDelta(
        num_key_heads=heads,
        num_heads=heads,
        key_dim=dim,
        value_dim=dim,
        eps=norm.eps,
        conv=nested.size("short_conv_kernel_size"),
        decay="channel",
        decay_rank=dim,
        decay_bound=None if bound is None else float(bound),
        decay_padding=max(dim - heads, 0),  # one A for each channel of a head, of which the heads' come first
        gate_rank=None if nested.get("use_full_rank_gate", False) else dim,
        gate_activation="sigmoid",
        wide=True,
    )


def mixture(config: Config, act: str, norm: Norm) -> MoE:
    """Kimi Linear's, at a width of the experts' own."""
    config.only("topk_method", "noaux_tc", default="noaux_tc")
    width, is_normed = config.get("routed_expert_hidden_size"), bool(config.get("latent_moe_use_norm", False))
    latent = Latent(width=config.size("routed_expert_hidden_size"), norm=norm if is_normed else None) if width else None
    return msgspec.structs.replace(kimi_linear.mixture(config, act, scale=1.0), latent=latent)


def text(config: Config) -> ModelSpec:
    config.only("model_type", "kimi_linear", default="kimi_linear")
    config.only("num_nextn_predict_layers", 0, default=0)
    norm, act = rms(config, 1e-5), situ(config)
    delta, full = delta_attention(config, norm), kimi_linear.full_layers(config)
    gated = bool(config.get("mla_use_output_gate", False))
    latent = msgspec.structs.replace(kimi_linear.latent_attention(config), gated=gated)
    moe, sparse = mixture(config, act, norm), sparse_layers(config, 1)
    plain = MLP(intermediate=config.size("intermediate_size"), activation=act)
    block = config.get("attn_res_block_size")
    residual = AttentionResidual(block_size=config.size("attn_res_block_size"), eps=norm.eps) if block else None

    def mixer(index: int) -> Mixer:
        return latent if index in full else delta

    def feed_forward(index: int) -> FeedForward:
        return moe if sparse[index] else plain

    return decoder(config, "kimi_k3", mixer, feed_forward, norm=norm, layer={"residual": residual})


def spec(config: Config) -> ModelSpec:
    config.get("image_placeholder"), config.get("tie_word_embeddings")  # the text's own flag counts
    found = text(config.sub("text_config"))
    if "vision_config" not in config:  # a release of the text alone
        config.get("media_placeholder_token_id")
        return found
    pad = int(config.need("media_placeholder_token_id"))
    return msgspec.structs.replace(found, vision=moonvit(config.sub("vision_config"), found.hidden, pad))


_L, _F = "model.layers.{i}.", "model.layers.{i}.block_sparse_moe."
_READERS = {  # where planes are read: theirs -> ours
    _L + "self_attention_res": "layers.{i}.residual.mixer_read",
    _L + "mlp_res": "layers.{i}.residual.ffn_read",
    "model.output_attn_res": "residual.read",
}
TEXT_RULES = (
    *(rule(f"{theirs}_norm.weight", f"{ours}.norm.weight") for theirs, ours in _READERS.items()),
    *(rule(f"{theirs}_proj.weight", f"{ours}.project.weight") for theirs, ours in _READERS.items()),
    *(
        rule(f"{_F}routed_expert_{theirs}.weight", f"layers.{{i}}.ffn.latent.{ours}.weight")
        for theirs, ours in (("down_proj", "down"), ("up_proj", "up"), ("norm", "norm"))
    ),
    rule(_L + "self_attn.A_log", "layers.{i}.mixer.decay", unpad=True),
    *TRUNK,
    *MLA_RULES,
    *kimi_linear.DELTA_RULES,
    *kimi_linear.MIXTURE_RULES,
)
RULES = under("language_model.", TEXT_RULES) + MOONVIT_RULES
FAMILY = Family(name="kimi_k3", model_types=("kimi_k3",), spec=spec, rules=RULES)
