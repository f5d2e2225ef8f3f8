"""The parts of `scaling.py` that have programs of their own: streams of a language model, ResNet-50
on a GPU, and two cores beside Triton. Each returns rows of the last table."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))

import triton_side  # noqa: E402

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 28,
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 3072, "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True,
}  # fmt: skip
TINY = QWEN3 | {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 64, "vocab_size": 300, "max_position_embeddings": 512,
}  # fmt: skip
LOAD_S = 240.0
# A part that takes longer is cut off.
PART_S = 900.0
# How rows of `gpu/server.py` whose inputs come through shared memory begin.
SHARED = "shared memory"


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the last table: what was found, and the goal of the issue."""

    title: str
    found: str
    goal: str = ""


def tail(text: str) -> str:
    """Return the last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


# Streams.


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """`lengths` are tokens in and out."""

    shards: Sequence[int]
    clients: Sequence[int]
    seconds: float
    generators: int
    is_tiny: bool
    device: str = ""

    @property
    def lengths(self) -> tuple[str, str]:
        return ("16", "16") if self.is_tiny else ("128", "128")


def streams(plan: StreamPlan, found: dict[str, Any]) -> list[TableRow]:
    """Measure OpenAI streams of a model of Qwen3-0.6B's shape with random weights."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(TINY if plan.is_tiny else QWEN3))
        one: dict[int, float] = {}
        for number in plan.shards:
            log = Path(folder) / "streams.log"
            try:
                with _text_server(config, number, log) as server:
                    server.wait_until_ready(LOAD_S)
                    for count in plan.clients:
                        figures = _stream(server.port, count, plan)
                        found[f"streams, {count} clients; {number} shards"] = figures
                        rows.append(_stream_row(number, count, figures, one))
            except triton_side.StartError:
                why = tail(log.read_text())
                rows.append(TableRow(f"streams, {number} shards", f"not served: {why}"))
    return rows


def _stream_row(
    number: int, count: int, figures: Mapping[str, Any], one: dict[int, float]
) -> TableRow:
    title = f"streams, {count} clients, {number} shards"
    if "failed" in figures:
        return TableRow(title, figures["failed"])
    rate, num_failed = figures["tokens_per_s"], figures["num_failed"]
    ratio = f", {rate / one[count]:.2f} of one loop" if count in one else ""
    if number == 1:
        one[count] = rate
    lost = f"{num_failed} lost" if num_failed else "none lost"
    return TableRow(title, f"{rate:,.0f} tokens/s{ratio}, {lost}", ">= one loop; none lost")


def _text_server(config: Path, number: int, log: Path) -> triton_side.Server:
    port = triton_side.free_port()
    command = [sys.executable, "-m", "penstock", "serve", str(config), "--random-weights"]
    command += ["--no-grpc", "--no-metrics", f"--http-port={port}", f"--shards={number}"]
    command += ["--log-level=WARNING", "--drain-s=1"]
    return triton_side.Server("penstock", command, port, log)


