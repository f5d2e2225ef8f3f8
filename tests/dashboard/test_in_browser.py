"""The pages in a real browser: they load without errors, forms work, and nothing overflows."""

import asyncio
import base64
import http.client
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_pretrained
import uvloop
from browser import CHROMIUM
from browser_tab import Tab, open_tab, overflowing
from page_server import KEYS, SECRETS, PageServer, null_config, page_server
from text_server import served

from penstock.protocols.gate import Gate
from penstock.repository.model_source import resolve

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium")
ODD = '<img src=x onerror="document.title=1">&amp;"\'{url}'
SCRIPT = "<script>document.title = 'broken'</script><b>bold</b>"
CONFIGS = [
    null_config("a-text", {"text": ("BYTES", (1,))}, slo="p99 < 20 ms at 200/s"),
    null_config(ODD, {"x<b>": ("INT32", (2,)), "y": ("FP32", (3, 40))}),
    null_config("halves", {"h": ("FP16", (2,))}),
    null_config("a-very-long-name-" + "x" * 90, {"name_" + "y" * 90: ("FP32", (1,) * 9)}),
]
PROBLEMS = {"<i>broken</i>": ["config.pbtxt: <u>no such file</u> " + "z" * 200]}
LOADED = "document.querySelectorAll('.model').length === 5"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with open_tab(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with page_server(CONFIGS, problems=PROBLEMS) as running:
        yield running


def submit(tab: Tab, index: int, text: str | None = None) -> str:
    """What the form of a model shows after it was sent."""
    form = f"document.querySelectorAll('.model')[{index}].querySelector('form')"
    if text is not None:
        tab.run(f"{form}.querySelector('textarea').value = {text!r}")
    tab.run(f"{form}.requestSubmit()")
    return tab.wait(
        f"!{form}.querySelector('button').disabled && {form}.querySelector('.answer').textContent"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1100])
def test_the_page_fits_and_logs_nothing(
    tab: Tab, server: PageServer, width: int, scheme: str
) -> None:
    tab.console.clear()
    tab.open(f"{server.url}/", width, scheme=scheme)
    tab.wait(LOADED)
    for panel in range(3):
        tab.run(
            "document.querySelectorAll('details.use').forEach((node) => { node.open = true; });"
            f"document.querySelectorAll('.tabs').forEach((bar) => bar.children[{panel}].click())"
        )
        assert overflowing(tab) == []
        assert tab.run("document.documentElement.scrollWidth <= window.innerWidth")
    dark = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert dark == (scheme == "dark")
    assert tab.console == []


def test_names_and_answers_are_text_never_markup(tab: Tab, server: PageServer) -> None:
    tab.console.clear()
    tab.open(f"{server.url}/")
    tab.wait(LOADED)
    titles = tab.run("[...document.querySelectorAll('.model h2')].map((n) => n.firstChild.data)")
    assert titles[:2] == ["<i>broken</i>", ODD]
    assert SCRIPT in submit(tab, 2, SCRIPT)
    tab.run("document.querySelectorAll('details').forEach((node) => { node.open = true; })")
    assert tab.run("document.querySelectorAll('main img, main script, main b, main u').length") == 0
    assert tab.run("document.title") == "Penstock"
    assert tab.console == []


def test_of_many_models_the_first_that_can_be_called_is_unfolded(
    tab: Tab, server: PageServer
) -> None:
    tab.open(f"{server.url}/")
    tab.wait(LOADED)
    unfolded = "[...document.querySelectorAll('details.use')].map((node) => node.open)"
    assert tab.run(unfolded) == [True, False, False, False]


def test_json_is_sent_as_written_and_large_inputs_as_zeros(tab: Tab, server: PageServer) -> None:
    tab.open(f"{server.url}/")
    tab.wait(LOADED)
    answer = submit(tab, 1)
    assert "OUT_x<b>  INT32 [1, 2]" in answer and "0, 0" in answer
    assert "OUT_y  FP32 [1, 3, 40]" in answer and "… 72 more" in answer
    assert "This is not JSON" in submit(tab, 1, "{")
    assert "400: " in submit(tab, 1, '{"inputs": []}')
    assert "4 bytes of tensors follow" in submit(tab, 4)


