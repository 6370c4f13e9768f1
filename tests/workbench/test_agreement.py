"""Side files that come from two revisions: what changes prompts, pictures or the end of an answer is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from firstlight.engine.findings import Finding
from firstlight.workbench.agreement import disagreements

CONFIG: dict[str, Any] = {
    "eos_token_id": 2,
    "image_token_id": 5,
    "vocab_size": 8,
    "vision_config": {"image_size": 12, "patch_size": 4, "spatial_merge_size": 2},
    "vision_feature_select_strategy": "default",
}
ADDED = [{"id": 5, "content": "<image>"}, {"id": 2, "content": "<|end|>"}]
FILES: dict[str, Any] = {
    "tokenizer.json": {"model": {"vocab": {f"t{i}": i for i in range(8)}}, "added_tokens": ADDED},
    "tokenizer_config.json": {"eos_token": "<|end|>", "chat_template": "{{ messages }}"},
    "chat_template.jinja": "{{ messages }}\n",
    "generation_config.json": {"eos_token_id": [2, 3]},
    "processor_config.json": {
        "image_token": "<image>",
        "patch_size": 4,
        "vision_feature_select_strategy": "default",
        "image_processor": {"do_center_crop": True, "crop_size": {"height": 12, "width": 12}, "merge_size": 2},
    },
}


def found(home: Path, changes: dict[str, Any], rows: int | None = 8) -> tuple[Finding, ...]:
    """What a directory with some files changed (None: absent) disagrees about; "config.json" changes keys of it."""
    for name, value in {**FILES, **changes}.items():
        if value is not None and name != "config.json":
            (home / name).write_text(value if isinstance(value, str) else json.dumps(value))
    findings = disagreements(home, {**CONFIG, **changes.get("config.json", {})}, rows)
    for finding in findings:
        assert finding.file
        assert finding.next
        assert finding.severity != "fatal", "verbs that do not need the file go on"
    return findings


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {name: {**FILES.get(name, {}), **fields}}


BEGIN = {"id": 6, "content": "<|begin|>"}


def template(text: str, id_: int) -> dict[str, Any]:
    """A post-processor that writes a token before a prompt."""
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": text, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {text: {"id": text, "ids": [id_], "tokens": [text]}},
    }


def with_begin(post_processor: dict[str, Any], **options: Any) -> dict[str, Any]:
    """A tokenizer with a mark of a beginning that it writes."""
    return {
        **changed("tokenizer.json", added_tokens=[*ADDED, BEGIN], post_processor=post_processor),
        **changed("tokenizer_config.json", **{"bos_token": "<|begin|>", **options}),
    }


NESTED = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template("<|begin|>", 6)]}


def test_what_agrees_is_silent(tmp_path: Path) -> None:
    assert found(tmp_path, {}) == ()


@pytest.mark.parametrize(
    "right",
    [
        {**with_begin(NESTED), "config.json": {"bos_token_id": 6}},
        {**with_begin(NESTED), "config.json": {"bos_token_id": 1}, "generation_config.json": {"bos_token_id": 6}},
        {**with_begin({"type": "ByteLevel"}), "special_tokens_map.json": {"bos_token": {"content": "<|begin|>"}}},
        {"config.json": {"bos_token_id": 1, "pad_token_id": -1}},
        {"config.json": {"bos_token_id": 2}, "special_tokens_map.json": {"pad_token": "t7"}},
        {
            "special_tokens_map.json": {"eos_token": "t3"},
            **changed("tokenizer_config.json", eos_token="t3", added_tokens_decoder={}),
        },
    ],
)
def test_marks_that_agree_are_silent(tmp_path: Path, right: dict[str, Any]) -> None:
    """The tokenizer's beginning may be that of either file; padding may be anything that has a row, or none."""
    assert found(tmp_path, right) == ()


@pytest.mark.parametrize("depth", [1, 450, 5000])
def test_post_processors_in_each_other_end_as_findings_or_in_silence(tmp_path: Path, depth: int) -> None:
    inner = '{"type": "Sequence", "processors": [' * depth + json.dumps(template("t1", 3)) + "]}" * depth
    tokenizer = json.dumps(FILES["tokenizer.json"]).removesuffix("}") + f', "post_processor": {inner}}}'
    (finding,) = found(tmp_path, {"tokenizer.json": tokenizer})
    assert ("id 3 for 't1', which is id 1" if depth < 500 else "no tokenizer") in finding.message


