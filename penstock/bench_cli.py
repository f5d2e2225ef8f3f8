"""The `bench` and `report` commands: flags to a plan, a run to files and terminal."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.commands import coloured, fail
from penstock.errors import CommandLineError, ConfigError
from penstock.exit_codes import ExitCode

if TYPE_CHECKING:
    from penstock.benchmark.inputs import InputSpec
    from penstock.benchmark.pacer import Load
    from penstock.benchmark.plan import Plan
    from penstock.benchmark.results import Run
    from penstock.benchmark.run import Conductor
    from penstock.benchmark.targets import TargetSpec
    from penstock.slo import Slo

SECRET_HEADERS = re.compile("auth|key|token|cookie|secret", re.IGNORECASE)

# Options of both commands.
HTML = click.option(
    "--html",
    "html_path",
    metavar="FILE",
    default="",
    help="Write a self-contained HTML page with plots. Use it to share the results.",
)
CSV = click.option(
    "--csv",
    "csv_path",
    metavar="FILE",
    default="",
    help="Write a row a level, with perf_analyzer's columns first. Use it where scripts read "
    "those.",
)


@click.command()
@click.argument("target")
@click.option(
    "--concurrency",
    metavar="N",
    help="Closed loop: keep N requests in flight. Default: 1, if no other load is given. 1:64 "
    "doubles from 1 to 64; 1,8,32 are three levels. Choose it to compare with perf_analyzer; real "
    "users do not wait for each other, so use --rate for latency targets.",
)
@click.option(
    "--rate",
    metavar="N",
    help="Open loop: send N requests per second, however slow the answers are. 100:1600 doubles; "
    "100,200,500 are three levels. Choose it for latency targets.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "constant", "gamma"]),
    default=None,
    help="How requests arrive at a rate; poisson unless the SLO says otherwise. Choose gamma with "
    "--cv for bursts, constant for machines that send by a clock.",
)
@click.option(
    "--cv",
    type=click.FloatRange(0.01, 100),
    default=None,
    help="Spread of gamma arrivals (standard deviation of gaps over their mean; 1 is poisson). "
    "Raise it when your traffic comes in bursts.",
)
@click.option(
    "--ramp",
    metavar="A:B",
    help="One level whose rate grows from A to B over --duration. Use it to see at which rate "
    "latency leaves the floor.",
)
@click.option(
    "--steps",
    metavar="R:T,…",
    help="One level of several rates, each for a time: 100:10s,500:5s,100:10s. Use it to see how "
    "a server takes a burst and recovers.",
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Replay the arrivals (and, for LLMs, the lengths) of a recorded trace, CSV or JSONL. Use "
    "it when you have one: no law of arrivals is as real.",
)
@click.option(
    "--rate-scale",
    type=click.FloatRange(0, min_open=True),
    default=None,
    help="Multiplies the rate of --trace. Lower it when the trace is of a larger service than "
    "yours; its shape stays.",
)
@click.option(
    "--find-knee",
    is_flag=True,
    help="Double the concurrency until throughput no longer grows, and say where the knee is. Use "
    "it to learn what a server can do before you promise anything.",
)
@click.option(
    "--max-rate",
    is_flag=True,
    help="Find the highest arrival rate that keeps --slo, with its interval. Use it to size a "
    "fleet.",
)
@click.option(
    "--slo",
    metavar="SLO",
    help="What must hold, as in 'p99 < 20 ms, goodput >= 99 % at 200/s'. Give it to get a verdict; "
    "its rate is used when no load is given.",
)
@click.option(
    "--gate",
    is_flag=True,
    help="Exit with 2 when the SLO is missed or, with --baseline, when something became slower. "
    "Use it in CI.",
)
@click.option(
    "--baseline",
    metavar="RUN.JSON",
    help="A saved run to compare with, by a two-sample test. Give it when a change must not make "
    "things slower.",
)
@click.option(
    "--tolerance",
    metavar="PERCENT",
    type=click.FloatRange(0, 1000),
    default=None,
    show_default="5",
    help="With --baseline: so much slower is still no regression. Lower it where machines are "
    "quiet, raise it where they are not.",
)
@click.option(
    "--duration",
    metavar="TIME",
    default=None,
    help="Time limit per level. Default: 10s; a trace or steps run to their end. Raise it when the "
    "report says that the interval is too wide.",
)
@click.option(
    "--precision",
    metavar="PERCENT",
    type=click.FloatRange(0, 100),
    default=5.0,
    show_default=True,
    help="A level ends early, after a third of its time at least, when the 95 % interval of the "
    "percentile that decides is so narrow (plus or minus). 0 always measures the whole time: "
    "choose that when rare stalls matter.",
)
@click.option(
    "--warm-up",
    metavar="TIME",
    default="10s",
    show_default=True,
    help="Longest time to wait until latency is steady; 0s measures from the first request. Raise "
    "it for models that compile while they run.",
)
@click.option(
    "--data",
    metavar="PATH",
    default="",
    help="Representative inputs: .npz, .npy, .jsonl, .json (perf_analyzer's form), .parquet, .txt "
    "(a prompt a line) or a folder of images. Random values of the model's signature are sent "
    "unless it is given: give it whenever time depends on values.",
)
@click.option(
    "--data-name",
    metavar="INPUT",
    default="",
    help="Which input .npy files and images are for. Needed when the model has several.",
)
@click.option(
    "--lengths",
    metavar="LAW",
    default="",
    help="Sizes of variable dimensions, or of prompts in tokens: 128, uniform:16:512, "
    "normal:128:30, lognormal:100:900 (median and p99) or list:FILE. Give it when requests differ "
    "in size.",
)
@click.option(
    "--output-lengths",
    metavar="LAW",
    default="",
    help="Tokens to ask an LLM for, a law as for --lengths. Give it when answers differ in length.",
)
@click.option(
    "-b",
    "--batch-size",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Rows in each request. Raise it when your clients send several at once.",
)
@click.option(
    "--tensors",
    type=click.Choice(["binary", "json"]),
    default=None,
    show_default="binary",
    help="How v2 over HTTP carries tensors. Choose json when your clients do.",
)
@click.option(
    "--model",
    metavar="NAME",
    default="",
    help="Model to ask for. Needed when the address does not name it: OpenAI servers with several "
    "models, repositories.",
)
@click.option(
    "--version",
    metavar="V",
    default="",
    help="Version of the model. Give it when the highest is not the one to measure.",
)
@click.option(
    "--api",
    type=click.Choice(["chat", "completions"]),
    default=None,
    show_default="chat",
    help="Which OpenAI endpoint to ask. Choose completions for base models without a template.",
)
@click.option(
    "--extra",
    metavar="JSON",
    default="",
    help="Further fields of OpenAI requests, as in '{\"ignore_eos\": true}'. Use it when answers "
    "must have the length asked for.",
)
@click.option(
    "--body",
    metavar="TEMPLATE",
    default="",
    help="Body for a plain URL; {name} stands for a field of --data, @FILE reads it from a file. "
    "Needed when the target speaks neither v2 nor OpenAI.",
)
@click.option(
    "--method",
    type=click.Choice(["GET", "POST", "PUT"]),
    default=None,
    help="Method for a plain URL: POST with --body, GET without. Change it when the server wants "
    "another.",
)
@click.option(
    "-H",
    "--header",
    multiple=True,
    metavar="'NAME: VALUE'",
    help="Header of each HTTP request. Give it when a proxy or the server wants one. Repeatable.",
)
@click.option(
    "--api-key",
    default="",
    envvar="PENSTOCK_API_KEY",
    metavar="KEY",
    help="Key for the server. Needed when it asks for one; better given as PENSTOCK_API_KEY, "
    "because flags are seen by everybody on the machine.",
)
@click.option(
    "--timeout",
    metavar="TIME",
    default="60s",
    show_default=True,
    help="A request that takes longer has failed. Raise it for slow models, lower it to what your "
    "clients wait.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1, 60000),
    default=None,
    help="Limit on connections per process. Default: 1024, or the highest concurrency. "
    "Raise it when the report says that requests waited for one.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Generator processes. Raise it when the report says that the generator was the limit and "
    "there are cores to spare.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**31 - 1),
    default=None,
    help="Random seed for arrival times and random inputs. Default: a new one for each run, so "
    "that caches do not know the inputs; the saved run has it. Give it to send the same requests "
    "again.",
)
@click.option(
    "--price",
    type=click.FloatRange(0, min_open=True),
    default=None,
    help="Price of the serving machine per hour, in any currency. Give it to get the cost of a "
    "million answers.",
)
@click.option(
    "--json",
    "json_path",
    metavar="FILE",
    default="",
    help="Write the run. Give it to look again later (`penstock report`), or to compare.",
)
@HTML
@CSV
def bench(target: str, **flags: Any) -> None:
    """Measure TARGET under load: what users would see, with how sure that is.

    \b
    TARGET is one of
      http://host:port/v2/models/NAME[/versions/V]   v2 over HTTP: Penstock, Triton, MLServer
      grpc://host:port/NAME[/V]                      v2 over gRPC
      openai+http://host:port/v1                     completions or chat, streamed
      http://…                                       any other URL, with --body
      models/NAME                                    a model's folder: in this process
      model.gguf                                     a language model, as are folders of such
    """
    from penstock.benchmark import run_files

    outputs = Outputs(flags["json_path"], flags["html_path"], flags["csv_path"])
    try:
        plan = make_plan(target, flags)
        outputs.check()
        baseline = run_files.read_run(Path(flags["baseline"])) if flags["baseline"] else None
        run = asyncio.run(_measure(plan, outputs))
        outputs.show(run)
    except ConfigError as error:
        fail(error)
    tolerance = TOLERANCE if flags["tolerance"] is None else flags["tolerance"]
    sys.exit(_conclude(run, baseline, plan, flags["gate"], tolerance / 100))


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN.JSON…")
@HTML
@CSV
def report(runs: tuple[str, ...], html_path: str, csv_path: str) -> None:
    """Show saved runs of `penstock bench` again: one as it was, several compared with the first;
    or one of `penstock optimize`."""
    from penstock import terminal
    from penstock.report import saved

    paths = [Path(each) for each in runs]
    outputs = _path(html_path), _path(csv_path), terminal.console()
    try:
        saved.show(paths, *outputs)
    except ConfigError as error:
        fail(error)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Files that the run is written to; empty names are not written."""

    json_path: str
    html_path: str
    csv_path: str

    def check(self) -> None:
        """Check the files before measuring; ConfigError for those that cannot be written."""
        from penstock.benchmark import run_files

        run_files.check_outputs([self.json_path, self.html_path, self.csv_path])

    def keep(self, run: Run) -> None:
        """Save the run so far, so that it survives a crash. A full disk does not stop the
        measurement; `show` tries again and reports it."""
        with contextlib.suppress(ConfigError):
            self._write(run)

    def _write(self, run: Run) -> None:
        from penstock.benchmark import run_files

        if self.json_path:
            run_files.write_run(run, Path(self.json_path))

    def show(self, run: Run) -> None:
        from penstock import terminal
        from penstock.report import saved

        saved.show_run(run, _path(self.html_path), _path(self.csv_path), terminal.console())
        self._write(run)