def test_calls_name_the_address_of_the_page(tab: Tab, server: PageServer) -> None:
    tab.open(f"{server.url}/")
    tab.wait(LOADED)
    texts = tab.run("[...document.querySelectorAll('.copied pre')].map((n) => n.textContent)")
    assert len(texts) == 8
    assert all(f"{server.url}/v2/models/" in text for text in texts)
    assert not any("{url}/" in text for text in texts)


def test_classes_are_shown_by_name_the_best_first(tab: Tab) -> None:
    config = null_config("classes", {"x": ("FP32", (3,))})
    named = replace(config.outputs[0], labels=("<b>low", "high", "middle"))
    with page_server([replace(config, outputs=(named,))]) as running:
        tab.open(f"{running.url}/")
        tab.wait("document.querySelector('.model')")
        tensor = '{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0.1, 0.7, 0.2]}'
        submit(tab, 0, f'{{"inputs": [{tensor}]}}')
        shown = "[...document.querySelectorAll('.bars span')].map((node) => node.textContent)"
        assert tab.run(shown) == ["high", "middle", "<b>low"]
        values = "[...document.querySelectorAll('.bars progress')].map((node) => node.value)"
        assert tab.run(values) == pytest.approx([0.7, 0.2, 0.1])
        tab.wait("document.querySelector('.facts').textContent.includes('Answered1')")


def test_a_key_is_asked_for_used_and_kept_in_memory_only(tab: Tab) -> None:
    with page_server(CONFIGS[:1], Gate(KEYS)) as running:
        tab.open(f"{running.url}/")
        tab.wait("!document.getElementById('key').hidden")
        assert tab.run("document.querySelectorAll('.model').length") == 0
        use = (
            "document.getElementById('secret').value = %r;"
            "document.getElementById('key').requestSubmit()"
        )
        for wrong, status in (
            ("not a known key", 401),
            ("ключ", "characters"),
            (SECRETS["admin"], 403),
        ):
            tab.run(use % wrong)
            tab.wait(f"document.getElementById('key-problem').textContent.includes('{status}')")
            assert tab.run("document.querySelectorAll('.model').length") == 0
        tab.run(use % SECRETS["both"])
        tab.wait("document.querySelector('.model')")
        assert "hello" in submit(tab, 0, "hello")
        assert tab.run("document.getElementById('secret').value") == ""
        assert tab.run("localStorage.length + sessionStorage.length + document.cookie.length") == 0
        tab.run("document.querySelector('nav a.fetched').click()")
        tab.wait("document.getElementById('shown-text').textContent.includes('nv_inference_count')")
        tab.run("document.getElementById('shown').close()")
        tab.run("document.querySelector('.links a').click()")
        tab.wait("document.getElementById('shown-text').textContent.includes('verdicts')")
        tab.open(f"{running.url}/")
        tab.wait("!document.getElementById('key').hidden")


def test_without_the_scope_of_metrics_no_explanation_is_offered(tab: Tab) -> None:
    with page_server(CONFIGS[:1], Gate(KEYS)) as running:
        tab.open(f"{running.url}/")
        tab.wait("!document.getElementById('key').hidden")
        tab.run(
            f"document.getElementById('secret').value = {SECRETS['infer']!r};"
            "document.getElementById('key').requestSubmit()"
        )
        tab.wait("document.querySelector('.model')")
        shown = tab.run("document.querySelector('.model').innerText")
        assert "Explain" not in shown and "Waiting" not in shown


class Proxy(http.server.BaseHTTPRequestHandler):
    """Serves another server under a prefix."""

    port = 0

    def do_GET(self) -> None:
        self._pass_on()

    def do_POST(self) -> None:
        self._pass_on()

    def _pass_on(self) -> None:
        assert self.path.startswith("/under/here/")
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        path = self.path.removeprefix("/under/here")
        connection.request(self.command, path, body, dict(self.headers))
        answer = connection.getresponse()
        data = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)
        connection.close()

    def log_message(self, *_: object) -> None: ...


