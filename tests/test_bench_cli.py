"""Flags become a plan, or an error that names what is wrong; commands end as CI expects."""

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from made_recordings import digits, write_recording

from penstock.api.bench_options import BenchOptions
from penstock.api.bench_plan import APPLIES, KINDS, make_plans
from penstock.benchmark.pacer import Closed, Flat, Open, Ramp, RateStep, Replay, Steps
from penstock.benchmark.plan import BenchPlan, Decides
from penstock.benchmark.targets import TargetSpec, kinds
from penstock.benchmark.targets.kinds import CLASSES
from penstock.cli.bench import bench
from penstock.cli.options import from_environment, from_params
from penstock.cli.report import report
from penstock.errors import CommandLineError, ConfigError
from penstock.system.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[1]


def parse(*arguments: str) -> tuple[str, BenchOptions, set[str]]:
    """MODEL, the options, and which of those came from the environment."""
    context = click.Context(bench)
    bench.parse_args(context, list(arguments))
    options = from_params(BenchOptions, context.params)
    return context.params["source"], options, from_environment(context, BenchOptions)


def plan(*arguments: str) -> BenchPlan:
    model, options, _ = parse("http://127.0.0.1:8000/v2/models/m", *arguments)
    command = shlex.join(["penstock", *sys.argv[1:]])
    [made] = make_plans(model, options, command=command)
    return made


