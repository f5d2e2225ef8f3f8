"""The benchmark of a GPU behind a server: which server each row starts; on a CPU, rows run."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.cli.bench import bench
from penstock.cli.serve import serve

pytest.importorskip("torch")
pytest.importorskip("safetensors")
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "gpu"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    import server

    return server


@pytest.fixture
def scaling_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS.parent), *sys.path])
    import scaling_parts

    return scaling_parts


class StartedServer:
    """Instead of a `penstock serve`."""

    port = 8000

    def check(self) -> None:
        pass

    def cpu_seconds(self) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_rows_start_a_server_and_a_bench_with_the_same_flags(
    server, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    benched: list[list[str]] = []

    @contextmanager
    def served(root: Path, flags: list[str]) -> Iterator[StartedServer]:
        started.append(flags)
        yield StartedServer()

    def highest_rate(target: str, subject, root: Path, args, flags: list[str]) -> dict[str, float]:
        benched.append(flags)
        return {"rate": 1.0}

    monkeypatch.setattr(server, "served", served)
    monkeypatch.setattr(server, "highest_rate", highest_rate)
    monkeypatch.setattr(
        server.repositories, "config_of", lambda root: SimpleNamespace(name="resnet50")
    )
    args = argparse.Namespace(
        model="resnet50", max_batch=4, tiny=True, generators=3, shards=[num_shards]
    )
    names = [name for name in server.row_names(args) if "shards" in name]
    assert names == [f"HTTP, {num_shards} shards", f"shared memory, {num_shards} shards"]
    for args.row in names:
        assert server.measured(args)["rate"] == 1.0
    shards = ["--shards", str(num_shards), "--shard-accept", "all"]
    processes = ["--processes", "3"]
    assert started == [shards, [*shards, "--shared-memory"]]
    assert benched == [processes, [*processes, "--shared-memory"]]
    for flags in started:
        # Raises for flags that `penstock serve` does not take.
        serve.make_context("serve", [str(SCRIPTS), *flags])
    for flags in benched:
        bench.make_context("bench", ["http://127.0.0.1/v2/models/m", *flags])


def test_the_highest_of_given_rates_kept_the_limit_without_failures(server) -> None:
    levels = [
        {"per_s": 100.0, "p99_ms": 9.0, "num_failed": 0},
        {"per_s": 200.0, "p99_ms": 14.9, "num_failed": 0},
        {"per_s": 300.0, "p99_ms": 14.0, "num_failed": 1},
        {"per_s": 400.0, "p99_ms": 15.1, "num_failed": 0},
    ]
    assert server.highest_of(levels, "p99 < 15 ms") == 200.0
    assert server.highest_of(levels[2:], "p99 < 15 ms") is None


def test_the_child_of_a_row_gets_the_rates(server, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(command: list[str], **_: object) -> SimpleNamespace:
        commands.append(command)
        return SimpleNamespace(returncode=0, communicate=lambda timeout: ("{}\n", ""))

    monkeypatch.setattr(server.subprocess, "Popen", start)
    flags = ["server.py", "--model", "resnet50", "--rates", "10,20", "--tiny", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", flags)
    server.in_a_child(server.parse_arguments(), "HTTP, 2 shards")
    monkeypatch.setattr(sys, "argv", ["server.py", *commands[0][2:]])
    assert server.parse_arguments().rates == "10,20"


def test_the_table_of_scaling_has_a_line_for_shared_memory(scaling_parts) -> None:
    found = {"offline; batch 4": {"rate": 100.0}, "HTTP, 8 shards; batch 4": {"rate": 80.0}}
    titles = {row.title: row for row in scaling_parts.resnet_rows(found)}
    assert titles["ResNet-50, shared memory"].found == "not measured"
    found["shared memory, 8 shards; batch 4"] = {"rate": 95.0}
    rows = {row.title: row for row in scaling_parts.resnet_rows(found)}
    assert set(rows) == {f"ResNet-50, {key.partition(';')[0]}" for key in found}
    shared = rows["ResNet-50, shared memory, 8 shards"]
    assert (shared.found, shared.goal) == ("95/s, 0.95 of offline", ">= 0.9 of offline")
    assert rows["ResNet-50, HTTP, 8 shards"].goal == ">= 25,000/s"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_row_of_a_server_has_a_rate(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "server.py"), "--model", "resnet50", "--tiny"]
    command += ["--device", "cpu", "--shards", "2", "--duration", "1", "--only", "shards"]
    command += ["--seconds", "580"]
    environment = {**os.environ, "OUT": str(tmp_path)}
    ran = subprocess.run(
        [*command, "--again"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "gpu_server_resnet50_tiny.json").read_text())["rows"]
    # The file may also have rows of earlier runs.
    for way in ("HTTP", "shared memory"):
        row = rows[f"{way}, 2 shards; batch 4"]
        assert row.get("rate"), (way, row)
