"""The command line as its users meet it: real processes, exit codes, and one line per problem."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import psutil
import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from waiting import wait_until

import penstock
from penstock.cli import main
from penstock.repository import layout, versions
from penstock.system.exit_codes import ExitCode

WriteOnnx = Callable[..., Path]
NULL = """
backend: "null"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
# tests/e2e/test_grpc.py serves gRPC.
FREE_PORT = ["--http-port", "0", "--no-grpc", "--metrics-port", "0"]
SERVE = [sys.executable, "-m", "penstock", "serve", *FREE_PORT]


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'


def add_model(root: Path, name: str, text: str = NULL) -> Path:
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(text)
    return folder


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The problems told, without their `error: `."""
        lines = self.stderr.splitlines()
        return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


def run_penstock(*arguments: str | Path, **environment: str) -> Ended:
    """To its end, which must come soon and leave no worker behind."""
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=60)
        finally:
            process.kill()
    assert "Traceback" not in stderr, stderr
    wait_until(lambda: workers_of(process.pid) == [])
    return Ended(process.returncode, stdout, stderr)


def call_penstock(*arguments: str | Path) -> Ended:
    """A command that starts nothing, in this process."""
    done = CliRunner(env={"COLUMNS": "80"}).invoke(main, [*map(str, arguments)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Ended(done.exit_code, done.stdout, done.stderr)


def workers_of(pid: int) -> list[psutil.Process]:
    """Worker processes that the core with this pid started, orphans included."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "penstock.serving.worker" in command and command[-1] == str(pid):
            found.append(process)
    return found


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    host: str
    port: int
    banner: str

    def get(self, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def post(self, path: str, body: bytes) -> tuple[int, str]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("POST", path, body)
            response = connection.getresponse()
            return response.status, json.loads(response.read())["error"]
        finally:
            connection.close()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def serving(*arguments: str | Path) -> Iterator[Running]:
    """`penstock serve` on a free port, from its banner to its end."""
    command = [*SERVE, *map(str, arguments)]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        try:
            banner = ""
            assert process.stdout is not None
            for line in process.stdout:
                banner += line
                address = re.search(r"http://(\S+):(\d+)/v2", line)
                if address:
                    host = address[1].strip("[]")
                    yield Running(process, host, int(address[2]), banner)
                    return
            log.seek(0)
            pytest.fail(f"ended before it served:\n{banner}\n{log.read()}")
        finally:
            process.kill()


# Help


def test_help_names_the_commands() -> None:
    ended = run_penstock("--help")
    assert ended.code == 0
    for command in ("serve", "inspect", "explain"):
        assert command in ended.stdout


def test_version_is_the_packages() -> None:
    assert penstock.__version__ in call_penstock("--version").stdout


def shown_flags(command: click.Command) -> list[click.Option]:
    """Those of the help; flags of earlier versions are hidden."""
    return [each for each in command.params if isinstance(each, click.Option) and not each.hidden]


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_and_flag_has_a_help_text(name: str) -> None:
    command = main.commands[name]
    assert command.help
    assert [flag.name for flag in shown_flags(command) if not flag.help] == []


# Words by which a help text says when one would change the flag.
WHEN = r"\b(when|where|until|only|needed|raise|choose|change|give it|use it|switch|behind|leave)\b"


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (name, flag)
        for name, command in sorted(main.commands.items())
        for flag in shown_flags(command)
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_flag_says_when_one_would_change_it(command: str, flag: click.Option) -> None:
    """More than its name in other words: what it is, and a reason to touch it."""
    assert flag.help is not None
    own_words = set(re.findall(r"[a-z]+", " ".join(flag.opts).lower()))
    words = set(re.findall(r"[a-z]+", flag.help.lower()))
    assert len(words - own_words) >= 8, flag.help
    assert re.search(WHEN, flag.help, re.I), flag.help
    assert flag.help.rstrip().endswith("."), flag.help


@pytest.mark.parametrize("name", sorted(main.commands))
def test_help_has_whole_summaries_and_ends_with_examples(name: str) -> None:
    command = main.commands[name]
    assert command.short_help and len(command.short_help) < 60
    text = call_penstock(name, "--help").stdout
    assert text.rstrip().splitlines()[-1].startswith("  ") and "\nExamples:\n" in text
    for flag in shown_flags(command):
        if flag.help:
            summary = flag.help.partition(". ")[0]
            assert len(summary) < 60, summary
            assert summary in " ".join(text.split()), summary


def test_help_shows_flags_by_group() -> None:
    text = call_penstock("bench", "--help").stdout
    groups = re.findall(r"^([A-Z][A-Za-z ]+):$", text, re.M)
    wanted = ["Load", "SLO and comparison", "Duration", "Inputs", "Server", "Load generator"]
    assert groups == [*wanted, "Output", "Other options", "Examples"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str) -> None:
    ended = call_penstock("completion", shell)
    assert ended.code == 0
    assert "_PENSTOCK_COMPLETE" in ended.stdout


def test_inspect_writes_json_and_nothing_else(examples: Path) -> None:
    ended = call_penstock("inspect", examples / "digits", "--json", "-")
    assert ended.code == 0
    [model] = json.loads(ended.stdout)["models"]
    assert model["name"] == "digits" and "max_batch_size: 64" in model["config_text"]


def test_explain_takes_the_url_of_a_model_and_writes_json(examples: Path, tmp_path: Path) -> None:
    with serving(examples / "digits") as server:
        url = f"http://127.0.0.1:{server.port}/v2/models/digits"
        ended = call_penstock("explain", url, "--json")
        assert json.loads(ended.stdout)["model"] == "digits"
        file = tmp_path / "e.json"
        call_penstock("explain", "digits", "--url", url.partition("/v2")[0], "--json", file)
        assert json.loads(file.read_text())["model"] == "digits"
    twice = call_penstock("explain", url, "--url", url)
    assert twice.code == ExitCode.USAGE and "--url is given twice" in twice.stderr


def test_a_quiet_server_prints_nothing(tmp_path: Path) -> None:
    add_model(tmp_path, "model")
    with tempfile.TemporaryFile("w+") as out:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [*SERVE, str(tmp_path), "--quiet", "--http-port", str(port)]
        process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            with penstock.Client(f"http://127.0.0.1:{port}") as client:
                while not client.ready():
                    assert process.poll() is None
                    time.sleep(0.05)  # Nothing tells that it is ready.
        finally:
            process.terminate()
            process.wait(timeout=60)
        out.seek(0)
        assert out.read() == ""


def test_help_of_serve_shows_every_flag_with_its_default() -> None:
    text = call_penstock("serve", "--help").stdout
    flags = {"--host": "127.0.0.1", "--http-port": "8000", "--grpc-port": "8001", "--grpc": "grpc"}
    flags |= {"--drain-s": "30.0", "--insecure": "", "--metrics-port": "8002"}
    for flag, default in flags.items():
        assert flag in text
        assert default in text
    assert "--no-exit-on-error" in text


@pytest.mark.parametrize(
    "arguments", [["serve"], ["inspect"], ["launch"], ["serve", ".", "--http-port", "99999"]]
)
def test_wrong_usage_ends_with_its_own_code_and_no_traceback(arguments: list[str]) -> None:
    assert call_penstock(*arguments).code == ExitCode.USAGE


def test_unknown_log_level_is_an_error_in_words(examples: Path) -> None:
    ended = run_penstock("inspect", examples, PENSTOCK_LOG="chatty")
    assert ended.code == ExitCode.USAGE
    assert "PENSTOCK_LOG" in ended.stderr


# capacity


def test_capacity_plans_and_writes_json_and_nothing_else(examples: Path) -> None:
    load = ("--rate", "9000/s", "--replica-rate", "1000/s", "--price", "2")
    ended = call_penstock("capacity", examples / "digits", *load)
    assert ended.code == 0
    assert "10, with 10% headroom" in ended.stdout and "20.0 per hour" in ended.stdout
    ended = call_penstock("capacity", examples / "digits", *load, "--json", "-")
    figures = json.loads(ended.stdout)
    assert figures["replicas"] == 10 and figures["utilisation"] == 0.9
    ended = call_penstock("capacity", examples / "digits", "--rate", "9000/s")
    assert ended.code == 1 and "give it as --replica-rate" in ended.stderr
    assert call_penstock("capacity", examples / "digits").code == 64


# inspect


def test_inspect_prints_a_config_pbtxt_for_every_model(examples: Path) -> None:
    ended = call_penstock("inspect", examples)
    assert (ended.code, ended.stderr) == (0, "")
    messages = [
        text_format.Parse(text, model_config_pb2.ModelConfig())
        for text in re.split(r"(?m)^(?=# \w+, version )", ended.stdout)
        if text.strip()
    ]
    names = ["digits", "identity", "simple", "text_length"]
    assert [message.name for message in messages] == names
    assert [message.max_batch_size for message in messages] == [64, 64, 8, 8]


def test_inspect_shows_what_was_worked_out(tmp_path: Path, write_identity: WriteOnnx) -> None:
    write_identity(tmp_path / "model" / "1" / "model.onnx", "INT64", ("batch", 3))
    ended = call_penstock("inspect", tmp_path)
    message = text_format.Parse(ended.stdout, model_config_pb2.ModelConfig())
    assert message.input[0].data_type == model_config_pb2.TYPE_INT64
    assert message.max_batch_size > 0
    assert message.HasField("dynamic_batching")


def test_inspect_shows_the_good_models_and_fails_for_the_bad_one(tmp_path: Path) -> None:
    add_model(tmp_path, "good")
    add_model(tmp_path, "bad", NULL + "instance_group { gpus: -1 }")
    ended = call_penstock("inspect", tmp_path)
    assert ended.code == 1
    assert 'name: "good"' in ended.stdout
    [problem] = ended.errors
    assert problem.startswith("bad: instance_group[0].gpus: ")


def test_inspect_says_which_versions_there_are_and_where_all_comes_from(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "model")
    [config] = layout.read(tmp_path).configs
    evidence = {"slo": "p99 < 20ms"}
    assert versions.commit(tmp_path, "model", {}, config, evidence) == "2"
    ended = call_penstock("inspect", tmp_path)
    assert (ended.code, ended.stderr) == (0, "")
    head = [line for line in ended.stdout.splitlines() if line.startswith("#   ")]
    assert head[:2] == ["#   versions: 1, 2", "#   configuration: 2/config.pbtxt"]
    assert head[2].startswith("#   manifest: 1 file, ")
    assert head[3:] == ["#   slo: p99 < 20ms, from 2/manifest.json: evidence.slo"]
    assert "penstock.slo" in ended.stdout
    (folder / "2" / "config.pbtxt").unlink()
    ended = call_penstock("inspect", tmp_path)
    assert ended.code == 1
    assert ended.errors[0].startswith("model: 2/config.pbtxt: missing; version 2 is incomplete")


# Wrong paths and broken repositories


@pytest.mark.parametrize("command", ["inspect", "serve"])
@pytest.mark.parametrize("name", ["nowhere", "file", "empty"])
def test_wrong_path_is_one_line_and_code_1(tmp_path: Path, command: str, name: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    ended = (call_penstock if command == "inspect" else run_penstock)(command, tmp_path / name)
    assert (ended.code, ended.stdout) == (1, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert str(tmp_path / name) in line


@pytest.mark.parametrize("command", ["inspect", "serve"])
def test_every_problem_of_every_model_is_one_line(tmp_path: Path, command: str) -> None:
    add_model(tmp_path, "first", NULL + "instance_group { gpus: -1 count: 100 }")
    add_model(tmp_path, "second", "nonsense")
    add_model(tmp_path, "third", NULL + "ensemble_scheduling { } response_cache { enable: true }")
    ended = (call_penstock if command == "inspect" else run_penstock)(command, tmp_path)
    assert (ended.code, ended.stdout) == (1, "")
    assert len(ended.errors) == len(ended.stderr.splitlines()) == 5
    models = [line.split(": ")[0] for line in ended.errors]
    assert models == ["first", "first", "second", "third", "third"]


def test_serve_ends_when_a_model_cannot_be_loaded_and_leaves_no_worker(tmp_path: Path) -> None:
    add_model(tmp_path, "bad", NULL + parameter("null.a_mss", "1") + parameter("null.c_ms", "x"))
    add_model(tmp_path, "good")
    ended = run_penstock("serve", tmp_path, *FREE_PORT)
    assert ended.code == 1
    assert "null.a_mss" in ended.stderr and "null.c_ms" in ended.stderr
    assert all(line.startswith("bad: ") for line in ended.errors)


def test_each_problem_found_while_loading_is_one_line(tmp_path: Path) -> None:
    add_model(tmp_path, "bad", NULL + parameter("null.a_mss", "1") + parameter("null.c_ms", "x"))
    ended = run_penstock("serve", tmp_path, *FREE_PORT)
    assert sorted(line.split(": ")[1] for line in ended.errors) == [
        "parameters.null.a_mss",
        "parameters.null.c_ms",
    ]


def test_serve_ends_when_the_worker_of_a_model_dies_while_loading(tmp_path: Path) -> None:
    text = NULL + parameter("null.crash_on", "0") + parameter("null.a_ms", "0")
    add_model(tmp_path, "deadly", text)
    ended = run_penstock("serve", tmp_path, *FREE_PORT)
    assert ended.code == 1
    [problem] = ended.errors
    assert problem.startswith("deadly: ") and "SIGABRT" in problem


def test_parameter_that_asks_for_more_memory_than_there_is_ends_in_words(tmp_path: Path) -> None:
    add_model(tmp_path, "greedy", NULL + parameter("penstock.spill_bytes", "100000000000000"))
    ended = run_penstock("serve", tmp_path, *FREE_PORT)
    assert ended.code == 1
    assert ended.errors


# Where it listens


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_address_that_others_can_reach_is_refused_without_insecure(
    examples: Path, host: str
) -> None:
    ended = run_penstock("serve", examples, "--host", host, *FREE_PORT)
    assert (ended.code, ended.stdout) == (ExitCode.USAGE, "")
    [problem] = ended.errors
    assert host in problem and "--insecure" in problem


def test_a_flag_of_earlier_versions_names_its_successor(examples: Path) -> None:
    ended = run_penstock("serve", examples, *FREE_PORT, "--fronts", "2")
    assert (ended.code, ended.stdout) == (ExitCode.USAGE, "")
    assert "--fronts does not exist any more; give --shards N" in ended.stderr


def test_address_that_others_can_reach_is_served_with_insecure(tmp_path: Path) -> None:
    with serving(add_model(tmp_path, "model"), "--host", "0.0.0.0", "--insecure") as server:
        assert server.get("/v2/health/ready")[0] == 200


def test_only_this_machine_is_listened_to_by_default(tmp_path: Path) -> None:
    with serving(add_model(tmp_path, "model")) as server:
        process = psutil.Process(server.process.pid)
        sockets = [
            connection.laddr
            for member in (process, *process.children(recursive=True))
            for connection in member.net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert {address.ip for address in sockets} == {"127.0.0.1"}
        assert len(sockets) == 2, "HTTP and metrics"
        assert server.port in {address.port for address in sockets}


def test_no_metrics_opens_one_port(tmp_path: Path) -> None:
    with serving(add_model(tmp_path, "model"), "--no-metrics") as server:
        listening = [
            connection
            for connection in psutil.Process(server.process.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert [connection.laddr.port for connection in listening] == [server.port]
        assert server.get("/metrics")[0] == 200


def can_listen_on_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_listen_on_ipv6(), reason="this machine has no ::1")
def test_printed_address_is_a_url_with_ipv6_too(tmp_path: Path) -> None:
    with serving(add_model(tmp_path, "model"), "--host", "::1") as server:
        assert f"http://[::1]:{server.port}/v2" in server.banner
        assert server.get("/v2/health/ready")[0] == 200


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-grpc", "--no-metrics", "--http-port"],
        ["--http-port", "0", "--metrics-port", "0", "--grpc-port"],
        ["--http-port", "0", "--no-grpc", "--metrics-port"],
    ],
)
def test_port_in_use_is_one_line_and_code_1(examples: Path, flags: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        ended = run_penstock("serve", examples, *flags, str(port))
    assert (ended.code, ended.stdout) == (1, "")
    [problem] = ended.errors
    assert f"127.0.0.1:{port}" in problem
    assert "in use" in problem


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--http-port", "18000", "--grpc-port", "18000"], "--http-port and --grpc-port are all"),
        (["--grpc-port", "18000", "--metrics-port", "18000"], "--grpc-port and --metrics-port are"),
        (["--metrics-port", "8000", "--no-grpc"], "--http-port and --metrics-port are all 8000"),
    ],
)
def test_ports_that_are_the_same_are_refused(tmp_path: Path, flags: list[str], expected: str):
    add_model(tmp_path, "model")
    ended = run_penstock("serve", tmp_path, *flags)
    assert (ended.code, ended.stdout) == (ExitCode.USAGE, "")
    [problem] = ended.errors
    assert problem.startswith(expected)


def test_a_taken_grpc_port_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    add_model(tmp_path, "model")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        flags = ["--http-port", "0", "--metrics-port", "0", "--grpc-port", port]
        ended = run_penstock("serve", tmp_path, *flags)
    [line] = ended.stderr.splitlines()
    assert "for gRPC: Address already in use" in line


@pytest.mark.parametrize("grpc", [["--grpc-port", "0"], ["--no-grpc"]])
def test_a_host_that_has_no_address_is_told_in_words(tmp_path: Path, grpc: list[str]) -> None:
    add_model(tmp_path, "model")
    flags = ["--host", "nosuch.invalid", "--insecure", "--http-port", "0", "--no-metrics", *grpc]
    ended = run_penstock("serve", tmp_path, *flags)
    [problem] = ended.errors
    assert "nosuch.invalid:0" in problem and "this name cannot be resolved" in problem


# Serving


def test_banner_names_every_model_and_the_address(examples: Path) -> None:
    with serving(examples) as server:
        for word in ("digits", "text_length", "READY", "onnxruntime", "python"):
            assert word in server.banner
        assert server.get("/v2/health/live")[0] == 200
        assert server.get("/v2/health/ready")[0] == 200
        for name in ("digits", "identity", "simple", "text_length"):
            assert server.get(f"/v2/models/{name}/ready")[0] == 200


def test_no_exit_on_error_tells_the_problems_and_serves_the_good_models(tmp_path: Path) -> None:
    add_model(tmp_path, "good")
    add_model(tmp_path, "unreadable", "nonsense")
    add_model(tmp_path, "unloadable", NULL + parameter("null.a_mss", "1"))
    with serving(tmp_path, "--no-exit-on-error") as server:
        assert server.get("/v2/models/good/ready")[0] == 200
        assert server.get("/v2/models/unreadable/ready")[0] != 200
        assert server.get("/v2/models/unloadable/ready")[0] != 200
        [row] = [line for line in server.banner.splitlines() if line.startswith(" unreadable ")]
        assert "UNAVAILABLE" in row
        assert "unreadable: config.pbtxt: " in server.banner
        assert "unloadable: parameters.null.a_mss" in server.banner
        assert server.get("/v2/health/live")[0] == 200
        assert server.stop() == 0


def test_server_is_not_ready_while_a_model_of_the_repository_is_broken(tmp_path: Path) -> None:
    """Whichever way it is broken: both are models that were asked for and cannot answer."""
    add_model(tmp_path, "good")
    add_model(tmp_path, "unreadable", "nonsense")
    with serving(tmp_path, "--no-exit-on-error") as server:
        status, body = server.get("/v2/health/ready")
        assert status == 503
        assert b"unreadable" in body


def test_bodies_may_be_as_large_as_the_flags_say_and_the_refusal_names_them(tmp_path: Path) -> None:
    flags = ("--max-body-bytes", "4096", "--max-json-bytes", "2048")
    with serving(add_model(tmp_path, "model"), *flags) as server:
        status, text = server.post("/v2/models/model/infer", bytes(4097))
        assert status == 413 and "4096" in text and "--max-body-bytes" in text
        status, text = server.post("/v2/models/model/infer", b" " * 2049)
        assert status == 413 and "2048" in text and "--max-json-bytes" in text
        assert server.post("/v2/models/model/infer", b" " * 2048)[0] == 400


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, ExitCode.OK), (signal.SIGINT, ExitCode.INTERRUPTED)],
)
def test_signal_ends_server_and_workers(examples: Path, number: int, code: ExitCode) -> None:
    with serving(examples) as server:
        workers = workers_of(server.process.pid)
        assert len(workers) == 4
        assert server.stop(number) == code
        assert psutil.wait_procs(workers, timeout=60)[1] == []


