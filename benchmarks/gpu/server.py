"""How much of what a GPU can do is left when requests come one by one: the highest rate of Poisson
arrivals that keeps MLPerf's limits (ResNet-50 15 ms, BERT 130 ms at the 99th percentile), against
whole batches back to back.

    python benchmarks/gpu/server.py --model resnet50             about four minutes on an H200
    python benchmarks/gpu/server.py --model bert-large           and bert-large-fp8
    python benchmarks/gpu/server.py --model resnet50 --tiny --device cpu     does it run? no figures

Goals, set before measuring: in process and by shared memory at least 0.90 of offline; BERT over
HTTP from other processes at least 0.80; the second start of a version ready within 15 s, with
nothing compiled.

Rows, each in processes of its own; the file is written after each, what it has is not measured
again (`--again` does), and none begins after `--seconds`:
  write       the repository (`repositories.py`): weights, calibration, kernels chosen and kept
  offline     whole batches from the host's memory through the runner, two on their way: the 100 %
  starts      `penstock serve` from exec to ready: first, again, and again with caches emptied
  in process  `penstock bench FOLDER --max-rate`, one row a request
  HTTP        `penstock bench http://... --max-rate` against `penstock serve --shards N`, all of
              which accept connections at all rates
  shared memory  the same with `--shared-memory` for both: requests only name their inputs
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import presence
import repositories
from repositories import SUBJECTS, Subject
from rich.console import Console
from rich.table import Table

from penstock.backends import Batch, Runner, backend
from penstock.config import ModelConfig
from penstock.serving import local
from penstock.slo import parse

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parents[1] / "results"
# Repositories, caches of compilers, and what was measured so far.
WORK = ROOT / ".bench" / "gpu" / "server"
SHARED = "shared memory"
# What one row may take.
ROW_S = 240
# Of tiny models on a CPU, which is for seeing whether it runs.
TINY_SLO = "p99 < 2 s"
# Who waits longer has no answer: an overrun server is not waited for.
PATIENCE = "3s"
# By compilers, into the folders that they keep what they compile in. What a version brings along
# is put there too, but without the stages in between.
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
COMPILED = (".ttir", ".ptx", ".py", ".so", ".cpp")
CPU = re.compile(r'^penstock_process_cpu_seconds{process="(\w+)".*} (\S+)', re.M)
URL = re.compile(r"http://127\.0\.0\.1:(\d+)/v2")
BUILT = re.compile(r" was built with (.*)")
TIMED = re.compile(r"fusion_timed=(\d+)")
# What must not be in the log of a model that is to be fast.
SPOILT = re.compile(r"(served one request at a time|not padded): .*")


def main() -> None:
    args = parse_arguments()
    if args.row:
        print(json.dumps(measured(args)))
        return
    presence.require_gpu(args.device)
    run(args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", choices=sorted(SUBJECTS), required=True)
    parser.add_argument("--device", default="cuda", help="cpu: only with --tiny")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see whether it runs")
    parser.add_argument("--max-batch", type=int, help="largest batch; others are further rows")
    parser.add_argument("--shards", type=int, nargs="*", help="of the server (BERT: 1 2 4)")
    parser.add_argument("--generators", type=int, help="processes that send over HTTP (4)")
    parser.add_argument("--rates", default="", help="such rates, as `penstock bench --rate` has it")
    parser.add_argument("--duration", type=int, help="seconds that a rate is measured (6)")
    parser.add_argument("--seconds", type=float, default=300, help="no row begins after it")
    parser.add_argument("--only", default="", help="rows with this in their name")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument(
        "--out", type=Path, help="default: benchmarks/results/gpu_server_MODEL.json"
    )
    parser.add_argument("--row", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    is_bert = args.model.startswith("bert")
    args.max_batch = args.max_batch or (4 if args.tiny else SUBJECTS[args.model].max_batch)
    if args.shards is None:
        args.shards = ([1, 2] if args.tiny else [1, 2, 4]) if is_bert else []
    args.generators = args.generators or (1 if args.tiny else 4)
    args.duration = args.duration or (1 if args.tiny else 6)
    if args.device == "cpu" and (not args.tiny or SUBJECTS[args.model].needs_gpu):
        parser.error("--device cpu: only with --tiny, and not for FP8, which needs a GPU")
    return args


def row_names(args: argparse.Namespace) -> list[str]:
    ways = ("HTTP", SHARED)
    served = [f"{way}, {number} shards" for number in args.shards for way in ways]
    return ["write", "offline", "starts", "in process", *served]


@dataclass(frozen=True, slots=True)
class ServedRow:
    """A row that needs a server, by its name: "HTTP, N shards" or "shared memory, N shards"."""

    num_shards: int
    is_shared: bool

    @classmethod
    def parse(cls, name: str) -> ServedRow:
        way, _, number = name.removesuffix(" shards").partition(", ")
        return cls(int(number), way == SHARED)

    @property
    def flags(self) -> list[str]:
        """Flags of both `penstock serve` and `penstock bench`."""
        return ["--shared-memory"] if self.is_shared else []


def run(args: argparse.Namespace) -> None:
    began = time.monotonic()
    out, kept = args.out or default_output(args), WORK / default_output(args).name
    known = next((path for path in (kept, out) if path.is_file()), None)
    found = json.loads(known.read_text()) if known else {"model": args.model, "rows": {}}
    for name in row_names(args):
        key = f"{name}; batch {args.max_batch}"
        if not is_wanted(name, found["rows"].get(key), args):
            continue
        if time.monotonic() - began > args.seconds:
            print(f"{key}: no time left; the same command goes on", flush=True)
            continue
        row_began = time.monotonic()
        row = in_a_child(args, name)
        row["took_s"] = round(time.monotonic() - row_began, 1)
        found["rows"][key] = row
        for path in (kept, out):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{time.monotonic() - began:6.1f} s  {key}  {in_short(row)}", flush=True)
    show(found)


def default_output(args: argparse.Namespace) -> Path:
    folder = Path(os.environ.get("OUT", WORK / "results" if args.tiny else RESULTS))
    return folder / f"gpu_server_{args.model}{'_tiny' if args.tiny else ''}.json"


def is_wanted(name: str, known: dict[str, Any] | None, args: argparse.Namespace) -> bool:
    if name == "write" and not repository_of(args).is_dir():
        return True  # It may be gone although its row is known: another machine wrote it.
    return args.only in name and (args.again or known is None or "failed" in known)


def repository_of(args: argparse.Namespace) -> Path:
    return WORK / f"{args.model}-{args.max_batch}{'-tiny' if args.tiny else ''}"


def in_a_child(args: argparse.Namespace, name: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--model", args.model, "--device", args.device]
    command += ["--row", name, "--max-batch", str(args.max_batch)]
    command += ["--generators", str(args.generators), "--duration", str(args.duration)]
    command += [*(["--tiny"] if args.tiny else []), "--rates", args.rates]
    child = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=ROW_S)
    except subprocess.TimeoutExpired:
        # With the servers that it has started.
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return {"failed": f"not done in {ROW_S} s"}
    if child.returncode:
        return {"failed": errors.strip()[-1500:]}
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def environment(caches: Path = WORK / "caches") -> dict[str, str]:
    """Compilers keep what they compile where nobody else does."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    kept = {name: str(caches / folder) for name, folder in CACHES.items()}
    return {**os.environ, "PYTHONPATH": paths, **kept}


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """In the child: one row."""
    subject, root = SUBJECTS[args.model], repository_of(args)
    if args.row == "write":
        repositories.write(subject, root, args.max_batch, args.device, args.tiny)
        files = repositories.config_of(root)
        return {"written": sorted(each.name for each in Path(files.artifact).parent.iterdir())}
    if args.row == "offline":
        return offline(root, args.duration)
    if args.row == "starts":
        return starts(root)
    if args.row == "in process":
        folder = root / repositories.config_of(root).name
        return highest_rate(str(folder), subject, root, args, ["--processes", "1"])
    return over_http(subject, root, args, ServedRow.parse(args.row))


