"""The dashboard: a page with a tab a view, over the runs of a folder and the engines that belong to them."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import shlex
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import panel as pn
from bokeh.server.auth_provider import AuthProvider
from panel.io.resources import LOCAL_DIST
from tornado.httpclient import AsyncHTTPClient, HTTPClientError
from tornado.web import RequestHandler

from firstlight.dashboards import first, html
from firstlight.dashboards.store import UNREADABLE, DataStore, Follower, Snapshot
from firstlight.dashboards.theme import FIELDS, FIRST, FRAME, NAV, TEMPLATE
from firstlight.dashboards.views.checkpoint import Checkpoint
from firstlight.dashboards.views.communication import Communication
from firstlight.dashboards.views.hardware import Hardware
from firstlight.dashboards.views.layers import Layers
from firstlight.dashboards.views.live import Live
from firstlight.dashboards.views.loading import Loading
from firstlight.dashboards.views.memory import Memory
from firstlight.dashboards.views.overview import Overview
from firstlight.dashboards.views.runs import Runs
from firstlight.dashboards.views.topology import Topology
from firstlight.dashboards.views.verify import Verify
from firstlight.dashboards.views.view import View, column, pane, put
from firstlight.engine.errors import Refused
from firstlight.engine.findings import fatal
from firstlight.engine.serving.options import is_loopback

VIEWS: tuple[Callable[[Any], View], ...] = (  # one line a tab
    Overview,
    Checkpoint,
    Memory,
    Loading,
    Layers,
    Communication,
    Verify,
    Live,
    Hardware,
    Topology,
    Runs,
)
TICK_MS = 1000
AGES_S = 15.0  # after which what is shown is drawn again without news: what ran may run no more, readings are old
LIST_S = 5.0
COOKIE = "firstlight"


class Dashboard:
    """One open page: the chosen run and tab, and the views that were looked at. Kept in step with the address."""

    def __init__(self, store: DataStore, first_run: str | None = None) -> None:
        self.store = store
        self._follower: Follower | None = None
        self._views: dict[str, View] = {}
        self._shown: tuple[str, str] = ("", "")  # the tab, and why it cannot be drawn
        self._drawn: tuple[str, str, int, int] = ("", "", -1, -1)
        titles = [view.title for view in VIEWS]  # type: ignore[attr-defined]
        self._run = pn.widgets.Select(
            name="Run", options=[], stylesheets=[FIELDS], sizing_mode="stretch_width", margin=(0, 0, 8, 0)
        )
        self._tab = pn.widgets.RadioButtonGroup(
            name="View",
            options=titles,
            orientation="vertical",
            stylesheets=[NAV],
            sizing_mode="stretch_width",
            margin=0,
        )
        self._message = pane()
        self._main = column(self._message)
        self._names: list[str] = []
        self._said = ""  # of that, on the page
        self._unknown = ""  # a run that the address named and that is not here
        self._document: Any = None
        self._location: Any = None
        self._listed_s = 0.0
        self._is_live = self._is_behind = False
        self._waiting: list[Callable[[], None]] = []
        self._list_runs(first_run)
        self._run.param.watch(lambda _: self._choose(), "value")
        self._tab.param.watch(lambda _: self._open_tab(), "value")

    @property
    def follower(self) -> Follower | None:
        return self._follower

    def later(self, change: Callable[[], None]) -> None:
        """Make a change in the page's own turn; a page that was closed meanwhile is left alone."""
        if self._document is not None and self._document.session_context is not None:
            self._document.add_next_tick_callback(change)

    def when_live(self, draw: Callable[[], None]) -> None:
        """Draw what takes time once the page stands in its browser: text is there before figures are."""
        if self._is_live:
            draw()
        elif draw not in self._waiting:
            self._waiting.append(draw)

    def _live(self) -> None:
        self._is_live = True
        while self._waiting:
            self._waiting.pop(0)()

    def template(self) -> Any:
        """The page for one session, bound to its address."""
        template = pn.Template(TEMPLATE)
        template.location = True
        template.add_panel("nav", pn.Column(self._run, self._tab, sizing_mode="stretch_width", margin=0))
        template.add_panel("main", self._main)
        self._document = pn.state.curdoc
        # What is drawn before the page is rendered would have its style sheets from panel's public store else.
        self._document.template_variables["dist_url"] = LOCAL_DIST
        self._location = pn.state.location
        self._go_where_the_address_says()
        self._choose()
        for name, value in (
            ("first_title", f"{self._tab.value} · Firstlight"),
            ("first_view", self._tab.value),
            ("style", FRAME),
            ("scripts", partial(first.scripts, figures=first.has_figures(self._main))),
            ("first_script", FIRST),
            ("first_nav", first.navigation(self._run.value, self._tab.options, self._tab.value)),
            ("first_main", first.text_of(self._main)),
        ):
            template.add_variable(name, value)
        pn.state.onload(self._live)
        pn.state.on_session_destroyed(lambda _: self.close())
        pn.state.add_periodic_callback(self.tick, TICK_MS)
        return template

    def _go_where_the_address_says(self) -> None:
        """The run and tab of a link; what is not there is said, and the latest run shown."""
        asked = {name: found[0].decode(errors="replace") for name, found in pn.state.session_args.items() if found}
        run, tab = asked.get("run", ""), asked.get("tab", "")
        self._unknown = run if run and run not in self._names else ""
        if run in self._names:
            self._run.value = run
        if tab in self._tab.options:
            self._tab.value = tab

    def _tell_address(self) -> None:
        """What is shown can be linked to, whatever else the address said; a token does not stay in it."""
        shown = "?" + urlencode({"run": self._run.value or "", "tab": self._tab.value})
        if self._location is not None and self._run.value is not None and self._location.search != shown:
            self._location.search = shown

    def news(self) -> None:
        """From the store's thread: something changed. Drawn in the page's own turn, once for all that came."""
        if not self._is_behind:
            self._is_behind = True
            self.later(self.draw)

    def draw(self) -> None:
        """Draw what changed; nothing is sent of what did not."""
        self._is_behind = False
        if self._follower is None:
            return
        snapshot = self._follower.snapshot
        now = _state(snapshot, self._tab.value)
        if now != self._drawn:
            self._drawn = now
            self._show(self._tab.value, snapshot)

    def tick(self) -> None:
        """Once a second: the run is still looked at, and there may be new ones."""
        if self._follower is not None:
            self._tell_address()  # the page overwrites the address with its own when it connects
            self.store.touch(self._follower)
        if self._follower is None or time.monotonic() - self._listed_s > LIST_S:
            self._listed_s = time.monotonic()
            self._list_runs()
        self.draw()

    def close(self) -> None:
        """The page is gone."""
        if self._follower is not None:
            self._follower.unlisten(self.news)

    def _list_runs(self, first: str | None = None) -> None:
        names = [name for name, _ in self.store.runs()]
        if names == self._names:
            return
        self._names = names
        kept = self._run.value or first
        if self._run.value is not None and self._run.value not in names:
            self._unknown = self._run.value  # it was removed while somebody looked at it
        self._run.options = names
        self._run.value = kept if kept in names else (names[0] if names else None)

    def _choose(self) -> None:
        name = self._run.value
        if name is None:
            put(
                self._message,
                html.page(html.card("No runs yet", _how_to_begin(self.store.root.name))),
            )
            return
        if self._follower is not None:
            self._follower.unlisten(self.news)
        try:
            self._follower = self.store.follow(name)
            self._follower.listen(self.news)
        except Refused as refused:
            put(self._message, html.page(html.card("No such run", html.nothing(str(refused.findings[0].message)))))
            return
        self._said = f"There is no run {self._unknown!r} here; this is {name}." if self._unknown else ""
        self._unknown = ""
        self._views.clear()
        self._shown = ("", "")
        self._open_tab()

    def _open_tab(self) -> None:
        if self._follower is None:
            return
        title, snapshot = self._tab.value, self._follower.snapshot
        self._tell_address()
        self._drawn = _state(snapshot, title)
        self._show(title, snapshot)

    def _show(self, title: str, snapshot: Snapshot) -> None:
        """The tab as the snapshot has it or, where that holds what cannot be drawn, the reason, until it can be."""
        kind = next(view for view in VIEWS if view.title == title)  # type: ignore[attr-defined]
        view, wrong = self._views.get(title), ""
        try:
            view = self._views.setdefault(title, kind(self)) if view is None else view
            view.draw(snapshot)
        except UNREADABLE as error:
            wrong = f"{title} cannot be drawn: the run holds something else than expected ({_kind(error)})"
        said = [html.card("No such run", html.nothing(self._said), "alarm")] if self._said else []
        said += [
            html.card("Not all can be shown", html.nothing(one), "alarm") for one in (snapshot.problem, wrong) if one
        ]
        put(self._message, html.page(*said) if said else "")
        if self._shown != (title, wrong):
            self._shown = title, wrong
            self._main.objects = [self._message] if wrong or view is None else [self._message, view.panel()]


