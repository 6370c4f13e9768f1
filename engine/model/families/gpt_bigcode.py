"""StarCoder and SantaCoder: GPT-2 with one key head for all queries, matrices stored output by input."""

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families import gpt2
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.rules import WeightRule, ignored, rule
from firstlight.engine.model.spec import Attention, Mixer, ModelSpec


def _one(config: Config) -> bool:
    return bool(config.get("multi_query", True))


def _with_keys(mixer: Mixer | None, one: bool) -> Attention:
    assert isinstance(mixer, Attention)
    return msgspec.structs.replace(mixer, num_kv_heads=1) if one else msgspec.structs.replace(mixer, fused=True)


def spec(config: Config) -> ModelSpec:
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner"):
        config.get(key)  # in which type an exact computation is done
    for key in (
        "num_key_value_heads",
        "validate_runner_input",
        "pre_allocate_kv_cache",
        "max_sequence_length",
        "max_batch_size",
    ):
        config.get(key)  # follows from multi_query; of code that is gone
    plain = gpt2.spec(config)
    layers = (msgspec.structs.replace(layer, mixer=_with_keys(layer.mixer, _one(config))) for layer in plain.layers)
    return msgspec.structs.replace(plain, family="gpt_bigcode", layers=tuple(layers))


_T = "(transformer.|)"
_L, _P = _T + "h.{i}.", "layers.{i}."
_NAMES = {
    "ln_1": "mixer_norm",
    "ln_2": "ffn_norm",
    "attn.c_proj": "mixer.o",
    "mlp.c_fc": "ffn.up",
    "mlp.c_proj": "ffn.down",
}
RULES = (
    rule(_T + "wte.weight", "embed.weight"),
    rule(_T + "wpe.weight", "positions.weight"),
    rule("lm_head.weight", "head.weight"),
    *(rule(f"{_T}ln_f.{kind}", f"norm.{kind}") for kind in ("weight", "bias")),
    *(rule(f"{_L}{t}.{kind}", f"{_P}{o}.{kind}") for t, o in _NAMES.items() for kind in ("weight", "bias")),
    ignored(_L + "attn.(bias|masked_bias)", "the causal mask, computed"),
)


def projections(config: Config) -> tuple[WeightRule, ...]:
    """With a single key head q, k and v stand one behind the other, else those of each head."""
    parts = [f"{_P}mixer.{part}" for part in "qkv"] if _one(config) else [f"{_P}mixer.qkv"]
    return tuple(rule(f"{_L}attn.c_attn.{kind}", *(f"{part}.{kind}" for part in parts)) for kind in ("weight", "bias"))


FAMILY = Family(
    name="gpt_bigcode",
    model_types=("gpt_bigcode",),
    spec=spec,
    rules=RULES,
    silent={"gpt_bigcode": {"activation_function": "gelu_pytorch_tanh"}},
    left_out=projections,
)
