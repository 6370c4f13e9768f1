"""GPT-J: attention and feed-forward side by side behind one norm, neighbouring pairs of a part of each head rotated."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ENDS, activation, decoder, gqa, in_layers, layer_norm
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import ignored, rule
from firstlight.engine.model.spec import MLP, ModelSpec, Rope

USUAL = {  # the usual keys -> GPT-J's
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def spec(config: Config) -> ModelSpec:
    config.rename(USUAL)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    if hidden % heads:
        config.refuse("n_head", heads, f"a divisor of n_embd {hidden}")
    for key in ("attn_pdrop", "rotary", "scale_attn_weights", "gradient_checkpointing", "summary_type"):
        config.get(key)  # of training or of a classification head, or without effect in the reference
    for key in ("summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout"):
        config.get(key)
    rotated = config.size("rotary_dim")
    if rotated > hidden // heads:
        config.refuse("rotary_dim", rotated, f"at most the {hidden // heads} of a head")
    attention = gqa(config, num_kv_heads=heads, rope=Rope(theta=10000.0, dim=rotated, interleaved=True))
    feed_forward = MLP(
        intermediate=int(config.get("n_inner", 4 * hidden)),
        activation=activation(config, "activation_function", "gelu_new"),
        gated=False,
        bias=True,
    )
    return decoder(
        config,
        "gptj",
        attention,
        feed_forward,
        norm=layer_norm(config, "layer_norm_epsilon"),
        norms=("mixer_norm",),
        layer={"parallel": True},
        head_bias=True,
    )


_T = "(transformer.|)"
_NAMES = {
    "ln_1": "mixer_norm",
    "attn.q_proj": "mixer.q",
    "attn.k_proj": "mixer.k",
    "attn.v_proj": "mixer.v",
    "attn.out_proj": "mixer.o",
    "mlp.fc_in": "ffn.up",
    "mlp.fc_out": "ffn.down",
}
RULES = (
    *ENDS,
    rule(_T + "wte.weight", "embed.weight"),
    *(rule(f"{_T}ln_f.{kind}", f"norm.{kind}") for kind in ("weight", "bias")),
    *in_layers(_NAMES, _T + "h.{i}."),
    ignored(_T + "h.{i}.attn.(bias|masked_bias|embed_positions)", "mask and positions, computed"),
)
FAMILY = Family(name="gptj", model_types=("gptj",), spec=spec, rules=RULES, silent={"gptj": {"rotary_dim": 64}})
