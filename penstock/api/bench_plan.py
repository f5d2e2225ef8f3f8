"""Options of `penstock bench` to a plan; all problems are reported at once, under their flags."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock import slo as slos
from penstock.api.bench_options import BenchOptions
from penstock.api.options import flag_name
from penstock.benchmark import pacer
from penstock.benchmark.pacer import Closed, Load
from penstock.benchmark.plan import BenchPlan, decides_for
from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.kinds import kind_of
from penstock.data import InputSpec, lengths, traces
from penstock.data.replays import ReplayPlan, plan_replay
from penstock.errors import CommandLineError, ConfigError
from penstock.slo import Rate, Slo

Value = TypeVar("Value")
SECRET_HEADERS = re.compile("auth|key|token|cookie|secret", re.IGNORECASE)
LOADS = ("concurrency", "rate", "ramp", "steps", "trace", "replay", "find_knee", "max_rate")
# Loads that have no arrival process, and inputs that a replay has itself.
WITHOUT_ARRIVALS = ("concurrency", "trace", "replay", "find_knee")
NOT_REPLAYED = ("data", "data_name", "lengths", "output_lengths", "shared_memory", "body")
DURATION_S = 10.0
MAX_CONNECTIONS = 1024
# Kinds of targets, in words.
KINDS = {
    "v2 HTTP": "v2 over HTTP",
    "v2 gRPC": "v2 over gRPC",
    "in process": "a model in this process",
    "text in process": "a language model in this process",
    "OpenAI": "OpenAI servers",
    "HTTP": "plain URLs",
}
# Kinds of targets that a flag has an effect for; flags that are not here have one for all.
OVER_HTTP = ("v2 HTTP", "OpenAI", "HTTP")
NETWORK = ("v2 HTTP", "v2 gRPC", "OpenAI", "HTTP")
TEXTS = ("OpenAI", "text in process")
APPLIES = {
    "tensors": ("v2 HTTP",),
    "shared_memory": ("v2 HTTP",),
    "model": ("v2 HTTP", "v2 gRPC", "in process", "text in process", "OpenAI"),
    "version": ("v2 HTTP", "v2 gRPC", "in process", "text in process"),
    "api": TEXTS,
    "extra": TEXTS,
    "body": ("HTTP",),
    "method": ("HTTP",),
    "header": OVER_HTTP,
    "api_key": NETWORK,
    "max_connections": NETWORK,
}


def make_plans(
    model: str, options: BenchOptions, *, command: str = "", ambient: Collection[str] = ()
) -> list[BenchPlan]:
    """Make a plan for each batch size; ConfigError lists everything that is wrong. `ambient` names
    options that came from the environment, which is for many commands: they may have no effect."""
    if options.seed is None:
        options = replace(options, seed=secrets.randbelow(2**31))
    reading = OptionReader(options)
    sizes = reading.parse("batch_size", parse_batch_sizes) or [1]
    slo = reading.parse("slo", slos.parse)
    duration_s = reading.parse("duration", slos.parse_duration)
    inputs = _inputs(reading)
    replay = reading.parse("replay", plan_replay, is_file=True)
    if replay is not None:
        path, count = options.replay, len(replay.trace.times_s)
        inputs = msgspec.structs.replace(inputs, path=path, num_replayed=count)
    loads = _loads(reading, slo, duration_s, replay)
    spec = _target(model, reading, loads)
    if replay is not None and replay.has_answers:
        spec = msgspec.structs.replace(spec, reads_answers=True)
    question = "knee" if options.find_knee else "max rate" if options.max_rate else ""
    needs_slo = question == "max rate" and not options.slo
    reading.refuse(needs_slo, "--max-rate needs --slo, e.g. --slo 'p99 < 20 ms'")
    is_cold = options.warm_up in ("0", "0s")
    warm_up_s = None if is_cold else reading.parse("warm_up", slos.parse_duration)
    is_vain = options.gate and slo is None and not options.baseline
    reading.refuse(is_vain, "--gate needs --slo, --baseline or both")
    _check_unused(reading, spec, ambient)
    _check_alone(reading, slo)
    reading.check()
    is_endless = not (options.trace or options.steps or options.replay)
    arrivals, cv = _arrivals(options, None if slo is None else slo.rate)
    plan = BenchPlan(
        target=spec,
        inputs=inputs,
        loads=() if question else loads,
        question=question,
        slo=slo,
        decides=decides_for(slo),
        duration_s=duration_s or (DURATION_S if is_endless else None),
        precision=options.precision / 100,
        max_warm_up_s=warm_up_s or 0.0,
        num_processes=options.processes,
        arrivals=arrivals,
        cv=cv,
        seed=inputs.seed,
        price_per_hour=options.price,
        command=_without_secrets(command, options),
    )
    batches = [msgspec.structs.replace(inputs, batch_size=size) for size in sizes]
    return [replace(plan, inputs=each) for each in batches]


def parse_batch_sizes(text: str) -> list[int]:
    """Parse `8`, `1,8,32`, `1:32`, which doubles, or `1:32:4`, which steps by 4."""
    expected = "expected one like 8, 1,8,32, 1:32 or 1:32:4"
    parts = text.split(":")
    if len(parts) == 3:
        if not all(part.strip().isdigit() and int(part) for part in parts):
            raise ValueError(f"'{text}' is not a batch size; {expected}")
        first, last, step = map(int, parts)
        if first > last:
            raise ValueError(f"'{text}' begins above its end; {expected}")
        # 1:32:4 is 1, 4, 8 ... 32: multiples of the step are what batchers like.
        multiples = range(step * (first // step + 1), last + 1, step)
        return sorted({first, *multiples, last})
    try:
        return pacer.parse_concurrency(text)
    except ValueError:
        raise ValueError(f"'{text}' is not a batch size; {expected}") from None


def _without_secrets(command: str, options: BenchOptions) -> str:
    """Return the command with secrets masked: runs are shared."""
    headers = [header.partition(":") for header in options.header]
    secret = [value.strip() for name, _, value in headers if SECRET_HEADERS.search(name)]
    for text in filter(None, [options.api_key, *secret]):
        command = command.replace(text, "...")
    return command


@dataclass(slots=True)
class OptionReader:
    """Parses options to values and collects problems."""

    options: BenchOptions
    # Options that are malformed or contradict each other.
    problems: list[str] = field(default_factory=list)
    # Files named by options that cannot be used.
    file_problems: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise CommandLineError, or ConfigError if only files are wrong, with all problems."""
        if self.problems:
            raise CommandLineError([*self.problems, *self.file_problems])
        if self.file_problems:
            raise ConfigError(self.file_problems)

    def parse(
        self, name: str, parse: Callable[[str], Value], *, is_file: bool = False
    ) -> Value | None:
        """Parse an option, or read its file; None if it is not given or cannot be used."""
        text = getattr(self.options, name)
        try:
            return parse(text) if text else None
        except (ConfigError, ValueError) as error:
            is_usage = not is_file or isinstance(error, CommandLineError)
            found = error.problems if isinstance(error, ConfigError) else [str(error)]
            problems = self.problems if is_usage else self.file_problems
            problems += [f"{flag_name(name)}: {each}" for each in found]
        return None

    def refuse(self, is_wrong: object, problem: str) -> None:
        if is_wrong:
            self.problems.append(problem)

    def list_given(self, *names: str) -> list[str]:
        """Return which of these options were given, as flags."""
        return [flag_name(name) for name in names if getattr(self.options, name)]


