"""DeepSeek-V3.2 and GLM-5: V3 with attention over keys that an indexer chooses; GLM-5.2 shares a choice over layers."""

from types import MappingProxyType

import msgspec

from firstlight.engine.model.config import Config
from firstlight.engine.model.families.common import DENSE, TRUNK, decoder, in_layers, mlp, one_a_layer, rms
from firstlight.engine.model.families.deepseek_v3 import MLA_RULES, attention, experts, extra_layers, with_extra_layers
from firstlight.engine.model.families.family import Family
from firstlight.engine.model.families.mixtures import MIXTURE, sparse_layers
from firstlight.engine.model.spec import MLA, Indexer, ModelSpec, Norm

# Whether the indexer's pairs are neighbours; the epsilon of its norm.
DEFAULTS = MappingProxyType({"deepseek_v32": (False, 1e-6), "glm_moe_dsa": (True, 1e-5)})


def _own(config: Config) -> list[bool]:
    """Which layers have an indexer of their own; the others take the choice of the last that has."""
    count = config.size("num_hidden_layers")
    every = max(int(config.get("index_topk_freq", 1)), 1)
    skipped = int(config.get("index_skip_topk_offset", 2))
    regular = ["full" if max(index - skipped + 1, 0) % every == 0 else "shared" for index in range(count)]
    pattern = config.get("index_topk_pattern")
    names = {"F": "full", "S": "shared"}
    kinds = config.get("indexer_types", [names.get(one, one) for one in pattern] if pattern else regular)
    if one_a_layer(config, "indexer_types", kinds, "full", "shared")[0] != "full":
        config.refuse("indexer_types", kinds, "an indexer in the first layer: the others take the choice of one before")
    return [kind == "full" for kind in kinds]


def spec(config: Config) -> ModelSpec:
    model_type = str(config.need("model_type"))
    neighbours, eps = DEFAULTS[model_type]
    latent, dense, moe = attention(config), mlp(config), experts(config)
    for kind in config.get("layer_types", []):
        if kind != "indexed_attention":
            config.unsupported("layer_types", kind, "indexed_attention")
    config.only("mlp_bias", False, default=False)
    config.get("index_share_for_mtp_iteration")  # of the extra layers, which are not run
    if latent.q_lora_rank is None:
        config.refuse("q_lora_rank", None, "a positive whole number: the indexer reads the query's latent")
    assert latent.rope is not None
    neighbours = bool(config.get("indexer_rope_interleave", neighbours))
    indexer = Indexer(
        num_heads=config.size("index_n_heads"),
        head_dim=config.size("index_head_dim"),
        topk=config.size("index_topk"),
        norm=Norm(kind="layer", eps=1e-6, bias=True),
        rope=msgspec.structs.replace(latent.rope, interleaved=neighbours),
    )
    own, sparse = _own(config), sparse_layers(config, 3)
    mixers: dict[bool, MLA] = {
        one: msgspec.structs.replace(latent, indexer=msgspec.structs.replace(indexer, own=one)) for one in (True, False)
    }
    plain = decoder(
        config,
        model_type,
        lambda i: mixers[own[i]],
        lambda i: moe if sparse[i] else dense,
        norm=rms(config, eps),
    )
    return with_extra_layers(
        config, plain, msgspec.structs.replace(plain.layers[-1], mixer=mixers[True]), model_type == "deepseek_v32"
    )


_NAMES = {"wq_b": "q", "wk": "k", "k_norm": "k_norm", "weights_proj": "weights"}
INDEXER_RULES = in_layers({f"self_attn.indexer.{theirs}": f"mixer.indexer.{ours}" for theirs, ours in _NAMES.items()})
RULES = TRUNK + MLA_RULES + INDEXER_RULES + DENSE + MIXTURE
FAMILY = Family(
    name="deepseek_v32",
    model_types=tuple(DEFAULTS),
    spec=spec,
    rules=RULES,
    silent={
        "deepseek_v32": {"n_group": 8, "topk_group": 4, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
        "glm_moe_dsa": {"q_lora_rank": 2048, "n_shared_experts": 1, "routed_scaling_factor": 2.5},
    },
    left_out=extra_layers,
)