def _stream(port: int, count: int, plan: StreamPlan) -> dict[str, Any]:
    path = Path(tempfile.mkdtemp()) / "run.json"
    command = [sys.executable, "-m", "penstock", "bench", f"openai+http://127.0.0.1:{port}/v1"]
    command += ["--json", str(path), "--concurrency", str(count), "--precision", "0"]
    command += ["--lengths", plan.lengths[0], "--output-lengths", plan.lengths[1]]
    command += ["--duration", f"{plan.seconds:g}s", "--warm-up", "2s", "--timeout", "120s"]
    command += ["--processes", str(plan.generators)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        if done.returncode:
            return {"failed": tail(done.stderr or done.stdout)}
        (level,) = json.loads(path.read_text())["levels"]
    finally:
        shutil.rmtree(path.parent)
    summary = level["summary"]
    tokens = summary["output_tokens_per_s"]
    return {"tokens_per_s": tokens, "num_failed": summary["num_failed"]}


# ResNet-50 on a GPU.


def resnet(shards: Sequence[int], seconds: float, is_tiny: bool) -> list[TableRow]:
    """Run `gpu/server.py`: offline, in process, over HTTP and by shared memory, in one run."""
    script = ROOT / "benchmarks" / "gpu" / "server.py"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet.json"
        command = [sys.executable, str(script), "--model", "resnet50", "--again", "--out"]
        command += [str(path), "--seconds", f"{seconds:g}", "--shards", *map(str, shards)]
        command += ["--generators", str(max(1, (os.cpu_count() or 2) // 4))]
        command += ["--tiny", "--device", "cpu"] if is_tiny else []
        title = "ResNet-50, 150 kB images"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=seconds + PART_S
            )
        except subprocess.TimeoutExpired:
            return [TableRow(title, "not done in time")]
        if not path.is_file():
            return [TableRow(title, f"not measured: {tail(done.stderr or done.stdout)}")]
        found: dict[str, Any] = json.loads(path.read_text())["rows"]
    return resnet_rows(found)


def resnet_rows(found: Mapping[str, Mapping[str, Any]]) -> list[TableRow]:
    by_name = {key.partition(";")[0]: row for key, row in found.items()}
    offline = by_name.get("offline", {}).get("rate") or 0.0
    rows = []
    for name, row in by_name.items():
        if name in ("write", "starts"):
            continue
        rate = row.get("rate")
        text = f"{rate:,.0f}/s" if rate else f"no rate: {tail(str(row.get('failed', row)))}"
        if rate and offline and name != "offline":
            text += f", {rate / offline:.2f} of offline"
        rows.append(TableRow(f"ResNet-50, {name}", text, resnet_goal(name)))
    if not any(name.startswith(SHARED) for name in by_name):
        rows.append(TableRow(f"ResNet-50, {SHARED}", "not measured", resnet_goal(SHARED)))
    return rows


def resnet_goal(name: str) -> str:
    if name == "offline":
        return ""
    is_direct = name == "in process" or name.startswith(SHARED)
    return ">= 0.9 of offline" if is_direct else ">= 25,000/s"


# Two cores.


def two_cores(seconds: int, rounds: int) -> list[TableRow]:
    """Run `serving_overhead.py` pinned to two cores: Penstock and Triton's Python backend."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    script = ROOT / "benchmarks" / "serving_overhead.py"
    title = "two cores, serving_overhead"
    with tempfile.TemporaryDirectory() as folder:
        command = ["taskset", "-c", cores, sys.executable, str(script), "--servers", "penstock"]
        command += ["triton", "--models", "identity", "--connections", "1", "64"]
        command += ["--seconds", str(seconds), "--rounds", str(rounds), "--output", folder]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=PART_S
            )
        except subprocess.TimeoutExpired:
            return [TableRow(title, "not done in time")]
        path = Path(folder) / "serving_overhead.json"
        if not path.is_file():
            return [TableRow(title, f"not measured: {tail(done.stderr or done.stdout)}")]
        return overhead_rows(json.loads(path.read_text()))


def overhead_rows(results: Mapping[str, Any]) -> list[TableRow]:
    """Compare the medians of binary tensors: requests/s at 64 connections, p50 at one."""
    rows = []
    for count, field, unit, goal in (
        (64, "requests_per_s", "/s", ">= 2.6x Triton's"),
        (1, "p50_us", " us p50", "<= 0.69x Triton's"),
    ):
        runs = [r for r in results["runs"] if (r["connections"], r["part"]) == (count, "binary")]
        found: dict[str, dict[str, list[float]]] = {}
        for run in runs:
            found.setdefault(run["server"], {}).setdefault(run["variant"], []).append(run[field])
        best = max if field == "requests_per_s" else min
        of = {name: best(map(statistics.median, each.values())) for name, each in found.items()}
        ours, theirs = of.get("penstock"), of.get("triton")
        text = "not measured" if ours is None else f"{ours:,.0f}{unit}"
        missing = results.get("missing", {}).get("triton", "no runs")
        text += f", {ours / theirs:.2f}x" if ours and theirs else f"; Triton: {tail(missing)}"
        rows.append(TableRow(f"two cores, {count} connections", text, goal))
    return rows
