"""A tab of a headless Chromium that a test drives, over the browser's debugging pipe."""

import base64
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from browser import CHROMIUM, FLAGS

TIMEOUT_MS = 20_000


class Tab:
    """One page. `console` holds the errors and warnings that it logged, and failed requests."""

    def __init__(self, folder: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # The browser reads commands from descriptor 3 and writes events to 4.
        flags = [each for each in FLAGS if "virtual-time" not in each and "logging" not in each]
        command = [CHROMIUM, *flags, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
        script = f'exec 3<&{to_read} 4>&{to_write}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command, "about:blank"],
            pass_fds=(to_read, to_write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._stream = os.fdopen(self._from, "rb")
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self.console: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        found = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = found["sessionId"]
        for domain in ("Page", "Runtime", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]
            self._note(answer)
        raise AssertionError("the browser is gone")

    def open(self, url: str, width: int = 1100, height: int = 900, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        wanted = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **wanted)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, timeout_ms: int = TIMEOUT_MS) -> Any:
        """The value of an expression as soon as it is true; also across a navigation."""
        script = (
            "new Promise((resolve, reject) => { const end = Date.now() + %d; const look = () => {"
            " let found; try { found = %s; } catch { found = null; }"
            " if (found) resolve(found); else if (Date.now() > end) reject(Error('never true'));"
            " else setTimeout(look, 20); }; look(); })"
        )
        return self.run(script % (timeout_ms, condition))

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._session = None
        with contextlib.suppress(OSError, AssertionError):
            self.call("Browser.close")
        os.close(self._to)
        self._stream.close()
        self._process.wait(timeout=60)

    def _messages(self) -> Iterator[dict[str, Any]]:
        while True:
            while b"\0" not in self._rest:
                part = os.read(self._stream.fileno(), 1 << 16)
                if not part:
                    return
                self._rest += part
            data, _, self._rest = self._rest.partition(b"\0")
            yield json.loads(data)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Log.entryAdded":
                self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")
            case "Runtime.consoleAPICalled":
                told = [str(each.get("value", "")) for each in params["args"]]
                self.console.append(f"{params['type']}: {' '.join(told)}")
            case "Runtime.exceptionThrown":
                self.console.append(json.dumps(params["exceptionDetails"]))


@contextlib.contextmanager
def open_tab(folder: Path) -> Iterator[Tab]:
    tab = Tab(folder)
    try:
        yield tab
    finally:
        tab.close()


def overflowing(tab: Tab) -> Sequence[str]:
    """Elements that reach beyond the window's right edge."""
    return tab.run(
        "[...document.querySelectorAll('body *')].filter((node) => node.offsetParent &&"
        " node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)"
        ".map((node) => node.tagName + '.' + node.className)"
    )
