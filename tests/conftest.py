"""What holds for every test: no network, memory that was not written is NaN, kernels run interpreted without a GPU."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = ("tests.browser",)

# Before anything imports the libraries that read them.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A thread that waits for another sleeps: where more run than there are processors, as in ranks beside each other, one
# that spins keeps the processor from the one it waits for, and a small product takes milliseconds.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# The same examples in every run, however slow the machine is. `--hypothesis-profile others` looks at others.
for profile, is_same in (("same", True), ("others", False)):
    settings.register_profile(
        profile,
        deadline=None,
        derandomize=is_same,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile("same")

# Tests that stand on a browser, Jupyter's kernels, other projects' servers of stores, Ray or network namespaces: marked
# `outside`. What drives processes of ours alone is not among them: it waits for states, and a failure is ours.
OUTSIDE = (
    "dashboards/test_figures.py",
    "dashboards/test_open_page.py",
    "dashboards/test_pages.py",
    "engine/serving/test_ray.py",
    "engine/serving/test_two_hosts.py",
    "engine/weights/test_sources_clouds.py",
    "engine/weights/test_sources_s3.py",
    "notebooks/",
    "workbench/test_runbook.py",
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """The same random numbers for a test, and for fixtures that it is the first to want, whatever ran before it."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Make `torch.empty` and its kin return NaN (or the largest integer), so that reading what was not written shows.

    torch fills memory only while deterministic algorithms are on; operators that have none warn, which
    `filterwarnings` lets pass. A test that does not use torch does not pay for importing it. Processes that a test
    starts are not reached.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True, scope="module")
def nobody_falls_back() -> Iterator[None]:
    """A bring-up in a test may let transformers answer for what nobody knows: not beyond its file."""
    yield
    registry = sys.modules.get("firstlight.engine.model.families.registry")
    if registry is not None:
        registry.FAMILIES.fall_back(None)


# Where processes divide the tests among themselves, file by file: what begins first. The others come after these in the
# order of their names, and of those the last are quick, so that none of the processes has long to wait for another.
FIRST = (
    "workbench/test_samples_ladder.py",
    "engine/parallel/test_meshes.py",
    "notebooks/",
    "dashboards/",
    "workbench/",
    "engine/serving/",
    "engine/weights/",
    "engine/model/",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests on outside programs may fail once for their sake, and say so; `gpu` is skipped without an accelerator."""
    here = Path(__file__).parent
    if hasattr(config, "workerinput"):  # one of several processes

        def rank(item: pytest.Item) -> int:
            file = item.path.relative_to(here).as_posix()
            return next((place for place, first in enumerate(FIRST) if file.startswith(first)), len(FIRST))

        items.sort(key=rank)
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(OUTSIDE):
            item.add_marker(pytest.mark.outside)
            item.add_marker(pytest.mark.flaky(reruns=1))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.accelerator.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an accelerator: torch finds none"))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a name in tests/checkpoints.py, written once a session."""
    home = tmp_path_factory.mktemp("checkpoints")

    def get(name: str) -> Path:
        from tests.checkpoints import build

        return build(name, home)

    return get


@pytest.fixture(scope="session")
def golden_file(checkpoint: Callable[[str], Path]) -> Callable[[str], Path]:
    """The golden file of a tiny checkpoint, written once a session by transformers: two rows, one of them padded."""

    def get(name: str) -> Path:
        from tests.checkpoints import write_golden

        return write_golden(name, checkpoint(name))

    return get
