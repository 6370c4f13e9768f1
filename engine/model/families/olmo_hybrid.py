"""OLMo Hybrid: gated delta attention with steps up to two, every fourth layer as in OLMo 2, norms behind."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    ATTENTION,
    DENSE,
    ENDS,
    QK_NORM,
    decoder,
    gqa,
    head_dim,
    mlp,
    one_a_layer,
    rms,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.state_spaces import layer_kinds
from firstlight.engine.model.rules import WeightRule, rule
from firstlight.engine.model.spec import Attention, GatedDelta, LayerSpec, ModelSpec


def kinds_of(config: Config) -> list[str]:
    count, kinds = config.size("num_hidden_layers"), layer_kinds(config, "linear_attention", "full_attention")
    if kinds is None:
        kinds = ["linear_attention" if (index + 1) % 4 else "full_attention" for index in range(count)]
        if count < 4:
            kinds[-1] = "full_attention"
    return one_a_layer(config, "layer_types", kinds)


def attention(config: Config) -> Attention:
    fields = config.get("rope_parameters") or {}
    rotates = fields.get("rope_theta", config.stated("rope_theta", absent=10000.0)) is not None  # null: no positions
    bias = bool(config.get("attention_bias", False))
    return gqa(
        config,
        rope=rope(config, head_dim(config)) if rotates else None,
        qk_norm=rms(config),
        qk_norm_over="width",
        qkv_bias=bias,
        output_bias=bias,
    )


def delta_attention(config: Config) -> GatedDelta:
    config.only("hidden_act", "silu", default="silu")  # of the convolution and the gate
    heads = config.size("num_attention_heads")
    key_heads = int(config.get("linear_num_key_heads", heads))
    key_dim = int(config.get("linear_key_head_dim", int(0.75 * config.size("hidden_size") / key_heads)))
    for key in ("linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"):
        config.get(key)  # of training
    value_heads = int(config.get("linear_num_value_heads", heads))
    if value_heads % key_heads:
        config.refuse("linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads {key_heads}")
    return GatedDelta(
        num_key_heads=key_heads,
        num_heads=value_heads,
        key_dim=key_dim,
        value_dim=int(config.get("linear_value_head_dim", 2 * key_dim)),
        eps=1e-5,  # fixed in the reference, whatever rms_norm_eps says
        conv=int(config.get("linear_conv_kernel_dim", 4)),
        beta_scale=2.0 if config.get("linear_allow_neg_eigval", True) else 1.0,
    )


def spec(config: Config) -> ModelSpec:
    softmax, delta, feed_forward, norm = attention(config), delta_attention(config), mlp(config), rms(config)
    places = {
        "full_attention": LayerSpec(mixer=softmax, ffn=feed_forward, post_mixer_norm=norm, post_ffn_norm=norm),
        "linear_attention": LayerSpec(mixer=delta, ffn=feed_forward, mixer_norm=norm, ffn_norm=norm),
    }
    layers = tuple(places[kind] for kind in kinds_of(config))
    return decoder(config, "olmo_hybrid", softmax, feed_forward, layers=layers)


def norm_names(config: Config) -> tuple[WeightRule, ...]:
    """The same name stands for different places in layers of either kind."""
    found: list[WeightRule] = []
    for index, kind in enumerate(kinds_of(config)):
        layer, ours = f"(model.|)layers.{index}.", f"layers.{index}."
        before = "(post_attention_layernorm|feedforward_layer_norm).weight"
        if kind == "full_attention":
            found.append(rule(layer + before, ours + "post_mixer_norm.weight"))
            found.append(rule(layer + "post_feedforward_layernorm.weight", ours + "post_ffn_norm.weight"))
        else:
            found.append(rule(layer + "(input_layernorm|attention_layer_norm).weight", ours + "mixer_norm.weight"))
            found.append(rule(layer + before, ours + "ffn_norm.weight"))
    return tuple(found)


_A, _P = "(model.|)layers.{i}.linear_attn.", "layers.{i}.mixer."
_NAMES = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "g", "b_proj": "b", "a_proj": "f", "o_proj": "o"}
DELTA_RULES = (
    *(rule(f"{_A}{theirs}.weight", f"{_P}{ours}.weight") for theirs, ours in _NAMES.items()),
    *(rule(f"{_A}{part}_conv1d.weight", f"{_P}conv.{part}.weight") for part in "qkv"),
    rule(_A + "conv1d.weight", *(f"{_P}conv.{part}.weight" for part in "qkv")),
    rule(_A + "A_log", _P + "decay"),
    rule(_A + "dt_bias", _P + "dt_bias"),
    rule(_A + "o_norm.weight", _P + "norm.weight"),
)
RULES = ENDS + ATTENTION + QK_NORM + DELTA_RULES + DENSE
FAMILY = Family(name="olmo_hybrid", model_types=("olmo_hybrid",), spec=spec, rules=RULES, left_out=norm_names)
