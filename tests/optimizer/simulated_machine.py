"""A machine with a clock of its own, on which servers queue requests and other programs take time.

One server of one build answers one request after the other. Pauses stop everything, the load
generator too; drift and neighbours make everything slower. Measurements go through the optimiser's
own code: windows, verdicts, the search for the highest rate, the proof.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from made_evaluators import made_record
from made_optimizations import machine as made_machine
from served_builds import a_config

from penstock.benchmark import pacer
from penstock.benchmark.pacer import Closed, Open
from penstock.benchmark.stats import DurationHistogram, Window
from penstock.benchmark.targets import TargetSpec
from penstock.data import InputSpec
from penstock.optimizer import endpoints, goals, served
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.conclusion import TensorConclusion
from penstock.optimizer.facts import Facts
from penstock.optimizer.findings import Contender, Finalist, Findings
from penstock.optimizer.machine import Conditions
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Optimization, ServedMeasurement, Try
from penstock.slo import parse
from penstock.types import Array

WINDOW_S, STEP_S = 0.25, 0.005
# Between two measurements: servers start, levels warm up.
BETWEEN_S = 5.0
NUM_CORES = 2


@dataclass
class Disturbance:
    """What other programs do. `neighbour`: mean share of the CPU, in bursts. `pauses_per_s` of
    `pause_s` stop everything. `drift`: by how much the machine is slower at most, changing slowly;
    none of it is visible in the CPU's own account unless `is_visible`."""

    neighbour: float = 0.0
    pauses_per_s: float = 0.0
    pause_s: float = 0.0
    drift: float = 0.0
    is_visible: bool = True


@dataclass
class SimulatedMachine:
    disturbance: Disturbance
    seed: int
    now: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        # Phases of two slow waves: quiet at the beginning, as a run begins.
        self._waves = self.random.uniform(60, 400, 2)

    def run(self, due: Array, service_s: float, length_s: float) -> tuple[Array, Array]:
        """When requests were sent and answered, of those due at these times from now on."""
        times, work = self._work(length_s)
        services = service_s * self.random.lognormal(-0.005, 0.1, len(due))
        arrived = np.interp(due, times, work)
        total = np.cumsum(services)
        done = total + np.maximum.accumulate(arrived - np.concatenate([[0.0], total[:-1]]))
        answered = np.interp(done, work, times)
        beyond = done > work[-1]
        answered[beyond] = times[-1] + (done[beyond] - work[-1])
        self._account(times, work, float(services.sum()))
        self.now += length_s
        return np.minimum(self._sent(due, times, work), answered), answered

    def _sent(self, due: Array, times: Array, work: Array) -> Array:
        """The generator pauses with the machine: what was due meanwhile leaves at the end."""
        is_paused = np.diff(work, append=work[-1] + STEP_S) < 1e-3 * STEP_S
        # By place: the next time at which the machine runs.
        running = np.where(is_paused, np.inf, times)
        following = np.minimum.accumulate(running[::-1])[::-1]
        places = np.minimum((due / STEP_S).astype(int), len(times) - 1)
        sent: Array = np.maximum(due, np.where(is_paused[places], following[places], due))
        return sent

    def _work(self, length_s: float) -> tuple[Array, Array]:
        """Time, and the work that a quiet machine would do in it, from now on."""
        # Longer than is measured: late answers are waited for.
        times = np.arange(0.0, 2 * length_s + 5.0, STEP_S)
        speed = 1 / self._slowness(self.now + times)
        wanted = self.disturbance
        if wanted.neighbour:
            # Half a second of work now and then, with one of the two cores.
            num = int(self.random.poisson(wanted.neighbour * times[-1] / 0.5 * 2))
            for begin in self.random.uniform(0, times[-1], num):
                speed[(times >= begin) & (times < begin + 0.5)] /= 1.15
        num = int(self.random.poisson(wanted.pauses_per_s * times[-1]))
        for begin in self.random.uniform(0, times[-1], num):
            pause_s = wanted.pause_s * self.random.uniform(0.5, 1.5)
            speed[(times >= begin) & (times < begin + pause_s)] = 1e-6
        return times, np.concatenate([[0.0], np.cumsum(speed[:-1]) * STEP_S])

    def _slowness(self, at: Array) -> Array:
        waves = [np.sin(math.pi * at / length_s) ** 2 for length_s in self._waves]
        slowness: Array = 1 + self.disturbance.drift * (waves[0] + waves[1]) / 2
        return slowness

    def _probed(self) -> float:
        """What the fixed piece of work takes, with the noise that its fastest run has."""
        noise = float(self.random.lognormal(0, 0.01))
        return noise * float(self._slowness(np.array([self.now]))[0])

    def _account(self, times: Array, work: Array, busy_s: float) -> None:
        taken = 1 - float(work[-1] / times[-1])
        is_seen = self.disturbance.is_visible
        self.conditions = Conditions(
            own_cpu=min(1.0, busy_s / float(times[-1]) / NUM_CORES),
            foreign_cpu=self.disturbance.neighbour if is_seen else 0.0,
            steal=max(0.0, taken) if is_seen and self.disturbance.pauses_per_s else 0.0,
            speed_s=1e-3 * self._probed(),
            load_average=1.0,
            num_cores=NUM_CORES,
        )


