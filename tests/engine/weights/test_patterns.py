"""Patterns of names: the fast way says what the plain way says, for any names."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from firstlight.engine.weights.names.patterns import STAR_ITSELF, bare, grouped, named, numbers, patterns, with_numbers

_part = st.one_of(st.sampled_from(["layers", "0", "1", "12", "007", "w1", "", "*", "\n", "٣"]), st.text(max_size=3))
_names = st.lists(st.lists(_part, min_size=1, max_size=5).map(".".join), max_size=8)


def plain(place: int, part: str) -> str:
    """A part of a name, with `*` for a number as it is written usually: without zeros before it, and of 16 digits.

    Another sign stands for its own stars.
    """
    if not place or not part.isdigit() or not part.isascii():
        return part.replace("*", STAR_ITSELF)
    return part[: len(part) - len(str(int(part[-16:])))] + "*"


@given(_names)
@example(["a.1\nb.2", "c.3"])
@example([])
@example(["layers." + "9" * 5000])
@example(["a.0.a.b.1.a.2", "a.3.a.b.4.a.5"])
def test_as_name_by_name(names: list[str]) -> None:
    assert patterns(names) == [".".join(plain(*item) for item in enumerate(name.split("."))) for name in names]
    groups = grouped(names, str)
    assert sorted(name for group in groups.values() for name in group) == sorted(names)
    for pattern, group in groups.items():
        parts = [name.split(".") for name in group]
        found = numbers(pattern, group)
        stars = {p: part[:-1] for p, part in enumerate(pattern.split(".")) if p and part[-1:] == "*" != pattern}
        stars = {p: before for p, before in stars.items() if not before or (before.isdigit() and before.isascii())}
        assert found == [
            sorted({int(own) for p in parts if (own := p[s].removeprefix(before)).isdigit() and own.isascii()})
            for s, before in stars.items()
        ]
        assert with_numbers(pattern, found) or not any(group)
        assert named(bare(pattern, group), len(group), pattern) in (None, group)


def test_numbers_are_shown_as_runs() -> None:
    def shown(*names: str) -> list[str]:
        return [with_numbers(pattern, numbers(pattern, group)) for pattern, group in grouped(names, str).items()]

    assert shown(*(f"layers.{i}.e.{j}.w" for i in (0, 1, 2, 7) for j in range(3))) == ["layers.{0..2,7}.e.{0..2}.w"]
    assert shown("norm.weight", "layers.5.w") == ["norm.weight", "layers.5.w"]
    assert shown(*(f"l.{2 * i}.w" for i in range(9))) == ["l.{9 of 0..16}.w"]
