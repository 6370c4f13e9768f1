"""Tracked files speak of the project alone: no paths of one machine, no notes to oneself."""

import re

from tests.repo.tree import ROOT, files

# Written in pieces, so that this file does not contain what it looks for.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"/work/(?:main|shared|notes|\.library)",
            r"\.\./sha" + "red",
            r"\.\./\.\./k" + "3",
            r"/opt/(?:py" + "pi|whe" + "els)",
            r"/(?:root|home/[a-z]+)/",
            r"/tmp/[a-z0-9]{3,}",
            r"\bthis ses" + r"sion\b",
            r"\bwork" + r"place\b",
            r"before-" + "stop",
            r"\bsub-?ag" + r"ents?\b",
            r"\b(?:DESIGN|BRIEF|CONTRACTS|anchors|faults)\.m" + r"d\b",
            r"\bDESIGN " + r"(?:section|§)",
            r"\b(?:TO" + "DO|FIX" + r"ME)\b",
        )
    )
)
BINARY = {
    ".bin",
    ".png",
    ".jpg",
    ".jpeg",
    ".webp",
    ".gif",
    ".safetensors",
    ".ico",
    ".bmp",
    ".tif",
    ".tiff",
    ".gz",
    ".npy",
}


def test_no_forbidden_words() -> None:
    wrong = []
    for file in files():
        if file.suffix in BINARY:
            continue
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), start=1):
            if found := FORBIDDEN.search(line):
                wrong.append(f"{file}:{number}: {found.group()}")
    assert not wrong, "\n".join(wrong)


def test_the_pattern_finds_what_it_should() -> None:
    for text in ("see ../sha" + "red/x", "/work/" + "main/engine", "# TO" + "DO later", "in this ses" + "sion we"):
        assert FORBIDDEN.search(text), text
    for text in ("runs/<time>-<model>", "a session of the reader", "temporary folder under /tmp"):
        assert not FORBIDDEN.search(text), text
