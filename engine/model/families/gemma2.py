"""Gemma 2: norms before and after each block with (1 + weight), soft-capped scores and logits, alternating windows."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ATTENTION, DENSE, TRUNK, activation, gqa, layer_windows, mlp
from firstlight.engine.model.families.common import decoder as plain_decoder
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import Attention, LayerSpec, ModelSpec, Norm


def _windows(config: Config) -> list[int | None]:
    window = config.stated("sliding_window", absent=4096)
    if "layer_types" in config:
        return layer_windows(config, window)
    return [window if index % 2 == 0 else None for index in range(config.size("num_hidden_layers"))]


def spec(config: Config) -> ModelSpec:
    norm = Norm(eps=float(config.get("rms_norm_eps", 1e-6)), offset=1.0)
    window, bias = _windows(config), bool(config.get("attention_bias", False))
    feed_forward = mlp(config, activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    config.get("hidden_act")  # superseded by hidden_activation
    config.only("use_bidirectional_attention", False, default=False)

    def attention(index: int) -> Attention:
        return gqa(
            config,
            head_dim=int(config.get("head_dim", 256)),
            scale=float(config.get("query_pre_attn_scalar", 256)) ** -0.5,
            softcap=config.stated("attn_logit_softcapping", absent=50.0),
            window=window[index],
            qkv_bias=bias,
            output_bias=bias,
        )

    plain = plain_decoder(
        config,
        "gemma2",
        attention,
        lambda i: feed_forward,
        norm=norm,
        tie_default=True,
        embed_scale=config.size("hidden_size") ** 0.5,
        logit_softcap=config.stated("final_logit_softcapping", absent=30.0),
    )
    layers = tuple(
        LayerSpec(
            mixer=layer.mixer,
            ffn=layer.ffn,
            mixer_norm=norm,
            post_mixer_norm=norm,
            ffn_norm=norm,
            post_ffn_norm=norm,
        )
        for layer in plain.layers
    )
    return ModelSpec(**{**{f: getattr(plain, f) for f in plain.__struct_fields__}, "layers": layers})


_L = "(model.|)layers.{i}."
RULES = (
    tuple(item for item in TRUNK if not item.tensor.endswith("post_attention_layernorm.weight"))
    + ATTENTION
    + DENSE
    + (
        rule(_L + "post_attention_layernorm.weight", "layers.{i}.post_mixer_norm.weight"),
        rule(_L + "pre_feedforward_layernorm.weight", "layers.{i}.ffn_norm.weight"),
        rule(_L + "post_feedforward_layernorm.weight", "layers.{i}.post_ffn_norm.weight"),
    )
)
FAMILY = Family(name="gemma2", model_types=("gemma2",), spec=spec, rules=RULES)
