"""Token ids and texts equal those of transformers' AutoTokenizer on the same directory."""

import json
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from firstlight.engine.errors import Refused
from firstlight.engine.inputs.tokenizer import Tokenizer
from firstlight.engine.inputs.tokenizer_classes import REGISTERED_TYPES, effective_class
from tests.engine.inputs.toys import CORPUS, byte_level_backend, metaspace_backend, save_tokenizer, write_json
from tests.repo.tree import ROOT

TEXTS = (
    *CORPUS,
    "",
    " ",
    "  two leading",
    "trailing  ",
    "\n\n\ttabs\r\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<image><image>",
    "x <|im_end|> y",
    "1234567890 12 3",
    "e\u0301 and é",
    "\u0000\u200b\ufeff",
    "▁mark",
    "<0x41>",
    "<s>a</s>",
)


def assert_same(directory: Path, texts: tuple[str, ...] = TEXTS) -> tuple[Tokenizer, Any]:
    ours, theirs = Tokenizer.open(directory), AutoTokenizer.from_pretrained(directory)
    for text in texts:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert ours.size == len(theirs)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_ids == {id_ for id_, token in theirs.added_tokens_decoder.items() if token.special}
    return ours, theirs


@pytest.mark.parametrize("name", ["text", "bos", "spm", "vlm"])
def test_toys_equal_transformers(toys: Path, name: str) -> None:
    assert_same(toys / name)


def test_post_processor_adds_the_beginning_once(toys: Path) -> None:
    tokenizer = Tokenizer.open(toys / "bos")
    start = tokenizer.token_id("<|endoftext|>")
    assert tokenizer.encode("hi")[0] == start
    assert tokenizer.encode("hi", add_special_tokens=False)[0] != start