# Offline.


def offline(root: Path, seconds: float) -> dict[str, Any]:
    """Rows a second in the largest batches that the configuration allows."""
    config = local.place_here(repositories.config_of(root))
    (device, num_slots), *_ = config.workers
    config = config.of_worker(device, num_slots)
    runner = backend(config.backend)(config)
    batches = list(pinned_batches(runner, root, config))
    for batch in batches:
        for _ in range(3):
            list(runner.start(batch).wait())
    began = time.perf_counter()
    begun: deque[Any] = deque()
    num_begun = num_rows = 0
    while time.perf_counter() - began < seconds or begun:
        if time.perf_counter() - began < seconds:
            batch = batches[num_begun % len(batches)]
            begun.append(runner.start(batch))
            num_begun += 1
            num_rows += batch.num_rows
        if len(begun) == num_slots or time.perf_counter() - began >= seconds:
            list(begun.popleft().wait())
    took_s = time.perf_counter() - began
    built = dict(runner.built())
    return {"rate": num_rows / took_s, "ms": 1e3 * took_s / num_begun, "built": built}


NUM_BATCHES = 8
# Memory that a device was told of stays where it is.
PINNED: list[mmap.mmap] = []


def pinned_batches(runner: object, root: Path, config: ModelConfig) -> Iterator[Batch]:
    """Of rows as they are sent, one behind the other, as a worker has them in shared memory; each
    as large as the configuration allows."""
    rows = repositories.rows_of(root)
    count = len(next(iter(rows.values())))
    mask = rows.get("attention_mask")
    sizes = np.ones(count, int) if mask is None else mask.sum(1)
    most = config.batching.max_tokens or int(sizes.sum()) * config.max_batch_size
    first = 0
    for _ in range(NUM_BATCHES):
        places = np.arange(first, first + config.max_batch_size) % count
        places = places[np.cumsum(sizes[places]) <= most]
        first += len(places)
        inputs = {name: pinned(runner, array[places]) for name, array in rows.items()}
        yield Batch(inputs, len(places))


