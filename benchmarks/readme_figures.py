"""Write the figures of the README from the committed results: its table and its chart.

    python benchmarks/readme_figures.py            write README.md and docs/pictures/*.svg
    python benchmarks/readme_figures.py --check    exit with 1 if they are not up to date
    python benchmarks/readme_figures.py --live     measure Penstock again, about 20 s; needs wrk
    python benchmarks/readme_figures.py --pages    take docs/pictures/*.png; needs chromium

Every other figure of the README is a link to benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from overhead.results import Results, best_points

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "pictures"
BEGIN, END = "<!-- figures: benchmarks/readme_figures.py -->\n", "<!-- end of figures -->"
MODEL, CONNECTIONS = "identity", 64
# The run whose page is shown.
REPORTED = "gpu_optimize_resnet50.json"
PARTS = {"binary": "binary tensors", "json": "JSON"}


@dataclass(frozen=True, slots=True)
class Bar:
    """One rate in a chart."""

    group: str
    label: str
    value: float
    is_ours: bool
    note: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if stale")
    parser.add_argument("--live", action="store_true", help="measure Penstock's bars again")
    parser.add_argument("--pages", action="store_true", help="take pictures of the pages")
    args = parser.parse_args()
    results = Results.load(RESULTS / "serving_overhead.json")
    if args.live:
        return measure_again(bars(results))
    if args.pages:
        return take_report() or asyncio.run(take_dashboard())
    wanted = {
        README: with_figures(README.read_text(), table()),
        PICTURES / "serving.svg": serving_chart(results),
        PICTURES / "optimize.svg": optimize_chart(),
    }
    stale = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in stale:
        print(f"{path.relative_to(ROOT)} {'is stale' if args.check else 'written'}")
        if not args.check:
            path.write_text(wanted[path])
    return 1 if args.check and stale else 0


def with_figures(readme: str, figures: str) -> str:
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + figures + END + rest.partition(END)[2]


def bars(results: Results) -> list[Bar]:
    """The best setting of each server under the chart's load, Penstock first."""
    points = [
        point
        for point in best_points(results.runs)
        if (point.model, point.connections) == (MODEL, CONNECTIONS)
    ]
    points.sort(key=lambda point: (point.part, point.server != "penstock", -point.requests_per_s))
    return [
        Bar(
            PARTS[point.part],
            results.titles[point.server],
            point.requests_per_s,
            point.server == "penstock",
        )
        for point in points
    ]


# The table


