"""Pages as a real browser sees them, for tests of reports."""

import re
import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
# All that a browser does besides showing a page is off.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=10000",
)
# How wide the page would like to be.
MEASURE = "<script>document.title = document.documentElement.scrollWidth</script>"
LAPTOP = "--window-size=1366,768"


def browse(html: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "page.html").write_text(html)
    profile = f"--user-data-dir={folder / 'profile'}"
    address = (folder / "page.html").as_uri()
    command = [CHROMIUM, *FLAGS, profile, *flags, address]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=90)


def body_of(document: str) -> str:
    """What is seen: no scripts."""
    return re.sub(r"<script.*?</script>", "", document[document.index("<body") :], flags=re.DOTALL)


def drawn(body: str) -> dict[str, bool]:
    """By plot: whether it holds lines or bars. A hidden one is not in it."""
    found = {}
    for card in re.split(r'<section class="card', body)[1:]:
        head, _, rest = card.partition(">")
        name = re.search(r'data-plot="(\w+)"', rest)
        if name is not None and "hidden" not in head:
            has_marks = re.search(r'<path class="(js-line|point)|<g class="point"', rest)
            found[name[1]] = "<svg" in rest and has_marks is not None
    return found


def console_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]