def test_workers_end_when_the_core_is_killed(examples: Path) -> None:
    with serving(examples) as server:
        workers = workers_of(server.process.pid)
        assert len(workers) == 4
        server.stop(signal.SIGKILL)
        assert psutil.wait_procs(workers, timeout=60)[1] == []


@pytest.mark.slow
def test_signal_ends_a_server_that_is_still_loading(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "slow", NULL + parameter("null.load_ms", "60000"))
    command = [*SERVE, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not workers_of(process.pid):
                assert process.poll() is None
                time.sleep(0.05)  # Nothing tells that a process has appeared.
            process.terminate()
            process.wait(timeout=60)
        finally:
            process.kill()


def test_a_name_with_square_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    add_model(tmp_path, "[bold]")
    with serving(tmp_path) as server:
        assert "[bold]" in server.banner


def test_banner_shows_what_explicit_mode_has_not_loaded(tmp_path: Path) -> None:
    add_model(tmp_path, "asleep")
    add_model(tmp_path, "awake")
    flags = ("--model-control-mode", "explicit", "--load-model", "awake")
    with serving(tmp_path, *flags) as server:
        rows = {line.split()[0]: line for line in server.banner.splitlines() if line.strip()}
        assert "not loaded" in rows["asleep"]
        assert "READY" in rows["awake"] and "null" in rows["awake"]


@pytest.mark.skipif(shutil.which("script") is None, reason="`script` makes the terminal")
def test_banner_fits_a_terminal_of_80_columns(examples: Path) -> None:
    """As a terminal shows it: no word is cut."""
    command = " ".join([*SERVE, str(examples)])
    with tempfile.TemporaryFile("w+b") as out:
        process = subprocess.Popen(
            ["script", "-qefc", f"stty cols 80; exec {command}", "/dev/null"],
            stdout=out,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TERM": "xterm"},
        )
        try:
            text = ""
            while "Metrics" not in text:
                assert process.poll() is None, text
                time.sleep(0.1)  # Nothing tells that a terminal shows something.
                out.seek(0)
                text = out.read().decode()
        finally:
            for child in psutil.Process(process.pid).children():
                child.terminate()
            process.wait(timeout=60)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    table = [line for line in plain.splitlines() if "READY" in line]
    assert [line.split()[0] for line in table] == ["digits", "identity", "simple", "text_length"]
    assert "onnxruntime" in table[0] and "up to 64" in table[0]
    assert "…" not in plain
    assert max(map(len, table)) <= 80


@pytest.mark.slow
def test_slow_loading_is_told(tmp_path: Path) -> None:
    add_model(tmp_path, "slow", NULL + parameter("null.load_ms", "4000"))
    add_model(tmp_path, "quick")
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*SERVE, str(tmp_path)], stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if "/metrics" in line:
                    break
        finally:
            process.terminate()
            process.wait(timeout=60)
            process.stdout.close()
        log.seek(0)
        # On a busy machine the quick one may not be loaded either.
        assert re.search(r"[01] of 2 models loaded; loading .*slow", log.read())


