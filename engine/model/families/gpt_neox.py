"""GPT-NeoX and Pythia, Falcon and BLOOM: rows of q, k and v stand together head by head; blocks mostly side by side."""

from typing import Any

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import (
    PRE,
    activation,
    decoder,
    gqa,
    in_layers,
    layer_norm,
    plain_mlp,
    rope,
)
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.state_spaces import ENDLESS
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import MLP, Alibi, Blend, ModelSpec
from firstlight.engine.model.spec.alibi import slopes


def _base(config: Config, base: float) -> None:
    """The rotary base under the name that later releases have for it."""
    if "rope_parameters" not in config:
        config.assume(rope_theta=base)


def _neox(config: Config) -> ModelSpec:
    parallel, bias = bool(config.get("use_parallel_residual", True)), bool(config.get("attention_bias", True))
    heads = config.size("num_attention_heads")
    size = config.size("hidden_size") // heads
    _base(config, float(config.get("rotary_emb_base", 10000)))
    positions = rope(config, size, partial=float(config.get("rotary_pct", 0.25)))
    attention = gqa(config, num_kv_heads=heads, fused=True, rope=positions, qkv_bias=bias, output_bias=bias)
    feed_forward = plain_mlp(config, "gelu", bias=True)
    norm, layer = layer_norm(config, "layer_norm_eps"), {"parallel": parallel}
    return decoder(config, "gpt_neox", attention, feed_forward, norm=norm, layer=layer)


def _key_heads(config: Config) -> int:
    """Falcon's: as many as the file says in the newer layout, otherwise one or as many as query heads."""
    heads = config.size("num_attention_heads")
    several, one = int(config.get("num_kv_heads", heads)), bool(config.get("multi_query", True))
    return several if config.get("new_decoder_architecture", False) else 1 if one else heads


def _falcon(config: Config) -> ModelSpec:
    config.get("apply_residual_connection_post_layernorm")  # without effect in the reference
    newer, biased = bool(config.get("new_decoder_architecture", False)), bool(config.get("alibi", False))
    parallel = bool(config.get("parallel_attn", True))
    heads, bias = config.size("num_attention_heads"), bool(config.get("bias", False))
    _base(config, 10000.0)
    for key in ("rope_parameters", "rope_theta", "rope_scaling") if biased else ():
        config.get(key)  # there, but without effect
    size, key_heads = config.size("hidden_size") // heads, _key_heads(config)
    attention = gqa(
        config,
        num_kv_heads=key_heads,
        head_dim=size,
        scale=size**-0.5,
        rope=None if biased else rope(config, size),
        alibi=Alibi(slopes=slopes(heads), scale=size**-0.5, narrow=True) if biased else None,
        fused=key_heads > 1,  # of one head the rows are simply q, k, v
        qkv_bias=bias,
        output_bias=bias,
    )
    feed_forward = MLP(
        intermediate=int(config.get("ffn_hidden_size", 4 * config.size("hidden_size"))),
        activation=activation(config, "activation", "gelu"),
        gated=False,
        bias=bias,
    )
    two = int(config.get("num_ln_in_parallel_attn", 2 if newer else 1)) == 2
    values: dict[str, Any] = {
        "norm": layer_norm(config, "layer_norm_epsilon"),
        "norms": PRE if two or not parallel else ("mixer_norm",),
        "layer": {"parallel": parallel},
        "tie_default": True,
    }
    return decoder(config, "falcon", attention, feed_forward, **values)


def _bloom(config: Config) -> ModelSpec:
    older = {"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    config.rename(older)
    config.only("n_embed", config.size("hidden_size"), default=config.size("hidden_size"))
    onto_norms = bool(config.get("apply_residual_connection_post_layernorm", False))
    if int(config.get("pretraining_tp", 1)) > 1:  # sums of slices, which leave biases out
        config.only("slow_but_exact", False, default=False)
    for key in ("slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "masked_softmax_fusion", "offset_alibi"):
        config.get(key)  # how sums are ordered, or of code that is gone
    hidden, norm = config.size("hidden_size"), layer_norm(config, "layer_norm_epsilon")
    attention = gqa(
        config,
        fused=True,
        rope=None,
        alibi=Alibi(slopes=slopes(config.size("num_attention_heads"))),
        qkv_bias=True,
        output_bias=True,
    )
    feed_forward = MLP(intermediate=4 * hidden, activation="gelu_tanh", gated=False, bias=True)
    values: dict[str, Any] = {"norm": norm, "embed_norm": norm, "tie_default": True, "max_positions": ENDLESS}
    if onto_norms:  # what a norm gives is the stream
        values["layer"] = {"blends": (Blend(keep=1.0, add=1.0), Blend(keep=1.0, add=1.0))}
    config.get("seq_length")  # what it was trained with; nothing ends there
    return decoder(config, "bloom", attention, feed_forward, **values)


READINGS = {"gpt_neox": _neox, "falcon": _falcon, "bloom": _bloom}


def spec(config: Config) -> ModelSpec:
    return READINGS[str(config.need("model_type"))](config)


_T = "(gpt_neox.|transformer.|)"
_L = _T + "(layers|h).{i}."
_NAMES = {
    "(input_layernorm|ln_attn)": "mixer_norm",
    "(post_attention_layernorm|ln_mlp)": "ffn_norm",
    "(attention|self_attention).query_key_value": "mixer.qkv",
    "(attention|self_attention).dense": "mixer.o",
    "mlp.dense_h_to_4h": "ffn.up",
    "mlp.dense_4h_to_h": "ffn.down",
}
RULES = (
    rule(_T + "(embed_in|word_embeddings).weight", "embed.weight"),
    *(rule(f"{_T}(final_layer_norm|ln_f).{kind}", f"norm.{kind}") for kind in ("weight", "bias")),
    *(rule(f"{_T}word_embeddings_layernorm.{kind}", f"embed_norm.{kind}") for kind in ("weight", "bias")),
    rule("(embed_out|lm_head).weight", "head.weight"),
    *in_layers(_NAMES, _L),
    ignored(_L + "attention.(bias|masked_bias|rotary_emb.inv_freq)", "mask and frequencies, computed"),
)


def one_key_head(config: Config) -> tuple[WeightRule, ...]:
    """With a single key head the rows of q, k and v stand one behind the other."""
    if config.need("model_type") != "falcon" or _key_heads(config) > 1:
        return ()
    parts = [f"layers.{{i}}.mixer.{part}" for part in "qkv"]
    name = _L + "self_attention.query_key_value."
    return tuple(rule(name + kind, *(f"{part}.{kind}" for part in parts)) for kind in ("weight", "bias"))


FAMILY = Family(name="gpt_neox", model_types=tuple(READINGS), spec=spec, rules=RULES, left_out=one_key_head)
