"""The table of families comes from results, and from those of tests that passed alone."""

import re
from pathlib import Path

import msgspec

from firstlight.engine.model.families.registry import HOMES
from tests.families.table import README, read, row, table
from tests.families.verified import Verified, formats_of
from tests.kimi_k3 import write_checkpoint


def results(path: Path, *cases: tuple[Verified, str]) -> Path:
    """A file as `pytest --junitxml` writes it; what follows a case is put inside it."""
    written = []
    for number, (found, inside) in enumerate(cases):
        value = msgspec.json.encode(found).decode().replace('"', "&quot;")
        properties = f'<properties><property name="verified" value="{value}"/></properties>'
        written.append(f'<testcase name="test_{number}">{properties}{inside}</testcase>')
    path.write_text(f"<testsuites><testsuite>{''.join(written)}</testsuite></testsuites>")
    return path


def test_only_what_passed_counts(tmp_path: Path) -> None:
    good = Verified(model_type="mixtral", what="text", error=3e-6)
    bad = Verified(model_type="mixtral", what="tp4")
    skipped = Verified(model_type="mixtral", what="pp2")
    found = list(
        read([results(tmp_path / "r.xml", (good, ""), (bad, '<failure message="no"/>'), (skipped, "<skipped/>"))])
    )
    assert found == [good]


def test_a_row_says_what_was_tried_and_the_largest_error() -> None:
    found = [
        Verified(model_type="granitemoe", what="text", error=2e-7, formats=("F32",)),
        Verified(model_type="granitemoe", what="text", error=4e-6),
        Verified(model_type="granitemoe", what="tp2 ep2"),
        Verified(model_type="granitemoe", what="steps", formats=("BF16", "F32")),
        Verified(model_type="mixtral", what="image", error=1.0),
    ]
    _, name, types, text, pictures, axes, steps, formats, error, lines, _ = (
        cell.strip() for cell in row("granitemoe", found).split("|")
    )
    assert (name, types) == ("[granitemoe](granitemoe.py)", "`granitemoe`, granitemoeshared")
    assert (text, pictures, axes, steps, error) == ("yes", "", "tp, ep", "yes", "4e-06")
    assert formats == "BF16, F32"
    assert int(lines) > 20


def test_formats_are_those_of_the_files(tmp_path: Path) -> None:
    assert formats_of(write_checkpoint(tmp_path / "packed")) == ("BF16", "F32", "MXFP4")
    assert formats_of(write_checkpoint(tmp_path / "plain", packed=False)) == ("BF16", "F32")


def test_a_family_without_results_says_so() -> None:
    assert row("mixtral", []).count("not verified here") == 1
    assert len(table([]).splitlines()) > len(HOMES)


def test_the_table_lists_the_families_that_there_are() -> None:
    """After a family came, `make families`."""
    listed = re.findall(r"^\| \[(\w+)\]", README.read_text(), re.MULTILINE)
    assert listed == list(HOMES)
    assert "not verified here" not in README.read_text()