def test_log_level_and_format_are_those_of_the_flags(tmp_path: Path) -> None:
    """As JSON even the start is lines of the log: nothing else is written."""
    add_model(tmp_path, "model")
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
        for flags, told in (
            (["--log-level", "error"], out),
            (["--log-format", "JSON", "--log-level", "info", "--shards", "1"], log),
        ):
            out.truncate(0)
            process = subprocess.Popen([*SERVE, str(tmp_path), *flags], stdout=out, stderr=log)
            while b"/metrics" not in os.pread(told.fileno(), 1 << 20, 0):
                assert process.poll() is None
                time.sleep(0.05)  # Nothing tells that a file has grown.
            process.terminate()
            process.wait(timeout=60)
        assert os.pread(out.fileno(), 1, 0) == b""
        log.seek(0)
        lines = [json.loads(line) for line in log]
    assert {line["level"] for line in lines} == {"INFO"}
    messages = [line["msg"] for line in lines]
    assert messages[1] == "model/1 loads 1 instance"
    assert messages[-2:] == ["shutting down: requests in flight have 30 s to finish", "stopped"]
    shards, model, http_port, metrics_port = (
        line for line in lines[:-2] if "server" in line["logger"]
    )
    assert shards["msg"] == "1 shard: --shards 1" and shards["shards"] == 1
    assert model["msg"] == "model/1 is READY"
    assert (model["state"], model["backend"], model["instances"]) == ("READY", "null", 1)
    assert re.fullmatch(r"http://127.0.0.1:\d+/v2", http_port["address"])
    assert re.fullmatch(r"http://127.0.0.1:\d+/metrics", metrics_port["address"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--log-level", "chatty"], "--log-level"),
        (["--log-format", "xml"], "--log-format"),
        (["--metrics-port", "70000"], "--metrics-port"),
    ],
)
def test_wrong_values_of_flags_are_usage_errors(
    examples: Path, flags: list[str], words: str
) -> None:
    ended = run_penstock("serve", examples, *flags)
    assert ended.code == ExitCode.USAGE
    assert words in ended.stderr


def test_explain_without_a_server_is_one_line_and_code_1() -> None:
    ended = call_penstock("explain", "digits", "--url", "http://127.0.0.1:1")
    assert (ended.code, ended.stdout) == (1, "")
    [problem] = ended.errors
    assert "http://127.0.0.1:1: the server cannot be reached" in problem


def test_explain_cannot_both_watch_and_print_json() -> None:
    assert call_penstock("explain", "digits", "--watch", "--json").code == ExitCode.USAGE
