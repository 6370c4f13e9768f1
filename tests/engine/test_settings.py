"""What the environment may say, and what is refused."""

import os
from pathlib import Path

import pytest

from firstlight.engine.errors import Refused
from firstlight.engine.parallel.cluster import place_from_environment
from firstlight.engine.settings import (
    SPIN_VARIABLES,
    SPINS,
    child_environment,
    read_launch,
    read_settings,
    wait_briefly,
)


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


@pytest.mark.parametrize("said", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_wait_briefly_unless_the_environment_says_how(
    monkeypatch: pytest.MonkeyPatch, said: dict[str, str]
) -> None:
    for name in SPIN_VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    expected = said or {"GOMP_SPINCOUNT": str(SPINS)}
    child = child_environment()
    assert {name: child[name] for name in SPIN_VARIABLES if name in child} == expected
    wait_briefly()
    assert {name: os.environ[name] for name in SPIN_VARIABLES if name in os.environ} == expected
