"""Every command ends with the exit codes of docs/exit_codes.md."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from penstock.cli import main
from penstock.cli.commands import fail, unknown_command
from penstock.errors import BackendFailed, CommandLineError, ConfigError, PenstockError
from penstock.optimizer.first_line import EXIT_CODES
from penstock.system.exit_codes import ExitCode

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = sorted(main.commands)
# `completion` reads no file and asks no server.
WITH_FILES = [name for name in COMMANDS if name != "completion"]
# A required argument, and a flag with a value that cannot be.
WRONG_VALUES = {
    "completion": [["tcsh"], []],
    "bench": [["http://h/v2/models/m", "--slo", "p98 < 1ms"], ["http://h/", "--rate", "fast"]],
    "capacity": [["m"], ["m", "--rate", "many"], ["m", "--rate", "5/s", "--headroom", "100"]],
    "explain": [["m", "--url", "nowhere"], ["m", "--watch", "--json"]],
    "export": [["nomad"], ["kubernetes", "m", "--gpus", "many"], ["kserve"]],
    "import": [["nomad"], ["triton"], ["triton", "a", "b"]],
    "inspect": [["a", "b"]],
    "optimize": [["m.onnx", "--slo", "soon", "--out", "o"], ["m.onnx", "--seed", "many"], []],
    "profile": [["m", "--runs", "1"], ["m", "--html", "x", "--json", "x"]],
    "repo": [["lst"], ["prune", "r", "m", "--keep", "0"], ["promote", "r", "m", "1", "--shadow"]],
    "report": [[], ["a.json", "--html"]],
    "serve": [["m", "--http-port", "99999"], ["m", "--load-model", "x"], ["m", "--host", "::"]],
}
# Files, models and servers that are not there.
FAILURES = {
    "bench": ["no/such/model"],
    "capacity": ["no/such", "--rate", "5/s"],
    "explain": ["m", "--url", "http://127.0.0.1:1"],
    "export": ["kubernetes", "no/such"],
    "import": ["triton", "no/such"],
    "inspect": ["no/such"],
    "optimize": ["no.onnx", "--slo", "p99 < 1s", "--out", "models"],
    "profile": ["no/such"],
    "repo": ["list", "no/such"],
    "report": ["no.json"],
    "serve": ["no/such"],
}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_flag_is_wrong_usage(name: str) -> None:
    done = run(name, "--no-such-flag")
    assert done.exit_code == ExitCode.USAGE, done.output
    assert "No such option" in done.output and "Traceback" not in done.output


@pytest.mark.parametrize(
    ("name", "arguments"), [(name, one) for name in COMMANDS for one in WRONG_VALUES[name]]
)
def test_a_wrong_value_is_wrong_usage(name: str, arguments: list[str]) -> None:
    done = run(name, *arguments)
    assert done.exit_code == ExitCode.USAGE, done.output
    assert re.search("(?i)^error: ", done.output, re.M)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.onnx", "'model.onnx' is not a command; to serve it: penstock serve model.onnx"),
        ("package.module:make", "to serve it: penstock serve package.module:make"),
        ("http://h:8000", "to measure this server: penstock bench http://h:8000"),
        ("serv", "'serv' is not a command; did you mean: penstock serve"),
        ("optimise", "did you mean: penstock optimize"),
        ("xyzzy", "'xyzzy' is not a command; expected one of serve, bench"),
    ],
)
def test_what_is_no_command_gets_the_next_command(name: str, text: str) -> None:
    assert text in unknown_command(name, list(main.commands))
    done = run(name)
    assert done.exit_code == ExitCode.USAGE and text in done.output


def test_a_folder_is_not_a_command_either(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert "to serve it: penstock serve models" in run("models").output


def test_a_flag_with_a_typo_gets_the_flag() -> None:
    done = run("bench", "m.onnx", "--duraton", "1s")
    assert done.exit_code == ExitCode.USAGE
    assert "No such option" in done.output and "--duration" in done.output


@pytest.mark.parametrize("name", ["serve", "bench", "inspect", "explain", "profile"])
def test_a_missing_model_gets_an_example(name: str) -> None:
    done = run(name)
    assert done.exit_code == ExitCode.USAGE
    assert f"error: MODEL is required, e.g. penstock {name} " in done.output
    assert f"{name} --help shows all options" in done.output


def test_no_command_gets_the_commands_and_where_to_start() -> None:
    done = run()
    assert done.exit_code == ExitCode.USAGE
    assert "Start here:" in done.output and "penstock serve model.onnx" in done.output


@pytest.mark.parametrize("arguments", [[], ["launch"]])
def test_no_command_is_wrong_usage(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == ExitCode.USAGE


@pytest.mark.parametrize("name", WITH_FILES)
def test_a_missing_file_or_server_is_a_failure(name: str) -> None:
    done = run(name, *FAILURES[name])
    assert done.exit_code == ExitCode.FAILED, done.output
    assert done.output.startswith("error: ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_no_error(name: str) -> None:
    assert run(name, "--help").exit_code == ExitCode.OK


@pytest.mark.parametrize("name", WITH_FILES)
def test_ctrl_c_anywhere_is_an_interruption(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**flags: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main.commands[name], "callback", interrupted)
    done = run(name, *FAILURES[name])
    assert done.exit_code == ExitCode.INTERRUPTED
    assert "Traceback" not in done.output


# A process whose imports are interrupted.
EARLY = """
import sys
from penstock.__main__ import main

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "penstock.cli":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder)
main()
"""


def test_ctrl_c_during_imports_is_an_interruption() -> None:
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (ExitCode.INTERRUPTED, "interrupted\n")


# A process whose files take for ever to be read.
SLOW = """
import sys, time
from penstock.repository import layout
from penstock.benchmark import run_files
from penstock.cli import main
from penstock.optimizer import plan_file
from penstock.optimizer import optimization_files

