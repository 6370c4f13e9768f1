"""The tensors of DeepSeek-V4: the releases' own names (`attn.wq_a`, `hc_attn_fn`) and transformers' (`attn_hc.fn`).

No family stands here.
"""

from firstlight.engine.model.rules import ignored, rule

_L, _A, _F = "(model.|)layers.{i}.", "(model.|)layers.{i}.(attn|self_attn).", "(model.|)layers.{i}.(ffn|mlp)."
_SHARES = {"fn": "project", "base": "base", "scale": "scale"}
_COMPRESSOR = {
    "(wkv|kv_proj).weight": "kv.weight",
    "(wgate|gate_proj).weight": "gate.weight",
    "(ape|position_bias)": "position_bias",
    "(norm|kv_norm).weight": "norm.weight",
}
_NAMES = {
    _L + "(attn_norm|input_layernorm).weight": "mixer_norm.weight",
    _L + "(ffn_norm|post_attention_layernorm).weight": "ffn_norm.weight",
    _A + "(wq_a|q_a_proj).weight": "mixer.q_a.weight",
    _A + "(q_norm|q_a_norm).weight": "mixer.q_a_norm.weight",
    _A + "(wq_b|q_b_proj).weight": "mixer.q_b.weight",
    _A + "(wkv|kv_proj).weight": "mixer.kv.weight",
    _A + "(norm|kv_norm).weight": "mixer.kv_norm.weight",
    _A + "(wo_a|o_a_proj).weight": "mixer.o_a.weight",
    _A + "(wo_b|o_b_proj).weight": "mixer.o_b.weight",
    _A + "(attn_sink|sinks)": "mixer.sinks",
    _A + "(indexer.wq_b|compressor.indexer.q_b_proj).weight": "mixer.indexer.q.weight",
    _A + "(indexer|compressor.indexer.scorer).weights_proj.weight": "mixer.indexer.weights.weight",
    _F + "gate.weight": "ffn.router.weight",
    _F + "gate.(bias|e_score_correction_bias)": "ffn.router.correction_bias",
    _F + "gate.tid2eid": "ffn.router.table",
    **{
        f"{_A}{block}.{theirs}": f"mixer.{own}.{ours}"
        for block, own in (
            ("compressor", "compressor"),
            ("(indexer.compressor|compressor.indexer)", "indexer.compressor"),
        )
        for theirs, ours in _COMPRESSOR.items()
    },
    **{
        f"{_L}(hc_{site}_|{site}_hc.){theirs}": f"residual.{own}.{ours}"
        for site, own in (("attn", "mixer"), ("ffn", "ffn"))
        for theirs, ours in _SHARES.items()
    },
    **{
        f"{_F}{theirs}({old}|{new}_proj).weight": f"ffn.{ours}{new}.weight"
        for theirs, ours in (("experts.{e}.", "experts.{e}."), ("shared_experts.", "shared."))
        for old, new in (("w1", "gate"), ("w3", "up"), ("w2", "down"))
    },
}
_E = "layers.{i}.ffn.experts.{e}."
RULES = (
    rule("(model.|)(embed|embed_tokens).weight", "embed.weight"),
    rule("(model.|)norm.weight", "norm.weight"),
    rule("(lm_head|head).weight", "head.weight"),
    *(rule(f"(model.|)(hc_head.hc_|hc_head_){theirs}", f"residual.read.{ours}") for theirs, ours in _SHARES.items()),
    *(rule(theirs, "layers.{i}." + ours) for theirs, ours in _NAMES.items()),
    rule(_F + "experts.gate_up_proj", _E + "gate.weight", _E + "up.weight", stacked=True),
    rule(_F + "experts.down_proj", _E + "down.weight", stacked=True),
    ignored("(model.|)mtp.{*}", "multi-token-prediction layer, not used for inference"),
)
