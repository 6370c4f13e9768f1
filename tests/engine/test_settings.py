"""What the environment may say, and what is refused."""

from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.cluster import place_from_environment
from firstlight.engine.settings import child_environment, read_launch, read_settings


def test_defaults_follow_the_system() -> None:
    settings = read_settings({"XDG_CACHE_HOME": "/c", "XDG_RUNTIME_DIR": "/r"})
    assert settings.cache_dir == Path("/c/firstlight")
    assert settings.runtime_dir == Path("/r/firstlight")
    assert settings.token is None
    assert settings.threads >= 1
    assert not settings.triton_interpret


def test_our_variables_win() -> None:
    given = {"FIRSTLIGHT_CACHE": "/x", "FIRSTLIGHT_THREADS": "3", "FIRSTLIGHT_TOKEN": "t", "TRITON_INTERPRET": "1"}
    settings = read_settings({"XDG_CACHE_HOME": "/c", **given})
    assert (settings.cache_dir, settings.threads, settings.token) == (Path("/x"), 3, "t")
    assert settings.triton_interpret


@pytest.mark.parametrize("wrong", [{"FIRSTLIGHT_TOKENS": "x"}, {"FIRSTLIGHT_THREADS": "many"}])
def test_misspelt_names_and_bad_values_are_refused(wrong: dict[str, str]) -> None:
    with pytest.raises(Refused, match=next(iter(wrong))):
        read_settings(wrong)


def test_a_launchers_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_launch({}) is None
    launch = read_launch(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}
    )
    assert launch is not None
    assert (launch.rank, launch.local_rank, launch.local_world_size, launch.address) == (3, 1, 2, "a")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    place = place_from_environment(4)
    assert place is not None
    assert place.keeps_store
    with pytest.raises(Refused, match="WORLD_SIZE=4"):
        place_from_environment(2)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert not place_from_environment(4).keeps_store  # type: ignore[union-attr]


def test_children_get_changes_on_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    environment = child_environment(ADDED="2")
    assert (environment["KEPT"], environment["ADDED"]) == ("1", "2")