def windows_of(
    due: Array, sent: Array, done: Array, length_s: float, limit_s: float
) -> list[Window]:
    found = []
    latencies, late = done - due, sent - due
    for index in range(math.ceil(length_s / WINDOW_S)):
        begin, end = index * WINDOW_S, min((index + 1) * WINDOW_S, length_s)
        is_mine = (due >= begin) & (due < end)
        histogram = DurationHistogram()
        histogram.add(latencies[is_mine])
        num = int(is_mine.sum())
        window = Window(begin, end - begin, num, num, int(((done >= begin) & (done < end)).sum()))
        window.metrics = {"latency": histogram}
        window.num_in_slo = int((latencies[is_mine] < limit_s).sum())
        window.max_late_s = float(late[is_mine].max(initial=0.0))
        found.append(window)
    return found


class SimulatedEndpoint:
    probe_s, precision = endpoints.ServedEndpoint.probe_s, endpoints.ServedEndpoint.precision
    is_streaming = False
    memory_bytes = 1 << 20
    gpu_memory_bytes: Sequence[int] = ()
    num_clients = 4

    def __init__(self, build: Build, machine: SimulatedMachine, service_s: float) -> None:
        self.build, self.machine, self.service_s = build, machine, service_s

    @property
    def conditions(self) -> Conditions:
        return self.machine.conditions

    def target(self, plan: Plan) -> TargetSpec:
        return TargetSpec("http://127.0.0.1:1/v2/models/m")

    def inputs(self, plan: Plan) -> InputSpec:
        return InputSpec()

    def level_s(self, plan: Plan, load: object) -> float:
        return plan.duration_s

    def measured(self, plan: Any, watch: object) -> SimpleNamespace:
        (load,) = plan.loads
        length_s = plan.duration_s
        limit_s = plan.slo.latency_s
        self.machine.now += BETWEEN_S
        if isinstance(load, Closed):
            due, sent, done = self._closed(load.concurrency, length_s)
        else:
            assert isinstance(load, Open)
            rate = pacer.mean_rate(load)
            gaps = self.machine.random.exponential(1 / rate, int(rate * length_s * 1.5) + 20)
            due = np.cumsum(gaps)
            due = due[due < length_s]
            sent, done = self.machine.run(due, self.service_s, length_s)
        windows = windows_of(due, sent, done, length_s, limit_s)
        generator = SimpleNamespace(num_waited=0)
        level = SimpleNamespace(load=load, windows=windows, server=None, generator=generator)
        return SimpleNamespace(levels=[level])

    def _closed(self, num_clients: int, length_s: float) -> tuple[Array, Array, Array]:
        """Clients that send again when they are answered: the server never waits."""
        num = int(length_s / self.service_s * 1.2) + num_clients
        _, done = self.machine.run(np.zeros(num), self.service_s, length_s)
        due = np.concatenate([np.zeros(num_clients), done[: num - num_clients]])
        return due, due, done


class SimulatedServers:
    is_alone = False

    def __init__(self, machine: SimulatedMachine, services: dict[str, float]) -> None:
        self._machine, self._services = machine, services

    def open(self, builds: Sequence[Build], rows: object) -> list[SimulatedEndpoint]:
        return [
            SimulatedEndpoint(build, self._machine, self._services[str(build.candidate)])
            for build in builds
        ]

    def close(self) -> None:
        pass