CLASSES = [
    ("GPT2Tokenizer", "llama", {}),
    ("GPT2Tokenizer", "gpt2", {"add_prefix_space": True}),
    ("GPT2TokenizerFast", "llama", {}),
    ("Qwen2Tokenizer", "qwen2", {}),
    ("Qwen2TokenizerFast", "qwen3_moe", {}),
    ("PreTrainedTokenizerFast", "qwen2", {}),
    ("PreTrainedTokenizerFast", "qwen3", {}),
    ("Qwen2Tokenizer", "llava", {}),
    ("Qwen3_5Tokenizer", "qwen3_5", {}),
    ("GPTNeoXTokenizer", "gpt_neox", {}),
    ("GPTNeoXTokenizerFast", "olmo", {}),
    ("CohereTokenizer", "cohere", {}),
    ("LlamaTokenizerFast", "llama", {}),
    ("LlamaTokenizer", "deepseek_v3", {}),
    ("TokenizersBackend", "mistral", {}),
    ("PreTrainedTokenizerFast", "kimi_k2", {}),
    (None, "qwen2", {}),
    (None, "llama", {}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("class_name", "model_type", "options"), CLASSES)
def test_classes_that_replace_the_pipeline(
    tmp_path: Path, class_name: str | None, model_type: str, options: dict[str, Any]
) -> None:
    """The toy's own pipeline differs from each class's: what counts is the class transformers takes."""
    from tokenizers import normalizers

    backend = byte_level_backend(bos=True)
    backend.normalizer = normalizers.Lowercase()
    directory = save_tokenizer(backend, tmp_path, class_name or "", **options)
    if class_name is None:
        write_json(directory / "tokenizer_config.json", options)
    write_json(directory / "config.json", {"model_type": model_type})
    ours, theirs = assert_same(directory)
    named = effective_class({"model_type": model_type}, {"tokenizer_class": class_name}, is_byte_level=True)
    assert ours.class_name == named
    assert type(theirs).__name__.removesuffix("Fast") == named or named == "PreTrainedTokenizerFast"
    is_replaced = type(theirs).__name__ not in ("TokenizersBackend", "PreTrainedTokenizerFast")
    assert any(finding.code == "tokenizer-class" for finding in ours.findings) == is_replaced
    if is_replaced:
        assert "normalizer" in ours.findings[0].message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("legacy", [True, False, None])
@pytest.mark.parametrize("prefix", [True, False, None])
def test_llama_with_marks_for_spaces(tmp_path: Path, legacy: bool | None, prefix: bool | None) -> None:
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    directory = save_tokenizer(
        metaspace_backend(), tmp_path, "LlamaTokenizerFast", legacy=legacy, add_prefix_space=prefix, **names
    )
    write_json(directory / "config.json", {"model_type": "llama"})
    assert_same(directory)


@pytest.mark.filterwarnings("ignore")
def test_gemma(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend

    backend = metaspace_backend()
    state = json.loads(backend.to_str())
    state["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    state["pre_tokenizer"] = None
    directory = save_tokenizer(
        Backend.from_str(json.dumps(state)),
        tmp_path,
        "GemmaTokenizer",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    write_json(directory / "config.json", {"model_type": "gemma2"})
    assert_same(directory)


def test_tokens_added_by_the_configuration(tmp_path: Path) -> None:
    """Tokens that only tokenizer_config.json lists, and flags it gives otherwise than tokenizer.json."""
    backend = byte_level_backend()
    size = backend.get_vocab_size()
    base = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    decoder = {
        "3": {"content": "<image>", **base, "lstrip": True, "rstrip": True, "special": True},
        str(size): {"content": "<tool>", **base, "special": False},
        str(size + 1): {"content": "<late>", **base, "special": True},
    }
    directory = save_tokenizer(
        backend,
        tmp_path,
        "PreTrainedTokenizerFast",
        added_tokens_decoder=decoder,
        eos_token="<|im_end|>",
        pad_token="<pad>",
        image_token="<image>",
        additional_special_tokens=["<tool>", "<extra>"],
    )
    texts = ("a <image> b", "<tool>x<late>", "<extra><pad>", "a<tool> <tool>")
    ours, theirs = assert_same(directory, texts)
    assert ours.special_tokens["image_token"] == "<image>"
    assert ours.token_id("<extra>") == theirs.convert_tokens_to_ids("<extra>") == size + 3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_which_tokens_are_special(tmp_path: Path, class_name: str) -> None:
    """A named token is special whatever its entry says; a nameless one where the class makes it so."""
    size = byte_level_backend().get_vocab_size()
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    decoder = {str(size + i): {"content": token, **flags} for i, token in enumerate(("<named>", "<extra>", "<plain>"))}
    directory = save_tokenizer(
        byte_level_backend(),
        tmp_path,
        class_name,
        added_tokens_decoder=decoder,
        pad_token="<named>",
        extra_special_tokens=["<extra>"],
    )
    write_json(directory / "config.json", {"model_type": "qwen2" if class_name.startswith("Qwen") else "llama"})
    ours, _ = assert_same(directory, ("a<named><extra><plain>b",))
    special = {token for token in ("<named>", "<extra>", "<plain>") if ours.token_id(token) in ours.special_ids}
    assert special == ({"<named>", "<extra>"} if class_name.startswith("Qwen") else {"<named>"})


@pytest.mark.filterwarnings("ignore")
def test_flags_of_the_model_that_a_class_replaces(tmp_path: Path) -> None:
    """What the vocabulary lacks becomes bytes with LlamaTokenizer, whatever tokenizer.json says."""
    from tokenizers import Tokenizer as Backend

    state = json.loads(metaspace_backend().to_str())
    state["model"] |= {"byte_fallback": False, "fuse_unk": False}
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    directory = save_tokenizer(Backend.from_str(json.dumps(state)), tmp_path, "LlamaTokenizer", **names)
    write_json(directory / "config.json", {"model_type": "llama"})
    ours, _ = assert_same(directory)
    assert ours.token_id("<unk>") not in ours.encode("🫠")


def test_special_tokens_in_files_of_older_releases(tmp_path: Path) -> None:
    directory = save_tokenizer(byte_level_backend(), tmp_path, "PreTrainedTokenizerFast")
    write_json(
        directory / "special_tokens_map.json",
        {
            "eos_token": {
                "content": "<|im_end|>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
            },
            "pad_token": "<pad>",
            "additional_special_tokens": ["<box>"],
        },
    )
    write_json(directory / "added_tokens.json", {"<added>": 422, "<pad>": 420})
    assert_same(directory, ("<box>a<pad>", "<added>b", "x<|im_end|>"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["BPE", "WordLevel"])
@pytest.mark.parametrize("forced", [True, False])
def test_clean_up_of_spaces(tmp_path: Path, kind: str, forced: bool) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers

    if kind == "BPE":
        backend = byte_level_backend()
    else:
        words = ["it", "'s", "n't", ".", ",", "?", "!", "we", "do", "'", "ve", "re"]
        backend = Backend(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    directory = save_tokenizer(
        backend,
        tmp_path,
        "PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=True,
        clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=forced,
    )
    assert_same(directory, ("it 's , we do n't . ! ?", "do ' we"))


def test_special_tokens_split_where_the_configuration_says_so(tmp_path: Path) -> None:
    directory = save_tokenizer(byte_level_backend(), tmp_path, "PreTrainedTokenizerFast", split_special_tokens=True)
    ours, _ = assert_same(directory, ("a<|im_end|>b",))
    assert ours.token_id("<|im_end|>") not in ours.encode("a<|im_end|>b")


@settings(max_examples=60)
@given(text=st.text(max_size=40))
@pytest.mark.parametrize("name", ["text", "spm"])
def test_any_text_equals_transformers(toys: Path, name: str, text: str) -> None:
    ours, theirs = _pair(toys / name)
    assert ours.encode(text) == theirs.encode(text)


@cache
def _pair(directory: Path) -> tuple[Tokenizer, Any]:
    return Tokenizer.open(directory), AutoTokenizer.from_pretrained(directory)


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, 419), max_size=12), skip=st.booleans())
def test_any_ids_decode_as_in_transformers(toys: Path, ids: list[int], skip: bool) -> None:
    for name in ("text", "spm"):
        ours, theirs = _pair(toys / name)
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["text", "spm"])
def test_bytes_of_tokens_make_the_text(toys: Path, name: str) -> None:
    tokenizer = Tokenizer.open(toys / name)
    for text in CORPUS:
        ids = tokenizer.encode(text)
        joined = b"".join(tokenizer.token_bytes(id_) for id_ in ids).decode()
        assert joined == (text if name == "text" else " " + text)
    assert tokenizer.token_bytes(99_999) == b""


def test_end_of_text_ids_and_their_file(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("text")
    assert (Tokenizer.open(directory).eos_ids, Tokenizer.open(directory).eos_source) == ((2,), "config.json")
    write_json(directory / "generation_config.json", {"eos_token_id": [2, 0]})
    tokenizer = Tokenizer.open(directory)
    assert (tokenizer.eos_ids, tokenizer.eos_source) == ((2, 0), "generation_config.json")
    (directory / "generation_config.json").unlink()
    write_json(directory / "config.json", {"model_type": "llava", "text_config": {"eos_token_id": 1}})
    assert Tokenizer.open(directory).eos_ids == (1,)
    write_json(directory / "config.json", {"model_type": "llama"})
    tokenizer = Tokenizer.open(directory)
    assert (tokenizer.eos_ids, tokenizer.eos_source) == ((2,), "tokenizer_config.json")


def test_missing_tokenizer_is_refused(copy_of: Callable[[str], Path]) -> None:
    directory = copy_of("text")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(Refused) as caught:
        Tokenizer.open(directory)
    assert caught.value.findings[0].code == "missing-side-file"
    (directory / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(Refused, match=r"tokenizer\.model instead"):
        Tokenizer.open(directory)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"model": {"type": "BPE", "vocab": {}, "merges": [["a", "b"]]}}']
)
def test_broken_tokenizer_is_refused(copy_of: Callable[[str], Path], text: str) -> None:
    directory = copy_of("text")
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(Refused) as caught:
        Tokenizer.open(directory)
    finding = caught.value.findings[0]
    assert (finding.code, finding.file) == ("side-file-invalid", str(directory / "tokenizer.json"))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"added_tokens_decoder": "text"}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"5": {"special": True}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"five": {"content": "<a>"}}}),
        ("tokenizer_config.json", {"additional_special_tokens": "<a>"}),
        ("tokenizer_config.json", {"extra_special_tokens": [7]}),
        ("added_tokens.json", {"<a>": "7"}),
    ],
)
def test_tokens_that_are_none_are_refused(copy_of: Callable[[str], Path], file: str, content: Any) -> None:
    directory = copy_of("text")
    write_json(directory / file, content)
    with pytest.raises(Refused) as caught:
        Tokenizer.open(directory)
    finding = caught.value.findings[0]
    assert (finding.code, finding.file) == ("side-file-invalid", str(directory / file))
    assert finding.expected
    assert finding.next


