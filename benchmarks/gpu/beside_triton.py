"""Penstock beside Triton 2.51 on one GPU: the highest rate over HTTP that keeps p99 < 130 ms.

    python benchmarks/gpu/beside_triton.py                       under six minutes on an H200
    python benchmarks/gpu/beside_triton.py --tiny --device cpu   does it run? tiny, no figures

BERT-large as `penstock optimize` leaves it (BF16, packed, our kernels, CUDA graphs), with sequences
as long as SQuAD's. Both servers run the same version by the same code: Penstock through its
`pytorch` backend, Triton through that backend inside its Python backend (`triton_model.py`). Small
batches are of at most 8 rows, large ones of at most 256. Both servers are up all the time and are
asked in turns, by the same generator: HTTP, binary tensors, one row a request, Poisson arrivals.
Rates are those of `penstock bench --max-rate`, begun near what a closed loop answered; each is a
run of `penstock bench` of its own, which ends when everything is answered, so that none begins with
what an overload left behind.

Triton is given what its users would: a dynamic batcher that takes lengths as they come
(`allow_ragged_batch`), one instance or two, with or without a delay for fuller batches, whichever
answers most in the closed loop; pinned memory; rows filled up to the one length of the graphs.

Goal, set before measuring: at least 1.3 times Triton's rate, small batches and large; 2 to reach
for. The file is written after each part; the same command goes on where it was (`--again` begins
anew). `$OUT` or benchmarks/results/gpu_beside_triton.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import repositories
import torch
import triton_side
from bert import BF16, GRAPHS, LARGE, PACKED, TINY, Scale, draw_lengths, write_model
from rich.console import Console
from rich.table import Table
from triton_side import ROOT, Server, StartError, Variant

from penstock import repository, slo
from penstock.benchmark import pacer, stats
from penstock.benchmark.report.run_files import read_run
from penstock.benchmark.results import Level, Run
from penstock.benchmark.search import MaxRate, MaxRateSearch
from penstock.optimizer.passes import half

SLO = "p99 < 130 ms"
GOAL = 1.3
ROUNDS = 2
MAX_BATCH = {"small": 8, "large": 256}
TINY_MAX_BATCH = {"small": 2, "large": 8}
VARIANTS = (Variant(1), Variant(2), Variant(2, delay_us=2000))
NUM_ROWS, SEED = 1024, 7
SIDES = ("penstock", "triton")
# More than both servers take in practice; clients that wait are what a closed loop is about.
MAX_CLIENTS = 512
# Answers of one version by one backend differ by what the size of a batch does to rounding.
TOLERANCE = 0.02
# Of a part that takes longer than it should.
PATIENCE_S = 10.0
# Where no closed loop said more.
UNKNOWN_RATE = 100.0
# Of rates that a search did not end with.
MARK = "*"
# Of what a closed loop answered: where a search begins.
FIRST = 0.7
PRECISION = 0.05


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: of one level, its warm-up, one search, one probe, the start, all of it."""

    level: float
    warm_up: float
    search: float
    probe: float
    start: float
    all: float


REAL_LIMITS = Limits(2.0, 0.6, 30.0, 6.0, 150.0, 345.0)
TINY_LIMITS = Limits(1.0, 0.5, 25.0, 10.0, 300.0, 900.0)


