"""GPT-2: learned positions, LayerNorms with biases, and matrices stored input by output."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import activation, computed_dtype, layer_norm
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import ignored, rule
from firstlight.engine.model.spec import MLP, Attention, LayerSpec, ModelSpec


def spec(config: Config) -> ModelSpec:
    hidden, heads = config.size("n_embd", "hidden_size"), config.size("n_head", "num_attention_heads")
    count, positions = config.size("n_layer", "num_hidden_layers"), config.size("n_positions", "n_ctx")
    if hidden % heads:
        config.refuse("n_head", heads, f"a divisor of n_embd {hidden}")
    for key in ("n_ctx", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"):
        config.get(key)  # the first repeats n_positions, the others are of a classification head
    for key in ("summary_first_dropout", "attn_pdrop", "layer_norm_epsilon", "reorder_and_upcast_attn"):
        config.get(key)  # dropout, or the order of an exact computation
    config.only("add_cross_attention", False, default=False)
    norm = layer_norm(config, "layer_norm_epsilon")
    feed_forward = MLP(
        intermediate=int(config.get("n_inner", 4 * hidden)),
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    scale = (hidden // heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    by_depth = bool(config.get("scale_attn_by_inverse_layer_idx", False))
    layers = (
        LayerSpec(
            mixer=Attention(
                num_heads=heads,
                num_kv_heads=heads,
                head_dim=hidden // heads,
                scale=scale / (index + 1 if by_depth else 1),
                qkv_bias=True,
                output_bias=True,
            ),
            ffn=feed_forward,
            mixer_norm=norm,
            ffn_norm=norm,
        )
        for index in range(count)
    )
    return ModelSpec(
        family="gpt2",
        vocab_size=config.size("vocab_size"),
        hidden=hidden,
        layers=tuple(layers),
        final_norm=norm,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        max_positions=positions,
        learned_positions=positions,
        dtype=computed_dtype(config, "float32"),
    )


_T = "(transformer.|)"
_L = _T + "h.{i}."
_QKV = tuple(f"layers.{{i}}.mixer.{part}" for part in "qkv")
_MATRICES = {"attn.c_proj": "mixer.o", "mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}
_NORMS = {"ln_1": "mixer_norm", "ln_2": "ffn_norm"}
RULES = (
    rule(_T + "wte.weight", "embed.weight"),
    rule(_T + "wpe.weight", "positions.weight"),
    rule("lm_head.weight", "head.weight"),
    *(rule(f"{_T}ln_f.{kind}", f"norm.{kind}") for kind in ("weight", "bias")),
    *(rule(f"{_L}{t}.{kind}", f"layers.{{i}}.{o}.{kind}") for t, o in _NORMS.items() for kind in ("weight", "bias")),
    rule(_L + "attn.c_attn.weight", *(f"{part}.weight" for part in _QKV), split_dim=1, transpose=True),
    rule(_L + "attn.c_attn.bias", *(f"{part}.bias" for part in _QKV)),
    *(rule(f"{_L}{t}.weight", f"layers.{{i}}.{o}.weight", transpose=True) for t, o in _MATRICES.items()),
    *(rule(f"{_L}{t}.bias", f"layers.{{i}}.{o}.bias") for t, o in _MATRICES.items()),
    ignored(_L + "attn.(bias|masked_bias)", "the causal mask, computed"),
)
FAMILY = Family(name="gpt2", model_types=("gpt2",), spec=spec, rules=RULES)
