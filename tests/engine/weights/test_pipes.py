"""A pipe where a side file belongs is refused at once; opening it would wait for a writer for ever."""

import os
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.inputs import side_files
from firstlight.engine.weights.checkpoint import Checkpoint
from firstlight.engine.weights.files.index import INDEX
from tests.engine.weights.files import directory


def test_a_pipe_in_place_of_a_side_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    for name in (side_files.CONFIG, INDEX):
        home = directory(tmp_path / name, {"a-00001-of-00001.safetensors": {"a": [2]}})
        (home / name).unlink(missing_ok=True)
        os.mkfifo(home / name)
        with pytest.raises(Refused, match="no regular file"):
            Checkpoint.open(home)
    with pytest.raises(Refused, match="no regular file"):
        side_files.read_json(home / INDEX)