def _arrivals(options: BenchOptions, rate: Rate | None) -> tuple[str, float]:
    """Return the arrival process and its coefficient of variation."""
    arrivals = options.arrivals or (rate.arrivals if rate else "poisson")
    return arrivals, options.cv or (rate.cv if rate and rate.cv else 1.0)


def _loads(
    reading: OptionReader, slo: Slo | None, duration_s: float | None, replay: ReplayPlan | None
) -> tuple[Load, ...]:
    options = reading.options
    given = reading.list_given(*LOADS)
    both = " and ".join(given)
    reading.refuse(len(given) > 1, f"{both} contradict each other; give one load")
    rate = None if slo is None else slo.rate
    arrivals, cv = _arrivals(options, rate)
    is_other = options.cv and arrivals != "gamma"
    reading.refuse(is_other, "--cv applies to gamma arrivals; give --arrivals gamma too")
    if options.arrivals and (closed := reading.list_given(*WITHOUT_ARRIVALS)):
        reading.problems.append(f"--arrivals has no effect with {closed[0]}; leave one of them out")
    reading.refuse(options.rate_scale and not options.trace, "--rate-scale needs --trace")
    counts = reading.parse("concurrency", pacer.parse_concurrency) or []
    loads: list[Load] = [pacer.Closed(count) for count in counts]
    rates = reading.parse("rate", pacer.parse_rates) or []
    profiles: list[pacer.Flat | pacer.Ramp | pacer.Steps] = [pacer.Flat(each) for each in rates]
    ramp = reading.parse("ramp", lambda text: pacer.parse_ramp(text, duration_s or DURATION_S))
    steps = reading.parse("steps", pacer.parse_steps)
    profiles += [each for each in (ramp, steps) if each is not None]
    loads += [pacer.Open(profile, arrivals, cv) for profile in profiles]
    if trace := reading.parse("trace", lambda text: traces.read_trace(Path(text)), is_file=True):
        loads.append(pacer.Replay(trace.times_s, options.rate_scale or 1.0, trace.name))
    if replay is not None:
        times_s, name = replay.trace.times_s, replay.trace.name
        loads.append(pacer.Replay(times_s, options.speed or 1.0, name, "replay"))
    if not given and rate is not None:
        loads = [pacer.Open(pacer.Flat(rate.per_s), arrivals, cv)]
    return tuple(loads) or (pacer.Closed(1),)


