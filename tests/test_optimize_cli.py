"""Flags and a plan file become one plan; what is wrong is told in lines, without a traceback."""

import errno
import json
import tempfile
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner
from optimizer import made_optimizations

from penstock.api.optimize import make_plan
from penstock.api.optimize_options import OptimizeOptions
from penstock.cli import main
from penstock.cli.optimize import optimize as command
from penstock.cli.options import from_params
from penstock.errors import ConfigError
from penstock.optimizer import run as optimizer_run
from penstock.optimizer.optimization_files import read_optimization
from penstock.optimizer.plan import Plan
from penstock.optimizer.workspace import WriteFailed
from penstock.system.exit_codes import ExitCode


def plan(*arguments: str) -> Plan:
    context = click.Context(command)
    command.parse_args(context, list(arguments))
    return make_plan(context.params["source"], from_params(OptimizeOptions, context.params))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "digits.onnx"
    path.write_bytes(b"no model")
    return str(path)


def test_flags(model: str) -> None:
    found = plan(model, "--slo", "p99 < 20ms", "--out", "models", "--exhaustive", "--seed", "3")
    assert (found.model, found.out, found.name) == (model, "models", "digits")
    assert found.is_exhaustive
    assert found.seed == 3
    assert found.budget_s is None


def test_functions_around_the_model(model: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(f'model = "{model}"\nslo = "p99 < 1s"\nout = "o"\npostprocess = "code:name"\n')
    found = plan("--plan", str(file), "--preprocess", "code:encode")
    assert (found.preprocess, found.postprocess) == ("code:encode", "code:name")
    assert plan("--plan", str(file), "--postprocess", "code:other").postprocess == "code:other"


def test_flags_override_the_plan_file(model: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        f'model = "{model}"\nslo = "p99 < 1s"\nout = "there"\nexhaustive = true\nseed = 7\n'
    )
    found = plan("--plan", str(file), "--slo", "p99 < 20ms", "--name", "other")
    assert str(found.slo) == "p99 < 20ms"
    assert found.name == "other"
    assert found.is_exhaustive
    assert found.seed == 7


def test_everything_that_is_missing_is_told() -> None:
    with pytest.raises(ConfigError) as caught:
        plan()
    assert list(caught.value.problems) == [
        "MODEL is required, e.g. penstock optimize model.onnx",
        "--slo is required, e.g. --slo 'p99 < 20 ms at 200/s'",
        "--out is required, e.g. --out models",
    ]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["optimize", *arguments])
    return result.exit_code, result.stderr


def test_a_model_that_is_none(model: str, tmp_path: Path) -> None:
    code, text = run(model, "--slo", "p99 < 20ms", "--out", str(tmp_path / "models"))
    assert code == ExitCode.FAILED
    assert text.startswith("error: ")
    assert "cannot be read as ONNX" in text
    assert "Traceback" not in text


def test_every_problem_has_a_line(tmp_path: Path) -> None:
    code, text = run("away.onnx", "--slo", "p98 < 20ms", "--budget", "soon", "--out", str(tmp_path))
    assert code == ExitCode.USAGE
    assert len(text.splitlines()) == 3
    assert "error: --slo: 'p98 < 20ms'" in text
    assert "error: --budget: 'soon' is not a time" in text
    assert "error: MODEL: away.onnx: no such file" in text


def test_a_wrong_plan_file_is_a_bad_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text('model = "m.onnx"\nslo = "p98 < 20ms"\nout = "models"\n')
    (tmp_path / "m.onnx").write_bytes(b"")
    code, text = run("--plan", str(file))
    assert code == ExitCode.FAILED
    assert text.startswith("error: plan.toml: slo: 'p98 < 20ms'")
    code, text = run("--plan", str(file), "--slo", "p98 < 20ms")
    assert code == ExitCode.USAGE
    assert text.startswith("error: --slo: 'p98 < 20ms'")


@pytest.mark.parametrize("arguments", [("--dat", "x.npz"), ("--seed", "many"), ("a", "b")])
def test_wrong_flags_do_not_look_like_an_slo_that_is_missed(arguments: tuple[str, ...]) -> None:
    code, text = run(*arguments)
    assert code == ExitCode.USAGE
    assert "Error: " in text


class TestWithoutAVersion:
    """The exit code is that of the outcome, and the reason is said in one sentence."""

    def ask(self, tmp_path, monkeypatch, found):
        (tmp_path / "m.onnx").write_bytes(b"")
        monkeypatch.setattr(optimizer_run, "optimize", lambda plan, watch, command: found)
        asked = ["--slo", "p99 < 1 s", "--out", str(tmp_path / "out")]
        asked += ["--html", str(tmp_path / "page.html")]
        return CliRunner().invoke(command, [str(tmp_path / "m.onnx"), *asked])

    def test_a_disturbed_result_leaves_the_kept_version(self, tmp_path, monkeypatch):
        found = msgspec.structs.replace(
            made_optimizations.disturbed(), version="", kept_version="2", name="small"
        )
        ended = self.ask(tmp_path, monkeypatch, found)
        assert ended.exit_code == ExitCode.DISTURBED
        said = "version 2 of small keeps its SLO and stays served; this result is not proven"
        assert f"no version was committed: {said}\n" in ended.stderr
        assert "free some space" not in ended.stderr

    def test_a_proof_that_fails_is_a_failure(self, tmp_path, monkeypatch):
        reason = "the proof of half failed: the server did not start"
        found = msgspec.structs.replace(
            made_optimizations.kept(), version="", outcome="failed", uncommitted=reason
        )
        found.proof_failure, found.headline = "the server did not start", ""
        ended = self.ask(tmp_path, monkeypatch, found)
        assert ended.exit_code == ExitCode.FAILED
        assert "Proof failed: the server did not start" in ended.stdout
        assert reason in ended.stderr and "free some space" not in ended.stderr


