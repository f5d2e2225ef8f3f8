"""The dashboard in a real browser, clicked through: figures change, models are loaded, versions
promoted, and a canary is rolled back while the page is open."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM
from browser_tab import Tab, open_tab, overflowing
from page_server import KEYS, SECRETS, PageServer, null_config, page_server

from penstock.operate.rollout_state import RolloutCheck, RolloutState
from penstock.protocols.gate import Gate

# The server and the clients of the end-to-end tests.
sys.path.append(str(Path(__file__).parents[1] / "e2e"))

from rollout_load import Clients, add_versions
from served import Served, null_model

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
ODD = '<img src=x onerror="document.title=1">&amp;"\''
LONG = "a-very-long-name-" + "x" * 90
CONFIGS = [
    null_config("echo", {"x": ("INT32", (1,))}, slo="p99 < 500ms"),
    null_config("echo", {"x": ("INT32", (1,))}, version="2", slo="p99 < 500ms"),
    null_config(ODD, {"x": ("INT32", (1,))}),
    null_config(LONG, {"x": ("INT32", (1,))}),
]
PROBLEMS = {"<i>broken</i>": ["config.pbtxt: <u>no such file</u> " + "z" * 200]}
ROW = b'{"inputs":[{"name":"x","datatype":"INT32","shape":[1,1],"data":[1]}]}'
ROLLOUT = RolloutState(
    *("echo", "1", "2", "canary", 0.25, 1, (0.05, 0.25, 0.5, 1.0), 1e9),
    reason="25 % of the requests since 10 s <b>bold</b>",
    checks=(
        RolloutCheck("errors", "holds", "0 of 900 requests failed", 0.0, 0.001),
        RolloutCheck("p99 < 500ms", "broken", "40 of 900 were late " + "w" * 120, 0.04, 0.01),
    ),
)
SECRET = "a-secret-of-all-scopes"
KEY_FILE = f'[[key]]\nname = "ada"\nsecret = "{SECRET}"\nscopes = ["infer", "metrics", "admin"]\n'


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server(CONFIGS, problems=PROBLEMS) as running:
        running.pages.sampler.rollouts = lambda: {"echo": ROLLOUT}
        yield running


@contextmanager
def quiet(tab: Tab) -> Iterator[None]:
    """Nothing is logged meanwhile. The page before may ask a server that is gone, so it leaves."""
    tab.open("about:blank")
    tab.wait("location.href === 'about:blank'")
    tab.console.clear()
    yield
    assert tab.console == []


def pick(tab: Tab, name: str, version: str = "1") -> None:
    key = json.dumps([name, version], separators=(",", ":"))
    tab.wait(f"[...document.querySelectorAll('.pick')].some((n) => n.dataset.key === {key!r})")
    tab.run(
        f"[...document.querySelectorAll('.pick')].find((n) => n.dataset.key === {key!r}).click()"
    )
    tab.wait(f"document.querySelector('.chosen-head h2').firstChild.data === {name!r}")


def press(tab: Tab, selector: str, text: str) -> None:
    """Click the button with this text once there is one."""
    found = f"[...document.querySelectorAll({selector!r})].find((n) => n.textContent === {text!r})"
    tab.wait(f"{found} && !{found}.disabled && {found}.offsetParent")
    tab.run(f"{found}.click()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_the_page_fits_and_logs_nothing(
    tab: Tab, server: PageServer, width: int, scheme: str
) -> None:
    with quiet(tab):
        tab.open(f"{server.url}/dashboard", width, scheme=scheme)
        tab.wait("document.querySelectorAll('#rows tr').length === 5")
        for name in ("echo", ODD, LONG):
            pick(tab, name)
            tab.wait("document.querySelectorAll('.chart path').length > 4")
            assert overflowing(tab) == []
            assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
        dark = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
        assert dark == (scheme == "dark")


def test_names_reasons_and_problems_are_text_never_markup(tab: Tab, server: PageServer) -> None:
    with quiet(tab):
        tab.open(f"{server.url}/dashboard")
        pick(tab, ODD)
        pick(tab, "echo")
        tab.wait("document.querySelector('.rollout .reason')")
        shown = tab.run("document.querySelector('.rollout .reason').textContent")
        assert "<b>bold</b>" in shown
        assert tab.run("document.querySelectorAll('main img, main script, main u').length") == 0
        assert tab.run("document.title") == "Penstock: dashboard"


def test_figures_follow_the_requests(tab: Tab, server: PageServer) -> None:
    with quiet(tab):
        tab.open(f"{server.url}/dashboard")
        pick(tab, "echo", "2")
        for _ in range(30):
            assert server.ask("/v2/models/echo/infer", body=ROW)[0] == 200
        tab.wait("document.querySelectorAll('.panel .bar').length > 0")
        latency = "document.querySelectorAll('.panel')[1]"
        tab.wait(f"{latency}.querySelector('.legend b').textContent.match(/(µs|ms|s)$/)")
        row = "document.querySelector('#rows tr.chosen')"
        assert "version 2" in tab.run(f"{row}.textContent")
        # A wrong request is a refusal, with its reason.
        assert server.ask("/v2/models/echo/infer", body=b'{"inputs":[]}')[0] == 400
        tab.wait("document.getElementById('refusals').textContent.includes('request is invalid')")
        # Hovering shows the values of that time.
        tab.run(
            f"{latency}.querySelector('svg').dispatchEvent("
            "new PointerEvent('pointermove', {clientX: 300, bubbles: true}))"
        )
        tab.wait(f"{latency}.querySelector('.pointer')")


def test_the_rollout_is_shown_as_it_stands(tab: Tab, server: PageServer) -> None:
    with quiet(tab):
        tab.open(f"{server.url}/dashboard")
        pick(tab, "echo")
        tab.wait("document.querySelector('.rollout .checks')")
        text = tab.run("document.querySelector('.rollout').innerText")
        for part in (
            "Canary: version 2 beside 1",
            "running",
            "25 % of the requests",
            "p99 < 500ms",
        ):
            assert part in text
        assert tab.run("document.querySelector('.steps .now').textContent") == "25 %"
        assert tab.run("document.querySelectorAll('.steps .past').length") == 1
        states = "[...document.querySelectorAll('.checks .chip')].map((n) => n.className)"
        assert tab.run(states) == ["chip good", "chip bad"]


def test_what_if_predicts_and_explains_refusals(tab: Tab, server: PageServer) -> None:
    with quiet(tab):
        tab.open(f"{server.url}/dashboard")
        for _ in range(3):
            assert server.ask("/v2/models/echo/versions/1/infer", body=ROW)[0] == 200
        pick(tab, "echo")
        tab.run("document.querySelector('.what-if input').value = '50'")
        press(tab, ".what-if button", "Predict")
        tab.wait("document.querySelector('.predicted')")
        text = tab.run("document.querySelector('.predicted').innerText")
        assert "predicted at 50/s, 1 instance" in text and "kept" in text
        assert "T(1) = " in tab.run("document.querySelector('.answer').innerText")


def test_without_the_scope_admin_nothing_can_be_changed(tab: Tab, tmp_path: Path) -> None:
    with page_server(CONFIGS[:2], Gate(KEYS)) as running:
        running.management.control.path = str(null_model(tmp_path, "echo"))
        tab.open(f"{running.url}/dashboard")
        tab.wait("!document.getElementById('key').hidden")
        assert tab.run("document.getElementById('live').hidden")
        use = (
            "document.getElementById('secret').value = %r;"
            "document.getElementById('key').requestSubmit()"
        )
        for wrong, status in (
            ("unknown key", 401),
            ("ключ", "characters"),
            (SECRETS["infer"], 403),
        ):
            tab.run(use % wrong)
            tab.wait(f"document.getElementById('key-problem').textContent.includes('{status}')")
        tab.run(use % SECRETS["both"])
        pick(tab, "echo")
        tab.wait("document.body.textContent.includes('with the scope admin shows all versions')")
        assert tab.run("document.querySelectorAll('main button.small').length") == 0
        assert tab.run("document.getElementById('repository').hidden")
        assert tab.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        assert not tab.run(f"location.href.includes({SECRETS['both']!r})")
        # A page that is opened again has forgotten the key.
        tab.open(f"{running.url}/dashboard")
        tab.wait("!document.getElementById('key').hidden")


def test_a_server_of_a_single_model_has_no_other_versions(tab: Tab, server: PageServer) -> None:
    with quiet(tab):
        tab.open(f"{server.url}/dashboard")
        pick(tab, "echo")
        tab.wait("document.body.textContent.includes('version 2, version 1. The server serves no')")
        assert tab.run("document.getElementById('repository').hidden")


def test_the_page_comes_back_when_the_stream_breaks(tab: Tab, server: PageServer) -> None:
    tab.open(f"{server.url}/dashboard")
    tab.wait("document.getElementById('stream').textContent === 'live'")
    tab.wait("!document.getElementById('state').hidden")
    server.pages.feed.drop_all()
    tab.wait("document.getElementById('stream').textContent === 'reconnecting'")
    # Nothing is known of the server meanwhile: its last figures must not look like those of now.
    old = "document.getElementById('live').classList.contains('old')"
    assert tab.run(f"{old} && document.getElementById('state').hidden")
    tab.wait("document.getElementById('stream').textContent === 'live'")
    tab.wait(f"!{old} && !document.getElementById('state').hidden")


@pytest.mark.slow
@pytest.mark.parametrize("shards", ["1", "2"])
def test_an_operator_loads_promotes_and_watches_a_canary_roll_back(
    tab: Tab, tmp_path: Path, shards: str
) -> None:
    root = tmp_path / "repository"
    add_versions(root, "good", "good", "errors", after_s=2.0)
    null_model(root, "spare", a_ms=1)
    (tmp_path / "keys.toml").write_text(KEY_FILE)
    flags = ["--model-control-mode", "explicit", "--load-model", "m", "--shards", shards]
    with Served(root, *flags, "--api-keys", str(tmp_path / "keys.toml")) as served:
        headers = {"Authorization": f"Bearer {SECRET}"}
        with Clients(served, 6, headers) as clients:
            tab.open(f"http://{served.address}/dashboard")
            tab.wait("!document.getElementById('key').hidden")
            tab.run(
                f"document.getElementById('secret').value = {SECRET!r};"
                "document.getElementById('key').requestSubmit()"
            )
            pick(tab, "m")
            tab.wait("Number(document.querySelector('#rows .rate span').textContent) > 5")
            load_and_unload(tab)
            promote_by_force(tab)
            watch_the_canary(tab)
            assert clients.num_wrong == 0
        tab.open("about:blank")
        tab.wait("location.href === 'about:blank'")


def load_and_unload(tab: Tab) -> None:
    names = "[...document.querySelectorAll('#rows .pick')].map((n) => n.textContent).join()"
    press(tab, "#not-loaded button", "Load")
    tab.wait(f"{names} === 'm,spare'")
    pick(tab, "spare")
    press(tab, ".chosen-head button", "Unload")
    press(tab, "#change button", "Unload")
    tab.wait(f"{names} === 'm'")
    tab.wait("document.getElementById('not-loaded').textContent.includes('spare')")


def promote_by_force(tab: Tab) -> None:
    pick(tab, "m")
    tab.wait("document.querySelectorAll('.versions tbody tr').length === 3")
    second = "document.querySelectorAll('.versions tbody tr')[1]"
    assert tab.run(f"{second}.firstChild.textContent") == "2"
    tab.run(f"{second}.querySelector('button').click()")
    press(tab, "#change button", "Promote")
    # It has no evidence, which an operator may override with a reason.
    tab.wait("!document.getElementById('change-problem').hidden")
    assert "400" in tab.run("document.getElementById('change-problem').textContent")
    tab.run("document.getElementById('change-force').value = 'a test of the page'")
    press(tab, "#change button", "Promote")
    tab.wait("!document.getElementById('change').open")
    pick(tab, "m", "2")
    served = "document.querySelectorAll('.versions tbody tr')[1].textContent.includes('served')"
    tab.wait(served)
    history = tab.run("document.querySelector('.history').textContent")
    assert "forced version 2" in history and "by ada" in history


def watch_the_canary(tab: Tab) -> None:
    third = "document.querySelectorAll('.versions tbody tr')[0]"
    tab.wait(f"{third} && {third}.querySelector('button')")
    tab.run(f"{third}.querySelector('button').click()")
    tab.run(
        "document.getElementById('change-how').value = 'canary';"
        "document.getElementById('change-force').value = 'a test of the page';"
        "document.getElementById('change-reason').value = 'faster'"
    )
    press(tab, "#change button", "Promote")
    tab.wait("!document.getElementById('change').open")
    tab.wait("document.querySelector('.rollout .decision').textContent === 'running'")
    assert "version 3 beside 2" in tab.run("document.querySelector('.rollout h3').textContent")
    # Both versions are in the list, each with its own figures.
    tab.wait("document.querySelectorAll('#rows tr').length === 2")
    ended = "document.querySelector('.rollout .decision').textContent === 'rolled back'"
    tab.wait(ended, timeout_ms=90_000)
    broken = tab.run("document.querySelector('.checks .chip.bad').parentNode.textContent")
    assert "errors" in broken
    tab.wait("document.querySelectorAll('#rows tr').length === 1")
    tab.wait("document.querySelector('.history').textContent.includes('rolled back')")
