"""Versions agree: pyproject, changelog and the exact pins."""

import re
import tomllib
from functools import cache
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repo.tree import ROOT


@cache
def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def _pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            assert version, f"constraints.txt: not an exact pin: {line}"
            assert re.fullmatch(r"[0-9A-Za-z.]+", version), (
                f"constraints.txt: no local builds, paths or addresses: {line}"
            )
            pins[canonicalize_name(name)] = version
    return pins


def test_every_dependency_is_pinned_within_its_range() -> None:
    extras = [wish for wishes in _project()["optional-dependencies"].values() for wish in wishes]
    for wish in [*_project()["dependencies"], *extras]:
        requirement = Requirement(wish)
        pin = _pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not in constraints.txt; run `make constraints`"
        assert requirement.specifier.contains(pin), f"{requirement.name} {pin} is outside {requirement.specifier}"


def test_torch_comes_first() -> None:
    first = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#"))
    assert first.startswith("torch==")


def test_changelog_names_the_version() -> None:
    headings = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert headings, "CHANGELOG.md has no versions"
    assert _project()["version"] in headings[:2]