def true_p99_s(service_s: float, rate: float) -> float:
    """On a quiet machine, over a long time."""
    machine = SimulatedMachine(Disturbance(), seed=1)
    due = np.cumsum(np.random.default_rng(2).exponential(1 / rate, int(rate * 300)))
    _, done = machine.run(due, service_s, float(due[-1]))
    return float(np.percentile((done - due)[len(due) // 10 :], 99))


CHOSEN = Candidate((Step("faster"),))


class SimulatedLab:
    """What `conclude` asks of a lab, measured on a simulated machine."""

    def __init__(self, plan: Plan, servers: SimulatedServers) -> None:
        # It is all of its parts.
        self.run = self.gate = self.measurements = self.data = self
        self.plan = plan
        self.machine = made_machine()
        self.subject = SimpleNamespace(text="", digest="")
        self.examples = self.ensemble = None
        self.notes: list[str] = []
        self.unchecked: list[str] = []
        self.rows: list[object] = []
        self.samples = SimpleNamespace(text="")
        self.forgotten: list[str] = []
        self.journal = SimpleNamespace(
            path=Path("work/journal.jsonl"), forget=self.forgotten.extend
        )
        self.original = Build(Candidate(), Path("original"), a_config())
        self.servers = servers
        self.num_proofs = 0

    def prove(
        self, builds: Sequence[Build], left_s: float | None, attempt: int
    ) -> list[ServedMeasurement]:
        self.num_proofs += 1
        servers: Any = self.servers
        return served.ServedBench(self.plan, [], lambda doing: None, servers).prove(builds)

    def clipped(self, build: Build) -> dict[str, float]:
        return {}


@dataclass(frozen=True)
class Situation:
    """How long requests take on a quiet machine, by the original and by what was found."""

    original_s: float
    chosen_s: float
    rate: float
    limit_s: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> "Situation":
        service_s = float(random.uniform(0.001, 0.01))
        load = float(random.uniform(0.2, 1.25))
        limit_s = service_s * float(random.uniform(2.5, 15))
        speedup = float(random.uniform(1.0, 6.0))
        return cls(service_s * speedup, service_s, load / service_s, limit_s)

    def is_kept(self, candidate: Candidate) -> bool:
        service_s = self.chosen_s if candidate.steps else self.original_s
        if service_s * self.rate >= 1:
            return False
        return true_p99_s(service_s, self.rate) < self.limit_s


@dataclass(frozen=True)
class Ended:
    found: Optimization
    is_truly_kept: bool
    num_proofs: int

    @property
    def is_wrong(self) -> bool:
        return self.found.outcome in ("kept", "missed") and self.is_truly_kept != (
            self.found.outcome == "kept"
        )


def run(situation: Situation, disturbance: Disturbance, seed: int) -> Ended:
    """From the baseline to the verdict."""
    machine = SimulatedMachine(disturbance, seed)
    rate, limit_ms = situation.rate, situation.limit_s * 1e3
    slo = parse(f"p99 < {limit_ms:.4f}ms at {rate:.4f}/s")
    plan = Plan("m.onnx", "m", "out", slo=slo, duration_s=10.0)
    services = {str(Candidate()): situation.original_s, str(CHOSEN): situation.chosen_s}
    servers: Any = SimulatedServers(machine, services)
    lab: Any = SimulatedLab(plan, servers)
    chosen = Build(CHOSEN, Path("chosen"), a_config())

    random = np.random.default_rng(seed + 1)
    bench = served.ServedBench(plan, [], lambda doing: None, servers)
    (baseline,) = bench.measure([lab.original])
    # Builds, trials.
    machine.now += float(random.uniform(10, 120))
    (finalist,) = bench.measure([chosen])
    findings = Findings(original=baseline)
    for build, measured in ((chosen, finalist), (lab.original, baseline)):
        service_s = services[str(build.candidate)]
        predicted = float(0.8 / service_s * random.lognormal(0, 0.25))
        contender = Contender(build, Facts("null"), {}, [((), predicted)], is_lossy=False)
        findings.contenders.append(contender)
        findings.finalists.append(Finalist(contender, build, measured))
        findings.tries.append(Try(build.candidate, "compile", "kept", "", served=measured))
    order = goals.order([one.served for one in findings.finalists], [1, 0])
    findings.finalists = [findings.finalists[index] for index in order]
    search: Any = SimpleNamespace(
        findings=findings,
        progress=SimpleNamespace(begin_proof=lambda *told: None),
        budget=SimpleNamespace(left_s=None, has_time_to_prove=lambda num: True),
    )
    found = made_record(lab, findings)
    TensorConclusion(lab, search, found).conclude()
    assert found.chosen is not None
    return Ended(found, situation.is_kept(found.chosen), lab.num_proofs)