def _state(snapshot: Snapshot, tab: str) -> tuple[str, str, int, int]:
    """What is on the page: the same state looks the same."""
    return snapshot.directory, tab, snapshot.version, int(time.monotonic() // AGES_S)


def _how_to_begin(folder: str) -> str:
    place = shlex.quote(f"{folder}/first")
    commands = html.commands(*(f"firstlight up CKPT --run {place}{more}" for more in ("", " --detached")))
    said = "The whole ladder on a checkpoint; the second leaves its engine running, to be asked in Live."
    later = "Its run is shown here as soon as it begins."
    return f"{html.nothing(said)}{commands}{html.nothing(later)}"


def _kind(error: BaseException) -> str:
    """An error in a few words."""
    return f"{type(error).__name__}: {error}"[:300]


class TokenProvider(AuthProvider):
    """Lets in who brings the token, once in the address (?token=...) and from then on in a signed cookie."""

    def __init__(self, token: str) -> None:
        self._token = token
        super().__init__()

    @property
    def get_user(self) -> Callable[[Any], Any]:  # bokeh hands a handler, whatever its annotation says
        def user(handler: RequestHandler) -> str | None:
            given = handler.get_argument("token", "")
            if given and hmac.compare_digest(given.encode(), self._token.encode()):
                handler.set_secure_cookie(COOKIE, "in", httponly=True, samesite="Strict")
                return "in"
            return "in" if handler.get_secure_cookie(COOKIE, max_age_days=1) == b"in" else None

        return user

    @property
    def get_user_async(self) -> None:
        return None

    @property
    def login_url(self) -> str:
        return "/firstlight-token"

    @property
    def get_login_url(self) -> None:
        return None

    @property
    def login_handler(self) -> type[RequestHandler]:
        class Ask(RequestHandler):
            def get(self) -> None:
                self.set_status(401)
                self.finish("This dashboard wants its token: open the address that it printed when it started.\n")

        return Ask

    @property
    def logout_url(self) -> None:
        return None

    @property
    def logout_handler(self) -> None:
        return None


def serve(
    root: str | Path, run: str | None = None, host: str = "127.0.0.1", port: int = 5006, token: str | None = None
) -> tuple[Any, str]:
    """Starts the server (a bokeh `Server`, its loop not yet running) and returns it with its address.

    Raises `Refused` for an address beyond this machine without a token, and for a port that is taken.
    """
    if not is_loopback(host) and not token:
        raise _open_to_all(host)
    store = DataStore(root).start()
    try:
        server = _listening(lambda: Dashboard(store, run).template(), host, port or _free_port(host), token)
    except OSError as error:
        store.close()
        raise _not_listening(host, port, error) from error
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    address = f"http://{shown}:{server.port}/" + (f"?token={token}" if token else "")
    server.io_loop.add_callback(_warm, address)
    return server, address


def _listening(page: Callable[[], Any], host: str, port: int, token: str | None) -> Any:
    """A server whose pages may only be opened from its own address and, if there is a token, with that."""
    pn.extension("plotly", notifications=False, loading_spinner="arc")
    names = ["localhost", "127.0.0.1"] if is_loopback(host) else [host]
    guarded: dict[str, Any] = {}
    if token:
        guarded = {"cookie_secret": secrets.token_hex(32), "auth_provider": TokenProvider(token)}
    return pn.serve(
        {"/": page},
        port=port,
        address=host,
        websocket_origin=[f"{name}:{port}" for name in names],
        show=False,
        start=False,
        verbose=False,
        title="Firstlight",
        sign_sessions=True,
        secret_key=secrets.token_hex(32),
        generate_session_ids=True,
        **guarded,
    )


def _open_to_all(host: str) -> Refused:
    return Refused(
        fatal(
            "usage",
            f"a dashboard on {host} without a token would show the runs to anyone on the network",
            expected="a token, or a loopback address",
            found=f"host {host}, no token",
            next="give --token, or leave --host at 127.0.0.1",
        )
    )


def _not_listening(host: str, port: int, error: OSError) -> Refused:
    return Refused(
        fatal(
            "usage",
            f"cannot listen on {host} port {port}: {error.strerror or error}",
            expected="a free port of this machine",
            found=f"{host}:{port}",
            next="choose another --port or --host",
        )
    )


async def _warm(address: str) -> None:
    """Opens the page once, so that the first person does not wait for templates and imports; nobody has to answer."""
    with contextlib.suppress(OSError, HTTPClientError):
        await AsyncHTTPClient().fetch(address, request_timeout=60.0)
    await asyncio.to_thread(lambda: pn.pane.Plotly({"data": [], "layout": {}}).get_root())  # it imports plotly


def _free_port(host: str) -> int:
    """A port that is free now: pages may only come from the server's own address, which must be known before."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