def problems(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(*arguments)
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize(
    ("arguments", "loads"),
    [
        ([], (Closed(1),)),
        (["--concurrency", "1:4"], (Closed(1), Closed(2), Closed(4))),
        (["--concurrency", "1,9"], (Closed(1), Closed(9))),
        (["--rate", "200"], (Open(Flat(200.0)),)),
        (
            ["--rate", "10,20", "--arrivals", "constant"],
            (Open(Flat(10.0), "constant"), Open(Flat(20.0), "constant")),
        ),
        (
            ["--rate", "10", "--arrivals", "gamma", "--cv", "3"],
            (Open(Flat(10.0), "gamma", 3.0),),
        ),
        (["--ramp", "10:100", "--duration", "30s"], (Open(Ramp(10.0, 100.0, 30.0)),)),
        (["--steps", "10:2s,50:500ms"], (Open(Steps((RateStep(10.0, 2.0), RateStep(50.0, 0.5)))),)),
        # The SLO's own rate, when nothing else is asked for.
        (["--slo", "p99 < 20ms at 200/s gamma 2"], (Open(Flat(200.0), "gamma", 2.0),)),
        (["--slo", "p99 < 20ms at 200/s", "--concurrency", "4"], (Closed(4),)),
    ],
)
def test_loads(arguments: list[str], loads: tuple[object, ...]) -> None:
    assert plan(*arguments).loads == loads


def test_a_recording_is_replayed_to_its_end(tmp_path: Path) -> None:
    folder = write_recording(tmp_path, digits(3), digits(3), times=[0, 1, 4])
    made = plan("--replay", str(folder), "--speed", "2")
    (load,) = made.loads
    assert load == Replay(pytest.approx((0.0, 1.0, 4.0)), 2.0, "m", "replay")
    assert made.duration_s is None and made.inputs.num_replayed == 3
    assert made.inputs.path == str(folder) and made.target.reads_answers
    without = plan("--replay", str(write_recording(tmp_path / "b", digits(3))))
    assert not without.target.reads_answers


def test_a_trace_is_replayed_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("time\n5.0\n6.0\n8.0\n")
    made = plan("--trace", str(path), "--rate-scale", "2")
    assert made.loads == (Replay((0.0, 1.0, 3.0), 2.0, "trace.csv"),)
    assert made.duration_s is None
    assert made.inputs.trace_path == str(path)


def test_questions_choose_their_own_loads() -> None:
    assert plan("--find-knee").question == "knee"
    asked = plan("--max-rate", "--slo", "p95 < 5ms at 10/s constant")
    assert (asked.question, asked.loads, asked.arrivals) == ("max rate", (), "constant")


def test_the_rest_of_a_plan() -> None:
    made = plan(
        "--slo", "p95 < 20ms", "--duration", "3s", "--precision", "2", "--warm-up", "0s",
        "--processes", "2", "--seed", "7", "-b", "4", "--tensors", "json", "-H", "a: b",
        "--timeout", "5s",
    )  # fmt: skip
    assert (made.duration_s, made.precision, made.max_warm_up_s) == (3.0, 0.02, 0.0)
    assert (made.num_processes, made.seed, made.decides) == (2, 7, Decides(95.0))
    assert (made.target.is_binary, made.target.headers) == (False, {"a": "b"})
    assert (made.inputs.batch_size, made.target.timeout_s) == (4, 5.0)


def test_connections_follow_the_concurrency_unless_given() -> None:
    assert plan("--concurrency", "8").target.max_connections == 1024
    assert plan("--concurrency", "8,5000").target.max_connections == 5000
    assert plan("--concurrency", "5000", "--max-connections", "9").target.max_connections == 9


def test_a_run_does_not_remember_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--api-key", "s3cret", "-H", "X-Auth-Token: t0ken", "-H", "X-Team: blue"]
    monkeypatch.setattr(sys, "argv", ["penstock", "bench", "http://x", *flags])
    command = plan(*flags).command
    assert "s3cret" not in command and "t0ken" not in command
    assert "--api-key ... " in command and "X-Team: blue" in command


def test_a_wrong_slo_is_not_called_missing() -> None:
    assert "needs --slo" not in problems("--max-rate", "--slo", "nonsense")


def test_seeds_differ_unless_given() -> None:
    assert plan().seed != plan().seed
    assert plan().inputs.seed != 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--concurrency", "1", "--rate", "5"], "--concurrency and --rate contradict each other"),
        (["--find-knee", "--max-rate", "--slo", "p99 < 1ms"], "--find-knee and --max-rate"),
        (["--max-rate"], "--max-rate needs --slo, e.g. --slo 'p99 < 20 ms'"),
        (["--gate"], "--gate needs --slo, --baseline or both"),
        (["--slo", "p98 < 1ms"], "--slo: 'p98 < 1ms': 'p98' is not a term"),
        (["--duration", "soon"], "--duration: 'soon' is not a duration"),
        (["--timeout", "-1s"], "--timeout"),
        (["--warm-up", "x"], "--warm-up"),
        (["--concurrency", "0"], "--concurrency"),
        (["--concurrency", "8:1"], "--concurrency"),
        (["--rate", "fast"], "--rate"),
        (["--steps", "10"], "--steps"),
        (["--cv", "3"], "--cv applies to gamma arrivals"),
        (
            ["--arrivals", "gamma", "--concurrency", "4"],
            "--arrivals has no effect with",
        ),
        (["--rate-scale", "3"], "--rate-scale needs --trace"),
        (["--speed", "3"], "--speed needs --replay"),
        (["--replay", "no/such"], "--replay: no/such: there is no such recording"),
        (["--replay", "no/such", "--rate", "3"], "--rate and --replay contradict each other"),
        (["--replay", "no/such", "--data", "x.npz"], "--data has no effect: --replay has its own"),
        (["--replay", "no/such", "-b", "8"], "--batch-size has no effect"),
        (["--trace", "no/such.csv"], "--trace: no/such.csv"),
        (["--lengths", "uniform:9"], "--lengths"),
        (["--header", "nocolon"], "--header 'nocolon': expected 'Name: value'"),
        (["--method", "PUT"], "--method applies to plain URLs; MODEL is v2 over HTTP"),
        (["--api", "chat"], "--api applies to OpenAI servers, a language model in this process;"),
        (["--body", "{}", "--tensors", "json"], "--tensors applies to v2 over HTTP; MODEL is"),
        (["--shared-memory", "--tensors", "json"], "--shared-memory and --tensors json contradict"),
        (["--tolerance", "3"], "--tolerance needs --baseline"),
        (["--arrivals", "constant"], "--arrivals applies to --rate, --ramp, --steps, --max-rate"),
        (["--data-name", "x"], "--data-name needs --data"),
        (["--body", "@no/such/file"], "--body: no/such/file cannot be read"),
        (["-b", "0"], "--batch-size: '0' is not a batch size; expected one like 8, 1,8,32, 1:32"),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], text: str) -> None:
    assert text in problems(*arguments)


