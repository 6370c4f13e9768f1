"""LFM2, dense and with experts: short gated convolutions, some layers of attention with QK-norm."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import decoder, gqa, head_dim, in_layers, one_a_layer, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import mixture, router
from firstlight.engine.model.rules import rule
from firstlight.engine.model.spec import MLP, FeedForward, Mixer, ModelSpec, Norm, ShortConv

# Keys of the first releases that repeat others, or speak of how weights were drawn.
IDLE = """block_dim block_mlp_init_scale block_norm_eps block_out_init_scale block_use_xavier_init conv_dim conv_dim_out
conv_use_xavier_init num_heads""".split()


def width(config: Config) -> int:
    """Channels of the dense feed-forward; the first releases state them before a correction that is made here."""
    channels = int(config.get("block_ff_dim", config.get("intermediate_size", 12288)))
    multiple, factor = int(config.get("block_multiple_of", 256)), config.stated("block_ffn_dim_multiplier", absent=1.0)
    if not config.get("block_auto_adjust_ff_dim", config.need("model_type") == "lfm2"):
        return channels
    channels = int(2 * channels / 3)
    return channels if factor is None else multiple * -(-int(factor * channels) // multiple)


def attention_layers(config: Config) -> set[int]:
    count, kinds = config.size("num_hidden_layers"), config.get("layer_types")
    indices = config.get("full_attn_idxs", list(range(count)))
    kinds = kinds or ["full_attention" if index in indices else "conv" for index in range(count)]
    kinds = one_a_layer(config, "layer_types", kinds, "full_attention", "conv")
    return {index for index, kind in enumerate(kinds) if kind == "full_attention"}


def spec(config: Config) -> ModelSpec:
    for key in IDLE:
        config.get(key)
    config.only("block_use_swiglu", True, default=True)
    config.only("use_pos_enc", True, default=True)
    norm = Norm(eps=config.positive("norm_eps", config.get("norm_eps", 1e-5)))
    attention = gqa(config, rope=rope(config, head_dim(config), 1e6), qk_norm=norm)
    bias, full = bool(config.get("conv_bias", False)), attention_layers(config)
    conv = ShortConv(width=config.size("hidden_size"), conv=int(config.get("conv_L_cache", 3)), bias=bias)
    dense, moe, first = MLP(intermediate=width(config), activation="silu"), None, config.size("num_hidden_layers")
    if config.need("model_type") == "lfm2_moe":
        chooses = router(
            config,
            scoring="sigmoid",
            normalize=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            correction_bias=bool(config.get("use_expert_bias", True)),
            eps=1e-6,
        )
        moe, first = mixture(config, chooses, activation="silu"), int(config.get("num_dense_layers", 2))

    def mixer(index: int) -> Mixer:
        return attention if index in full else conv

    def feed_forward(index: int) -> FeedForward:
        return dense if moe is None or index < first else moe

    tied = bool(config.get("tie_embedding", config.get("tie_word_embeddings", True)))
    return decoder(config, "lfm2", mixer, feed_forward, norm=norm, tied_head=tied)


_L, _F, _P = "model.layers.{i}.", "layers.{i}.ffn.", "layers.{i}.mixer."
PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
RULES = (
    rule("model.embed_tokens.weight", "embed.weight"),
    rule("model.embedding_norm.weight", "norm.weight"),
    rule("lm_head.weight", "head.weight"),
    *in_layers({"operator_norm": "mixer_norm", "ffn_norm": "ffn_norm"}),
    *in_layers({f"self_attn.{part}_proj": f"mixer.{part}" for part in "qkv"} | {"self_attn.out_proj": "mixer.o"}),
    *in_layers({f"self_attn.{part}_layernorm": f"mixer.{part}_norm" for part in "qk"}),
    *(rule(f"{_L}conv.in_proj.{kind}", *(f"{_P}{part}.{kind}" for part in "bcu")) for kind in ("weight", "bias")),
    *in_layers({"conv.conv": "mixer.conv", "conv.out_proj": "mixer.o"}),
    *in_layers({f"feed_forward.{theirs}": f"ffn.{ours}" for ours, theirs in PARTS.items()}),
    *(  # exporters of quantized weights call them gate_proj and the like
        rule(f"{_L}feed_forward.experts.{{e}}.({t}|{o}_proj).weight", f"{_F}experts.{{e}}.{o}.weight")
        for o, t in PARTS.items()
    ),
    rule(
        _L + "feed_forward.experts.gate_up_proj",
        _F + "experts.{e}.gate.weight",
        _F + "experts.{e}.up.weight",
        stacked=True,
    ),
    rule(_L + "feed_forward.experts.down_proj", _F + "experts.{e}.down.weight", stacked=True),
    rule(_L + "feed_forward.gate.weight", _F + "router.weight"),
    rule(_L + "feed_forward.expert_bias", _F + "router.correction_bias"),
)
FAMILY = Family(
    name="lfm2",
    model_types=("lfm2", "lfm2_moe"),
    spec=spec,
    rules=RULES,
    silent={"lfm2": {"num_key_value_heads": 8}, "lfm2_moe": {"num_key_value_heads": 8, "intermediate_size": 7168}},
)
