"""The rounds: every server in turn, started fresh, under every load, then stopped.

Round 1 tries all settings of a server. Later rounds repeat those that lead at some load or come
close, so that what is reported is a median over all rounds and the whole stays short. A run
during which other programs were busy is done again, whatever it measured and whoever served it.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rivals.environment import BENCH, InstallError, onnx_path, publishable
from rivals.server import Server

from overhead import load
from overhead.process import StartError, cpu_between, cpu_seconds, running
from overhead.results import BUSY, Failure, Part, Results, Run, contenders
from overhead.workload import Encoding, Examples, Model, make_examples, write_workload

CHECK_S = 1
CLOSE = 0.15


@dataclass(frozen=True, slots=True)
class Plan:
    servers: Sequence[Server]
    models: Sequence[Model]
    connections: Sequence[int]
    rounds: int
    seconds: float
    max_repeats: int  # of a run that other programs disturbed


@dataclass(frozen=True, slots=True)
class Setup:
    server: Server
    variant: str
    examples: Examples
    round: int


def measure(plan: Plan, results: Results, say: Callable[[str], None]) -> None:
    """Fills results; a server that cannot run is noted there and left out."""
    examples = [make_examples(model, onnx_path(model.name)) for model in plan.models]
    servers = [server for server in plan.servers if _prepare(server, results, say)]
    for number in range(1, plan.rounds + 1):
        kept = contenders(results.runs, CLOSE)
        for server in servers:
            for each in examples:
                for variant in server.variants:
                    if number > 1 and (server.name, variant, each.model.name) not in kept:
                        continue
                    setup = Setup(server, variant, each, number)
                    say(f"round {number}/{plan.rounds}: {_describe(setup)}")
                    _measure_setup(setup, plan, results, say)


def _prepare(server: Server, results: Results, say: Callable[[str], None]) -> bool:
    try:
        version, note = server.prepare()
    except InstallError as error:
        results.missing[server.name] = f"not installed: {error}"
        say(f"{server.title} {results.missing[server.name]}")
        return False
    results.titles[server.name] = f"{server.title} {version}"
    if note:
        results.notes[server.name] = note
    return True


def _describe(setup: Setup) -> str:
    return f"{setup.server.title} ({setup.variant}), {setup.examples.model.name}"


def _measure_setup(setup: Setup, plan: Plan, results: Results, say: Callable[[str], None]) -> None:
    launch = setup.server.launch(setup.variant, setup.examples.model)
    log = BENCH / "work" / f"{setup.server.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with running(launch, log) as process:
            for encoding in setup.server.encodings:
                workload = BENCH / "work" / "requests.workload"
                write_workload(setup.examples, encoding, launch.port, workload)
                for connections in plan.connections:
                    target = _Target(setup, encoding, process, launch.port, workload)
                    _measure_load(target, connections, plan, results, say)
    except StartError as error:
        reason = f"{setup.variant} did not start: {publishable(str(error))}"
        say(f"  {reason}")
        results.missing.setdefault(setup.server.name, reason)


@dataclass(frozen=True, slots=True)
class _Target:
    setup: Setup
    encoding: Encoding
    process: psutil.Process
    port: int
    workload: Path

    def run(self, connections: int, seconds: float) -> Run | Failure:
        part: Part = "binary" if self.encoding == "v2-binary" else "json"
        names = (self.setup.server.name, self.setup.variant, part)
        model = self.setup.examples.model.name
        try:
            # The checked run comes first: it also warms the server up for this load.
            checked = load.check_answers(self.port, self.workload, connections, CHECK_S)
            before = self._cpu()
            timing = load.time_requests(self.port, self.workload, connections, seconds)
            after = self._cpu()
        except load.LoadError as error:
            return Failure(*names, model, connections, str(error))
        server_s = cpu_between(before.server, after.server)
        generator_s = after.generator - before.generator
        other_s = max(0.0, after.machine - before.machine - server_s - generator_s)
        capacity_s = timing.seconds * (psutil.cpu_count() or 1)
        return Run(
            *names,
            model,
            connections,
            self.setup.round,
            num_requests=timing.num_requests,
            requests_per_s=round(timing.requests_per_s, 1),
            p50_us=timing.p50_us,
            p90_us=timing.p90_us,
            p99_us=timing.p99_us,
            max_us=timing.max_us,
            cpu_us=round(server_s / timing.num_requests * 1e6, 1),
            num_checked=checked,
            generator_share=round(generator_s / capacity_s, 3),
            other_share=round(other_s / capacity_s, 3),
        )

    def _cpu(self) -> _CpuTimes:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)  # grows when wrk ends
        machine = psutil.cpu_times()
        return _CpuTimes(
            cpu_seconds(self.process),
            children.ru_utime + children.ru_stime,
            machine.user + machine.nice + machine.system,
        )


@dataclass(frozen=True, slots=True)
class _CpuTimes:
    server: dict[int, float]
    generator: float
    machine: float


def _measure_load(
    target: _Target, connections: int, plan: Plan, results: Results, say: Callable[[str], None]
) -> None:
    for repeats_left in range(plan.max_repeats, -1, -1):
        outcome = target.run(connections, plan.seconds)
        say(f"  {_outcome_line(outcome)}")
        if isinstance(outcome, Failure):
            results.failures.append(outcome)
            return
        if outcome.other_share <= BUSY or not repeats_left:
            results.runs.append(outcome)
            return
        say(f"  other programs took {outcome.other_share:.0%} of the machine: once more")
        results.disturbed.append(outcome)


def _outcome_line(outcome: Run | Failure) -> str:
    head = f"{outcome.part:6} {outcome.connections:3} connections: "
    if isinstance(outcome, Failure):
        return f"{head}FAILED, {outcome.reason}"
    return (
        f"{head}{outcome.requests_per_s:8,.0f} requests/s, p50 {outcome.p50_us / 1000:.2f} ms, "
        f"p99 {outcome.p99_us / 1000:.2f} ms, {outcome.cpu_us:.0f} CPU-us per request, "
        f"{outcome.num_checked} answers checked"
    )
