"""What scaling instances costs, beside an oracle, on a real trace: simulated and with processes.

    python benchmarks/autoscaling.py                 20 minutes; two cores will do
    python benchmarks/autoscaling.py --simulate      only the simulator: under a minute
    python benchmarks/autoscaling.py --seconds 60    the first minute of the real part: does it run?
    python benchmarks/autoscaling.py --shards 2      with several shards

Arrivals are those of the Azure conversation trace (`scaling_trace.py`), scaled to need 1 to 8
instances. Goals: the SLO is kept (99 % of the requests are answered in time), with at most 1.3
times the instance-hours of an oracle. The oracle uses the fewest instances of each window of 10 s
with which 99 % are in time, knows the arrivals, and starts and stops instances in no time; it is
computed by the simulator, from the batch times that the server has measured. Our instances count
from their start, so their load time is paid.

Simulated: the whole hour, a model of 0.7 s to 1.6 s a batch, an SLO of 2 s, load times of 1 s to
10 s. With processes: everything three times as fast, except the windows and the load time. The
model is Python and sleeps for as long as a batch would take, so eight instances share two cores;
`penstock serve` has real workers, and `penstock bench` sends in an open loop. Latency counts from
the time at which a request was due. A request is lost if it gets neither an answer nor a refusal
(503).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from scaling_trace import read_arrivals

from penstock.benchmark.run_files import read_run
from penstock.benchmark.stats import Window, merged
from penstock.config import BatchPolicy, ModelConfig, ScalingConfig
from penstock.operate.scaling_replay import WINDOW_S, ScaledModel, oracle, replay
from penstock.optimizer.simulate import TimeTable

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "autoscaling.json"
MIN_IN_TIME, MAX_RATIO = 0.99, 1.3
LEAST, MOST = 1, 8
MAX_BATCH = 4
LOAD_TIMES_S = (1.0, 2.0, 5.0, 10.0)
# Factor by which the real part is faster than the trace; its batches too.
COMPRESSION = 3.0
SAMPLE_S = 0.2
# Seconds of a batch: fixed, and per row.
FIXED_S, ROW_S = 0.4, 0.3
SLO_S = 2.0
MODEL = """import time


def infer(inputs):
    time.sleep({fixed} + {row} * len(inputs["x"]))
    return {{"y": inputs["x"]}}
"""
CONFIG = """backend: "python" max_batch_size: {batch} dynamic_batching {{ }}
input {{ name: "x" data_type: TYPE_FP32 dims: 16 }}
output {{ name: "y" data_type: TYPE_FP32 dims: 16 }}
instance_group {{ count: {least} kind: KIND_CPU }}
parameters {{ key: "penstock.slo" value {{ string_value: "p99 < {slo_ms:g} ms" }} }}
parameters {{ key: "penstock.min_instances" value {{ string_value: "{least}" }} }}
parameters {{ key: "penstock.max_instances" value {{ string_value: "{most}" }} }}
"""
console = Console(width=120)


@dataclass(frozen=True)
class Row:
    """One experiment."""

    name: str
    load_s: float
    num_requests: int
    share_in_time: float
    ratio: float
    oracle: Sequence[int]
    num_scalings: int
    num_lost: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        return self.share_in_time >= MIN_IN_TIME and self.ratio <= MAX_RATIO and not self.num_lost


def scaled(seconds: Mapping[int, float], slo_s: float, load_s: float) -> ScaledModel:
    batching = BatchPolicy(MAX_BATCH, is_dynamic=True, slo_latency_s=slo_s)
    scaling = ScalingConfig(LEAST, MOST)
    config = ModelConfig(
        "m", "1", "python", "", (), (), MAX_BATCH, batching, LEAST, scaling=scaling
    )
    return ScaledModel(config, TimeTable(1, 1, {0: dict(seconds)}), load_s)


def simulated() -> Iterator[Row]:
    arrivals, source = read_arrivals()
    seconds = {rows: FIXED_S + ROW_S * rows for rows in (1, 2, MAX_BATCH)}
    fewest = oracle(arrivals, scaled(seconds, SLO_S, 0.0))
    for load_s in LOAD_TIMES_S:
        outcome = replay(arrivals, scaled(seconds, SLO_S, load_s))
        ratio = outcome.instance_s / (WINDOW_S * sum(fewest))
        counted = len(arrivals), outcome.share_in_time, ratio, fewest, len(outcome.decisions)
        yield Row("simulated", load_s, *counted, more={"source": source, "most": outcome.most})


# With processes.


@contextmanager
def serving(root: Path, shards: int, log: Path) -> Iterator[str]:
    """Serve the repository; the URL of the model. The server is stopped at the end."""
    command = [sys.executable, "-m", "penstock", "serve", str(root), "--http-port", "0"]
    command += ["--no-grpc", "--no-metrics", "--shards", str(shards)]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := re.search(r"(http://127\.0\.0\.1:\d+)/v2", line):
                    break
            else:
                raise RuntimeError(log.read_text())
            yield found[1]
        finally:
            process.terminate()
            process.communicate(timeout=60)


class InstanceCounter:
    """Adds up instance-seconds, from what the server says several times a second."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.instance_s = 0.0
        self.most = 0

    def __enter__(self) -> InstanceCounter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        before = time.monotonic()
        while not self._stop.wait(SAMPLE_S):
            with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as answer:
                text = answer.read().decode()
            now = time.monotonic()
            found = re.findall(r"^penstock_instances{.*} (\d+)$", text, re.M)
            count = sum(map(int, found))
            self.instance_s += count * (now - before)
            self.most = max(self.most, count)
            before = now