# A target of each kind, and a value for each flag that is about targets.
TARGETS = {
    "v2 HTTP": ["http://127.0.0.1:8000/v2/models/m"],
    "v2 gRPC": ["grpc://127.0.0.1:8001/m"],
    "OpenAI": ["openai+http://127.0.0.1:8000/v1"],
    "HTTP": ["http://127.0.0.1:8000/ask", "--body", "{}"],
    "in process": ["."],
    "text in process": ["."],
}
VALUES = {
    "tensors": "binary",
    # A switch.
    "shared_memory": "",
    "model": "m",
    "version": "1",
    "api": "chat",
    "extra": "{}",
    "body": "{}",
    "method": "POST",
    "header": "a: b",
    "api_key": "key",
    "max_connections": "8",
    "timeout": "5s",
}
# Fields without a flag, or given by the argument.
NO_FLAG = {"address", "timing_every", "reads_answers"}


def refused(kind: str, name: str) -> list[str]:
    """Problems with this flag for a target of this kind."""
    flag = f"--{name.replace('_', '-')}"
    model, options, _ = parse(*TARGETS[kind], flag, *filter(None, [VALUES[name]]))
    try:
        make_plans(model, options)
    except CommandLineError as error:
        return [text for text in error.problems if text.startswith(f"{flag} applies to ")]
    return []


@pytest.mark.parametrize("kind", TARGETS)
def test_flags_without_an_effect_on_the_target_are_refused(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds, "is_text", lambda spec: kind == "text in process")
    for name in VALUES:
        # A body makes any URL a plain one.
        is_plain = (kind, name) == ("v2 HTTP", "body")
        has_effect = is_plain or kind in APPLIES.get(name, TARGETS)
        found = refused(kind, name)
        assert len(found) == (0 if has_effect else 1), f"{name}: {found}"
        assert all(f"MODEL is {KINDS[kind]}" in text for text in found)


def test_the_table_has_every_flag_that_is_about_targets() -> None:
    names = {"timeout_s": "timeout", "is_binary": "tensors", "headers": "header"}
    fields = {names.get(each, each) for each in TargetSpec.__struct_fields__} - NO_FLAG
    assert fields == set(VALUES)
    assert fields - set(APPLIES) == {"timeout"}, "these have an effect on all targets"
    options = {each.name for each in bench.params}
    assert fields <= options
    assert set(KINDS) == set(TARGETS) == set(CLASSES)


def test_a_key_from_the_environment_is_for_whichever_target_takes_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kinds, "is_text", lambda spec: False)
    monkeypatch.setenv("PENSTOCK_API_KEY", "key")
    model, options, ambient = parse(".")
    assert ambient == {"api_key"}
    [made] = make_plans(model, options, ambient=ambient)
    assert made.target.api_key == "key"


@pytest.mark.parametrize(
    ("arguments", "is_usage"),
    [
        (["--slo", "soon"], True),
        (["--lengths", "uniform:9"], True),
        (["--lengths", "no/such.txt"], False),
        (["--trace", "no/such.csv"], False),
        (["--body", "@no/such/file"], False),
        (["--trace", "no/such.csv", "--duration", "soon"], True),
    ],
)
def test_wrong_flags_are_told_from_wrong_files(arguments: list[str], is_usage: bool) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(*arguments)
    assert isinstance(caught.value, CommandLineError) is is_usage


def test_all_problems_come_at_once() -> None:
    text = problems("--duration", "x", "--rate", "y", "--slo", "z")
    assert "--duration" in text and "--rate" in text and "--slo" in text


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


IN_PROCESS = str(ROOT / "examples" / "repository" / "identity")
SHORT = ["--duration", "500ms", "--warm-up", "500ms", "--concurrency", "2"]