class TestOutputs:
    """The verdict alone, or JSON alone."""

    def ask(self, tmp_path, monkeypatch, *flags):
        (tmp_path / "m.onnx").write_bytes(b"")
        found = made_optimizations.kept()
        monkeypatch.setattr(optimizer_run, "optimize", lambda plan, watch, command: found)
        asked = ["--slo", "p99 < 1 s", "--out", str(tmp_path / "out")]
        asked += ["--html", str(tmp_path / "page.html"), *flags]
        ended = CliRunner().invoke(command, [str(tmp_path / "m.onnx"), *asked])
        assert ended.exit_code == ExitCode.OK, ended.output
        return ended, found

    def test_json_to_stdout_is_alone_there(self, tmp_path, monkeypatch):
        ended, found = self.ask(tmp_path, monkeypatch, "--json", "-")
        assert json.loads(ended.stdout)["name"] == found.name

    def test_a_quiet_run_prints_its_verdict_only(self, tmp_path, monkeypatch):
        ended, found = self.ask(tmp_path, monkeypatch, "--quiet")
        assert ended.stdout.splitlines() == [found.headline]


class TestAFullDisk:
    """The command ends with a line, and what was found is not lost."""

    def ask(self, tmp_path, monkeypatch, outcome, *flags):
        (tmp_path / "m.onnx").write_bytes(b"")

        def run(plan, watch, command):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr(optimizer_run, "optimize", run)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        (tmp_path / "temporary").mkdir()
        asked = [str(tmp_path / "m.onnx"), "--slo", "p99 < 1 s", "--out", str(tmp_path / "out")]
        return CliRunner().invoke(command, [*asked, *flags])

    def found(self):
        reason = "out: not enough disk space for the version: needs 9 MiB, 1 MiB free"
        return msgspec.structs.replace(
            made_optimizations.kept(), version="", uncommitted=reason, build_folder="work/build"
        )

    def test_without_a_version_the_verdict_is_kept(self, tmp_path, monkeypatch):
        flags = ("--html", str(tmp_path / "page.html"))
        ended = self.ask(tmp_path, monkeypatch, self.found(), *flags)
        assert ended.exit_code == 1
        assert "SLO kept" in ended.stdout
        for wanted in (
            "needs 9 MiB, 1 MiB free",
            "page.html",
            "work/build",
            "run the same command",
        ):
            assert wanted in ended.stderr
        assert (tmp_path / "page.html").is_file()
        kept = read_optimization(tmp_path / "page.json")
        assert kept.outcome == "kept" and kept.uncommitted

    def test_a_page_that_cannot_be_written_is_among_temporary_files(self, tmp_path, monkeypatch):
        # Its folder is not there: nothing could be written to the repository.
        ended = self.ask(tmp_path, monkeypatch, self.found())
        assert ended.exit_code == 1
        (page,) = (tmp_path / "temporary").glob("*/report.html")
        assert f"written to {page} instead" in ended.stderr
        assert page.with_suffix(".json").is_file()
        assert "Traceback" not in ended.output

    @pytest.mark.parametrize(
        "error",
        [
            WriteFailed("journal.jsonl: cannot be written: No space left on device"),
            OSError(errno.ENOSPC, "No space left on device", "a file"),
        ],
    )
    def test_in_the_middle_of_a_run(self, error, tmp_path, monkeypatch):
        ended = self.ask(tmp_path, monkeypatch, error)
        assert ended.exit_code == 1
        assert ended.stderr.startswith("error: ")
        assert "No space left on device" in ended.stderr

    def test_other_errors_of_files_are_not_hidden(self, tmp_path, monkeypatch):
        ended = self.ask(tmp_path, monkeypatch, PermissionError(errno.EACCES, "Permission denied"))
        assert isinstance(ended.exception, PermissionError)


class TestLanguageModels:
    def ask(self, folder, architecture, *flags):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
        (folder / "model.safetensors").write_bytes(b"")
        asked = [str(folder), "--slo", "p99 < 1 s", "--out", str(folder.parent / "out")]
        return CliRunner().invoke(main, ["optimize", *asked, *flags])

    def test_need_prompts(self, tmp_path):
        found = self.ask(tmp_path / "m", "LlamaForCausalLM")
        assert found.exit_code == ExitCode.USAGE
        assert "--data is required for language models" in found.output

    def test_of_families_that_are_not_served_are_told_those_that_are(self, tmp_path):
        (tmp_path / "p.txt").write_text("why\n")
        flags = ("--data", str(tmp_path / "p.txt"), "--device", "cpu")
        found = self.ask(tmp_path / "m", "FooForCausalLM", *flags)
        assert found.exit_code == 1
        assert "architecture 'FooForCausalLM' is not served" in found.output
        assert "LlamaForCausalLM" in found.output

    def test_encoders_go_the_way_of_tensors(self, tmp_path):
        found = self.ask(tmp_path / "m", "BertModel")
        assert found.exit_code == 1 and "language model" not in found.output
