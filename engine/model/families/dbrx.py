"""DBRX: one matrix for queries, keys and values, clamped; sixteen experts whose matrices lie one behind the other."""

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import ACTIVATIONS, computed_dtype, rope
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import WeightRule, rule
from firstlight.engine.model.spec import Attention, LayerSpec, ModelSpec, MoE, Norm, Rope, Router


def _experts(config: Config) -> MoE:
    act = config.sub("ffn_act_fn").only("name", *ACTIVATIONS, default="silu")
    config.get("hidden_size"), config.get("moe_jitter_eps"), config.get("moe_loss_weight")  # known; in training alone
    order = config.stated("moe_normalize_expert_weights", absent=1.0)
    if order not in (None, 1, 1.0):
        config.unsupported("moe_normalize_expert_weights", order, "1, weights that sum to one, or null")
    return MoE(
        num_experts=config.size("moe_num_experts"),
        intermediate=config.size("ffn_hidden_size"),
        activation=ACTIVATIONS[act],
        router=Router(top_k=config.size("moe_top_k"), normalize=order is not None, eps=0.0),
    )


def _positions(config: Config, attention: Config, dim: int) -> Rope:
    """The base stands with the attention in releases, and on top in newer files."""
    config.assume(max_position_embeddings=config.size("max_seq_len", "max_position_embeddings"))
    return rope(config, dim, float(attention.get("rope_theta", 10000.0)))


def spec(config: Config) -> ModelSpec:
    hidden, heads = config.size("d_model", "hidden_size"), config.size("n_heads", "num_attention_heads")
    if hidden % heads:
        config.refuse("n_heads", heads, f"a divisor of d_model {hidden}")
    given = config.sub("attn_config")
    given.get("attn_pdrop"), config.get("emb_pdrop"), config.get("num_key_value_heads")  # the last repeats kv_n_heads
    dim, norm = hidden // heads, Norm(kind="layer", eps=1e-5)
    attention = Attention(
        num_heads=heads,
        num_kv_heads=int(given.get("kv_n_heads", 1)),
        head_dim=dim,
        scale=dim**-0.5,
        rope=_positions(config, given, dim),
        clip=given.get("clip_qkv"),
    )
    experts = _experts(config.sub("ffn_config"))
    layer = LayerSpec(mixer=attention, ffn=experts, mixer_norm=norm, ffn_norm=norm)
    return ModelSpec(
        family="dbrx",
        vocab_size=config.size("vocab_size"),
        hidden=hidden,
        layers=(layer,) * config.size("n_layers", "num_hidden_layers"),
        final_norm=norm,
        tied_head=bool(config.get("tie_word_embeddings", False)),
        max_positions=config.size("max_seq_len", "max_position_embeddings"),
        dtype=computed_dtype(config),
    )


_L = "transformer.blocks.{i}."
_A = _L + "norm_attn_norm."


def names(config: Config) -> tuple[WeightRule, ...]:
    """A matrix of all experts is as many rows as they have channels together."""
    count = config.sub("ffn_config").size("moe_num_experts")

    def parts(ours: str) -> tuple[str, ...]:
        return tuple(f"layers.{{i}}.ffn.experts.{expert}.{ours}.weight" for expert in range(count))

    return (
        rule(_L + "ffn.experts.mlp.w1", *parts("gate")),
        rule(_L + "ffn.experts.mlp.v1", *parts("up")),
        rule(_L + "ffn.experts.mlp.w2", *parts("down"), transpose=True),
    )


RULES = (
    rule("transformer.wte.weight", "embed.weight"),
    rule("transformer.norm_f.weight", "norm.weight"),
    rule("lm_head.weight", "head.weight"),
    rule(_A + "norm_1.weight", "layers.{i}.mixer_norm.weight"),
    rule(_A + "norm_2.weight", "layers.{i}.ffn_norm.weight"),
    rule(_A + "attn.Wqkv.weight", *(f"layers.{{i}}.mixer.{part}.weight" for part in "qkv")),
    rule(_A + "attn.out_proj.weight", "layers.{i}.mixer.o.weight"),
    rule(_L + "ffn.router.layer.weight", "layers.{i}.ffn.router.weight"),
)
FAMILY = Family(name="dbrx", model_types=("dbrx",), spec=spec, rules=RULES, left_out=names)