def _path(name: str) -> Path | None:
    return Path(name) if name else None


async def _measure(plan: Plan, outputs: Outputs) -> Run:
    from penstock.benchmark.run import Conductor
    from penstock.report.live import Live

    with Live() as live:
        conductor = Conductor(plan, live.update, outputs.keep)
        with _interruptible(conductor):
            return await conductor.measure()


@contextlib.contextmanager
def _interruptible(conductor: Conductor) -> Iterator[None]:
    """Handle Ctrl-C: the first ends the level and keeps its measurements; the second ends the run,
    as does the first if nothing was measured yet."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None

    def interrupt() -> None:
        if conductor.is_interrupted or not conductor.is_measuring:
            task.cancel()
        conductor.interrupt()

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, interrupt)
    try:
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)


def _conclude(run: Run, baseline: Run | None, plan: Plan, is_gate: bool, tolerance: float) -> int:
    """Print the checks of the gate and return the exit code."""
    from penstock.benchmark import ci_gate
    from penstock.benchmark.run import INTERRUPTED

    if run.problem == INTERRUPTED:
        return ExitCode.INTERRUPTED
    checks = ci_gate.checks(run, plan.slo, baseline, tolerance)
    if is_gate or baseline is not None:
        for check in checks:
            mark = coloured("pass", "green") if check.is_passed else coloured("FAIL", "red")
            click.echo(f"{mark}  {check.text}")
    if run.is_partial:
        return ExitCode.FAILED
    is_shut = is_gate and not all(check.is_passed for check in checks)
    return ExitCode.MISSED if is_shut else ExitCode.OK


# Flags to a plan.


def make_plan(target: str, flags: dict[str, Any]) -> Plan:
    """Make a plan from flags; ConfigError lists everything that is wrong."""
    from penstock import slo as slos
    from penstock.benchmark.plan import Plan, decides_for

    if flags["seed"] is None:
        flags = {**flags, "seed": secrets.randbelow(2**31)}
    reading = Reading(flags)
    slo: Slo | None = reading.maybe("slo", slos.parse)
    duration_s = reading.maybe("duration", slos.parse_duration)
    inputs = _inputs(reading)
    loads = _loads(reading, slo, duration_s)
    spec = _target(target, reading, loads)
    question = _question(reading, slo, loads)
    warm_up_s = (
        0.0 if flags["warm_up"] in ("0", "0s") else reading.maybe("warm_up", slos.parse_duration)
    )
    _check_gate(reading, slo)
    _check_unused(reading, spec)
    _check_alone(reading, slo)
    reading.check()
    is_endless = flags["trace"] is None and flags["steps"] is None
    rate = None if slo is None else slo.rate
    return Plan(
        target=spec,
        inputs=inputs,
        loads=() if question else loads,
        question=question,
        slo=slo,
        decides=decides_for(slo),
        duration_s=duration_s or (DURATION_S if is_endless else None),
        precision=flags["precision"] / 100,
        max_warm_up_s=warm_up_s or 0.0,
        num_processes=flags["processes"],
        arrivals=flags["arrivals"] or (rate.arrivals if rate else "poisson"),
        cv=flags["cv"] or (rate.cv if rate and rate.cv else 1.0),
        seed=flags["seed"],
        price_per_hour=flags["price"],
        command=_command(sys.argv[1:], flags),
    )


def _command(arguments: list[str], flags: dict[str, Any]) -> str:
    """Return the command as typed, with secrets masked: runs are shared."""
    secret_texts = [flags["api_key"]] if flags["api_key"] else []
    for header in flags["header"]:
        name, _, value = header.partition(":")
        if value.strip() and SECRET_HEADERS.search(name):
            secret_texts.append(value.strip())
    for text in secret_texts:
        arguments = [each.replace(text, "...") for each in arguments]
    return shlex.join(["penstock", *arguments])


class Reading:
    """Parses flags to values and collects problems."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        # Flags that are malformed or contradict each other.
        self.problems: list[str] = []
        # Files named by flags that cannot be used.
        self.file_problems: list[str] = []

    def check(self) -> None:
        """Raise CommandLineError, or ConfigError if only files are wrong, with all problems."""
        if self.problems:
            raise CommandLineError([*self.problems, *self.file_problems])
        if self.file_problems:
            raise ConfigError(self.file_problems)

    def file(self, name: str, read: Callable[[str], Any]) -> Any:
        """Read a flag's file; None if the flag is not given or the file cannot be used."""
        text = self.flags[name]
        try:
            return read(text) if text else None
        except ConfigError as error:
            is_usage = isinstance(error, CommandLineError)
            problems = self.problems if is_usage else self.file_problems
            problems += [f"--{name.replace('_', '-')}: {each}" for each in error.problems]
        return None

    def maybe(self, name: str, parse: Callable[[str], Any]) -> Any:
        """Parse a flag; None if it is not given or invalid."""
        text = self.flags[name]
        if not text:
            return None
        try:
            return parse(text)
        except ConfigError as error:
            self.problems += [f"--{name.replace('_', '-')}: {each}" for each in error.problems]
        except ValueError as error:
            self.problems.append(f"--{name.replace('_', '-')}: {error}")
        return None

    def given(self, *names: str) -> list[str]:
        """Return which of these flags were given, with their dashes."""
        return [f"--{name.replace('_', '-')}" for name in names if self.flags[name]]


