"""The names that others may rely on: `python -m tests.repo.public_api` accepts the present ones."""

import importlib
from pathlib import Path

PACKAGES = ("firstlight.engine", "firstlight.workbench")
RECORD = Path(__file__).with_name("public_api.txt")


def present() -> list[str]:
    """Every exported name, qualified, in order; each is looked up, so that a name without a thing is an error."""
    names = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        exported = getattr(module, "__all__", ())
        for name in exported:
            getattr(module, name)
        names += [f"{package}.{name}" for name in exported]
    return sorted(names)


def recorded() -> list[str]:
    """The accepted names."""
    return RECORD.read_text().split()


if __name__ == "__main__":
    RECORD.write_text("".join(f"{name}\n" for name in present()))
