"""Findings: codes are stable and listed once, and the words show what a person needs and nothing harmful."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import msgspec
import pytest

from firstlight.engine.errors import FirstlightError, Refused
from firstlight.engine.findings import (
    CODES,
    MOST_FILES,
    MOST_TENSORS,
    Finding,
    fatal,
    gathered,
    listing,
    note,
    warning,
)
from tests.repo.tree import python_files, syntax_tree

PROMISED = """missing-shard stale-index unlisted-tensor duplicate-tensor truncated-shard trailing-bytes header-too-large
not-safetensors header-invalid missing-tensor unconsumed-tensor shape-mismatch unpaired-scale tied-head conflicting-flag
missing-side-file padded-tensor unknown-architecture unsupported-block unsupported-format unsafe-file"""


def test_codes_are_kebab_case_and_explained() -> None:
    for code, words in CODES.items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", code)
        assert len(words) > 10
    assert len(set(CODES.values())) == len(CODES)


def test_the_codes_that_are_promised_are_there() -> None:
    assert set(PROMISED.split()) <= set(CODES)


def test_every_refusal_says_what_to_do_next() -> None:
    silent = [
        f"{path}:{call.lineno}"
        for path in python_files("engine", "kernels", "workbench", "dashboards")
        for call in ast.walk(syntax_tree(path))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "fatal"
        if not {"next", None} & {keyword.arg for keyword in call.keywords}  # None: **fields
    ]
    assert silent == []


def test_every_code_that_is_used_is_listed() -> None:
    """`fatal("code", ...)`, `warning(...)`, `note(...)` and `warn(...)` anywhere in the packages."""
    used: dict[str, str] = {}
    for path in python_files("engine", "kernels", "workbench", "dashboards"):
        used.update(dict.fromkeys(codes_in(path), str(path)))
    assert len(used) > 25
    assert {code: where for code, where in used.items() if code not in CODES} == {}


def codes_in(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(syntax_tree(path)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        first = node.args[0]
        if name in ("fatal", "warning", "note", "warn") and isinstance(first, ast.Constant):
            found |= {first.value} if isinstance(first.value, str) and re.fullmatch(r"[a-z-]+", first.value) else set()
    return found


def test_an_unlisted_code_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="is not listed"):
        fatal("no-such-code", "words")
    with pytest.raises(msgspec.ValidationError):
        fatal("usage", "words", expected=5)


def test_severities_and_json() -> None:
    made = [make("usage", "words", file="a", tensors=("t",), next="do") for make in (fatal, warning, note)]
    assert [finding.severity for finding in made] == ["fatal", "warning", "note"]
    for finding in made:
        text = msgspec.json.encode(finding)
        assert set(msgspec.json.decode(text)) == set(Finding.__struct_fields__)
        assert msgspec.json.decode(text, type=Finding) == finding


def test_words_show_everything_and_at_most_four_tensors() -> None:
    finding = fatal("usage", "m", file="f", tensors=tuple("abcdef"), expected="e", found="x", next="n")
    assert str(finding) == "usage: m\n  file: f\n  tensors: a, b, c, d and 2 more\n  expected: e; found: x\n  next: n"
    assert str(note("usage", "m")) == "usage: m"


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x07", "\r", "\u202e", "\x00", "\x9b31m", "\u200b"])
def test_names_from_files_cannot_steer_a_terminal(evil: str) -> None:
    """Tensor and file names come from the checkpoint: control and direction characters are spelt out."""
    shown = str(fatal("usage", f"m{evil}", file=f"f{evil}", tensors=(f"t{evil}",), found=f"x{evil}"))
    assert evil not in shown
    assert shown.count("\\") == 4


def test_lines_of_a_message_stay_lines() -> None:
    assert str(note("usage", "one\ntwo")) == "usage: one\ntwo"


def test_refusals_carry_their_findings() -> None:
    one, two = fatal("usage", "a"), fatal("not-found", "b")
    refused = Refused([one, two])
    assert refused.findings == (one, two)
    assert str(refused) == f"{one}\n{two}"
    assert Refused(one).findings == (one,)
    assert issubclass(Refused, FirstlightError)


def cut(file: str, size: int = 7, tensors: int = 1) -> Finding:
    names = [f"{file}.{number}" for number in range(tensors)]
    found = f"{size} bytes"
    return fatal(
        "truncated-shard", f"{file} is short by {size}", file=file, found=found, next="fetch it", **listing(names)
    )


def test_a_finding_names_the_first_of_very_many_tensors_and_counts_the_others() -> None:
    names = [f"layers.{number}.w" for number in range(MOST_TENSORS + 5)]
    for finding in (fatal("missing-tensor", "m", next="n", **listing(names)), *gathered([note("tied-head", "m")])):
        assert len(finding.tensors) + finding.more_tensors in (len(names), 0)
    told = gathered([fatal("missing-tensor", "m", tensors=tuple(names), next="n")])[0]
    assert (told.tensors, told.more_tensors) == (tuple(names[:MOST_TENSORS]), 5)
    assert f"layers.3.w and {len(names) - 4:,} more" in str(told)


def test_one_fault_of_very_many_files_is_said_of_some_and_once_for_the_others() -> None:
    files = [f"model-{number:05}.safetensors" for number in range(1, 41)]
    other = fatal("truncated-shard", "a.safetensors ends in its header", file="a.safetensors", next="fetch it")
    said = gathered([*(cut(file, 7 + place % 2, 100) for place, file in enumerate(files)), other])
    assert said[:MOST_FILES] == tuple(cut(file, 7 + place % 2, 100) for place, file in enumerate(files[:MOST_FILES]))
    rest, last = said[MOST_FILES:]
    assert last == other
    assert f"the same of {40 - MOST_FILES} files more" in rest.message
    assert all(file in str(rest.found) for file in files[MOST_FILES:])
    assert {"7 bytes", "8 bytes"} == set(re.findall(r"\d bytes", str(rest.found)))
    assert len(rest.tensors) + rest.more_tensors == 100 * (40 - MOST_FILES)
    assert gathered(said[: MOST_FILES + 1]) == said[: MOST_FILES + 1]


def test_findings_that_are_about_different_things_stay_apart() -> None:
    kinds = [
        fatal("unconsumed-tensor", f"layers.*.{word}: 3 tensors", file="model.safetensors", next="n")
        for word in map(chr, range(97, 97 + 26))
    ]
    assert gathered(kinds) == tuple(kinds)