def test_a_run_and_its_report(tmp_path: Path) -> None:
    files = {name: tmp_path / f"run.{name}" for name in ("json", "html", "csv")}
    outputs = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    done = run_bench(IN_PROCESS, *SHORT, *outputs, "--slo", "p99 < 30s")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SLO kept: p99")
    assert "SLO kept" in files["html"].read_text()
    assert files["csv"].read_text().startswith("Concurrency,Inferences/Second")
    shown = subprocess.run(
        [sys.executable, "-m", "penstock", "report", str(files["json"])],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == done.stdout


def test_json_to_stdout_is_alone_there() -> None:
    done = run_bench(IN_PROCESS, *SHORT, "--slo", "p99 < 30s", "--gate", "--json", "-")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdict"]["slo"] == "kept"
    assert "pass" in done.stderr


def test_a_quiet_run_prints_its_verdict_only() -> None:
    done = run_bench(IN_PROCESS, *SHORT, "--slo", "p99 < 30s", "--quiet")
    assert done.stdout.startswith("SLO kept") and done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.mark.slow
def test_a_sweep_has_a_table_and_a_file_for_each_batch_size(tmp_path: Path) -> None:
    short = ["--duration", "300ms", "--warm-up", "0s"]
    done = run_bench(IN_PROCESS, *short, "-b", "1:2", "--json", str(tmp_path / "run.json"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("highest throughput: ")
    sizes = re.findall(r"^ +(\d+) +concurrency 1 ", done.stdout, re.M)
    assert sizes == ["1", "2"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run-b1.json", "run-b2.json"]
    done = run_bench(IN_PROCESS, *short, "-b", "1,2", "--json", "-")
    assert [run["batch_size"] for run in json.loads(done.stdout)] == [1, 2]


def test_the_gate_is_shut_by_a_missed_slo() -> None:
    done = run_bench(IN_PROCESS, *SHORT, "--slo", "p99 < 1us", "--gate")
    assert done.returncode == ExitCode.MISSED
    assert done.stdout.startswith("SLO missed")
    assert "FAIL" in done.stdout


@pytest.mark.slow
def test_the_gate_opens_for_a_run_like_the_baseline(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    assert run_bench(IN_PROCESS, *SHORT, "--json", str(saved)).returncode == 0
    flags = ["--gate", "--baseline", str(saved), "--tolerance", "1000"]
    done = run_bench(IN_PROCESS, *SHORT, *flags)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("pass") == 4


@pytest.mark.slow
def test_a_baseline_with_another_load_shuts_the_gate(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    run_bench(IN_PROCESS, *SHORT, "--json", str(saved))
    flags = ["--gate", "--baseline", str(saved), "--concurrency", "3"]
    done = run_bench(IN_PROCESS, "--duration", "300ms", "--warm-up", "0s", *flags)
    assert done.returncode == ExitCode.MISSED
    assert "the baseline holds concurrency 2" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no/such/model"], "no/such/model: no such file or folder"),
        ([IN_PROCESS, "--baseline", "no.json"], "no.json"),
        ([IN_PROCESS, "--json", "no/such/folder/run.json"], "there is no folder"),
        ([IN_PROCESS, "--json", str(ROOT)], "is a folder; expected the name of a file"),
        ([IN_PROCESS, "--html", "x", "--csv", "x"], "x: two outputs cannot share a file"),
        ([IN_PROCESS, "--data", "no.npz"], "no.npz"),
        (["http://127.0.0.1:9/v2/models/m"], "127.0.0.1:9"),
    ],
)
def test_bad_input_ends_with_an_error_in_words(arguments: list[str], text: str) -> None:
    done = run_bench(*arguments)
    is_usage = "two outputs" in text
    assert done.returncode == (ExitCode.USAGE if is_usage else ExitCode.FAILED)
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_interrupted_before_anything_was_measured_it_ends_at_once() -> None:
    """Here a server takes the first request and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}/"
        command = [sys.executable, "-m", "penstock", "bench", address, "--timeout", "600s"]
        bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        server.settimeout(60)
        connection, _ = server.accept()
        while not (question := connection.recv(1000)):
            connection.close()  # It only tried whether anybody is there.
            connection, _ = server.accept()
        with connection:
            assert question.startswith(b"GET / ")
            bench.send_signal(signal.SIGINT)
            out, errors = bench.communicate(timeout=60)
    assert (bench.returncode, out) == (130, "")
    assert "Traceback" not in errors


@pytest.mark.parametrize(("value", "is_coloured"), [("", True), ("1", False)])
def test_colours_can_be_switched_off(
    monkeypatch: pytest.MonkeyPatch, value: str, is_coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", value)
    done = CliRunner().invoke(bench, ["no/such/model"], color=True)
    assert ("\x1b[31m" in done.output) is is_coloured


def test_a_report_of_something_else_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    done = CliRunner().invoke(report, [str(tmp_path / "x.json")])
    assert done.exit_code == ExitCode.FAILED
    assert "x.json" in done.output