def read(*names):
    print("reading", flush=True)
    time.sleep(60)

layout.folder_kind = plan_file.read = read
run_files.read_run = optimization_files.is_optimization = read
main()
"""
READING = {
    "bench": ["."],
    "capacity": [".", "--rate", "5/s"],
    "export": ["kubernetes", "."],
    "import": ["triton", "."],
    "inspect": ["."],
    "optimize": ["--plan", "plan.toml"],
    "profile": ["."],
    "repo": ["list", "."],
    "report": ["run.json"],
    "serve": ["."],
}


@pytest.mark.parametrize("name", [name for name in WITH_FILES if name != "explain"])
def test_sigint_while_files_are_read_is_an_interruption(name: str) -> None:
    """tests/e2e/test_watch.py interrupts explain, which reads no file."""
    command = [sys.executable, "-c", SLOW, name, *READING[name]]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline() == "reading\n", process.stderr.read()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == ExitCode.INTERRUPTED, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError(["a: wrong", "b: wrong"]), ExitCode.FAILED),
        (BackendFailed("crashed"), ExitCode.FAILED),
        (CommandLineError(["--slo: wrong"]), ExitCode.USAGE),
    ],
)
def test_errors_have_a_line_for_each_problem(
    error: PenstockError, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fail(error)
    assert ended.value.code == code
    problems = error.problems if isinstance(error, ConfigError) else ["crashed"]
    lines = [click.unstyle(line) for line in capsys.readouterr().err.splitlines()]
    assert lines == [f"error: {problem}" for problem in problems]


def test_the_documentation_lists_every_code() -> None:
    text = (ROOT / "docs" / "exit_codes.md").read_text()
    codes = {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", text)}
    assert codes == set(map(int, ExitCode))


def test_every_outcome_of_optimize_has_a_code() -> None:
    codes = {name: int(code) for name, code in EXIT_CODES.items()}
    expected = {"kept": 0, "missed": 2, "refused": 3, "disturbed": 4, "interrupted": 130}
    assert codes == expected | {"failed": 1}
