"""From a GGUF file to a checkpoint directory: values, names, tokenizer, and a directory that is whole or made anew."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

HEADS, KV_HEADS, HIDDEN, FEED_FORWARD, LAYERS = 4, 2, 64, 96, 2


@pytest.fixture(scope="module")
def fetch(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("fetch_smollm2")


@pytest.fixture(scope="module")
def gguf_and_weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A GGUF file of the same kind, with two small layers, and the values in it under the names of transformers."""
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize, quantize
    from tokenizers.pre_tokenizers import ByteLevel

    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "Ġc", "at", "Ġcat"]
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ c", "a t", "Ġc at"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")
    rng = np.random.default_rng(0)
    expected = {}
    kv_rows = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": HIDDEN, "attn_k": kv_rows, "attn_v": kv_rows, "ffn_gate": FEED_FORWARD, "attn_norm": 0}
    shapes |= {"attn_output": HIDDEN, "ffn_up": FEED_FORWARD, "ffn_down": HIDDEN, "ffn_norm": 0}
    stored = {f"blk.{layer}.{kind}": rows for layer in range(LAYERS) for kind, rows in shapes.items()}
    for name, rows in {"token_embd": len(tokens), **stored, "output_norm": 0}.items():
        columns = FEED_FORWARD if name.endswith("ffn_down") else HIDDEN
        values = rng.standard_normal((rows, columns) if rows else columns).astype(np.float32)
        if name.endswith(("attn_q", "attn_k")):
            halves = values.reshape(rows // 16, 2, 8, columns)
            paired = halves.swapaxes(1, 2).reshape(rows, columns)  # as llama.cpp's converter does
        else:
            paired = values
        if rows:
            kind = GGMLQuantizationType.Q8_0 if name == "token_embd" else GGMLQuantizationType.Q4_1
            packed = quantize(paired, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            paired = dequantize(packed, kind)
            if name.endswith(("attn_q", "attn_k")):
                values = paired.reshape(rows // 16, 8, 2, columns).swapaxes(1, 2).reshape(rows, columns)
            else:
                values = paired
        else:
            writer.add_tensor(f"{name}.weight", paired)
        expected[f"{name}.weight"] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, expected


@pytest.fixture(scope="module")
def converted(
    fetch: ModuleType,
    gguf_and_weights: tuple[Path, dict[str, np.ndarray]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    directory = tmp_path_factory.mktemp("smollm2")
    fetch.convert(gguf_and_weights[0], directory)
    return directory


def test_transformers_loads_what_the_file_holds(
    fetch: ModuleType, converted: Path, gguf_and_weights: tuple[Path, dict[str, np.ndarray]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(converted)
    state = model.state_dict()
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    for name, values in gguf_and_weights[1].items():
        found = state.pop(fetch.name_of(name))
        assert torch.equal(found, torch.from_numpy(values).to(torch.bfloat16)), name
    assert set(state) == {"lm_head.weight"}


def test_the_head_is_not_stored_twice(converted: Path) -> None:
    index = json.loads((converted / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"]
    assert "model.embed_tokens.weight" in index["weight_map"]


def test_the_tokenizer_splits_digits_and_keeps_every_byte(converted: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert tokenizer.tokenize("a cat 12") == ["a", "Ġcat", "Ġ", "1", "2"]
    text = "naïve 🐱 <|im_start|>"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|im_end|>") == [2]
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "<|im_start|>hi<|im_end|>"
    )


def test_a_directory_is_whole_only_with_all_its_bytes(fetch: ModuleType, converted: Path) -> None:
    assert fetch.is_whole(converted)
    assert not fetch.is_whole(converted / "nowhere")
    tokenizer = converted / "tokenizer.json"
    content = tokenizer.read_bytes()
    tokenizer.write_bytes(content[:-1])
    assert not fetch.is_whole(converted)
    tokenizer.write_bytes(content)
    manifest = converted / "source.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content.replace(fetch.GGUF_SHA256.encode(), b"0" * 64))
    assert not fetch.is_whole(converted)
    manifest.write_bytes(content)
    assert fetch.is_whole(converted)


@pytest.mark.smollm2
@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(fetch: ModuleType) -> None:
    directory = fetch.default_directory()
    if not fetch.is_whole(directory):
        pytest.skip("python data/samples/fetch_smollm2.py has not been run")
    assert len(list(directory.glob("*.safetensors"))) >= 2
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(generated[0, inputs["input_ids"].shape[1] :])
