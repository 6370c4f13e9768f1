"""Products with weights that stay packed beside plain bfloat16, by kind of codes and rows; and decoding with either.

The first table is where `kernels/packed/kinds.py` has its figures from. Weights are read from memory, as in decoding.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstlight.engine.weights.synthesize import synthesize
from firstlight.kernels.packed.cases import Form
from tests.benchmarks.common import machine, median, seconds, setting, show, spread, take_turns
from tests.benchmarks.contestants import Firstlight

SHAPE = (2048, 4096)
ROWS = (1, 2, 4, 8, 16, 32)
BEYOND_CACHES_BYTES = 96 << 20  # as many copies of a weight as need this much
FORMS: Mapping[str, Form] = {
    "int2": Form("int2", (1, 32), torch.bfloat16),
    "int4": Form("int4", (1, 0), torch.bfloat16, words=True),
    "int4, groups of 32": Form("int4", (1, 32), torch.bfloat16, words=True),
    "int4 in small groups": Form("int4", (1, 16), torch.bfloat16, words=True),
    "int4, AWQ": Form("int4", (1, 128), torch.float16, zero=torch.int8),
    "int4 in any order": Form("int4", (1, 128), torch.float16, zero=torch.int8, ordered=True),
    "e2m1, MXFP4": Form("e2m1", (1, 32), torch.uint8),
    "e2m1 in small groups, NVFP4": Form("e2m1", (1, 16), torch.float8_e4m3fn, outer="by"),
    "int8": Form("int8", (1, 0), torch.bfloat16),
    "e4m3": Form("e4m3", (1, 0), torch.bfloat16),
    "e4m3, blocks": Form("e4m3", (128, 128)),
    "e5m2": Form("e5m2", (1, 0), torch.bfloat16),
}
MODEL: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
STORED: Mapping[str, Mapping[str, Any]] = {
    "AWQ int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "GPTQ int4": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False},
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
    "MXFP4": {"quant_method": "modelopt", "quant_algo": "MXFP4", "ignore": ["lm_head"]},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
BATCHES = (1, 4, 8, 16)
PROMPT_TOKENS, NEW_TOKENS = 16, 24


def products(repeats: int) -> list[dict[str, object]]:
    """For each kind and number of rows, the best time of a product, and its share of a plain one's."""
    from firstlight.kernels.linear.table import measured
    from firstlight.kernels.packed.native import linear_packed

    random = torch.Generator().manual_seed(0)
    copies = -(-BEYOND_CACHES_BYTES // (SHAPE[0] * SHAPE[1]))
    prepare = measured()
    plain = [prepare(torch.randn(SHAPE, generator=random).bfloat16(), None, ROWS) for _ in range(copies)]
    rows: list[dict[str, object]] = []
    for name, form in FORMS.items():
        weights = [form.make(SHAPE, random, torch.device("cpu")) for _ in range(copies)]
        packed: list[Callable[[Tensor], Tensor]] = [
            lambda x_TH, weight=weight: linear_packed(x_TH, weight) for weight in weights
        ]
        row: dict[str, object] = {"codes": name}
        for count in ROWS:
            x_TH = torch.randn(count, SHAPE[1], generator=random).bfloat16()
            best = dict.fromkeys(("plain", "packed"), float("inf"))
            with torch.inference_mode():
                for _ in range(repeats):
                    for way, own in (("plain", plain), ("packed", packed)):
                        best[way] = min(best[way], *(seconds(partial(one, x_TH)) for one in own))
            row[f"{count} rows"] = round(best["packed"] / best["plain"], 2)
            row[f"{count} rows, us"] = round(best["packed"] * 1e6)
        rows.append(row)
    return rows


def decoding(repeats: int, threads: int, homes: Mapping[str, Path]) -> list[dict[str, object]]:
    """Tokens per second of a model in each format, packed and unpacked, in turns."""
    rows: list[dict[str, object]] = []
    for name, home in homes.items():
        engines = {
            packed: Firstlight(home, max(BATCHES), PROMPT_TOKENS + NEW_TOKENS, threads=threads, packed=packed)
            for packed in ("never", "always")
        }
        for batch in BATCHES:
            runs = {
                packed: partial(engine.decode_rate, batch, PROMPT_TOKENS, NEW_TOKENS)
                for packed, engine in engines.items()
            }
            figures = take_turns(runs, repeats)
            rows.append(
                {
                    "stored": name,
                    "batch": batch,
                    **{f"{way}, tokens/s": round(median(figures[way]), 1) for way in runs},
                    "packed to unpacked": round(median(figures["always"]) / median(figures["never"]), 2),
                    "packed, lowest to highest": spread(figures["always"]),
                    "MB": " / ".join(str(engine.weight_bytes // 10**6) for engine in engines.values()),
                }
            )
    return rows


def main() -> None:
    given = setting(__doc__, None)
    torch.set_num_threads(given.threads)
    show("Products with packed weights, as a share of plain bfloat16", products(given.repeats), machine(given.threads))
    with tempfile.TemporaryDirectory() as place:
        homes = {name: Path(place) / name for name in STORED}
        for name, quantization in STORED.items():
            synthesize({**MODEL, "quantization_config": dict(quantization)}, homes[name], dtype="BF16")
        rows = decoding(given.repeats, given.threads, homes)
    show("Decoding with packed weights", rows, machine(given.threads), given.json_file)


if __name__ == "__main__":
    main()
