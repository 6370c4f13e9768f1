"""One host on two ranks for all tests that only talk to it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from firstlight.engine.parallel.mesh import Mesh
from firstlight.engine.serving.host import Host
from firstlight.engine.serving.options import HostOptions

ROOT = Path(__file__).parents[3]
MENAGERIE = ROOT / "data" / "samples" / "menagerie"
PICTURES = ROOT / "data" / "samples" / "pictures"


@pytest.fixture(scope="package")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The sample model in float32, tp=2, behind a token."""
    options = HostOptions(body_limit_bytes=1 << 20, trace_limit_bytes=16 << 20)
    run_dir = tmp_path_factory.mktemp("host")
    with Host.start(
        MENAGERIE, Mesh(tp=2), run_dir=run_dir, http=options, dtype="F32", max_batch=16, max_context=160
    ) as host:
        host.wait_ready(240)
        yield host
        assert host.health().is_ready, f"a test ended the host: {host.health().failure}\n{host.log(0)}"