@pytest.mark.parametrize("token", [{}, {"id": "7", "content": "<a>"}, {"id": 7}])
def test_added_tokens_that_a_class_reads_itself_are_checked(copy_of: Callable[[str], Path], token: Any) -> None:
    directory = copy_of("text")
    file = directory / "tokenizer.json"
    write_json(file, {**json.loads(file.read_text()), "added_tokens": [token]})
    write_json(directory / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    with pytest.raises(Refused) as caught:
        Tokenizer.open(directory)
    finding = caught.value.findings[0]
    assert (finding.code, finding.file) == ("side-file-invalid", str(file))


def test_the_table_of_classes_agrees_with_transformers() -> None:
    from transformers.models.auto import tokenization_auto

    theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES
    for class_name, types in REGISTERED_TYPES.items():
        for model_type in types:
            assert str(theirs[model_type]).removesuffix("Fast") == class_name, model_type
    covered = {model_type for types in REGISTERED_TYPES.values() for model_type in types}
    for model_type, class_name in theirs.items():
        if class_name in set(REGISTERED_TYPES) - {"TokenizersBackend"}:
            assert model_type in covered, model_type


def test_other_threads_run_while_a_text_is_tokenized() -> None:
    """A server tokenizes long prompts beside what else it does. No thread is made to yield here: who runs was let."""
    tokenizer = Tokenizer.open(ROOT / "data" / "samples" / "menagerie")
    text, is_inside, was_seen = "A cow says " * 1000, False, False

    def encode() -> None:
        nonlocal is_inside
        for _ in range(100):
            is_inside = True
            tokenizer.encode(text)
            is_inside = False
            if was_seen:
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        while thread.is_alive() and not was_seen:
            was_seen = is_inside
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert was_seen