def test_no_side_files_at_all_are_no_disagreement(tmp_path: Path) -> None:
    assert found(tmp_path, dict.fromkeys(FILES)) == ()


VOCABULARY = {"vocab": {f"t{i}": i for i in range(11)}}
IMAGES = FILES["processor_config.json"]["image_processor"]
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "an end that special_tokens_map.json has otherwise": (
        {"special_tokens_map.json": {"eos_token": {"content": "t3"}}},
        "special_tokens_map.json",
        "eos_token is 't3' in special_tokens_map.json, '<|end|>' in tokenizer_config.json; special_tokens_map.json is",
    ),
    "an end of special_tokens_map.json at which answers do not end": (
        {
            "special_tokens_map.json": {"eos_token": "t4"},
            "tokenizer_config.json": {"chat_template": "{{ messages }}"},
        },
        "tokenizer_config.json",
        "eos_token 't4' is id 4, at which answers do not end",
    ),
    "fewer ends than config.json has": (
        {"config.json": {"eos_token_id": [2, 4]}},
        "generation_config.json",
        "answers do not end at id 4, as config.json says",
    ),
    "a post-processor with other ids": (
        with_begin(template("<|begin|>", 7)),
        "tokenizer.json",
        "the post_processor writes id 7 for '<|begin|>', which is id 6 in the vocabulary",
    ),
    "prompts that begin otherwise than chats": (
        with_begin(NESTED, bos_token="t1"),
        "tokenizer_config.json",
        "bos_token is 't1', and the post_processor of tokenizer.json begins prompts with '<|begin|>'",
    ),
    "a beginning that no other file knows": (
        {**with_begin(NESTED), "config.json": {"bos_token_id": 1}},
        "tokenizer_config.json",
        "bos_token '<|begin|>' is id 6, and config.json says bos_token_id 1",
    ),
    "padding beyond the embedding": (
        {"config.json": {"pad_token_id": 8}},
        "config.json",
        "pad_token_id 8 is beyond the 8 rows of the embedding",
    ),
    "tokens beyond the embedding": (
        changed("tokenizer.json", model=VOCABULARY),
        "tokenizer.json",
        "3 tokens have no row in the embedding, 't8' (8) first",
    ),
    "an added token beyond the embedding": (
        changed("tokenizer.json", added_tokens=[*ADDED, {"id": 9, "content": "<new>"}]),
        "tokenizer.json",
        "1 token has no row in the embedding, '<new>' (9) first",
    ),
    "added tokens under other ids": (
        changed("tokenizer_config.json", added_tokens_decoder={"2": "<|end|>", "6": {"content": "<image>"}}),
        "tokenizer_config.json",
        "1 added token has another id than in tokenizer.json, which is used: '<image>' first",
    ),
    "other added tokens under the same ids": (
        changed("tokenizer_config.json", added_tokens_decoder={"2": "<|stop|>", "5": {"content": "<pic>"}}),
        "tokenizer_config.json",
        "2 added tokens have other ids than in tokenizer.json, which is used: '<|stop|>' first",
    ),
    "an image token that the tokenizer lacks": (
        {"config.json": {"image_token_id": 77}},
        "config.json",
        "image_token_id 77 is no token of the tokenizer",
    ),
    "another image token written": (
        changed("processor_config.json", image_token="t4"),
        "processor_config.json",
        "the processor writes 't4' for a picture",
    ),
    "answers that end elsewhere": (
        changed("generation_config.json", eos_token_id=3) | {"tokenizer_config.json": {}},
        "generation_config.json",
        "answers end at other tokens than config.json says",
    ),
    "a tokenizer's end that is none": (
        changed("tokenizer_config.json", eos_token={"content": "t6"}),
        "tokenizer_config.json",
        "eos_token 't6' is id 6, at which answers do not end",
    ),
    "an end that is no token": (
        changed("generation_config.json", eos_token_id=[2, 4242]),
        "generation_config.json",
        "eos_token_id of generation_config.json holds 4242: no answer ends at that",
    ),
    "two chat templates": (
        {"chat_template.jinja": "{{ messages[0] }}"},
        "tokenizer_config.json",
        "the chat template in tokenizer_config.json is not that of chat_template.jinja",
    ),
    "an end that the tokenizer does not know": (
        changed("tokenizer_config.json", eos_token="</s>"),
        "tokenizer_config.json",
        "eos_token '</s>' is no token of the tokenizer",
    ),
    "a beginning that is no text": (
        changed("tokenizer_config.json", bos_token=[1]),
        "tokenizer_config.json",
        "bos_token of tokenizer_config.json is list, and no text",
    ),
    "a key with two values": (
        {"generation_config.json": '{"eos_token_id": 7, "eos_token_id": [2, 3]}'},
        "generation_config.json",
        "states eos_token_id twice with different values",
    ),
    "pictures of another size": (
        changed("processor_config.json", image_processor={**IMAGES, "crop_size": {"height": 12, "width": 16}}),
        "processor_config.json",
        "the size of pictures is 12 x 16",
    ),
    "patches of another size": (
        changed("processor_config.json", patch_size=6),
        "processor_config.json",
        "patch_size is 6 in processor_config.json, but config.json says patch_size 4",
    ),
    "patches merged otherwise": (
        changed("processor_config.json", image_processor={**IMAGES, "merge_size": 1}),
        "processor_config.json",
        "merge_size is 1",
    ),
    "a picture that patches do not fill": (
        {"config.json": {"vision_config": {"image_size": 14, "patch_size": 4}}, "processor_config.json": {}},
        "config.json",
        "image_size 14 is no multiple of patch_size 4",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_kind_is_named(case: str, tmp_path: Path) -> None:
    changes, file, words = CASES[case]
    (finding,) = found(tmp_path, changes)
    assert (finding.code, finding.severity, finding.file) == ("conflicting-flag", "warning", file)
    assert words in finding.message


def test_an_end_among_rows_without_a_token_is_named(tmp_path: Path) -> None:
    vocabulary = {"vocab": {f"t{i}": i for i in range(7)}}
    changes = changed("tokenizer.json", model=vocabulary) | changed("generation_config.json", eos_token_id=[2, 7])
    messages = [finding.message for finding in found(tmp_path, changes)]
    assert any("answers end at id 7, which is no token" in message for message in messages), messages


def test_a_vocabulary_that_is_padded_is_a_note(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, {}, rows=128)
    assert (finding.code, finding.severity) == ("padded-tensor", "note")
    assert "128 rows, the tokenizer 8 ids" in finding.message


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b"}}}', "no tokenizer"),
        ("tokenizer.json", '{"model"', "no tokenizer"),
        ("tokenizer.json", "{}", "it has no vocabulary"),
        ("tokenizer_config.json", "<html>", "a web page"),
        ("tokenizer_config.json", '{"a": 1' + "0" * 5000 + "}", "more than 4,300 digits"),
        ("generation_config.json", '{"a": "\\ud800"}', "half of a pair of surrogates"),
        ("chat_template.jinja", "", "never names the messages"),
        ("chat_template.jinja", "<!DOCTYPE html>", "never names the messages"),
        ("generation_config.json", "[]", "object"),
        ("processor_config.json", "", "not JSON"),
    ],
)
def test_a_file_that_is_broken_is_a_warning(file: str, text: str, words: str, tmp_path: Path) -> None:
    finding = next(finding for finding in found(tmp_path, {file: text}) if finding.code == "side-file-invalid")
    assert (finding.severity, finding.file) == ("warning", file)
    assert words in f"{finding.message} {finding.found}"


def test_without_a_tokenizer_the_id_of_a_picture_is_held_against_the_embedding(tmp_path: Path) -> None:
    absent = {**dict.fromkeys(FILES), "config.json": {"image_token_index": 99}}
    (finding,) = found(tmp_path, absent)
    assert "image_token_index 99 is beyond the 8 rows" in finding.message


def test_a_unigram_vocabulary_counts_by_place(tmp_path: Path) -> None:
    listed = {"model": {"vocab": [[f"t{i}", -1.0] for i in range(9)]}, "added_tokens": ADDED}
    (finding,) = found(tmp_path, {"tokenizer.json": listed})
    assert "1 token has no row in the embedding" in finding.message
