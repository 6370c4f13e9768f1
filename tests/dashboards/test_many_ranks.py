"""Sixty-four ranks stay readable: figures without long legends, units that fit, tiles in rows of their axis."""

import re

from firstlight.dashboards import figures, html
from firstlight.dashboards.views.topology import _grid, _groups
from firstlight.engine.findings import fatal
from firstlight.workbench.render import words

RANKS = 64


def rates(ranks: int, scale: float = 2.0**20) -> list[dict[str, object]]:
    """Rank r reads layer l at (r + 1)(l + 1) units of `scale` bytes a second."""
    return [
        {"rank": rank, "layer": f"layer {layer}", "rate_bytes_per_s": scale * (rank + 1) * (layer + 1)}
        | {"read_bytes": 2**20, "done_s": 0.5}
        for rank in range(ranks)
        for layer in range(3)
    ]


def test_rates_of_many_ranks_are_the_fastest_the_median_and_the_slowest() -> None:
    few, many = figures.layer_rates(rates(8), None), figures.layer_rates(rates(RANKS), None)
    assert few is not None
    assert many is not None
    assert [trace["name"] for trace in few["data"]] == [f"rank {rank}" for rank in range(8)]
    fastest, median, slowest = many["data"]
    assert (fastest["y"], slowest["y"]) == ([64.0, 128.0, 192.0], [1.0, 2.0, 3.0])
    assert median["y"] == [32.0, 64.0, 96.0]
    assert "rank 63<br>192 MiB/s" in fastest["hovertext"][2]


def test_a_limit_that_is_very_fast_stands_in_larger_units() -> None:
    figure = figures.layer_rates(rates(2, scale=2.0**30), 20 * 2.0**30)
    assert figure is not None
    assert figure["layout"]["yaxis"]["title"]["text"] == "rate (GiB/s)"
    assert figure["data"][-1]["y"] == [20.0, 20.0, 20.0]
    assert figure["data"][-1]["name"] == "the source gives 20 GiB/s"
    assert figure["data"][0]["y"] == [1.0, 2.0, 3.0]


def test_bytes_over_time_of_many_ranks_have_no_legend() -> None:
    events = [(f"read, rank {rank}", float(at), at * 2.0**33) for rank in range(RANKS) for at in range(3)]
    figure = figures.loading(events)
    assert figure["layout"]["showlegend"] is False
    assert figure["layout"]["yaxis"]["title"]["text"] == "read (GiB)"
    assert figure["data"][0]["y"] == [0.0, 8.0, 16.0]
    few = figures.loading(events[:6])
    assert few["layout"]["showlegend"]


def test_a_timeline_of_many_ranks_has_narrow_lanes() -> None:
    def height(ranks: int) -> int:
        rows = [
            {"phase": "decode", "rank": rank, "kind": "compute", "name": "x", "start_ms": 0.0, "duration_ms": 1.0}
            | {"moved_bytes": 0}
            for rank in range(ranks)
        ]
        return int(figures.timeline(rows, "decode")["layout"]["height"])

    assert height(RANKS) < height(16) * RANKS / 16 * 0.7


def test_tiles_of_ranks_stand_in_rows_of_their_axis() -> None:
    assert _grid(2, 2) == "grid ranks"
    assert _grid(64, 8) == "grid ranks many eights"
    assert _grid(12, 6) == "grid ranks many"


def test_short_rows_of_many_ranks_stand_side_by_side() -> None:
    assert _groups(64, 2) == "rows"
    assert _groups(64, 8) == _groups(2, 2) == ""


def test_a_few_words_may_stand_in_lines_where_there_is_little_room_and_names_may_not() -> None:
    kinds = [html.table([{"x": text}]).partition('<td class="')[2].partition('"')[0] for text in (
        "stop", "What animal is this?", "model-00001-of-00003.safetensors", "long " * 12,
    )]  # fmt: skip
    assert kinds == ["t", "t m", "t", "w"]


def test_amounts_name_their_unit_once() -> None:
    assert words.of_total(3, 3, "inputs") == "3 of 3 inputs"
    assert words.of_total(0, 1, "models") == "0 of 1 model"
    assert words.of_total(1536, 4096, "B") == "1.50 KiB of 4.00 KiB"


def test_a_number_stays_with_its_unit_and_apart_from_words() -> None:
    said = html.with_units("3 parameters, 5.90 MiB at 1.2 GiB/s, 95 % in 1.1 s, KL 4.6e-13 nat <b>")
    whole = re.findall(r'<span class="whole">([^<]*)</span>', said)
    assert whole == ["5.90 MiB", "1.2 GiB/s", "95 %", "1.1 s", "4.6e-13 nat"]
    assert said.endswith("&lt;b&gt;")


def test_figures_in_words_stand_right_and_long_names_break_where_their_parts_end() -> None:
    shown = html.table([{"measured": html.Figure("4.18 MiB")}])
    assert '<th class="n"' in shown
    assert '<td class="n">4.18 MiB</td>' in shown
    found = html.findings([fatal("missing-tensor", "layers.{0..3}.self_attn.q_proj is <not> here")])
    assert re.findall(r"[^ >]*<wbr>\S*", found) == ["layers.{0..3}.<wbr>self_<wbr>attn.<wbr>q_<wbr>proj"]
    assert "&lt;not&gt;" in found