def table() -> str:
    rates = read("optimize_minilm")["rates"]
    eager, onnx, optimised = (
        statistics.median(rates[name]) for name in ("eager", "FP32 ONNX", "optimised")
    )
    rows = [
        ("what", "Penstock", "beside it", "ratio"),
        ("---",) * 4,
        (
            "`penstock optimize`, MiniLM classifier, highest rate with p99 < 100 ms, 2 cores",
            f"{optimised:,.0f}/s",
            f"PyTorch eager {eager:,.0f}/s; FP32 ONNX at its best {onnx:,.0f}/s",
            f"{optimised / eager:.1f}x; {optimised / onnx:.1f}x",
        ),
        beside_vllm("Qwen3-0.6B", "qwen3-0.6b"),
        beside_vllm("Llama-3.1-8B", "llama-8b"),
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def beside_vllm(title: str, case: str) -> tuple[str, str, str, str]:
    """A row of the run beside vLLM, with the slower of our two turns."""
    found = read("gpu_beside_vllm")[case]
    ours = min(run[found["figure"]] for run in found["ours"])
    return (
        f"{title} in BF16, 256 requests of 100 to 1,024 tokens in and out, H200",
        f"{ours:,.0f} tokens/s",
        f"vLLM {found['vllm']['vllm']} {found['vllm'][found['figure']]:,.0f} tokens/s",
        f"{found['times_vllm']:.2f}x",
    )


def read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


# The chart

WIDTH, LEFT, RIGHT, ROW, GAP, TOP = 760, 210, 190, 26, 16, 56
STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #24292f }
.small { font-size: 11px; fill: #57606a }
.title { font-size: 15px; font-weight: 600 }
.ours { fill: #0a7ea4 } .theirs { fill: #9aa7b4 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9198a1 }
  .ours { fill: #3fb6dd } .theirs { fill: #6e7a87 }
}
</style>"""


def serving_chart(results: Results) -> str:
    machine = results.machine
    caption = (
        f"{machine['cpu']}, {machine['cores']} cores shared with the load generator, "
        f"{machine['date']}; make bench-serving; best setting of each server"
    )
    title = f"HTTP requests/s, model “{MODEL}”, {CONNECTIONS} connections"
    return chart(title, caption, bars(results))


def optimize_chart() -> str:
    """What `penstock optimize` gained: the highest rate within the SLO, before and after."""
    found = read("optimize_minilm")
    rate = {name: statistics.median(rates) for name, rates in found["rates"].items()}
    accuracy = found["held_out"]
    before, after = accuracy["original"], accuracy["candidate"]
    gain = f"{rate['optimised'] / rate['eager']:.1f}x"
    steps = "ONNX, OpenVINO, BF16, static INT8, batched by the SLO"
    shown = [
        Bar("before", "PyTorch eager", rate["eager"], False, f"top-1 {before:.1%}"),
        Bar("", "FP32 ONNX, tuned", rate["FP32 ONNX"], False),
        Bar("after", "penstock optimize", rate["optimised"], True, f"{gain}, top-1 {after:.1%}"),
    ]
    title = "A sentiment classifier: highest rate with p99 < 100 ms, requests/s"
    caption = f"{steps}; 2 cores, 2026-11-15; benchmarks/optimize_minilm.py"
    return chart(title, caption, shown)


def chart(title: str, caption: str, shown: Sequence[Bar]) -> str:
    longest = max(bar.value for bar in shown)
    scale = (WIDTH - LEFT - RIGHT) / longest
    y, parts, group = TOP, [], ""
    for bar in shown:
        if bar.group and bar.group != group:
            y += GAP if group else 0
            group = bar.group
            parts.append(text(0, y + 17, group, "small"))
        parts.append(draw_bar(bar, y, scale))
        y += ROW
    head = [text(0, 18, title, "title"), text(0, 38, caption, "small")]
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 8}" role="img" '
        f'aria-label="{escape(title)}">'
    )
    return "\n".join([opening, STYLE, *head, *parts, "</svg>", ""])


def draw_bar(bar: Bar, y: int, scale: float) -> str:
    width = round(bar.value * scale, 1)
    kind = "ours" if bar.is_ours else "theirs"
    value = f"{bar.value:,.0f}" + (f"  ({bar.note})" if bar.note else "")
    return "\n".join(
        [
            text(LEFT - 8, y + 17, bar.label, "", "end"),
            f'<rect class="{kind}" x="{LEFT}" y="{y + 3}" width="{width}" height="{ROW - 8}"/>',
            text(LEFT + width + 6, y + 17, value),
        ]
    )


def text(x: float, y: int, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


# Measured again


def measure_again(known: Sequence[Bar]) -> int:
    """Penstock's own bars on this machine, beside the committed ones."""
    output = ROOT / ".bench" / "results"
    command = [sys.executable, str(ROOT / "benchmarks" / "serving_overhead.py"), "--quick"]
    command += ["--servers", "penstock", "--models", MODEL, "--connections", str(CONNECTIONS)]
    status = subprocess.run([*command, "--output", str(output)], check=False).returncode
    if status:
        return status
    committed = {bar.group: bar.value for bar in known if bar.is_ours}
    for bar in bars(Results.load(output / "serving_overhead.json")):
        print(f"{bar.group}: {bar.value:,.0f}/s now, {committed[bar.group]:,.0f}/s in the README")
    return 0


# Pictures of pages


def take_report() -> int:
    """The page of `penstock optimize`, of a committed run."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        command = [sys.executable, "-m", "penstock", "report", str(RESULTS / REPORTED)]
        subprocess.run([*command, "--html", str(page)], check=True, stdout=subprocess.DEVNULL)
        return shoot(page.as_uri(), "optimize-page", 1040)


async def take_dashboard() -> int:
    """The start page of a server with the example models."""
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    command = [sys.executable, "-m", "penstock", "serve", "examples/repository", *ports]
    server = await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert server.stdout
        async with asyncio.timeout(60):
            async for line in server.stdout:
                if line.startswith(b"Page"):
                    return shoot(line.split()[1].decode(), "dashboard", 690)
    finally:
        server.terminate()
        await server.wait()
    return 1


def shoot(url: str, name: str, height: int) -> int:
    flags = ["--headless=new", "--no-sandbox", "--hide-scrollbars"]
    flags += [f"--window-size=1100,{height}", "--virtual-time-budget=4000"]
    flags += [f"--screenshot={PICTURES / name}.png"]
    with tempfile.TemporaryDirectory() as profile:
        command = ["chromium", *flags, f"--user-data-dir={profile}", url]
        return subprocess.run(command, stderr=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    sys.exit(main())