def pinned(runner: Runner, array: np.ndarray) -> np.ndarray:
    memory = mmap.mmap(-1, array.nbytes)
    runner.pin(memoryview(memory))
    PINNED.append(memory)
    placed = np.frombuffer(memory, array.dtype).reshape(array.shape)
    placed[:] = array
    return placed


# Starts.


def starts(root: Path) -> dict[str, Any]:
    """Seconds from exec to ready, and what was compiled meanwhile. The one with caches emptied is
    what another machine with the same GPU would see."""
    caches, empty = WORK / "caches", WORK / "empty"
    found: dict[str, Any] = {}
    for name, where in (("first", caches), ("second", caches), ("emptied", empty)):
        shutil.rmtree(empty, ignore_errors=True)
        before = kept_in(where)
        with served(root, ["--shards", "1"], where) as server:
            server.check()
            new = kept_in(where) - before
            compiled = [each for each in new if each.endswith(COMPILED)]
            found[name] = {
                "ready_s": round(server.ready_s, 2),
                "num_compiled": len(compiled),
                "num_new_in_caches": len(new),
                # Layers whose implementations were timed: 0 where the version says which to take.
                "num_timed": server.num_timed(),
            }
            found["built"] = server.built()
    shutil.rmtree(empty, ignore_errors=True)
    return found


def kept_in(caches: Path) -> set[str]:
    return {str(path) for path in caches.rglob("*") if path.is_file()}


class Server:
    """A `penstock serve` of ours that is ready."""

    def __init__(self, port: int, ready_s: float, log: Path) -> None:
        self.port = port
        self.ready_s = ready_s
        self._log = log

    def built(self) -> str:
        match = BUILT.search(self._log.read_text())
        return match[1] if match else ""

    def num_timed(self) -> int:
        match = TIMED.search(self.built())
        return int(match[1]) if match else 0

    def check(self) -> None:
        """A model that is not batched as it was asked to be is not worth measuring."""
        if match := SPOILT.search(self._log.read_text()):
            raise SystemExit(match[0])

    def cpu_seconds(self) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics") as answer:
            text = answer.read().decode()
        total: dict[str, float] = {}
        for role, seconds in CPU.findall(text):
            total[role] = max(total.get(role, 0.0), float(seconds))
        return total


@contextmanager
def served(root: Path, flags: Sequence[str], caches: Path = WORK / "caches") -> Iterator[Server]:
    command = [sys.executable, "-m", "penstock", "serve", str(root), "--http-port", "0"]
    command += ["--no-grpc", "--no-metrics", *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        began = time.monotonic()
        with log.open("w") as errors:
            server = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment(caches)
            )
        assert server.stdout is not None
        try:
            for line in server.stdout:
                if match := URL.search(line):
                    yield Server(int(match[1]), time.monotonic() - began, log)
                    return
            raise SystemExit(f"the server did not start: {log.read_text()[-1000:]}")
        finally:
            server.terminate()
            server.wait()


# Under load.