LOADS = ("concurrency", "rate", "ramp", "steps", "trace", "find_knee", "max_rate")
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
# Percent, of --tolerance.
TOLERANCE = 5.0


def _loads(reading: Reading, slo: Slo | None, duration_s: float | None) -> tuple[Load, ...]:
    from penstock.benchmark import pacer
    from penstock.benchmark.inputs import traces

    flags = reading.flags
    given = reading.given(*LOADS)
    if len(given) > 1:
        reading.problems.append(f"{' and '.join(given)} do not go together; choose one load")
    rate = None if slo is None else slo.rate
    arrivals = flags["arrivals"] or (rate.arrivals if rate else "poisson")
    cv = flags["cv"] or (rate.cv if rate and rate.cv else 1.0)
    if flags["cv"] and arrivals != "gamma":
        reading.problems.append("--cv: the spread of gamma arrivals; give --arrivals gamma too")
    if flags["arrivals"] and (closed := reading.given("concurrency", "trace", "find_knee")):
        reading.problems.append(f"--arrivals: {closed[0]} has arrivals of its own; leave one out")
    if flags["rate_scale"] and not flags["trace"]:
        reading.problems.append("--rate-scale: there is no --trace to scale")
    counts = reading.maybe("concurrency", pacer.parse_concurrency) or []
    loads: list[Load] = [pacer.Closed(count) for count in counts]
    rates = reading.maybe("rate", pacer.parse_rates) or []
    profiles: list[Any] = [pacer.Flat(each) for each in rates]
    ramp = reading.maybe("ramp", lambda text: pacer.parse_ramp(text, duration_s or DURATION_S))
    steps = reading.maybe("steps", pacer.parse_steps)
    profiles += [each for each in (ramp, steps) if each is not None]
    loads += [pacer.Open(profile, arrivals, cv) for profile in profiles]
    if trace := reading.file("trace", lambda text: traces.read_trace(Path(text))):
        loads.append(pacer.Replay(trace.times_s, flags["rate_scale"] or 1.0, trace.name))
    if not given and rate is not None:
        loads = [pacer.Open(pacer.Flat(rate.per_s), arrivals, cv)]
    return tuple(loads) or (pacer.Closed(1),)


