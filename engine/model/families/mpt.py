"""MPT: linear biases in place of positions, LayerNorms and projections without biases, queries to values clamped."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import decoder, gqa, in_layers, layer_norm
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, Alibi, ModelSpec


def slopes(num_heads: int) -> tuple[float, ...]:
    """A geometric row over the next power of two; of fewer heads, every second of it first, then those between."""
    whole = 1 << (num_heads - 1).bit_length()
    row = [2.0 ** (-8 * (head + 1) / whole) for head in range(whole)]
    return tuple(row if whole == num_heads else (row[1::2] + row[::2])[:num_heads])


def spec(config: Config) -> ModelSpec:
    older = {"hidden_size": "d_model", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"}
    config.rename(older)
    own = config.sub("attn_config")
    for key, value in (("alibi", True), ("alibi_bias_max", 8), ("qk_ln", False), ("prefix_lm", False)):
        own.only(key, value, default=value)
    own.only("attn_type", "multihead_attention", default="multihead_attention")
    for key in ("attn_impl", "attn_pdrop", "attn_uses_sequence_id", "model_type"):
        own.get(key)  # how it is computed, and of training
    config.only("no_bias", True, default=True)
    config.only("expansion_ratio", 4, default=4)
    config.only("logit_scale", None)
    unused = "learned_pos_emb emb_pdrop embedding_fraction init_device init_config norm_type verbose"
    for key in unused.split():
        config.get(key)  # without effect beside the biases, or of training
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    attention = gqa(
        config,
        rope=None,
        alibi=Alibi(slopes=slopes(heads)),
        scale=float(own.get("softmax_scale", (hidden / heads) ** -0.5)),
        clip=own.get("clip_qkv"),
    )
    feed_forward = MLP(intermediate=4 * hidden, activation="gelu", gated=False)
    norm = layer_norm(config, "layer_norm_epsilon", bias=False)
    reach = int(config.get("max_seq_len", 2048))
    return decoder(config, "mpt", attention, feed_forward, norm=norm, tie_default=True, max_positions=reach)


_L = "transformer.blocks.{i}."
_NAMES = {
    "norm_1": "mixer_norm",
    "norm_2": "ffn_norm",
    "attn.out_proj": "mixer.o",
    "ffn.up_proj": "ffn.up",
    "ffn.down_proj": "ffn.down",
}
RULES = (
    rule("transformer.wte.weight", "embed.weight"),
    rule("transformer.norm_f.weight", "norm.weight"),
    rule("lm_head.weight", "head.weight"),
    rule(_L + "attn.Wqkv.weight", *(f"layers.{{i}}.mixer.{part}.weight" for part in "qkv")),
    *in_layers(_NAMES, _L),
)
FAMILY = Family(name="mpt", model_types=("mpt",), spec=spec, rules=RULES)