def _check_unused(reading: OptionReader, spec: TargetSpec, ambient: Collection[str]) -> None:
    """Report options that have no effect for this target: they are mistakes."""
    if any(each.startswith("--body:") for each in reading.file_problems):
        # The body decides the kind.
        return
    try:
        kind = kind_of(spec)
    except CommandLineError as error:
        reading.problems += error.problems
        return
    except ConfigError as error:
        reading.file_problems += error.problems
        return
    useless = [name for name, kinds in APPLIES.items() if kind not in kinds and name not in ambient]
    for name in useless:
        where = ", ".join(KINDS[each] for each in APPLIES[name])
        problem = f"{flag_name(name)} applies to {where}; MODEL is {KINDS[kind]}"
        reading.refuse(getattr(reading.options, name), problem)


def _check_alone(reading: OptionReader, slo: Slo | None) -> None:
    """Report options that have no effect without another one."""
    options = reading.options
    reading.refuse(options.data_name and not options.data, "--data-name needs --data")
    reading.refuse(options.speed and not options.replay, "--speed needs --replay")
    if options.replay and (own := reading.list_given(*NOT_REPLAYED)):
        reading.problems.append(f"{own[0]} has no effect: --replay has its own inputs")
    several = options.replay and options.batch_size != "1"
    reading.refuse(several, "--batch-size has no effect: --replay has its own rows")
    is_torn = options.shared_memory and options.tensors == "json"
    problem = "--shared-memory and --tensors json contradict each other; leave one of them out"
    reading.refuse(is_torn, problem)
    has_tolerance = options.tolerance is not None
    reading.refuse(has_tolerance and not options.baseline, "--tolerance needs --baseline")
    has_rate = slo is not None and slo.rate is not None
    if options.arrivals and not (reading.list_given(*LOADS) or has_rate or options.slo and not slo):
        rates = "--rate, --ramp, --steps, --max-rate or an SLO with a rate"
        reading.problems.append(f"--arrivals applies to {rates}; give one of them")


def _inputs(reading: OptionReader) -> InputSpec:
    options = reading.options
    assert options.seed is not None
    return InputSpec(
        path=options.data,
        name=options.data_name,
        lengths=reading.parse("lengths", lengths.parse, is_file=True),
        output_lengths=reading.parse("output_lengths", lengths.parse, is_file=True),
        seed=options.seed,
        trace_path=options.trace,
    )


def _target(address: str, reading: OptionReader, loads: tuple[Load, ...]) -> TargetSpec:
    options = reading.options
    headers = {}
    for text in options.header:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            reading.problems.append(f"--header '{text}': expected 'Name: value'")
        headers[name.strip()] = value.strip()
    counts = [load.concurrency for load in loads if isinstance(load, Closed)]
    return TargetSpec(
        address=address,
        model=options.model,
        version=options.version,
        is_binary=options.tensors != "json",
        shared_memory=options.shared_memory,
        api=options.api or "chat",
        method=options.method or ("POST" if options.body else "GET"),
        headers=headers,
        body=reading.parse("body", _read_body, is_file=True) or "",
        api_key=options.api_key,
        timeout_s=reading.parse("timeout", slos.parse_duration) or 0.0,
        max_connections=options.max_connections or max([MAX_CONNECTIONS, *counts]),
        extra=options.extra,
    )


def _read_body(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{text[1:]} cannot be read: {error}"]) from None
