"""Runs as files: JSON that can be read back, and CSV in perf_analyzer's format.

Besides its data the JSON holds a `verdict` and, per level, a `summary` for other tools; both are
computed on writing and ignored on reading.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock import slo as promises
from penstock.benchmark import summary
from penstock.benchmark.headline import headline_of
from penstock.benchmark.pacer import Closed
from penstock.benchmark.results import FORMAT, BenchRun, Level
from penstock.benchmark.stats import Interval
from penstock.benchmark.summary import Breakdown, Figures, MemberFigures
from penstock.errors import CommandLineError, ConfigError
from penstock.repository import staging

# perf_analyzer's columns, in its order, after the load. Durations in microseconds.
PERF_ANALYZER_COLUMNS = (
    *("Inferences/Second", "Client Send", "Network+Server Send/Recv", "Server Queue"),
    *("Server Compute Input", "Server Compute Infer", "Server Compute Output", "Client Recv"),
    *("p50 latency", "p90 latency", "p95 latency", "p99 latency"),
)
# Long rows of numbers, written on one line each.
LONG_ROWS = re.compile(r'"(?:counts|times)": [\[{][^\[\]{}]*')
Result = TypeVar("Result")
OWN_COLUMNS = ("p99.9 latency", "p99 low", "p99 high", "Failures", "Goodput/Second")


def write_run(run: BenchRun, path: Path) -> None:
    """Write the run as JSON, atomically."""
    write_text(to_json(run), path)


def to_json(run: BenchRun) -> str:
    """Return the run as JSON, with a summary of each level."""
    verdict = headline_of(run)
    data = plain(msgspec.to_builtins(run, str_keys=True))
    data["levels"] = [
        {"summary": _summary(run, level)} | values
        for level, values in zip(run.levels, data["levels"], strict=True)
    ]
    data = {"verdict": {"slo": verdict.outcome, "text": verdict.text}} | data
    text = msgspec.json.format(msgspec.json.encode(data), indent=1).decode()
    return LONG_ROWS.sub(lambda match: re.sub(r"\n *", " ", match[0]), text) + "\n"


def problem_of(path: Path) -> str:
    """Return why a file cannot be written there; empty when it can.

    Writing replaces the target by rename, so devices and other special files are refused.
    """
    if path.is_dir():
        return f"{path}: is a folder; expected the name of a file"
    if not path.parent.is_dir():
        return f"{path}: there is no folder {path.parent}"
    is_special = path.exists() and not path.is_file()
    if is_special or path.parent.resolve() == Path("/dev"):
        return f"{path}: is no plain file; expected the name of a file to write"
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return ""
    except OSError as error:
        return f"{path}: cannot be written: {error.strerror or error}"


def check_outputs(names: Iterable[str | None]) -> None:
    """Check output files before anything long begins: ConfigError for files that cannot be written,
    CommandLineError if a name is given twice. Empty names are ignored."""
    given = [name for name in names if name]
    problems = [text for name in given if (text := problem_of(Path(name)))]
    if shared := sorted({name for name in given if given.count(name) > 1}):
        clashes = [f"{name}: two outputs cannot share a file" for name in shared]
        raise CommandLineError([*problems, *clashes])
    if problems:
        raise ConfigError(problems)


def write_text(text: str, path: Path) -> None:
    """Write a file by atomic rename; ConfigError when it cannot be written."""
    if problem := problem_of(path):
        raise ConfigError([problem])
    waiting = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        staging.write(waiting, text.encode())
        os.replace(waiting, path)
        staging.sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            waiting.unlink()
        reason = error.strerror or str(error)
        raise ConfigError([f"{path}: cannot be written: {reason}"]) from error


def plain(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, with words that are read back as such."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def _summary(run: BenchRun, level: Level) -> dict[str, object]:
    """Summarise a level; None where a figure is unknown."""
    figures = summary.figures_of(run, level)
    found: dict[str, object] = {
        "load": figures.label,
        "num_requests": figures.num_requests,
        "num_failed": figures.num_failed,
        "failures": figures.failures,
        "throughput_per_s": _bounds(figures.throughput),
        "goodput_percent": figures.goodput_percent,
        "latency_ms": {name: _bounds(each, 1e3) for name, each in figures.latency.items()},
        "mean_latency_ms": _finite(figures.mean_s * 1e3),
        "utilisation_percent": figures.utilisation,
    }
    for metric, percentiles in figures.streams.items():
        found[f"{metric}_ms"] = {name: _bounds(each, 1e3) for name, each in percentiles.items()}
    if figures.output_tokens_per_s is not None:
        found["output_tokens_per_s"] = figures.output_tokens_per_s
    if figures.breakdown is not None:
        phases = figures.breakdown.phases()
        found["phases_ms"] = {name: _finite(seconds * 1e3) for name, seconds in phases.items()}
    if figures.members:
        found["members"] = {name: _member(each) for name, each in figures.members.items()}
    return found


def _member(member: MemberFigures) -> dict[str, object]:
    """Summarise a member of an ensemble: means of a request to it."""
    phases = member.breakdown.inside()
    return {
        "requests_per_request": _finite(member.num_requests),
        "rows_per_execution": _finite(member.num_rows),
        "server_ms": _finite(member.breakdown.server_s * 1e3),
        "phases_ms": {name: _finite(seconds * 1e3) for name, seconds in phases.items()},
    }


def _bounds(interval: Interval, factor: float = 1.0) -> dict[str, float | None]:
    return {name: _finite(getattr(interval, name) * factor) for name in ("value", "low", "high")}


def _finite(number: float) -> float | None:
    return round(number, 6) if math.isfinite(number) else None


def read_run(path: Path) -> BenchRun:
    """Read a run; ConfigError says why the file is not one."""
    return read_result(path, BenchRun, {"target", "levels", "format"}, "a run", "bench or optimize")


def read_result(
    path: Path, kind: type[Result], fields: Set[str], what: str, command: str
) -> Result:
    """Read the JSON of a command's result, which has these fields and may have an SLO; ConfigError
    says why the file does not hold one."""
    expected = f"expected what penstock {command} --json writes"
    try:
        text = path.read_bytes()
        document = msgspec.json.decode(text)
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file; {expected}"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except msgspec.DecodeError as error:
        raise ConfigError([f"{path}: not JSON: {error}"]) from None
    if not isinstance(document, dict) or not document.keys() >= fields:
        raise ConfigError([f"{path}: JSON, but not of {what}; {expected}"])
    if document["format"] != FORMAT:
        known = f"this version of penstock reads format {FORMAT}"
        raise ConfigError([f"{path}: format {document['format']!r}; {known}"])
    try:
        # Not strict: NaN is written as a string.
        found = msgspec.json.decode(text, type=kind, strict=False)
        if document.get("slo"):
            promises.parse(document["slo"])
    except msgspec.ValidationError as error:
        raise ConfigError([f"{path}: not the whole of {what}: {error}"]) from None
    except ConfigError as error:
        raise ConfigError([f"{path}: slo: {problem}" for problem in error.problems]) from None
    return found


def csv_text(run: BenchRun) -> str:
    """Return one row per level, ordered by throughput as perf_analyzer does."""
    is_closed = all(isinstance(level.load, Closed) for level in run.levels)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    load = "Concurrency" if is_closed else "Request Rate"
    writer.writerow((load, *PERF_ANALYZER_COLUMNS, *OWN_COLUMNS))
    rows = [(level, summary.figures_of(run, level)) for level in run.levels]
    for level, figures in sorted(rows, key=lambda row: row[1].throughput.value):
        load = f"{summary.load_size(level.load):.6g}"
        writer.writerow([load, *_known_cells(run, figures), *_own_cells(figures)])
    return out.getvalue()


def _known_cells(run: BenchRun, figures: Figures) -> list[str]:
    parts = figures.breakdown or Breakdown()
    inside = (parts.queue_s, parts.input_s, parts.infer_s, parts.output_s)
    # The remainder, so that the columns add up to the mean latency; NaN stays NaN.
    network_s = max(figures.mean_s - parts.unsent_s - sum(inside), 0.0)
    cells = [f"{figures.throughput.value * run.batch_size:.6g}"]
    cells += map(_microseconds, (parts.unsent_s, network_s, *inside, 0.0))
    cells += [_microseconds(figures.latency[name].value) for name in ("p50", "p90", "p95", "p99")]
    return cells


def _own_cells(figures: Figures) -> list[str]:
    p99 = figures.latency["p99"]
    cells = [_microseconds(each) for each in (figures.latency["p99.9"].value, p99.low, p99.high)]
    goodput = ""
    if (percent := figures.goodput_percent) is not None:
        # Throughput times the share of good answers that came in time.
        in_time = percent / 100 * figures.num_requests / max(1, figures.num_good)
        goodput = f"{figures.throughput.value * in_time:.6g}"
    return [*cells, str(figures.num_failed), goodput]


def _microseconds(seconds: float) -> str:
    return str(round(seconds * 1e6)) if math.isfinite(seconds) else ""