def main() -> int:
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    console = Console(width=None if sys.stdout.isatty() else 160)
    comparison = Comparison(args, lambda: time.monotonic() - began)
    try:
        comparison.run()
    except StartError as error:
        print(error, flush=True)
        return 1
    finally:
        comparison.save()
        if comparison.found["searches"]:
            console.print(table_of(comparison.found))
            print(f"written: {args.out}", flush=True)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0", help="cpu to try it out without a GPU")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to see that it runs")
    parser.add_argument(
        "--triton", type=Path, help="folder with pytriton and nvidia_pytriton.libs in it"
    )
    parser.add_argument("--fronts", type=int, default=2, help="of penstock serve; 0 for few cores")
    parser.add_argument(
        "--generators", type=int, help="processes that send; a quarter of the cores unless given"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="more for less noise")
    parser.add_argument("--limit-s", type=float, help="nothing is begun that would end after it")
    parser.add_argument("--again", action="store_true", help="measure what the file has already")
    parser.add_argument("--check", action="store_true", help="say what Triton finds here, and end")
    parser.add_argument("--work", type=Path, help="weights and logs; .bench/gpu/beside_triton")
    parser.add_argument("--out", type=Path, help="where the result goes")
    args = parser.parse_args()
    args.generators = args.generators or max(1, min(4, (os.cpu_count() or 1) // 4))
    name = "beside_triton_tiny" if args.tiny else "beside_triton"
    args.work = (args.work or ROOT / ".bench" / "gpu" / name).resolve()
    results = ROOT / ".bench" / "gpu" if args.tiny else ROOT / "benchmarks" / "results"
    args.out = args.out or Path(os.environ.get("OUT", results)) / f"gpu_{name}.json"
    return args


class Comparison:
    """`found` is what the file has; parts that are there are not measured again."""

    def __init__(self, args: argparse.Namespace, elapsed_s: Callable[[], float]) -> None:
        self.args = args
        self.elapsed_s = elapsed_s
        self.scale: Scale = TINY if args.tiny else LARGE
        self.max_batch = TINY_MAX_BATCH if args.tiny else MAX_BATCH
        self.limits = TINY_LIMITS if args.tiny else REAL_LIMITS
        self.limit_s = args.limit_s or self.limits.all
        self.found = self.known() or {
            "settings": self.settings(),
            "machine": self.machine(),
            "difference": {},
            "probes": {},
            "searches": {},
        }
        self.servers: dict[str, Server] = {}

    def settings(self) -> dict[str, Any]:
        names = ("device", "tiny", "fronts", "generators")
        return {
            **{name: getattr(self.args, name) for name in names},
            "slo": SLO,
            "max_batch": self.max_batch,
            "variants": [each.name for each in VARIANTS],
            "mean_length": self.scale.mean_length,
            "level_s": self.limits.level,
        }

    def machine(self) -> dict[str, Any]:
        is_gpu = self.args.device != "cpu"
        name = torch.cuda.get_device_name(self.args.device) if is_gpu else "CPU, no figures"
        return {"name": name, "cores": os.cpu_count(), "torch": torch.__version__}

    def known(self) -> dict[str, Any] | None:
        if self.args.again or not self.args.out.is_file():
            return None
        found: dict[str, Any] = json.loads(self.args.out.read_text())
        if found["settings"] != json.loads(json.dumps(self.settings())):
            print(f"{self.args.out} is of other settings; begun anew", flush=True)
            return None
        return found

    def save(self) -> None:
        self.args.out.parent.mkdir(parents=True, exist_ok=True)
        self.args.out.write_text(json.dumps(self.found, indent=1) + "\n")

    def say(self, text: str) -> None:
        print(f"{self.elapsed_s():6.1f} s  {text}", flush=True)

    # In order.

    def run(self) -> None:
        home = triton_side.find_home(self.args.triton)
        self.args.work.mkdir(parents=True, exist_ok=True)
        for line in triton_side.diagnosis(home, self.args.work):
            print(line, flush=True)
        if self.args.check or not self.missing():
            return
        self.prepare()
        self.say("model and inputs are written")
        with ExitStack() as stack:
            self.serve(stack, home)
            self.compare_answers()
            self.probe()
            self.search()

    def missing(self) -> list[str]:
        return [key for key in self.search_keys() if key not in self.found["searches"]]

    def search_keys(self) -> list[str]:
        """Both servers with both sizes before any of them a second time."""
        return [
            f"{size}; {side}; {number + 1}"
            for number in range(self.args.rounds)
            for size in self.max_batch
            for side in SIDES
        ]

    def prepare(self) -> None:
        """Two models for each server, on one file of weights; what is sent."""
        work = self.args.work
        weights = work / "weights" / self.scale_name
        if not (weights / "done").is_file():
            weights.mkdir(parents=True, exist_ok=True)
            write_model(weights, self.scale)
            (weights / "done").touch()
        for name in ("penstock", "triton"):
            shutil.rmtree(work / name, ignore_errors=True)
        for size, max_batch in self.max_batch.items():
            served = work / "penstock" / size
            (served / "1").mkdir(parents=True)
            for name in ("module.py", "model.safetensors"):
                os.link(weights / name, served / "1" / name)
            (served / "config.pbtxt").write_text(self.config(max_batch))
            if self.args.device != "cpu":
                # Which kernels are the fastest, found while nobody else is on the GPU.
                (config,) = repository.read_one(str(served.parent), size).configs
                for name, content in repositories.compiled(config).items():
                    (served / "1" / name).write_bytes(content)
            for variant in VARIANTS:
                name = triton_name(size, variant)
                triton_side.write_model(work / "triton", name, served, variant, self.args.device)
        write_rows(work / "rows.jsonl", self.scale)

    @property
    def scale_name(self) -> str:
        return "x".join(map(str, self.scale.sizes))

    def config(self, max_batch: int) -> str:
        is_gpu = self.args.device != "cpu"
        options = {**BF16, **PACKED, **(GRAPHS if is_gpu else {})}
        options |= {"penstock.pad": "input_ids[0], attention_mask[0]"}
        options |= {"penstock.pad_buckets": str(self.scale.max_length)}
        # Rows that share a batch differ by what BF16 rounds; the server would keep them apart.
        options |= {"penstock.tolerance": str(half.TOLERANCE)}
        if not is_gpu:
            options |= {"intra_op_thread_count": "1"}
        # Of one GPU: batches on their way in one worker, one copied while the other is computed.
        group = "count: 2 kind: " + ("KIND_GPU gpus: [ 0 ]" if is_gpu else "KIND_CPU")
        parameters = "\n".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in options.items()
        )
        return f"""backend: "pytorch"
max_batch_size: {max_batch}
input [ {{ name: "input_ids" data_type: TYPE_INT64 dims: [ -1 ] }},
        {{ name: "attention_mask" data_type: TYPE_INT64 dims: [ -1 ] }} ]
output [ {{ name: "logits" data_type: TYPE_FP32 dims: [ -1, 2 ] }} ]
instance_group [ {{ {group} }} ]
dynamic_batching {{ }}
{parameters}
"""

    def serve(self, stack: ExitStack, home: Path) -> None:
        """One after the other is up; whoever is not asked sleeps."""
        work = self.args.work
        num_stubs = len(self.max_batch) * sum(each.num_instances for each in VARIANTS)
        for server in (
            triton_side.penstock(work / "penstock", self.args.fronts, work / "penstock.log"),
            triton_side.triton(home, work / "triton", work, num_stubs),
        ):
            self.servers[server.name.lower()] = stack.enter_context(server)
            server.wait_until_ready(self.limits.start)
            self.say(f"{server.name} is ready")
        # Each would run nearly alone, and the figures would be of that.
        for line in self.servers["penstock"].lines("WARNING"):
            print(line, flush=True)
            if "not padded" in line or "one request at a time" in line:
                raise StartError("Penstock keeps requests apart that Triton runs together")

    def address(self, side: str, size: str, variant: Variant | None = None) -> str:
        model = size if variant is None else triton_name(size, variant)
        return f"http://127.0.0.1:{self.servers[side].port}/v2/models/{model}"

    def compare_answers(self) -> None:
        """The same module is in both, or the figures would be of different things."""
        lines = (self.args.work / "rows.jsonl").read_text().splitlines()
        rows = sorted(map(json.loads, lines), key=lambda row: len(row["input_ids"]))
        for size in self.max_batch:
            differences = []
            for row in (rows[0], rows[len(rows) // 2], rows[-1]):
                ours = asked(self.address("penstock", size), row)
                theirs = asked(self.address("triton", size, VARIANTS[0]), row)
                differences.append(float(np.abs(ours - theirs).max() / np.abs(ours).max()))
            self.found["difference"][size] = max(differences)
            self.say(f"{size}: answers differ by {max(differences):.2g} of the largest value")
            if max(differences) > TOLERANCE:
                raise StartError("the two servers do not give the same answers")

    def probe(self) -> None:
        """What each answers when it never has to wait for requests; Triton in all its ways."""
        for size in self.max_batch:
            self.probe_one("penstock", size, None)
            for variant in VARIANTS:
                self.probe_one("triton", size, variant)

    def probe_one(self, side: str, size: str, variant: Variant | None) -> None:
        key = probe_key(size, variant)
        if key in self.found["probes"] or not self.has_time(self.limits.probe):
            return
        clients = min(4 * self.max_batch[size], MAX_CLIENTS)
        address = self.address(side, size, variant)
        limit_s = self.limits.probe + PATIENCE_S
        run = self.bench(address, ["--concurrency", str(clients)], limit_s)
        if run is None:
            self.say(f"{key}: nothing was measured{self.servers[side].tail()}")
            return
        told = self.found["probes"][key] = figures_of(run.levels[-1])
        self.save()
        self.say(f"closed loop, {key}: {told['per_s']:,.0f}/s, {told['rows_per_batch']} rows")

    def best_variant(self, size: str) -> Variant:
        probes = self.found["probes"]
        tried = [each for each in VARIANTS if probe_key(size, each) in probes]
        if not tried:
            return VARIANTS[1]
        return max(tried, key=lambda each: probes[probe_key(size, each)]["per_s"])

    def search(self) -> None:
        for key in self.missing():
            if not self.has_time(self.limits.search):
                self.say(f"{key}: no time left; the same command goes on")
                continue
            size, side, _ = key.split("; ")
            variant = self.best_variant(size) if side == "triton" else None
            levels, rate = self.highest_rate(side, size, variant)
            if rate is None:
                self.say(f"{key}: nothing was measured{self.servers[side].tail()}")
                continue
            self.found["searches"][key] = {
                "variant": variant.name if variant is not None else f"{self.args.fronts} fronts",
                "rate": number(rate.rate.value),
                "low": number(rate.rate.low),
                "high": number(rate.rate.high),
                "reason": rate.reason,
                "levels": [figures_of(level) for level in levels],
            }
            self.save()
            self.say(f"{key}: {rate.rate.value:,.0f}/s {rate.reason}")

    def highest_rate(
        self, side: str, size: str, variant: Variant | None
    ) -> tuple[list[Level], MaxRate | None]:
        """What was found when the time was up counts as far as it goes."""
        probe = self.found["probes"].get(probe_key(size, variant))
        per_s = probe["per_s"] if probe else UNKNOWN_RATE
        search = MaxRateSearch(slo.parse(SLO), FIRST * per_s, precision=PRECISION)
        levels: list[Level] = []
        is_cut = False
        began = time.monotonic()
        longest_s = 0.0
        while (load := search.next()) is not None:
            so_far_s = time.monotonic() - began
            if is_cut := so_far_s + longest_s > self.limits.search:
                break
            flags = ["--rate", f"{pacer.mean_rate(load):.6g}", "--slo", SLO]
            limit_s = self.limits.search - so_far_s + PATIENCE_S
            run = self.bench(self.address(side, size, variant), flags, limit_s, len(levels))
            if is_cut := run is None:
                break
            levels += run.levels
            search.add(load, run.levels[0].windows)
            longest_s = max(longest_s, time.monotonic() - began - so_far_s)
        found = search.max_rate
        if found is not None and is_cut:
            found.reason = f"{found.reason}; the search was cut short".strip("; ")
        return levels, found

    def has_time(self, needed_s: float) -> bool:
        return self.elapsed_s() + needed_s <= self.limit_s

    def bench(
        self, address: str, flags: Sequence[str], limit_s: float, number: int = 0
    ) -> Run | None:
        """None, and its output is shown, where nothing was measured to its end."""
        path = self.args.work / "run.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "penstock", "bench", address, *flags]
        command += ["--duration", f"{self.limits.level:g}s", "--json", str(path)]
        command += ["--warm-up", f"{self.limits.warm_up:g}s", "--timeout", "5s"]
        command += ["--data", str(self.args.work / "rows.jsonl"), "--seed", str(SEED + number)]
        command += ["--processes", str(self.args.generators)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(triton_side.packages())}
        log_path = self.args.work / "bench.log"
        with log_path.open("wb") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=log, stderr=log, env=env, timeout=limit_s, check=False)
        run = read_run(path) if path.is_file() else None
        if run is None or not run.levels or run.problem == "interrupted":
            print(log_path.read_text(errors="replace")[-1500:], flush=True)
            return None
        return run


def probe_key(size: str, variant: Variant | None) -> str:
    return f"{size}; {'penstock' if variant is None else variant.name}"


def triton_name(size: str, variant: Variant) -> str:
    return f"{size}_{variant.model}"


def write_rows(path: Path, scale: Scale) -> None:
    random = np.random.default_rng(SEED)
    with path.open("w") as file:
        for length in draw_lengths(scale, NUM_ROWS, SEED):
            ids = random.integers(1, scale.sizes[4], length).tolist()
            row = {"input_ids": ids, "attention_mask": [1] * int(length)}
            file.write(json.dumps(row) + "\n")


def asked(address: str, row: dict[str, list[int]]) -> np.ndarray:
    inputs = [
        {"name": name, "datatype": "INT64", "shape": [1, len(values)], "data": values}
        for name, values in row.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{address}/infer", body, timeout=60) as answer:
        (output,) = json.load(answer)["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


# What was measured.


def figures_of(level: Level) -> dict[str, Any]:
    seen = stats.histogram(level.windows)
    server = level.server
    num_executions = server.num_executions if server is not None else 0
    rows = server.num_inferences / num_executions if server and num_executions else float("nan")
    return {
        "load": pacer.label(level.load),
        "per_s": number(stats.throughput_interval(level.windows).value),
        "p50_ms": number(1e3 * seen.percentile(50)),
        "p99_ms": number(1e3 * seen.percentile(99)),
        "rows_per_batch": number(rows),
        "num_failed": sum(window.num_failed for window in level.windows),
        "generator_cpu": number(max(level.generator.cpu_shares, default=float("nan"))),
        "ending": level.ending,
    }


def number(value: float) -> float | None:
    """JSON has no NaN."""
    return None if value != value or abs(value) == float("inf") else round(value, 3)


def table_of(found: dict[str, Any]) -> Table:
    searches: dict[str, dict[str, Any]] = found["searches"]
    title = f"highest rate with {SLO}, {found['machine']['name']}; goal: {GOAL} times Triton's"
    reasons = dict.fromkeys(each["reason"] for each in searches.values() if each["reason"])
    caption = f"{MARK} {'; '.join(reasons)}" if reasons else ""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in ("batches", "server", "as", "rates, /s", "p99 ms", "rows a batch", "times"):
        table.add_column(column, justify="right" if column == "times" else "left")
    for size, max_batch in found["settings"]["max_batch"].items():
        medians = {side: median_rate(searches, size, side) for side in SIDES}
        for side in SIDES:
            of_side = [each for key, each in searches.items() if key.startswith(f"{size}; {side};")]
            cells = [f"{size}, up to {max_batch}", side.capitalize()]
            cells.append(", ".join(dict.fromkeys(each["variant"] for each in of_side)))
            cells.append(
                ", ".join(shown(each["rate"]) + MARK * bool(each["reason"]) for each in of_side)
            )
            kept = [highest_kept(each) for each in of_side]
            cells.append(", ".join(shown(each.get("p99_ms")) for each in kept))
            cells.append(", ".join(shown(each.get("rows_per_batch"), 1) for each in kept))
            ours, theirs = medians["penstock"], medians["triton"]
            is_told = side == "penstock" and ours is not None and theirs
            table.add_row(*cells, f"{ours / theirs:.2f}" if is_told else "")
    return table


def median_rate(searches: dict[str, dict[str, Any]], size: str, side: str) -> float | None:
    rates = [
        each["rate"]
        for key, each in searches.items()
        if key.startswith(f"{size}; {side};") and each["rate"] is not None
    ]
    return statistics.median(rates) if rates else None


def highest_kept(search: dict[str, Any]) -> dict[str, Any]:
    """The level that the answer rests on."""
    limit_ms = 1e3 * slo.parse(SLO).latency_s
    kept = [
        level
        for level in search["levels"]
        if level["p99_ms"] is not None and level["p99_ms"] < limit_ms and not level["num_failed"]
    ]
    return max(kept, key=lambda level: level["per_s"], default={})


def shown(value: float | None, digits: int = 0) -> str:
    return "?" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    raise SystemExit(main())