def _question(reading: Reading, slo: Slo | None, loads: tuple[Load, ...]) -> str:
    if reading.flags["find_knee"]:
        return "knee"
    if not reading.flags["max_rate"]:
        return ""
    if not reading.flags["slo"]:
        reading.problems.append("--max-rate: needs --slo, as in --slo 'p99 < 20 ms'")
    return "max rate"


def _check_gate(reading: Reading, slo: Slo | None) -> None:
    if reading.flags["gate"] and slo is None and not reading.flags["baseline"]:
        reading.problems.append("--gate: nothing to judge by; give --slo, --baseline or both")


def _check_unused(reading: Reading, spec: TargetSpec) -> None:
    """Report flags that have no effect for this target: they are mistakes."""
    from penstock.benchmark.targets.kinds import kind_of
    from penstock.benchmark.targets.path_target import is_text

    if any(each.startswith("--body:") for each in reading.file_problems):
        # The body decides the kind.
        return
    try:
        kind = kind_of(spec)
        if kind == "in process" and is_text(spec):
            kind = "text in process"
    except CommandLineError as error:
        reading.problems += error.problems
        return
    except ConfigError as error:
        reading.file_problems += error.problems
        return
    for name, kinds in APPLIES.items():
        if kind not in kinds and not _is_from_environment(name):
            where = ", ".join(KINDS[each] for each in kinds)
            reading.problems += [
                f"{flag} applies to {where}; the target is {KINDS[kind]}"
                for flag in reading.given(name)
            ]


