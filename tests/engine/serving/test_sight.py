"""Positions of pictures as transformers places them, at any cut of a prompt."""

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from firstlight.engine.serving.sight import Seen, Sight, by_picture, extras, grid_positions

CPU = torch.device("cpu")
pictures = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=4)


def prompt(shapes: list[tuple[int, int, int]], first: int) -> tuple[list[int], Seen, torch.Tensor]:
    """Types of tokens, the part of a sequence that is all of it, and grids of patches: pictures with text behind."""
    types, spans, grids = [0] * first, [], []
    for rows, columns, text in shapes:
        spans.append((len(types), rows * columns))
        types += [1] * (rows * columns) + [0] * text
        grids.append((1, 2 * rows, 2 * columns))
    merged = tuple((frames, rows // 2, columns // 2) for frames, rows, columns in grids)
    return types, Seen(0, len(types), tuple(spans), merged), torch.tensor(grids)


@settings(max_examples=60)
@given(shapes=pictures, first=st.integers(0, 5), cut=st.floats(0, 1))
def test_positions_are_those_of_transformers(shapes: list[tuple[int, int, int]], first: int, cut: float) -> None:
    types, part, grids = prompt(shapes, first)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    ids, kinds = torch.ones(1, len(types), dtype=torch.int64), torch.tensor([types])
    found = grid_positions(part)
    for reference in (Qwen2VLModel, Qwen3VLModel):
        stand_in = SimpleNamespace(config=config)
        stand_in.get_vision_position_ids = reference.get_vision_position_ids.__get__(stand_in)
        theirs, delta = reference.get_rope_index(stand_in, ids, kinds, image_grid_thw=grids)
        torch.testing.assert_close(found, theirs[:, 0])
        later = Seen(len(types), len(types) + 3, part.spans, part.grids)  # tokens that were generated
        assert grid_positions(later)[0].tolist() == [len(types) + int(delta) + step for step in range(3)]
    at = int(cut * len(types))
    pieces = [grid_positions(Seen(*ends, part.spans, part.grids)) for ends in ((0, at), (at, len(types)))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), found)


@settings(max_examples=60)
@given(shapes=pictures, cut=st.floats(0, 1))
def test_rows_and_groups_of_a_cut_prompt(shapes: list[tuple[int, int, int]], cut: float) -> None:
    """Rows count within a batch, behind the tokens of other sequences; groups count within a sequence."""
    types, whole, _ = prompt(shapes, 1)
    at = int(cut * len(types))
    sight = Sight(grid=True, deep=1, whole=True)
    for start, stop in ((0, at), (at, len(types))):
        found = extras(sight, [Seen(0, 7), Seen(start, stop, whole.spans, whole.grids)], CPU)
        rows = [7 + place - start for place in range(start, stop) if types[place]]
        assert (found.picture_rows.tolist() if found.picture_rows is not None else []) == rows
        assert found.positions_3T is not None
        assert found.positions_3T.shape == (3, 7 + stop - start)
        if rows:
            assert found.groups is not None
            alone, beside = found.groups
            assert alone.tolist() == [-1] * 7
            assert [group >= 0 for group in beside.tolist()] == [bool(kind) for kind in types[:stop]]
            assert len(set(beside.tolist()) - {-1}) == sum(begin < stop for begin, _ in whole.spans)


def test_text_alone_has_nothing_beside_it() -> None:
    found = extras(Sight(grid=True, deep=3, whole=True), [Seen(0, 4), Seen(2, 3)], CPU)
    assert (found.positions_3T, found.picture_rows, found.groups) == (None, None, None)


def test_pictures_that_touch_are_told_apart() -> None:
    assert by_picture([(1, 10), (20, 2)], [4, 6, 2]) == ((1, 4), (5, 6), (20, 2))
    assert by_picture([(0, 3), (5, 3)], [6]) == ((0, 3), (5, 3))  # one picture with marks between its rows
