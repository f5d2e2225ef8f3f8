"""Runs for tests of reports: a queue is simulated, its requests go through the real columns,
recorder and windows. The same seed gives the same run."""

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from penstock import slo as promises
from penstock.benchmark.exchange import Collector, StreamTimes, TimedExchange
from penstock.benchmark.pacer import Closed, Flat, Load, Open, due_times
from penstock.benchmark.recorder import Recorder
from penstock.benchmark.results import (
    BenchRun,
    ColdStart,
    Environment,
    GeneratorUse,
    Knee,
    Level,
    MaxRate,
    SystemSample,
    WarmUp,
)
from penstock.benchmark.stats import DurationHistogram, Interval
from penstock.benchmark.targets import Counters, Description
from penstock.data import Origin

START = 1000.0
NETWORK_S = 0.0003
GIB = 2**30


@dataclass(frozen=True)
class Server:
    """A queue before `num_instances` that take a lognormal time each."""

    num_instances: int = 4
    median_s: float = 0.004
    spread: float = 0.2
    # Of requests, at random.
    fail_share: float = 0.0
    # One stop of the whole server: when, and for how long.
    stall_at_s: float = math.inf
    stall_s: float = 0.0
    # Streams: so many tokens of so long each, after the time of the queue.
    num_tokens: int = 0
    token_s: float = 0.012


@dataclass
class Simulation:
    """What became of a load; `busy_s` and `waited_s` are sums over requests."""

    exchanges: list[TimedExchange]
    busy_s: float = 0.0
    waited_s: float = 0.0


def simulate(server: Server, load: Load, span_s: float, seed: int = 0) -> Simulation:
    random = np.random.default_rng(seed)
    free = [0.0] * server.num_instances
    made = Simulation([])
    arrivals = _closed(load) if isinstance(load, Closed) else _Opened(load, span_s, seed)
    for due in arrivals:
        if due >= span_s:
            break
        took_s = server.median_s * math.exp(random.normal(0.0, server.spread))
        came = due + NETWORK_S / 2
        begin = max(came, heapq.heappop(free))
        if begin >= server.stall_at_s and begin < server.stall_at_s + server.stall_s:
            begin = server.stall_at_s + server.stall_s
        end = begin + took_s
        exchange = TimedExchange(START + due, None, lambda _: None)
        exchange.sent = exchange.due
        _add_tokens(server, exchange, end, random)
        last = exchange.stream.times[-1] - START if exchange.stream else end
        heapq.heappush(free, end)
        exchange.done = START + last + NETWORK_S / 2
        if random.random() < server.fail_share:
            exchange.failure = "503 Overloaded" if random.random() < 0.8 else "timed out"
            exchange.stream = None
        elif len(made.exchanges) % 16 == 0:
            exchange.phases = _phases(begin - came, took_s)
        made.busy_s += took_s
        made.waited_s += begin - came
        made.exchanges.append(exchange)
        arrivals.answer(exchange.done - START)
    return made


def _add_tokens(
    server: Server, exchange: TimedExchange, first: float, random: np.random.Generator
) -> None:
    if not server.num_tokens:
        return
    stream = exchange.stream = StreamTimes()
    num = max(2, int(random.poisson(server.num_tokens)))
    gaps = server.token_s * random.lognormal(0.0, 0.3, num - 1)
    stream.times = [START + first, *(START + first + np.cumsum(gaps)).tolist()]
    stream.num_output_tokens, stream.num_input_tokens = num, int(random.integers(20, 400))


def _phases(waited_s: float, took_s: float) -> dict[str, float]:
    inside = {"decode": 0.00004, "queue_batch": 0.1 * waited_s, "queue_instance": 0.9 * waited_s}
    inside |= {"compute_input": 0.04 * took_s, "compute_infer": 0.92 * took_s}
    inside["compute_output"] = 0.04 * took_s
    return inside | {"total": sum(inside.values())}


class _Opened:
    def __init__(self, load: Load, span_s: float, seed: int) -> None:
        assert isinstance(load, Open)
        self._chunks = due_times(load, seed)

    def __iter__(self) -> Iterator[float]:
        for chunk in self._chunks:
            yield from chunk.tolist()

    def answer(self, at: float) -> None:
        """Arrivals do not mind."""


class _Closed:
    def __init__(self, concurrency: int) -> None:
        self._ready = [0.0] * concurrency

    def __iter__(self) -> Iterator[float]:
        while True:
            yield heapq.heappop(self._ready)

    def answer(self, at: float) -> None:
        heapq.heappush(self._ready, at)


def _closed(load: Closed) -> _Closed:
    return _Closed(load.concurrency)


def level(
    load: Load, server: Server | None = None, span_s: float = 10.0, seed: int = 0, slo: str = ""
) -> Level:
    server = server or Server()
    made = simulate(server, load, span_s, seed)
    collector = Collector()
    for exchange in made.exchanges:
        collector.add(exchange)
    recorder = Recorder(START, promises.parse(slo) if slo else None)
    recorder.stop(START + span_s)
    recorder.add(collector.take())
    spent_s = sum(exchange.done - exchange.due for exchange in made.exchanges)
    use = GeneratorUse(
        cpu_shares=[0.31, 0.28],
        lateness=histogram([0.00005, 0.0001]),
        mean_in_flight=spent_s / span_s,
        max_in_flight=64,
        num_connections=64,
        num_waited=0,
    )
    return Level(
        load=load,
        measured_s=span_s,
        ending="time",
        warm_up=WarmUp(2.0, 500, True, 0.006, 0.0045),
        windows=recorder.windows(START + span_s),
        service=recorder.service,
        generator=use,
        server=_counters(server, made),
        samples=list(recorder.samples),
        system=_system(server, made, span_s),
    )


