"""Figures while the script that draws them is on its way: tabs change, and no call falls on a figure that is gone."""

from typing import Any

import pytest

from tests.dashboards.conftest import Errors

FIGURES = ("Layers", "Verify", "Memory", "Communication", "Topology")
"""Tabs with figures."""


def late(page: Any, delay_s: float) -> None:
    """Lets plotly come after a while."""

    def hold(route: Any) -> None:
        page.wait_for_timeout(1000 * delay_s)
        route.continue_()

    page.route("**/*plotly*.js*", hold)


@pytest.fixture
def page(browser: Any, errors: Errors) -> Any:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    yield errors.watch(context.new_page())
    context.close()


@pytest.mark.parametrize("delay_s", [0.0, 1.5])
def test_tabs_change_faster_than_plotly_comes(page: Any, address: str, errors: Errors, delay_s: float) -> None:
    late(page, delay_s)
    page.goto(f"{address}?run=live&tab=Verify", wait_until="commit")
    for tab in FIGURES * 2:
        page.get_by_role("button", name=tab, exact=True).click()
        page.wait_for_timeout(120)
    page.get_by_role("button", name="Layers", exact=True).click()
    page.locator(".js-plotly-plot .main-svg").first.wait_for()
    page.wait_for_timeout(500)
    assert page.locator("script[src*=plotly]").count() == 1
    assert not errors


CALLS = """async () => {
  const part = () => document.body.appendChild(document.createElement("div"));
  const figure = { data: [{ y: [1, 2, 3] }], layout: { yaxis: { automargin: true } } };
  const drawn = (one) => !!one._fullLayout;
  const later = (ms) => new Promise((go) => setTimeout(() => go(false), ms));
  const settled = (call, ms) => Promise.race([call.then(() => true), later(ms)]);
  const early = part(), kept = part(), never = part(), late = part(), busy = part();
  const gone = window.Plotly.newPlot(early, figure);
  window.Plotly.purge(early);
  const stays = await window.Plotly.newPlot(kept, figure).then(() => true);
  const alone = await settled(window.Plotly.relayout(never, { width: 300 }), 60000);
  await window.Plotly.newPlot(late, figure);
  window.Plotly.purge(late);
  await window.Plotly.relayout(late, { width: 300 });
  const again = window.Plotly.newPlot(busy, figure);
  const moved = window.Plotly.relayout(busy, { width: 300 });
  window.Plotly.purge(busy);
  const back = [await settled(gone, 400), await settled(again, 400), await settled(moved, 60000)];
  await window.Plotly.newPlot(late, figure);
  return { stays, alone, back, drawn: [early, kept, never, late, busy].map(drawn) };
}"""


def test_calls_on_a_figure_follow_each_other_and_end_with_it(page: Any, address: str, errors: Errors) -> None:
    """The same while plotly is on its way and when it is there."""
    late(page, 1.0)
    page.goto(f"{address}?run=live&tab=Checkpoint")
    for _ in range(2):
        got = page.evaluate(CALLS)
        assert got["stays"], "a figure that stays is drawn"
        assert got["alone"], "a redraw without a figure is over at once"
        assert got["back"] == [False, False, True], "nobody goes on with a figure that is gone"
        assert got["drawn"] == [False, True, False, True, False]
        assert page.evaluate("'itself' in window.Plotly")
    assert not errors
