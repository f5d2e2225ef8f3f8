"""Pages as a real browser sees them, for tests of reports."""

import re
import shutil
import subprocess
from html import escape
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


# Lets a page tell its width to the page around it, and what sticks out of it.
PHONE = """<!DOCTYPE html><body style="margin:0"><iframe width="390" height="800"
style="border:0" srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{
  const inner = document.querySelector("iframe").contentDocument;
  const out = Array.from(inner.querySelectorAll("main *")).filter((each) =>
    each.getBoundingClientRect().right > 391 && !each.closest(".scroll, .plot"));
  document.title = inner.documentElement.scrollWidth + " " +
    out.map((each) => each.tagName + "." + each.className).join(" ");
}});
</script></body>"""


def on_phone(html: str, folder: Path) -> tuple[int, str]:
    """The width that a page takes on a screen of 390 px, and the elements that stick out of it,
    besides those in containers that scroll."""
    page = PHONE.format(page=escape(html, quote=True))
    done = browse(page, folder, LAPTOP, "--dump-dom")
    title = re.search(r"<title>(\d+)\s*(.*?)</title>", done.stdout)
    assert title is not None
    return int(title[1]), title[2]


def body_of(document: str) -> str:
    """What is seen: no scripts."""
    return re.sub(r"<script.*?</script>", "", document[document.index("<body") :], flags=re.DOTALL)


def drawn(body: str) -> dict[str, bool]:
    """By plot: whether it holds lines, bars or dots. Plots of levels that are hidden are not in
    it."""
    found = {}
    body = re.sub(
        r'<div data-level="\d+" hidden="">.*?(?=<div data-level|<h2>)', "", body, flags=re.S
    )
    for card in re.split(r'<section class="card', body)[1:]:
        name = re.search(r'data-plot="(\w+)"', card)
        if name is not None:
            has_marks = re.search(r'<(path|rect) class="m"|<circle', card)
            found[name[1]] = "<svg" in card and has_marks is not None
    return found


def console_lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if "CONSOLE" in line]