def highest_rate(
    target: str, subject: Subject, root: Path, args: argparse.Namespace, flags: Sequence[str]
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        command = [sys.executable, "-m", "penstock", "bench", target]
        command += ["--rate", args.rates] if args.rates else ["--max-rate"]
        slo = TINY_SLO if args.tiny else subject.slo
        command += ["--slo", slo, "--data", str(repositories.data_of(root))]
        command += ["--duration", f"{args.duration}s", "--warm-up", f"{args.duration / 2:g}s"]
        command += ["--timeout", PATIENCE, "--json", str(path), *flags]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not path.is_file():
            raise SystemExit(f"bench failed: {(done.stdout + done.stderr)[-1500:]}")
        found = json.loads(path.read_text())
    levels = [level_of(each) for each in found["levels"]]
    if args.rates:
        return {"rate": highest_of(levels, slo), "slo": found["slo"], "levels": levels}
    answer = found["max_rate"]
    # JSON has no NaN; what is not known is a word there.
    rate = {name: number(answer["rate"][name]) for name in ("value", "low", "high")}
    return {
        "rate": rate["value"],
        "low": rate["low"],
        "high": rate["high"],
        "slo": found["slo"],
        "reason": answer.get("reason", ""),
        "levels": levels,
    }


def highest_of(levels: Sequence[Mapping[str, Any]], slo: str) -> float | None:
    """Return the highest rate of given ones that kept a limit on the p99 without a failure."""
    limit_s = parse(slo).limits_s["latency"]
    kept = [
        each["per_s"]
        for each in levels
        if each["p99_ms"] < 1e3 * limit_s and not each["num_failed"]
    ]
    return max(kept, default=None)


def number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value == value else None


def level_of(level: dict[str, Any]) -> dict[str, Any]:
    summary = level["summary"]
    latency = summary["latency_ms"]
    return {
        "load": summary["load"],
        "per_s": summary["throughput_per_s"]["value"],
        "p50_ms": latency["p50"]["value"],
        "p99_ms": latency["p99"]["value"],
        "num_failed": summary["num_failed"],
        "phases_ms": summary.get("phases_ms"),
        "generator_cpu": max(level["generator"]["cpu_shares"], default=0.0),
    }


def over_http(
    subject: Subject, root: Path, args: argparse.Namespace, row: ServedRow
) -> dict[str, Any]:
    model = repositories.config_of(root).name
    shards = ["--shards", str(row.num_shards), "--shard-accept", "all"]
    with served(root, [*shards, *row.flags]) as server:
        server.check()
        before, began = server.cpu_seconds(), time.monotonic()
        url = f"http://127.0.0.1:{server.port}/v2/models/{model}"
        flags = ["--processes", str(args.generators), *row.flags]
        found = highest_rate(url, subject, root, args, flags)
        after, took_s = server.cpu_seconds(), time.monotonic() - began
    # Of the busiest process of each kind, over all rates.
    found["cpu"] = {role: (after[role] - before.get(role, 0.0)) / took_s for role in after}
    return found


# What was found.


def in_short(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"failed: {row['failed'].splitlines()[-1][:80] if row['failed'] else ''}"
    if "second" in row:
        texts = [f"{name} {row[name]['ready_s']} s" for name in ("first", "second", "emptied")]
        return ", ".join(texts)
    rate = row.get("rate")
    return f"{rate:,.0f}/s" if rate is not None else row.get("reason", "")


def show(found: dict[str, Any]) -> None:
    rows = found["rows"]
    offlines = [row["rate"] for key, row in rows.items() if "offline" in key and row.get("rate")]
    table = Table(title=f"{found['model']}: shares are of the best offline rate")
    for name in ("row", "rows/s", "share", "at the highest rate that kept it"):
        table.add_column(name, justify="left" if name in ("row",) else "right")
    for key, row in rows.items():
        rate = row.get("rate")
        share = f"{rate / max(offlines):.2f}" if rate is not None and offlines else "-"
        shown = f"{rate:,.0f}" if rate is not None else "-"
        table.add_row(key, shown, share, remark_of(row))
    Console(width=120).print(table)


def remark_of(row: dict[str, Any]) -> str:
    if "failed" in row or "second" in row:
        if "second" not in row:
            return in_short(row)
        second = row["second"]
        did = f"compiled {second['num_compiled']}, timed {second['num_timed']}"
        return f"{in_short(row)}; the second {did}"
    level = best_level(row.get("levels", ()), row.get("rate"))
    if level is None:
        return row.get("reason", "")
    busy = f"generator {level['generator_cpu']:.0%} busy"
    return f"p50 {level['p50_ms']:.1f} ms, p99 {level['p99_ms']:.1f} ms, {busy}"


def best_level(levels: Sequence[dict[str, Any]], rate: float | None) -> dict[str, Any] | None:
    """That with the highest rate up to the one that was found, as it was asked for: one that asks
    for more may be answered at less."""
    kept = [each for each in levels if rate is not None and asked(each) <= 1.01 * rate]
    return max(kept, key=asked, default=None)


def asked(level: dict[str, Any]) -> float:
    return float(level["load"].partition("/s")[0])


if __name__ == "__main__":
    main()