@contextmanager
def proxied(port: int) -> Iterator[str]:
    handler = type("ProxyTo", (Proxy,), {"port": port})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{proxy.server_port}/under/here"
        proxy.shutdown()
        thread.join()


def test_pages_work_under_a_prefix(tab: Tab, server: PageServer) -> None:
    tab.console.clear()
    with proxied(server.port) as url:
        tab.open(f"{url}/")
        tab.wait(LOADED)
        assert "hello" in submit(tab, 2, "hello")
        curl = tab.run("document.querySelectorAll('.copied pre')[2].textContent")
        assert f"{url}/v2/models/a-text/infer" in curl
        tab.open(f"{url}/docs")
        tab.wait("document.querySelectorAll('.route').length > 40")
    assert tab.console == []


@pytest.mark.parametrize("width", [390, 1100])
def test_the_description_of_the_api_is_shown(tab: Tab, server: PageServer, width: int) -> None:
    tab.console.clear()
    tab.open(f"{server.url}/docs", width)
    tab.wait("document.querySelectorAll('.route').length > 40")
    tab.run("document.querySelectorAll('.route').forEach((node) => { node.open = true; })")
    tab.wait("document.querySelectorAll('.inside').length > 40")
    assert overflowing(tab) == []
    tab.run(
        "document.getElementById('filter').value = 'post chat/completions';"
        "document.getElementById('filter').dispatchEvent(new Event('input'))"
    )
    shown = "[...document.querySelectorAll('.route')].filter((n) => n.offsetParent)"
    assert tab.run(f"{shown}.length") == 1
    text = tab.run(f"{shown}[0].innerText")
    assert "/v1/chat/completions" in text and "messages" in text and "required" in text
    assert tab.console == []


@pytest.mark.slow
def test_an_image_is_chosen_shown_and_classified(tab: Tab, tmp_path: Path) -> None:
    folder = tiny_pretrained.write_image_classifier(tmp_path / "pictures")
    photo = tmp_path / "photo.png"
    photo.write_bytes(tiny_pretrained.draw_image(64, 48))
    tab.console.clear()
    with page_server(resolve(folder).read().configs) as running:
        tab.open(f"{running.url}/")
        tab.wait("document.querySelector('.model')")
        tab.choose_file(".model input[type=file]", photo)
        tab.wait("document.querySelector('.preview').naturalWidth === 64")
        shown = submit(tab, 0)
        call = json.loads(running.ask("/dashboard/state")[2])["models"][0]["call"]
        body = json.loads(call["body"])
        body["inputs"][0]["data"] = [base64.b64encode(photo.read_bytes()).decode()]
        status, _, answer = running.ask(f"/{call['path']}", body=json.dumps(body).encode())
        assert status == 200
        label = json.loads(answer)["outputs"][0]["data"][0]
        assert f"LABEL  BYTES [1, 1]{label}" in shown
        assert running.ask(f"/{call['path']}", body=call["body"].encode())[0] == 200
    assert tab.console == []


def test_a_language_model_answers_in_the_page(tab: Tab, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    started, stop = threading.Event(), threading.Event()
    box: list[str] = []

    async def serve() -> None:
        async with served(tmp_path) as running:
            box.append(running.address)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert started.wait(60)
        # The page before this one asks its own server, which may be gone.
        tab.open("about:blank")
        tab.wait("location.href === 'about:blank'")
        tab.console.clear()
        tab.open(f"{box[0]}/")
        tab.wait("document.querySelector('.model')")
        assert submit(tab, 0, "Where does the river go?")
        took = tab.run("document.querySelector('.run span').textContent")
        assert took.endswith(" ms")
        assert tab.console == []
    finally:
        stop.set()
        thread.join(60)
