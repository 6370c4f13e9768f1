"""Which side files a checkpoint has, in terms of what they are for. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from firstlight.engine.errors import Refused
from firstlight.engine.inputs import side_files


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
