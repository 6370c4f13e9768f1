"""Quantization options that are known not to affect how weights are stored. No torch.

Every other option that no reader asked for is named in a finding: it may be about numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

HARMLESS = frozenset(
    (
        # who wrote it, and how long it took
        *("quant_method", "method", "producer", "provider", "version", "meta", "uri", "name", "status", "model_type"),
        *("autoround_version", "quantization_status", "global_compression_ratio", "is_checkpoint_fp8_serialized"),
        *("_load_in_8bit", "_load_in_4bit", "model_name_or_path", "model_file_base_name", "model_seqlen", "tokenizer"),
        # how codes were looked for
        *("dataset", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "iters", "lr"),
        *("act_group_aware", "hyb_act", "batch_size", "nsamples", "seqlen", "minmax_lr", "enable_quanted_input"),
        *("block_name_to_quantize", "module_name_preceding_first_block", "pad_token_id", "cache_block_outputs"),
        *("gradient_accumulate_steps", "enable_minmax_tuning", "low_gpu_mem_usage", "to_quant_block_names"),
        *("lm_head", "enable_alg_ext", "sym", "desc_act"),
        *("offload_to_disk", "offload_to_disk_path", "parallel_packing", "gptaq", "foem", "failsafe", "fallback"),
        *("weight_scale_method", "scale_fmt", "bits", "group_size", "has_zero_point", "w_bit", "q_group_size"),
        *("amp", "enable_norm_bias_tuning", "scale_dtype", "sampler", "enable_torch_compile", "optimizer"),
        *("not_use_best_mse", "dynamic_max_gap", "enable_deterministic_algorithms"),
        # what computes with them
        *(
            "backend",
            "do_fuse",
            "fuse_max_seq_len",
            "modules_to_fuse",
            "exllama_config",
            "use_exllama",
            "run_compressed",
        ),
        *("disable_exllama", "use_cuda_fp16", "max_input_length", "dequantize", "packed_modules_mapping"),
        *("modules_to_convert", "expert_backend", "dequantize_dtype"),
        # activations and caches, which are not quantized here
        *("activation_scheme", "activation_scale_ub", "kv_cache_scheme", "kv_cache_quant_algo", "act_bits", "act_sym"),
        *("act_data_type", "act_dynamic", "act_group_size", "input_dtype", "act_per_tensor", "weight_per_tensor"),
    )
)


def unread(options: Mapping[str, object], seen: Iterable[str]) -> tuple[str, ...]:
    """Those that say something, that nobody asked for and that are not known to be harmless."""
    known = HARMLESS.union(seen)
    return tuple(
        sorted(key for key, value in options.items() if key not in known and value not in (None, False, {}, []))
    )