def _is_from_environment(name: str) -> bool:
    """Whether a value came from an environment variable, which applies to many commands, rather
    than from this command line."""
    context = click.get_current_context(silent=True)
    source = None if context is None else context.get_parameter_source(name)
    return source is click.core.ParameterSource.ENVIRONMENT


def _check_alone(reading: Reading, slo: Slo | None) -> None:
    """Report flags that have no effect without another one."""
    flags = reading.flags
    if flags["data_name"] and not flags["data"]:
        reading.problems.append("--data-name: there is no --data to name the input of")
    if flags["tolerance"] is not None and not flags["baseline"]:
        reading.problems.append("--tolerance applies to the comparison with --baseline; give both")
    has_rate = slo is not None and slo.rate is not None
    if flags["arrivals"] and not (reading.given(*LOADS) or has_rate or flags["slo"] and not slo):
        rates = "--rate, --ramp, --steps, --max-rate or an SLO with a rate"
        reading.problems.append(f"--arrivals applies to {rates}; give one of them")


def _inputs(reading: Reading) -> InputSpec:
    from penstock.benchmark.inputs import InputSpec, lengths

    flags = reading.flags
    return InputSpec(
        path=flags["data"],
        name=flags["data_name"],
        lengths=reading.file("lengths", lengths.parse),
        output_lengths=reading.file("output_lengths", lengths.parse),
        batch_size=flags["batch_size"],
        seed=flags["seed"],
        trace_path=flags["trace"] or "",
    )


def _target(address: str, reading: Reading, loads: tuple[Load, ...]) -> TargetSpec:
    from penstock import slo as slos
    from penstock.benchmark.pacer import Closed
    from penstock.benchmark.targets import TargetSpec

    flags = reading.flags
    headers = {}
    for text in flags["header"]:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            reading.problems.append(f"--header '{text}': expected 'Name: value'")
        headers[name.strip()] = value.strip()
    counts = [load.concurrency for load in loads if isinstance(load, Closed)]
    return TargetSpec(
        address=address,
        model=flags["model"],
        version=flags["version"],
        is_binary=flags["tensors"] != "json",
        api=flags["api"] or "chat",
        method=flags["method"] or ("POST" if flags["body"] else "GET"),
        headers=headers,
        body=reading.file("body", _read_body) or "",
        api_key=flags["api_key"],
        timeout_s=reading.maybe("timeout", slos.parse_duration) or 0.0,
        max_connections=flags["max_connections"] or max([MAX_CONNECTIONS, *counts]),
        extra=flags["extra"],
    )


def _read_body(text: str) -> str:
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{text[1:]} cannot be read: {error}"]) from None
