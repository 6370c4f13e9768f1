"""Interrupts are not lost while libraries are imported."""

import subprocess
import sys

import pytest

# Ends the process where torch would be imported: 0 if numpy was imported before it. torch imports numpy itself from a
# place that drops every exception, an interrupt too, and then goes on without numpy.
WATCH = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(0 if hasattr(sys.modules.get("numpy"), "ndarray") else 3)

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "start",
    [
        "import firstlight.workbench.load",
        "from firstlight.workbench.engines import start_here; start_here(None, None)",
    ],
)
def test_numpy_is_imported_before_torch(start: str) -> None:
    ended = subprocess.run([sys.executable, "-c", f"{WATCH}\n{start}"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
