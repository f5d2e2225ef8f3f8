"""Penstock beside Triton 2.51 on one GPU: the highest rate over HTTP that keeps p99 < 130 ms.

    python benchmarks/gpu/beside_triton.py                       under ten minutes on an H200
    python benchmarks/gpu/beside_triton.py --tiny --device cpu   does it run? tiny, no figures

BERT-large as `penstock optimize` leaves it (BF16, packed, our kernels, CUDA graphs), with sequences
as long as SQuAD's. Both servers run the same version by the same code: Penstock through its
`pytorch` backend, Triton through that backend inside its Python backend (`triton_model.py`). Small
batches are of at most 8 rows, large ones of at most 256. Both servers are up all the time and are
asked in turns, by the same generator: HTTP, binary tensors, one row a request, Poisson arrivals.

First both answer a closed loop, Triton in all its ways. Then both are asked at the same rates, one
right after the other, who is first in turns: 0.70 to 1.00 of the better closed loop of that size.
What counts is the highest rate that is kept (p99 below the limit, nothing failed) in half of the
rounds or more, and with it all lower ones; who misses one clearly is not asked for more in that
round (`rate_ladder.py`). Each is a run of `penstock bench` of its own, which ends when everything
is answered, so that none begins with what an overload left behind.

Triton is given what its users would: a dynamic batcher that takes lengths as they come
(`allow_ragged_batch`), one instance or two, with or without a delay for fuller batches, whichever
answers most in the closed loop; pinned memory; rows filled up to the one length of the graphs. Its
batcher counts rows, and has nothing like `penstock.max_tokens`, by which Penstock's large batches
end with as many tokens as fill the GPU.

Goal, set before measuring: at least 1.3 times Triton's rate, small batches and large; 2 to reach
for. The file is written after each level; the same command goes on where it was (`--again` begins
anew). `$OUT` or benchmarks/results/gpu_beside_triton.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import rate_ladder
import repositories
import torch
import triton_side
from bert import BF16, GRAPHS, LARGE, PACKED, TINY, Scale, draw_lengths, filling, write_model
from rate_ladder import SHARES, SIDES, Ladder, Turn
from rich.console import Console
from rich.table import Table
from triton_side import ROOT, Server, StartError, Variant

from penstock import slo
from penstock.benchmark import pacer, stats
from penstock.benchmark.results import Level
from penstock.benchmark.run_files import read_run
from penstock.optimizer.passes import half
from penstock.repository import layout

SLO = "p99 < 130 ms"
GOAL = 1.3
ROUNDS = 2
MAX_BATCH = {"small": 8, "large": 256}
TINY_MAX_BATCH = {"small": 2, "large": 8}
VARIANTS = (Variant(1), Variant(2), Variant(2, delay_us=2000))
NUM_ROWS, SEED = 1024, 7
# Of rates above which nothing is decided, and of runs with failures.
MARK, FAILED = "*", "!"
CAPTION = f"""under shares of the better closed loop: p99 in ms, round by round
{MARK} higher rates were not asked of both; {FAILED} requests failed"""
# More than both servers take in practice; clients that wait are what a closed loop is about.
MAX_CLIENTS = 512
# Answers of one version by one backend differ by what the size of a batch does to rounding.
TOLERANCE = 0.02
# Of a part that takes longer than it should.
PATIENCE_S = 10.0
# The most of a batch are as many as fill the GPU; small ones are never that full.
BY_TOKENS = "large"


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds: of one level, its warm-up, one turn with them and all around it, one probe, the
    start, all of it."""

    level: float
    warm_up: float
    turn: float
    probe: float
    start: float
    all: float


