"""The public API changes only on purpose."""

import importlib

import pytest

from tests.repo import public_api


def test_public_names_are_the_recorded_ones() -> None:
    present, recorded = set(public_api.present()), set(public_api.recorded())
    assert present == recorded, (
        f"new: {sorted(present - recorded)}; gone: {sorted(recorded - present)}; "
        "if this is meant, run `make public-api` and say so in CHANGELOG.md"
    )


@pytest.mark.parametrize("package", public_api.PACKAGES)
def test_exports_are_listed_once_and_shown_by_dir(package: str) -> None:
    module = importlib.import_module(package)
    exported = list(getattr(module, "__all__", ()))
    assert len(exported) == len(set(exported)), f"{package}.__all__ has duplicates"
    assert set(exported) <= set(dir(module))
