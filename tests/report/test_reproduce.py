"""How to get a candidate again."""

import ast
import importlib
import shlex

import msgspec
from click.testing import CliRunner
from optimizer import made_optimizations as made

from penstock.cli import main
from penstock.optimizer.candidates import Candidate, Step
from penstock.report import reproduce


def test_steps_are_python_that_makes_the_same_candidate() -> None:
    code = reproduce.steps_code(made.CHOSEN)
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    steps = [Step(*(ast.literal_eval(each) for each in call.args)) for call in calls]
    assert Candidate(tuple(steps)).key == made.CHOSEN.key
    assert reproduce.steps_code(made.ORIGINAL) == "steps = []"


def test_settings_cannot_become_code() -> None:
    evil = made.ORIGINAL.then(Step("half", {"datatype": "'); import os; ('"}))
    (statement,) = ast.parse(reproduce.steps_code(evil)).body
    assert isinstance(statement, ast.Assign)


def test_the_script_imports_only_what_exists() -> None:
    tree = ast.parse(reproduce.build_code(made.kept(), made.CHOSEN))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert len(imports) == 8
    for node in imports:
        assert node.module is not None
        module = importlib.import_module(node.module)
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            assert hasattr(module, alias.name) or importlib.import_module(submodule)


def test_the_script_has_the_wishes_that_a_build_depends_on() -> None:
    found = made.kept()
    found.command = "penstock optimize m.onnx --data d.npz --labels=y --seed 3 --slo 'p99 < 1ms'"
    found.command += " --preprocess code:encode --postprocess=code:name"
    found.source = "it's.onnx"
    tree = ast.parse(reproduce.build_code(found, made.CHOSEN))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    (plan,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Plan"]
    assert {str(each.arg): ast.literal_eval(each.value) for each in plan.keywords} == {
        "model": "it's.onnx",
        "name": "reviews",
        "out": "rebuilt",
        "data": "d.npz",
        "labels": "y",
        "preprocess": "code:encode",
        "postprocess": "code:name",
        "seed": 3,
    }


def test_live_data_is_the_recording_it_was() -> None:
    found = made.kept()
    found.command = "penstock optimize m.onnx --from-live rec --slo 'p99 < 1ms'"
    found.live_data = "rec/reviews"
    code = reproduce.build_code(found, made.CHOSEN)
    assert "data='rec/reviews', from_live='rec/reviews'" in code
    assert "--data rec/reviews" in reproduce.bench_commands(found)


def test_files_of_a_candidate_that_was_kept() -> None:
    found = made.kept()
    assert reproduce.files(found, made.CHOSEN) == f"{found.work}/builds/{made.CHOSEN.key}"
    assert reproduce.files(found, made.ORIGINAL) == f"{found.work}/original"
    found.work = ""
    assert reproduce.files(found, made.CHOSEN) == ""


def test_commands_serve_the_version_and_measure_it_with_the_same_data_and_slo() -> None:
    found = made.kept()
    found.command = "penstock optimize m.onnx --data 'my data.npz' --data-name=x --out models"
    serve, bench, rate = map(shlex.split, reproduce.bench_commands(found).splitlines())
    assert serve == ["penstock", "serve", "models"]
    data = ["--data", "my data.npz", "--data-name", "x"]
    address = "http://127.0.0.1:8000/v2/models/reviews"
    assert bench == ["penstock", "bench", address, *data, "--slo", made.SLO]
    assert rate == [*bench, "--max-rate"]


def test_without_a_version_what_the_script_makes_is_served() -> None:
    found = msgspec.structs.replace(made.interrupted(), slo="")
    assert reproduce.bench_commands(found).splitlines() == [
        "penstock serve rebuilt/2",
        "penstock bench http://127.0.0.1:8000/v2/models/reviews --data reviews.npz",
    ]


def test_bench_knows_the_flags_that_it_is_given() -> None:
    text = CliRunner().invoke(main, ["bench", "--help"]).output
    for flag in (*reproduce.DATA_FLAGS, "--slo", "--max-rate"):
        assert f"{flag} " in text


def test_a_language_model_is_asked_as_this_run_did_and_its_settings_are_its_build() -> None:
    found = made.text()
    serve, bench, highest = reproduce.bench_commands(found).splitlines()
    assert serve == "penstock serve models"
    assert bench.startswith("penstock bench openai+http://127.0.0.1:8000/v1 --model smol --data")
    assert "ignore_eos" in bench and highest == f"{bench} --max-rate"
    assert reproduce.build_code(found, found.chosen).splitlines() == [
        'backend: "llm"',
        'parameters { key: "penstock.dtype" value { string_value: "bfloat16" } }',
        'parameters { key: "penstock.tpot_ms" value { string_value: "100" } }',
    ]
