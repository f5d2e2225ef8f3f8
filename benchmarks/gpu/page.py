"""The GPU benchmarks as one page that needs nothing else, from the files that `run.py` and
`optimize.py` write; on any machine.

    python benchmarks/gpu/page.py benchmarks/results/gpu_*.json --html gpu.html
    python benchmarks/gpu/page.py benchmarks/results/gpu_*.json --markdown      the table alone
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import drawing
import techniques
from techniques import ALONE, CLAIMS, Found

from penstock import units
from penstock.errors import ConfigError
from penstock.report.page import Card, Drawn, drawn, rendered
from penstock.report.tables import Cell

HERE = Path(__file__).resolve().parent
TITLES = {
    "resnet50": "ResNet-50",
    "bert-large": "BERT-large",
    "vit-b": "ViT-B/16",
    "efficientnet-b0": "EfficientNet-B0",
    "mobilenet-v2": "MobileNetV2",
    "detector": "YOLO-like detector, 640 x 640",
}
SERVED_HEAD = ("row", "clients", "rows/s", "GPU busy", "power, W", "rows of a batch", "p50, ms")
UNITS = {"bert-large": "sequences/s"}
OPTIMIZED = "gpu_optimize_"
EXPECTED = "expected what benchmarks/gpu/run.py or optimize.py writes"
PLOTS = (
    (
        "gains",
        "Claimed and measured",
        "Grey is what guides say, pale up to their best case. Left of 1x is a loss.",
    ),
    (
        "waterfall",
        "What each step adds",
        "Answers per second at the largest batch. Pale: host-fed.",
    ),
    ("latency", "One alone", "How long it takes; shorter is better."),
    (
        "rates",
        "The largest batch",
        "With inputs on the device, and with inputs copied from the host while others compute.",
    ),
    (
        "errors",
        "How far answers are from FP32",
        "Random weights: what rounding does to sums. Left is better.",
    ),
    (
        "chosen",
        "What optimize chose",
        "Each step that was kept, through a real server. Pale: predicted.",
    ),
)


@dataclass
class Section:
    """One model: its measurements, and what `penstock optimize` made of it."""

    model: str
    found: dict[str, Any] = field(default_factory=lambda: {"techniques": {}})
    optimized: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return TITLES.get(self.model, self.model)

    @property
    def key(self) -> str:
        return self.model.replace("-", "_")

    @property
    def unit(self) -> str:
        return UNITS.get(self.model, "images/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", nargs="+", type=Path, help="files of run.py and optimize.py")
    parser.add_argument("--html", type=Path, help="where the page goes")
    parser.add_argument("--markdown", action="store_true", help="print the table of all networks")
    args = parser.parse_args()
    if not args.html and not args.markdown:
        parser.error("nothing to do; expected --html FILE or --markdown")
    try:
        sections = read(args.results)
    except ConfigError as error:
        raise SystemExit("\n".join(error.problems)) from None
    if args.markdown:
        print(markdown(sections))
    if args.html:
        args.html.write_text(page(sections))
        print(args.html)


def read(paths: Sequence[Path]) -> list[Section]:
    """Files of other benchmarks are left out. ConfigError with all that cannot be read, or with all
    if none is ours."""
    sections: dict[str, Section] = {}
    problems, others = [], []
    for path in paths:
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}; {EXPECTED}")
            continue
        if path.stem.startswith(OPTIMIZED) and isinstance(found, dict) and "tries" in found:
            model = path.stem.removeprefix(OPTIMIZED).replace("_", "-")
            sections.setdefault(model, Section(model)).optimized = found
        elif isinstance(found, dict) and isinstance(found.get("techniques"), dict):
            model = str(found.get("model", path.stem))
            sections.setdefault(model, Section(model)).found = found
        else:
            others.append(f"{path}: {EXPECTED}")
    if problems or not sections:
        raise ConfigError([*problems, *others])
    return list(sections.values())


def page(sections: Sequence[Section]) -> str:
    values = {
        "headline": headline(sections),
        "machines": ", ".join(sorted(set(machines(sections)))) or "no machine",
        "cards": [card for each in sections for card in cards(each)],
        "sections": [
            {
                "title": each.title,
                "figures": figures(each),
                "head": ["row", "batch", "waited, ms", f"on the device, {each.unit}"]
                + [f"host-fed, {each.unit}", "error"],
                "rows": list(table(each.found)),
                "served_head": [*SERVED_HEAD, "p99, ms"],
                "served": list(served_table(each.found)),
                "failed": failed(each.found),
                "chosen": chosen_text(each.optimized),
                "tries": list(tries(each.optimized)),
            }
            for each in sections
        ],
        "summary_head": ["technique", "guides claim", *(each.title for each in sections)],
        "summary": list(summary(sections)),
        "claims": CLAIMS.values(),
        "unmeasured": unmeasured(sections),
    }
    return rendered("gpu.html.jinja", values, HERE)


def summary(sections: Sequence[Section]) -> Iterator[list[Cell]]:
    """What each technique gives each network, beside what guides claim for it."""
    for key, claim in CLAIMS.items():
        found = [techniques.best_gain(each.found, key) for each in sections]
        if any(found):
            gave = (_gain_cell(each) for each in found)
            yield [Cell(claim.name), Cell(drawing.claimed(claim)), *gave]


def _gain_cell(gain: techniques.Gain | None) -> Cell:
    """One alone and the largest batch; of a server, its rate."""
    if gain is None:
        return Cell(units.UNKNOWN)
    texts = [
        f"{drawing.times(value)} {name}".strip()
        for value, name in ((gain.alone, "alone"), (gain.largest, "" if gain.detail else "batch"))
        if not math.isnan(value)
    ]
    return Cell(", ".join(texts), gain.detail)


def markdown(sections: Sequence[Section]) -> str:
    """The table of all networks, as text."""
    sections = [each for each in sections if each.found["techniques"]]
    head = ["technique", "guides claim", *(each.title for each in sections)]
    lines = [head, ["---"] * len(head)]
    for row in summary(sections):
        lines.append([f"{cell.text} ({cell.detail})" if cell.detail else cell.text for cell in row])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figures(section: Section) -> list[Drawn]:
    plots = drawing.plots_of(section.found) | {"chosen": drawing.chosen_steps(section.optimized)}
    named = {f"{name}_{section.key}": plot for name, plot in plots.items()}
    words = {f"{name}_{section.key}": (title, text) for name, title, text in PLOTS}
    return drawn(named, words)


def headline(sections: Sequence[Section]) -> str:
    """The largest gain and the largest loss against what guides say, in one sentence."""
    gains = [
        (each.best, each, section)
        for section in sections
        for each in techniques.gains(section.found)
        if each.technique != "batching"
    ]
    if not gains:
        return "Nothing was measured"
    best, gain, section = max(gains, key=lambda each: each[0])
    name = CLAIMS[gain.technique].name
    text = f"{name} gave most: {drawing.times(best)} on {section.title} ({gain.label})"
    most: dict[str, float] = {}
    for value, each, _ in gains:
        most[each.technique] = max(value, most.get(each.technique, 0.0))
    short = [CLAIMS[key].name for key, value in most.items() if value < (CLAIMS[key].low or 0.0)]
    return f"{text}. Nowhere as much as guides claim: {', '.join(short)}" if short else text


def machines(sections: Sequence[Section]) -> Iterator[str]:
    for section in sections:
        for each in section.found["techniques"].values():
            if "machine" in each:
                version = each.get("built", {}).get("torch", "")
                yield f"{each['machine']}, torch {version}" if version else str(each["machine"])


def cards(section: Section) -> Iterator[Card]:
    rows = techniques.rows_of(section.found)
    for key, where in (("device_per_s", "inputs on the device"), ("host_per_s", "host-fed")):
        found = [(techniques.last(loads).get(key) or 0.0, name) for name, loads in rows.items()]
        if found and max(found)[0]:
            best, name = max(found)
            yield Card(f"{section.title}, {where}", f"{best:,.0f}/s", name)
    waited = [
        (loads[ALONE][key], name)
        for name, loads in rows.items()
        for key in ("waited_ms", "host_waited_ms")
        if loads.get(ALONE, {}).get(key)
    ]
    if waited:
        best, name = min(waited)
        yield Card(f"{section.title}, one alone", units.duration(best / 1e3), name)


def table(found: Found) -> Iterator[list[Cell]]:
    keys = ("waited_ms", "device_per_s", "host_per_s")
    for name, loads in techniques.rows_of(found).items():
        for load, row in loads.items() if not techniques.is_served(loads) else ():
            figures = [row.get(key) for key in keys]
            texts = [units.UNKNOWN if not each else _figure(each) for each in figures]
            error = row.get("error")
            last = units.UNKNOWN if error is None else f"{error:.1e}"
            yield [Cell(name), Cell(load), *map(Cell, texts), Cell(last)]


def served_table(found: Found) -> Iterator[list[Cell]]:
    """Without and with dynamic batching."""
    keys = ("power_watts", "mean_batch", "p50_ms", "p99_ms")
    for name, loads in techniques.rows_of(found).items():
        row = techniques.last(loads)
        if not techniques.is_served(loads):
            continue
        share = row.get("utilization")
        busy = units.UNKNOWN if share is None else f"{share:.0%}"
        texts = [units.UNKNOWN if not row.get(key) else _figure(row[key]) for key in keys]
        first = [name, str(row["clients"]), _figure(row[techniques.SERVED]), busy]
        yield [Cell(text) for text in (*first, *texts)]


def _figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else units.number(value)


def failed(found: Found) -> list[tuple[str, str]]:
    return [
        (name, each["error"].strip().splitlines()[-1])
        for name, each in found["techniques"].items()
        if each.get("error")
    ]


def chosen_text(found: Mapping[str, Any]) -> str:
    steps = (found.get("chosen") or {}).get("steps") or []
    return " → ".join(_step(each) for each in steps) if steps else ""


def _step(step: Mapping[str, Any]) -> str:
    listed = ", ".join(f"{key}={value}" for key, value in (step.get("settings") or {}).items())
    return f"{step['pass_name']}({listed})" if listed else str(step["pass_name"])


def tries(found: Mapping[str, Any]) -> Iterator[list[Cell]]:
    for each in found.get("tries") or []:
        steps = (each.get("candidate") or {}).get("steps") or []
        name = " → ".join(map(_step, steps)) or "original"
        style = {"kept": "kept-text", "rejected": "missed-text", "failed": "missed-text"}
        outcome = str(each.get("outcome", ""))
        reason = Cell(str(each.get("reason", "")), style="words")
        yield [Cell(name, style="words"), Cell(outcome, style=style.get(outcome, "")), reason]


def unmeasured(sections: Sequence[Section]) -> list[str]:
    """Techniques with a claim and without a row."""
    seen = {each.technique for section in sections for each in techniques.gains(section.found)}
    return [claim.name for key, claim in CLAIMS.items() if key not in seen]


if __name__ == "__main__":
    main()
