"""The dashboard in a real browser, on a real run with a live engine."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from firstlight.workbench import Bringup
from firstlight.workbench.events import ProgressEvent
from firstlight.workbench.readings import Reading
from firstlight.workbench.report import Draft
from firstlight.workbench.runs import Run
from tests.dashboards.conftest import MENAGERIE, PICTURES, Errors, serve
from tests.waiting import PATIENCE_S

TABS = {  # what each tab shows of the live run
    "Overview": ["Ladder", "Answers", "requests running"],
    "Checkpoint": ["every tensor is accounted for", "language_model.lm_head.weight"],
    "Memory": ["Planned, by rank and role", "Measured: what the running engine holds", "rank 1"],
    "Loading": ["resident bytes are those planned", "rank"],
    "Layers": ["Operators, rank 0", "layers.0.mixer", "decode (ms)"],
    "Communication": ["Where a decode step goes", "Overlap, by rank", "all_reduce tp"],
    "Verify": ["checks", "prompt layers", "noise"],
    "Live": ["BF16 on cpu", "Ask"],
    "Hardware": ["host", "memory total", "not available", "nvml"],
    "Topology": ["Mesh: tp 2", "rank 1", "Links, measured"],
    "Runs": ["Compare", "begun", "all passed"],
}


def open_page(browser: Any, url: str, errors: Errors, width: int = 1280, **options: Any) -> Any:
    context = browser.new_context(viewport={"width": width, "height": 900}, **options)
    page = errors.watch(context.new_page())
    page.goto(url)
    return page


READ = """() => {
  const read = (node) => node.nodeType === 3 ? node.data
    : node.nodeName === "STYLE" || node.nodeName === "SCRIPT" ? ""
    : [...(node.shadowRoot ? node.shadowRoot.childNodes : []), ...node.childNodes].map(read).join(" ");
  return read(document.body);
}"""


HAS_READ_THE_FILE = """() => Bokeh.documents.some((document) =>
  [...document._all_models.values()].some((model) =>
    model.type === "FileInput" && !model.properties.value.is_unset && model.value))"""


def shown(page: Any) -> str:
    """Every text on the page, shadow roots included."""
    return str(page.evaluate(READ))


@pytest.mark.parametrize("width", [1280, 400])
def test_every_tab_shows_the_live_run_and_fits_the_screen(
    browser: Any, address: str, errors: Errors, width: int
) -> None:
    page = open_page(browser, f"{address}?run=live", errors, width)
    for tab, words in TABS.items():
        page.get_by_role("button", name=tab, exact=True).click()
        for word in words:
            page.get_by_text(word).first.wait_for()
        page.wait_for_url(f"**tab={tab}*")
        assert "run=live" in page.url
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 1, f"{tab} is {overflow} pixels wider than the screen"
    assert not errors
    page.context.close()


def test_a_link_leads_to_a_tab_of_a_run_and_tabs_are_reached_by_keyboard(
    browser: Any, address: str, errors: Errors
) -> None:
    page = open_page(browser, f"{address}?run=live&tab=Verify", errors)
    page.get_by_text("prompt layers").first.wait_for()
    page.get_by_role("button", name="Layers", exact=True).focus()
    page.keyboard.press("Enter")
    page.get_by_text("Operators, rank 0").first.wait_for()
    page.get_by_role("button", name="Layers", exact=True, pressed=True).wait_for()
    page.wait_for_function("document.title.startsWith('Layers')")
    page.get_by_role("heading", name="Layers", exact=True, level=1).wait_for()
    page.wait_for_url("**tab=Layers*")
    before = page.evaluate("document.documentElement.dataset.theme")
    page.get_by_text("light / dark").click()
    page.wait_for_function("before => document.documentElement.dataset.theme !== before", arg=before)
    assert not errors
    page.context.close()


def test_what_was_asked_for_stands_in_the_page_before_any_script(address: str) -> None:
    page = httpx.get(f"{address}?run=live&tab=Verify", timeout=PATIENCE_S).text
    body = page[page.index("<body>") :]
    assert "Prompt layers" in body
    assert "noise floor" in body
    assert 'href="?run=live&amp;tab=Memory"' in body, "tabs are links until the components are there"
    assert "plotly" in page
    assert not re.findall(r"<script[^>]*src=[^>]*plotly", page), "the largest script waits for the first figure"
    assert all("defer" in tag for tag in re.findall(r"<script[^>]*\bsrc=[^>]*>", page))


def test_a_link_to_what_is_not_there_says_so_and_shows_something_else(
    browser: Any, address: str, errors: Errors
) -> None:
    wrong = "gone<img src=x onerror=window.wrong=1>"
    page = open_page(browser, f"{address}?run={quote(wrong)}&tab=Nowhere&x=1", errors)
    page.get_by_text("There is no run").first.wait_for()
    page.get_by_text("Ladder").first.wait_for()
    page.wait_for_url("**tab=Overview")
    assert "gone" not in page.url
    assert page.evaluate("window.wrong") is None
    page.get_by_role("button", name="Topology", exact=True).click()
    page.wait_for_url("**tab=Topology")
    assert not errors
    page.context.close()


@pytest.mark.parametrize("width", [1280, 400])
def test_long_names_fit_the_screen(browser: Any, address: str, runs: Path, errors: Errors, width: int) -> None:
    name, long = "long" + "x" * 150, "name-without-any-end" * 20
    with Run.at(runs / name, long, "/" + long) as run:
        draft = Draft("scan", long)
        draft.check(long, False, detail=long)
        draft.metric(long, 3, long)
        draft.table("answers", [{long: long}])
        if not run.record.rungs:
            run.add(draft.close())
        run.events.put(Reading(time_s=1.0, source="nvml", device=long, metric=long, unit=long, value=1.0))
        assert run.events.flush()
    page = open_page(browser, f"{address}?run={name}", errors, width)
    page.wait_for_function("!document.querySelector('.fl-first')")
    for tab in ("Overview", "Checkpoint", "Hardware", "Runs"):
        page.get_by_role("button", name=tab, exact=True).click()
        page.wait_for_url(f"**tab={tab}*")
        page.wait_for_timeout(300)
        overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert overflow <= 1, f"{tab} is {overflow} pixels wider than the screen"
    assert not errors
    page.context.close()


def test_a_question_about_a_picture_is_answered_in_two_browsers_at_once(
    browser: Any, address: str, errors: Errors
) -> None:
    pages = [open_page(browser, f"{address}?run=live&tab=Live", errors) for _ in range(2)]
    for page, picture in zip(pages, ("cat.png", "dog.png"), strict=True):
        page.get_by_text("BF16 on cpu").first.wait_for()
        page.locator("input[type=file]").set_input_files(PICTURES / picture)
        page.wait_for_function(HAS_READ_THE_FILE)
        page.locator("textarea").fill("What animal is this?")
        page.locator("textarea").blur()
    for page in pages:
        page.get_by_role("button", name="Ask", exact=True).click()
    for page, animal in zip(pages, ("A cat.", "A dog."), strict=True):
        page.get_by_text(animal).first.wait_for()
        for words in ("What goes into the model", "pixel_values", "tokens in"):
            page.get_by_text(words).first.wait_for()
        text = shown(page)
        assert ("A dog." in text) != (animal == "A cat."), "each page has its own conversation"
    assert not errors
    for page in pages:
        page.context.close()


def test_what_is_foreign_is_shown_and_not_run(browser: Any, address: str, runs: Path, errors: Errors) -> None:
    evil = '<img src=x onerror="window.wrong=1"><script>window.wrong=1</script>'
    run = Run.at(runs / "evil", evil, evil)
    draft = Draft("infer", evil)
    draft.check(evil, False, detail=evil)
    draft.table("answers", [{"question": evil, "answer": evil * 20}])
    draft.table(evil, [{evil: evil}])
    run.add(draft.close())
    page = open_page(browser, f"{address}?run=evil", errors)
    for tab in ("Overview", "Checkpoint", "Runs", "Topology"):
        page.get_by_role("button", name=tab, exact=True).click()
        page.wait_for_timeout(500)
    page.get_by_role("button", name="Overview", exact=True).click()
    page.get_by_text("onerror").first.wait_for()
    assert page.evaluate("window.wrong") is None
    page.context.close()


def test_news_arrives_without_a_reload_and_a_reload_shows_the_same(
    browser: Any, address: str, runs: Path, errors: Errors
) -> None:
    run = Run.at(runs / "loading", "menagerie", str(MENAGERIE))
    page = open_page(browser, f"{address}?run=loading", errors)
    page.get_by_text("Ladder").first.wait_for()

    def tell(done: float) -> None:
        event = ProgressEvent(
            time_s=time.time(), rung="load", phase="read", done=done, total=4096.0, unit="B", detail=f"layer {done:.0f}"
        )
        run.events.put(event)
        assert run.events.flush()

    tell(1024.0)
    page.get_by_text("layer 1024").first.wait_for()
    page.reload()
    page.get_by_text("layer 1024").first.wait_for()
    tell(2048.0)
    page.get_by_text("layer 2048").first.wait_for()
    draft = Draft("load", "menagerie")
    draft.check("bytes are there", False, detail="a shard is missing")
    run.add(draft.close())
    page.get_by_text("What failed").first.wait_for()
    assert not errors
    run.close()
    page.context.close()


def test_runs_are_compared_figure_by_figure(browser: Any, address: str, runs: Path, errors: Errors) -> None:
    for name, value in (("first", 10.0), ("second", 25.0)):
        run = Run.at(runs / name, "menagerie", str(MENAGERIE))
        draft = Draft("profile", "menagerie")
        draft.check("measured", True)
        draft.metric("decode_ms", value, "ms")
        run.add(draft.close())
    page = open_page(browser, f"{address}?run=first&tab=Runs", errors)
    page.get_by_text("Compare").first.wait_for()
    assert page.locator("select[multiple]").bounding_box()["width"] < 500, "a list of names is no wider than names are"
    page.locator("select[multiple]").select_option(["first", "second"])
    page.get_by_text("Figure by figure").first.wait_for()
    page.get_by_text("25 ms").first.wait_for()
    text = shown(page)
    assert "10 ms" in text
    assert "2.5" in text, "the last to the first"
    page.context.close()


def test_only_runs_of_the_folder_can_be_opened(address: str) -> None:
    for name in ("../live", "..", "/etc", "nothing"):
        page = httpx.get(f"{address}?run={quote(name, safe='')}", timeout=PATIENCE_S).text
        assert "There is no run" in page
        assert "root:" not in page
    for path in ("static/../../../etc/passwd", "run.json", "live/run.json", "..%2f..%2fetc/passwd"):
        assert httpx.get(f"{address}{path}", timeout=PATIENCE_S).status_code in (403, 404), path


def test_a_token_is_asked_for_and_kept(runs: Path, live: Bringup, browser: Any, errors: Errors) -> None:
    for address in serve(str(runs), "--port", "0", "--token", "secret-token"):
        base = address.partition("?")[0]
        assert address.endswith("?token=secret-token")
        refused = httpx.get(base, follow_redirects=True, timeout=PATIENCE_S)
        assert refused.status_code == 401
        assert "wants its token" in refused.text
        assert httpx.get(f"{base}?token=wrong", follow_redirects=True, timeout=PATIENCE_S).status_code == 401
        page = open_page(browser, f"{base}?token=secret-token&run=live", errors)
        page.get_by_text("Ladder").first.wait_for()
        page.wait_for_url(f"{base}?run=live&tab=Overview")  # the token does not stay in the address
        page.goto(f"{base}?run=live&tab=Verify")
        page.get_by_text("prompt layers").first.wait_for()
        page.context.close()


def test_an_engine_that_is_killed_is_shown_with_rank_and_phase(
    browser: Any, address: str, runs: Path, errors: Errors
) -> None:
    with Bringup(MENAGERIE, run=runs / "killed", tp=2, max_context=128) as bringup:
        assert bringup.start().passed
        page = open_page(browser, f"{address}?run=killed", errors)
        page.get_by_text("requests running").first.wait_for()
        assert bringup.host is not None
        os.kill(bringup.host.pids[1], signal.SIGKILL)
        page.get_by_text("rank 1 in phase").first.wait_for()
        page.get_by_role("button", name="Topology", exact=True).click()
        page.locator(".alarm").first.wait_for()
        page.get_by_role("button", name="Live", exact=True).click()
        page.get_by_text("the engine failed").first.wait_for()
        page.context.close()