def ensemble_level(load: Load) -> Level:
    """Of an ensemble of `tokenizer`, which computes twice a request, and `encoder`."""
    whole = level(load)
    counters = whole.server
    assert counters is not None
    tokenizer = msgspec.structs.replace(
        counters,
        num_success=2 * counters.num_success,
        num_inferences=2 * counters.num_success,
        num_executions=counters.num_success // 2,
    )
    members = {"tokenizer": tokenizer, "encoder/2": counters}
    whole.server = msgspec.structs.replace(counters, members=members)
    return whole


def histogram(seconds: Sequence[float]) -> DurationHistogram:
    made = DurationHistogram({})
    made.add(np.asarray(seconds))
    return made


def _counters(server: Server, made: Simulation) -> Counters:
    num = sum(exchange.failure is None for exchange in made.exchanges)
    waited, busy = (round(seconds * 1e9) for seconds in (made.waited_s, made.busy_s))
    return Counters(
        num_success=num,
        num_fail=len(made.exchanges) - num,
        num_inferences=num,
        num_executions=num,
        success_ns=waited + busy + num * 60_000,
        queue_ns=waited,
        compute_input_ns=busy // 25,
        compute_infer_ns=busy - 2 * (busy // 25),
        compute_output_ns=busy // 25,
        batch_wait_ns=waited // 10,
        instance_wait_ns=waited - waited // 10,
        busy_ns=busy,
    )


def _system(server: Server, made: Simulation, span_s: float) -> list[SystemSample]:
    busy = 85 * min(1.0, made.busy_s / span_s / server.num_instances)
    return [
        SystemSample(
            at_s=at,
            cpu_percent=6 + busy + 2 * math.sin(at),
            memory_bytes=int((6 + 0.02 * at) * GIB),
            cpu_mhz=3200.0,
        )
        for at in np.arange(0.5, span_s, 0.5).tolist()
    ]


def run(levels: Sequence[Level], slo: str = "") -> BenchRun:
    """Of a v2 server on this machine with real inputs; tests change what they are about."""
    return BenchRun(
        target=Description(
            protocol="v2 HTTP, binary",
            address="http://127.0.0.1:8000/v2/models/digits",
            model="digits",
            version="3",
            server="penstock 0.1.0",
            backend="onnxruntime",
            num_instances=4,
            max_batch_size=16,
            config_digest="sha256:5b1c",
            model_digest="sha256:9f2e",
        ),
        origin=Origin(
            "450 examples of digits.npz, shuffled anew each time round", False, 450, "d1"
        ),
        environment=Environment(
            host_cpu="Example CPU 9000",
            num_cores=8,
            memory_bytes=32 * GIB,
            system="Linux 6.1",
            versions={"penstock": "0.1.0", "python": "3.11.9"},
        ),
        created="2026-03-01T12:00:00Z",
        command="penstock bench http://127.0.0.1:8000/v2/models/digits",
        duration_s=10.0,
        precision_percent=5.0,
        statistic="p99",
        slo=slo,
        cold_start=ColdStart(first_s=0.182, connect_s=0.0011),
        levels=list(levels),
        seed=7,
    )


def sweep(slo: str = "") -> BenchRun:
    """Closed loop, 1 to 64 clients of 4 instances, with its knee."""
    made = run(
        [level(Closed(2**power), seed=power, slo=slo, span_s=5.0) for power in range(7)], slo
    )
    made.knee = Knee(concurrency=4.3, throughput=960.0, alone_s=0.0044, level=2)
    return made


def open_loop(
    rate: float = 400.0, slo: str = "p99 < 20ms", server: Server | None = None
) -> BenchRun:
    return run([level(Open(Flat(rate)), server, slo=slo)], slo)


def max_rate() -> BenchRun:
    """A search: rates in the order in which they were tried."""
    slo = "p99 < 20ms"
    rates = (200.0, 400.0, 800.0, 1100.0, 900.0, 850.0)
    made = run([level(Open(Flat(rate)), slo=slo, seed=3) for rate in rates], slo)
    made.max_rate = MaxRate(Interval(872.0, 850.0, 900.0), slo)
    return made


def streams(slo: str = "p99 ttft < 200ms") -> BenchRun:
    """An LLM: tokens, and no account of its server."""
    server = Server(num_instances=8, median_s=0.06, spread=0.3, num_tokens=60)
    levels = [level(Open(Flat(rate)), server, 20.0, seed=5, slo=slo) for rate in (10.0, 40.0, 80.0)]
    for each in levels:
        each.server, each.samples = None, []
    made = run(levels, slo)
    made.target = Description("OpenAI chat", "http://127.0.0.1:8000/v1", "smollm2")
    made.origin = Origin("random prompts, 128 tokens", True)
    return made


def partial() -> BenchRun:
    """A server that refused some and was gone before the end."""
    made = open_loop(300.0, server=Server(fail_share=0.04))
    made.levels[0].ending = "lost"
    made.is_partial, made.problem = True, "the server no longer answered after 10 s"
    return made


def empty() -> BenchRun:
    """Interrupted before the first level was measured."""
    made = run([], "p99 < 20ms")
    made.is_partial, made.problem = True, "interrupted"
    return made