REAL_LIMITS = Limits(4.0, 0.6, 7.0, 6.0, 150.0, 580.0)
TINY_LIMITS = Limits(1.0, 0.5, 6.0, 10.0, 300.0, 900.0)


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
        if comparison.found["probes"]:
            console.print(table_of(comparison.found, comparison.ladder))
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
    parser.add_argument("--shards", type=int, default=2, help="of penstock serve; 1 for few cores")
    parser.add_argument(
        "--generators", type=int, help="processes that send; a quarter of the cores unless given"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="more for less noise")
    parser.add_argument(
        "--limit-s",
        type=float,
        help="nothing is begun that would end after it; less than 580 where less time is allowed",
    )
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
        scale = TINY if args.tiny else LARGE
        self.scale: Scale = scale if args.device == "cpu" else filling(scale, args.device)
        self.max_batch = TINY_MAX_BATCH if args.tiny else MAX_BATCH
        self.limits = TINY_LIMITS if args.tiny else REAL_LIMITS
        self.limit_s = args.limit_s or self.limits.all
        self.found = self.known() or {
            "settings": self.settings(),
            "machine": self.machine(),
            "difference": {},
            "probes": {},
            "ladders": {},
            "levels": [],
        }
        # The longest turn so far: the next may take as long.
        self.turn_s = self.limits.turn
        self.servers: dict[str, Server] = {}

    def settings(self) -> dict[str, Any]:
        names = ("device", "tiny", "shards", "generators")
        return {
            **{name: getattr(self.args, name) for name in names},
            "slo": SLO,
            "max_batch": self.max_batch,
            "variants": [each.name for each in VARIANTS],
            "mean_length": self.scale.mean_length,
            "level_s": self.limits.level,
            "shares": SHARES,
            "max_tokens": {BY_TOKENS: self.scale.num_tokens},
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
            self.climb()

    @property
    def ladder(self) -> Ladder:
        levels = {turn_of(each): each for each in self.found["levels"]}
        return Ladder(levels, 1e3 * slo.parse(SLO).latency_s)

    def missing(self) -> list[Turn]:
        pairs = rate_ladder.pairs(self.args.rounds, tuple(self.max_batch))
        return [turn for pair in pairs for turn in self.ladder.open_turns(pair)]

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
        for size in self.max_batch:
            served = work / "penstock" / size
            (served / "1").mkdir(parents=True)
            for name in ("module.py", "model.safetensors"):
                os.link(weights / name, served / "1" / name)
            (served / "config.pbtxt").write_text(self.config(size))
            if self.args.device != "cpu":
                # Which kernels are the fastest, found while nobody else is on the GPU.
                (config,) = layout.read_one(str(served.parent), size).configs
                # For all counts of tokens: Triton's batches have more than Penstock's.
                config = replace(config, batching=replace(config.batching, max_tokens=None))
                for name, content in repositories.compiled(config).items():
                    (served / "1" / name).write_bytes(content)
            for variant in VARIANTS:
                name = triton_name(size, variant)
                triton_side.write_model(work / "triton", name, served, variant, self.args.device)
        write_rows(work / "rows.jsonl", self.scale)

    @property
    def scale_name(self) -> str:
        return "x".join(map(str, self.scale.sizes))

    def config(self, size: str) -> str:
        is_gpu = self.args.device != "cpu"
        options = {**BF16, **PACKED, **(GRAPHS if is_gpu else {})}
        options |= {"penstock.pad": "input_ids[0], attention_mask[0]"}
        options |= {"penstock.pad_buckets": str(self.scale.max_length)}
        # Rows that share a batch differ by what BF16 rounds; the server would keep them apart.
        options |= {"penstock.tolerance": str(half.TOLERANCE)}
        if size == BY_TOKENS:
            options |= {"penstock.max_tokens": str(self.scale.num_tokens)}
        if not is_gpu:
            options |= {"intra_op_thread_count": "1"}
        # Of one GPU: batches on their way in one worker, one copied while the other is computed.
        group = "count: 2 kind: " + ("KIND_GPU gpus: [ 0 ]" if is_gpu else "KIND_CPU")
        parameters = "\n".join(
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'
            for key, value in options.items()
        )
        return f"""backend: "pytorch"
max_batch_size: {self.max_batch[size]}
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
            triton_side.penstock(work / "penstock", self.args.shards, work / "penstock.log"),
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
            if size in self.found["ladders"]:
                continue
            are_tried = [self.probe_one(size, each) for each in (None, *VARIANTS)]
            # Rates are shares of the best of all: what has not been tried might be it.
            if all(are_tried):
                self.fix_rates(size)

    def probe_one(self, size: str, variant: Variant | None) -> bool:
        """Whether it has been tried. Who answers nothing is left out."""
        key = probe_key(size, variant)
        if key in self.found["probes"]:
            return True
        if not self.has_time(self.limits.probe):
            self.say(f"closed loop, {key}: no time left; the same command goes on")
            return False
        clients = min(4 * self.max_batch[size], MAX_CLIENTS)
        side = SIDES[variant is not None]
        address = self.address(side, size, variant)
        told = self.bench(address, ["--concurrency", str(clients)], self.limits.probe)
        if told is None or not told["per_s"]:
            self.say(f"closed loop, {key}: nothing was measured{self.servers[side].tail()}")
            return True
        self.found["probes"][key] = told
        self.save()
        self.say(f"closed loop, {key}: {told['per_s']:,.0f}/s, {told['rows_per_batch']} rows")
        return True

    def fix_rates(self, size: str) -> None:
        """Once: whoever goes on with the file goes on with the same."""
        loops = closed_loops(self.found, size)
        if any(each is None for each in loops.values()):
            self.say(f"{size}: no rates without a closed loop of each server")
            return
        best = max(each["per_s"] for each in loops.values())
        self.found["ladders"][size] = {
            "variant": loops["triton"]["variant"],
            "rates": {f"{share:.2f}": number(share * best) for share in SHARES},
        }
        self.save()

    def climb(self) -> None:
        """A pair is begun only where there is time for both."""
        for pair in rate_ladder.pairs(self.args.rounds, tuple(self.max_batch)):
            turns = self.ladder.open_turns(pair)
            if not turns or pair[0].size not in self.found["ladders"]:
                continue
            if not self.has_time(len(turns) * self.turn_s):
                self.say(f"{turns[0]}: no time left; the same command goes on")
                return
            for turn in turns:
                self.take(turn)

    def take(self, turn: Turn) -> None:
        if not self.has_time(self.turn_s):
            self.say(f"{turn}: no time left; the same command goes on")
            return
        fixed = self.found["ladders"][turn.size]
        rate = fixed["rates"][f"{turn.share:.2f}"]
        is_triton = turn.side == "triton"
        variant = next(each for each in VARIANTS if each.name == fixed["variant"])
        address = self.address(turn.side, turn.size, variant if is_triton else None)
        flags = ["--rate", f"{rate:.6g}", "--slo", SLO]
        began_s = self.elapsed_s()
        # Arrivals are the same for both.
        seed = SEED + len(SHARES) * turn.round + SHARES.index(turn.share)
        told = self.bench(address, flags, self.turn_s, seed)
        self.turn_s = max(self.turn_s, self.elapsed_s() - began_s)
        if told is None:
            self.say(f"{turn}: nothing was measured{self.servers[turn.side].tail()}")
            return
        self.found["levels"].append({**asdict(turn), "rate": rate, **told})
        self.save()
        word = "kept" if self.ladder.is_kept(turn) else "missed"
        p99, failed = shown(told["p99_ms"]), told["num_failed"]
        self.say(f"{turn}: {rate:,.0f}/s {word}, p99 {p99} ms, {failed} failed")

    def has_time(self, needed_s: float) -> bool:
        return self.elapsed_s() + needed_s <= self.limit_s

    def bench(
        self, address: str, flags: Sequence[str], expected_s: float, seed: int = SEED
    ) -> dict[str, Any] | None:
        """Its figures. None, and its output is shown, where nothing was measured to its end."""
        path = self.args.work / "run.json"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "penstock", "bench", address, *flags]
        command += ["--duration", f"{self.limits.level:g}s", "--json", str(path)]
        command += ["--warm-up", f"{self.limits.warm_up:g}s", "--timeout", "5s"]
        command += ["--data", str(self.args.work / "rows.jsonl"), "--seed", str(seed)]
        command += ["--processes", str(self.args.generators)]
        limit_s = min(expected_s + PATIENCE_S, self.limit_s - self.elapsed_s())
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(triton_side.packages())}
        log_path = self.args.work / "bench.log"
        with log_path.open("wb") as log, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, stdout=log, stderr=log, env=env, timeout=limit_s, check=False)
        run = read_run(path) if path.is_file() else None
        if run is None or not run.levels or run.problem == "interrupted":
            print(log_path.read_text(errors="replace")[-1500:], flush=True)
            return None
        return figures_of(run.levels[-1])


def probe_key(size: str, variant: Variant | None) -> str:
    return f"{size}; {'penstock' if variant is None else variant.name}"


def turn_of(level: dict[str, Any]) -> Turn:
    return Turn(level["round"], level["size"], level["share"], level["side"])


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


def closed_loops(found: dict[str, Any], size: str) -> dict[str, dict[str, Any] | None]:
    """Of each side, with its `variant`; of Triton in the way that answered most."""
    probes: dict[str, dict[str, Any]] = found["probes"]
    ours = probes.get(probe_key(size, None))
    tried = [
        {"variant": each.name, **probes[probe_key(size, each)]}
        for each in VARIANTS
        if probe_key(size, each) in probes
    ]
    return {
        "penstock": ours and {"variant": _processes(found["settings"]), **ours},
        "triton": max(tried, key=lambda each: each["per_s"], default=None),
    }


def _processes(settings: dict[str, Any]) -> str:
    """Say how many processes took requests; results of before have other ones than shards."""
    return f"{settings['shards']} shards" if "shards" in settings else "without shards"


def table_of(found: dict[str, Any], ladder: Ladder) -> Table:
    """Under each share of the better closed loop p99 in ms, round by round."""
    title = f"highest rate with {SLO}, {found['machine']['name']}; goal: {GOAL} times Triton's"
    table = Table(title=title, title_justify="left", caption=CAPTION, caption_justify="left")
    shares = [f"{share:.2f}" for share in SHARES]
    for column in ("batches", "server", "as", "closed loop", "times", *shares, "kept, /s", "times"):
        table.add_column(column)
    for size, max_batch in found["settings"]["max_batch"].items():
        loops = closed_loops(found, size)
        highest = {side: ladder.highest(size, side) for side in SIDES}
        ratios = [loop_ratio(loops), rate_ladder.times(*(highest[side] for side in SIDES))]
        for side in SIDES:
            loop = loops[side] or {}
            closed, kept = ratios if side == SIDES[0] else ("", "")
            cells = [f"{size}, up to {max_batch}", side.capitalize(), loop.get("variant", "?")]
            cells += [shown(loop.get("per_s")), closed]
            cells += [p99s(ladder, size, share, side) for share in SHARES]
            rates = found["ladders"].get(size, {}).get("rates", {})
            per_s = rates.get(f"{highest[side].share:.2f}", 0.0)
            table.add_row(*cells, shown(per_s) + MARK * highest[side].is_open, kept)
    return table


def loop_ratio(loops: dict[str, dict[str, Any] | None]) -> str:
    ours, theirs = (loops[side] for side in SIDES)
    return f"{ours['per_s'] / theirs['per_s']:.2f}" if ours and theirs else "?"


def p99s(ladder: Ladder, size: str, share: float, side: str) -> str:
    found = [
        shown(level["p99_ms"]) + FAILED * bool(level["num_failed"])
        for turn, level in ladder.levels.items()
        if (turn.size, turn.share, turn.side) == (size, share, side)
    ]
    return ", ".join(found)


def shown(value: float | None, digits: int = 0) -> str:
    return "?" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    raise SystemExit(main())
