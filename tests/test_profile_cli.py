"""`penstock profile`, from flags to files."""

import json

import numpy as np
import pytest
from click.testing import CliRunner, Result
from onnx import helper, numpy_helper

from penstock.cli import main
from penstock.system.exit_codes import ExitCode


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def model(tmp_path, write_onnx):
    weights = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="dense")]
    shape = ("n", "s", 8)
    return write_onnx(
        tmp_path / "small.onnx", nodes, {"x": ("FP32", shape)}, {"y": ("FP32", shape)}, [weights]
    )


@pytest.fixture
def profile(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, ["profile", *map(str, arguments)])

    return run


def test_a_file_is_profiled_to_terminal_page_trace_and_json(profile, model, tmp_path) -> None:
    files = [tmp_path / name for name in ("p.html", "p.json", "t.json")]
    outputs = zip(("--html", "--json", "--trace"), files, strict=True)
    flags = ["--runs", 3, "--threads", 1, *(text for pair in outputs for text in pair)]
    ended = profile(model, "--lengths", 6, "-b", 2, *flags)
    assert ended.exit_code == 0, ended.output
    assert "2 rows of x 6x8" in " ".join(ended.output.split())
    found = json.loads(files[1].read_text())
    assert [each["name"] for each in found["operators"]] == ["dense"]
    assert ended.output.splitlines()[0][:40] in found["recommendation"]
    assert "random values" in found["inputs"]
    assert "Roofline" in files[0].read_text()
    assert "traceEvents" in json.loads(files[2].read_text())


@pytest.mark.slow
def test_json_to_stdout_is_alone_there_and_a_quiet_run_recommends(profile, model) -> None:
    flags = ("--runs", 3, "--threads", 1)
    ended = profile(model, *flags, "--json", "-")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    ended = profile(model, *flags, "--quiet")
    assert len(ended.stdout.splitlines()) == 1
    assert found["format"] == 1


@pytest.mark.slow
def test_data_is_what_runs(profile, model, tmp_path) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((4, 3, 8), np.float32))
    out = tmp_path / "p.json"
    ended = profile(
        model, "--data", tmp_path / "d.npz", "-b", 3, "--threads", 1, "--runs", 3, "--json", out
    )
    assert ended.exit_code == 0, ended.output
    found = json.loads(out.read_text())
    assert found["batch"] == "3 rows of x 3x8"
    assert found["inputs"].startswith("4 examples of d.npz")
    assert found["peaks"]["num_threads"] == 1


@pytest.mark.parametrize(
    ("flags", "problem", "code"),
    [
        (["--lengths", "many"], "expected a length", ExitCode.USAGE),
        (["--data", "nowhere.npz"], "nowhere.npz: there is no such file", ExitCode.FAILED),
        (["-b", "100000"], "--batch-size 100000: the model takes at most", ExitCode.USAGE),
        (["--html", "a.html", "--json", "a.html"], "cannot share a file", ExitCode.USAGE),
        (["--html", "no/such/folder/a.html"], "no/such/folder", ExitCode.FAILED),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_measured(
    profile, model, flags, problem, code
) -> None:
    ended = profile(model, *flags)
    assert ended.exit_code == code
    assert problem in ended.output


def test_what_is_no_model_is_an_error(profile, tmp_path) -> None:
    ended = profile(tmp_path / "nowhere")
    assert ended.exit_code == ExitCode.FAILED
    assert "error:" in ended.output