@dataclass(frozen=True)
class RealRun:
    """The trace against real processes, `compression` times as fast."""

    arrivals: Sequence[float]
    source: str
    compression: float
    shards: int

    @property
    def slo_s(self) -> float:
        return SLO_S / self.compression

    def write(self, folder: Path) -> Path:
        """Write the repository and the trace; return the trace."""
        model = folder / "models" / "sleepy"
        (model / "1").mkdir(parents=True)
        batch = {"fixed": FIXED_S / self.compression, "row": ROW_S / self.compression}
        (model / "1" / "model.py").write_text(MODEL.format(**batch))
        limits = {"batch": MAX_BATCH, "least": LEAST, "most": MOST, "slo_ms": 1e3 * self.slo_s}
        (model / "config.pbtxt").write_text(CONFIG.format(**limits))
        trace = folder / "arrivals.csv"
        trace.write_text("\n".join(["time_s", *map(repr, self.arrivals)]) + "\n")
        return trace


def measured(run: RealRun) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        trace, log = run.write(Path(folder)), Path(folder) / "log"
        load_before = os.getloadavg()
        with serving(Path(folder) / "models", run.shards, log) as url:
            with InstanceCounter(url) as counter:
                windows = bench(url, trace, run.slo_s)
            table = learned(url)
        text = log.read_text()
    whole = merged(windows)
    fewest = oracle(run.arrivals, scaled(table, run.slo_s, 0.0))
    starts = [float(each) for each in re.findall(r"ready on cpu in ([\d.]+) s", text)]
    refused = sum(count for kind, count in whole.failures.items() if "503" in kind)
    more = {
        "source": run.source,
        "compression": run.compression,
        "most": counter.most,
        "table_s": {rows: round(each, 4) for rows, each in table.items()},
        "failures": whole.failures,
        "missed_by_minute": missed(windows),
        "num_refused": refused,
        "load_s": {"mean": sum(starts) / len(starts), "max": max(starts), "count": len(starts)},
        "load_average": {"before": load_before, "after": os.getloadavg()},
        "shards": run.shards,
        "scalings": re.findall(r"scales from .*", text),
    }
    return Row(
        f"processes, {run.shards} shard{'s' if run.shards > 1 else ''}",
        max(starts),
        whole.num_due,
        (whole.num_in_slo or 0) / whole.num_due,
        counter.instance_s / (WINDOW_S * sum(fewest)),
        fewest,
        len(more["scalings"]),
        whole.num_due - whole.num_good - refused,
        more,
    )


def bench(url: str, trace: Path, slo_s: float) -> list[Window]:
    """Replay the trace; return what became of the requests."""
    command = [sys.executable, "-m", "penstock", "bench", f"{url}/v2/models/sleepy"]
    command += ["--trace", str(trace), "--slo", f"p99 < {1e3 * slo_s:g} ms", "--quiet"]
    out = trace.with_name("run.json")
    command += ["--warm-up", "0s", "--precision", "0", "--timeout", "10s", "--json", str(out)]
    subprocess.run(command, check=True)
    return read_run(out).levels[0].windows


def missed(windows: Sequence[Window]) -> dict[int, int]:
    """Return how many requests were not in time, by the minute in which they were due."""
    found: Counter[int] = Counter()
    for each in windows:
        found[int(each.start_s // 60)] += each.num_due - (each.num_in_slo or 0)
    return {minute: count for minute, count in sorted(found.items()) if count}


def learned(url: str) -> dict[int, float]:
    """Return T(b) as the server has measured it."""
    with urllib.request.urlopen(f"{url}/v2/models/sleepy/explain", timeout=30) as answer:
        paces = json.load(answer)["paces"]
    return {int(rows): seconds for rows, seconds in paces[0]["times_s"].items()}


def show(rows: Sequence[Row]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("", "load time", "requests", "in time", "oracle", "instance-hours", "scalings"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    table.add_column("lost", justify="right")
    table.add_column("goal")
    for row in rows:
        span = f"{min(row.oracle)} to {max(row.oracle)}"
        table.add_row(
            row.name,
            f"{row.load_s:.1f} s",
            f"{row.num_requests}",
            f"{row.share_in_time:.2%}",
            span,
            f"{row.ratio:.2f}x",
            str(row.num_scalings),
            "" if row.num_lost is None else str(row.num_lost),
            "kept" if row.is_kept else "MISSED",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--simulate", action="store_true", help="only the simulator")
    parser.add_argument("--seconds", type=float, help="length of the real part")
    parser.add_argument("--shards", type=int, nargs="*", default=[1], help="of the real part")
    parser.add_argument("--compression", type=float, default=COMPRESSION)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = list(simulated()) if options.seconds is None else []
    if not options.simulate:
        arrivals, source = read_arrivals(options.compression)
        if options.seconds is not None:
            arrivals = [each for each in arrivals if each <= options.seconds]
        for shards in options.shards:
            rows.append(measured(RealRun(arrivals, source, options.compression, shards)))
    show(rows)
    for row in rows:
        if row.num_lost is not None:
            console.print(json.dumps(row.more))
    if options.seconds is None:
        records = [{**vars(row), "is_kept": row.is_kept} for row in rows]
        options.out.write_text(json.dumps(records, indent=1) + "\n")
    sys.exit(0 if all(row.is_kept for row in rows) else 1)


if __name__ == "__main__":
    main()
