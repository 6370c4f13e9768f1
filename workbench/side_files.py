"""Which side files a checkpoint has, in terms of what they are for. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from firstlight.engine.errors import Refused
from firstlight.engine.findings import Finding, note, warning, what_is
from firstlight.engine.inputs import side_files

ENDINGS = (".json", ".jinja", ".model", ".tiktoken", ".txt")  # of files beside the weights


def has_chat_template(directory: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint says how a conversation is written."""
    path = Path(directory)
    if any((path / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        config = side_files.read_json_if_present(path / side_files.TOKENIZER_CONFIG)
    except Refused:
        return False
    return bool(config and config.get("chat_template"))


def side_file_rows(directory: str | os.PathLike[str], sees: bool) -> Iterator[tuple[str, str, bool]]:
    """Each side file, what it is for, and whether it is there; `sees`: the model takes pictures."""
    path = Path(directory)
    for file, purpose in (
        (side_files.TOKENIZER, "text to token ids"),
        (side_files.TOKENIZER_CONFIG, "special tokens"),
    ):
        yield file, purpose, (path / file).is_file()
    yield "chat template", "conversations", has_chat_template(path)
    yield side_files.GENERATION_CONFIG, "the vendor's stop tokens", (path / side_files.GENERATION_CONFIG).is_file()
    if sees:
        has = any((path / name).is_file() for name in (side_files.PROCESSOR_CONFIG, side_files.PREPROCESSOR_CONFIG))
        yield side_files.PREPROCESSOR_CONFIG, "pictures to pixel tensors", has


def absent_side_files(directory: str | os.PathLike[str], sees: bool) -> tuple[Finding, ...]:
    """A warning for each side file that some verb will miss, for verbs that can go on without it.

    One that is there by name alone, such as a link to nothing, is named whatever it is for.
    """
    path = Path(directory)
    empty = [entry.name for entry in sorted(path.iterdir()) if entry.suffix in ENDINGS and not entry.is_file()]
    rows = [row for row in side_file_rows(directory, sees) if row[0] not in empty]
    return (
        *(_by_name_alone(path, name) for name in empty),
        *(_absent(path, file, purpose) for file, purpose, there in rows if not there),
    )


def _by_name_alone(directory: Path, file: str) -> Finding:
    return warning(
        "side-file-invalid",
        f"{file} cannot be read, and counts as absent: it is {what_is(directory / file)}",
        file=file,
        expected="a file as released",
        found=what_is(directory / file),
        next=f"fetch {file} from the release into {directory}",
    )


def _absent(directory: Path, file: str, purpose: str) -> Finding:
    is_optional, there = file == side_files.GENERATION_CONFIG, what_is(directory / file)
    return (note if is_optional else warning)(
        "missing-side-file",
        f"no {file}: stop tokens come from config.json and the tokenizer"
        if is_optional
        else f"no {file}: what needs it ({purpose}) will be refused",
        file=file,
        expected=file,
        found="absent" if there == "nothing of that name" else there,
        next=f"fetch it from the release into {directory}",
    )
