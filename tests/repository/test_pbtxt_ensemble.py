"""`ensemble_scheduling` in config.pbtxt: what it becomes, and what an ensemble may not have."""

from pathlib import Path

import pytest

from penstock.config import Comparison, EnsembleStep, FanOutLimits, TensorDefault
from penstock.errors import ConfigError
from penstock.repository import layout, pbtxt

TENSORS = """
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: 3 }
output { name: "OUT" data_type: TYPE_FP32 dims: 3 }
"""
STEPS = """
ensemble_scheduling {
  step { model_name: "first" model_version: -1
    input_map { key: "x" value: "IN" } output_map { key: "y" value: "between" } }
  step { model_name: "second" model_version: 7
    input_map { key: "x" value: "between" } output_map { key: "y" value: "OUT" } }
}
"""
ENSEMBLE = 'platform: "ensemble"' + TENSORS


def read(folder: Path, text: str):
    (folder / "both" / "1").mkdir(parents=True)
    (folder / "both" / "config.pbtxt").write_text(text)
    return layout.read(folder)


def problems(folder: Path, text: str) -> list[str]:
    return read(folder, text).problems["both"]


def test_an_ensemble_needs_no_file_and_has_no_instances(tmp_path: Path) -> None:
    [config] = read(tmp_path, ENSEMBLE + STEPS).configs
    assert (config.backend, config.platform, config.devices) == ("ensemble", "ensemble", ())
    assert config.is_ensemble and not config.uses_gpu and not config.is_scaled
    assert config.steps == (
        EnsembleStep("first", "", {"x": "IN"}, {"y": "between"}),
        EnsembleStep("second", "7", {"x": "between"}, {"y": "OUT"}),
    )
    assert config.warnings == ()


def test_what_inspect_prints_is_read_as_the_same_ensemble(tmp_path: Path) -> None:
    [config] = read(tmp_path, ENSEMBLE + STEPS).configs
    again = pbtxt.resolve(pbtxt.parse(pbtxt.describe(config)), "both", tmp_path / "both" / "1")
    assert again == config


def test_clients_see_the_steps_in_the_configuration(tmp_path: Path) -> None:
    [config] = read(tmp_path, ENSEMBLE + STEPS).configs
    shown = pbtxt.to_json(config)
    assert (shown["platform"], shown["backend"], shown["instance_group"]) == ("ensemble", "", [])
    steps = shown["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["first", "second"]
    assert [step["model_version"] for step in steps] == [-1, 7]
    assert steps[0]["output_map"] == {"y": "between"}


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("instance_group { count: 2 }", "instance_group"),
        ('model_warmup { name: "w" }', "model_warmup"),
        ('backend: "python"', "backend"),
        ("batch_input { }", "batch_input"),
        ("response_cache { enable: true }", "response_cache"),
        ('model_operations { op_library_filename: "x.so" }', "model_operations"),
    ],
)
def test_what_belongs_to_models_with_workers_is_refused(
    tmp_path: Path, text: str, path: str
) -> None:
    [problem] = problems(tmp_path, ENSEMBLE + STEPS + text)
    assert problem.startswith(f"{path}: ")


def test_an_ensemble_has_one_scheduler(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, ENSEMBLE + STEPS + "dynamic_batching { }")
    assert "scheduling_choice" in problem


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (ENSEMBLE, "ensemble_scheduling.step: missing"),
        (TENSORS + STEPS, "platform: '' beside ensemble_scheduling; expected 'ensemble'"),
        ('backend: "python"' + TENSORS + STEPS, "ensemble_scheduling: beside 'python'"),
        ('platform: "ensemble"' + STEPS, "input, output: must be given for backend 'ensemble'"),
        (
            ENSEMBLE + 'ensemble_scheduling { step { model_version: 0 input_map { key: "x" } } }',
            "ensemble_scheduling.step[0].model_name: missing",
        ),
    ],
)
def test_each_problem_has_its_path(tmp_path: Path, text: str, found: str) -> None:
    assert any(problem.startswith(found) for problem in problems(tmp_path, text))


def test_all_problems_of_a_step_are_told_at_once(tmp_path: Path) -> None:
    text = 'ensemble_scheduling { step { model_version: 0 input_map { key: "x" value: "" } } }'
    paths = [problem.split(": ")[0] for problem in problems(tmp_path, ENSEMBLE + text)]
    fields = ("model_name", "model_version", "input_map", "output_map")
    assert paths == [f"ensemble_scheduling.step[0].{field}" for field in fields]


def test_a_wrong_graph_is_found_without_its_members(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, ENSEMBLE + STEPS.replace('"OUT"', '"LOST"'))
    assert problem == "output: no step makes 'OUT'"


def test_fields_without_effect_are_warned_of(tmp_path: Path) -> None:
    more = """
    input { name: "IDLE" data_type: TYPE_FP32 dims: 1 }
    default_model_filename: "x" optimization { priority: PRIORITY_MAX }
    parameters { key: "penstock.slo" value { string_value: "p99 < 5 ms" } }
    parameters { key: "penstock.record" value { string_value: "off" } }
    """
    [config] = read(tmp_path, ENSEMBLE + STEPS + more).configs
    paths = {warning.split(": ")[0] for warning in config.warnings}
    assert paths >= {"input", "default_model_filename", "optimization", "parameters.penstock.slo"}
    assert "parameters.penstock.record" not in paths
    assert config.record is not None and config.record.max_bytes == 0


def test_an_unknown_parameter_is_a_problem(tmp_path: Path) -> None:
    more = 'parameters { key: "penstock.speed" value { string_value: "high" } }'
    [problem] = problems(tmp_path, ENSEMBLE + STEPS + more)
    assert problem.startswith("parameters.penstock.speed: unknown")


def test_a_missing_map_of_a_member_that_has_no_effect_names_the_step() -> None:
    message = pbtxt.parse(ENSEMBLE + "ensemble_scheduling { step { model_name: 'm' } }")
    with pytest.raises(ConfigError, match=r"step\[0\].input_map: missing"):
        pbtxt.resolve(message, "both", Path("both/1"))


FLOW = """
input { name: "FLAG" data_type: TYPE_BOOL dims: 1 }
parameters { key: "penstock.fan_out.first" value { string_value: "IN" } }
parameters { key: "penstock.if.1" value { string_value: "FLAG" } }
parameters { key: "penstock.default.OUT" value { string_value: "0.5" } }
parameters { key: "penstock.fan_out_limit" value { string_value: "10" } }
parameters { key: "penstock.fan_out_concurrency" value { string_value: "2" } }
"""


def test_conditions_and_steps_that_fan_out_are_parameters(tmp_path: Path) -> None:
    [config] = read(tmp_path, ENSEMBLE + STEPS + FLOW).configs
    assert config.steps[0].fan_out == ("IN",) and config.steps[0].condition == ()
    assert config.steps[1].condition == (Comparison("FLAG", "!=", 0.0),)
    assert config.defaults == {"OUT": TensorDefault(value=0.5)}
    assert config.fan_out_limits == FanOutLimits(10, 2)
    assert config.warnings == ()
    again = pbtxt.resolve(pbtxt.parse(pbtxt.describe(config)), "both", tmp_path / "both" / "1")
    assert again == config
    assert pbtxt.to_json(config)["parameters"]["penstock.if.1"] == {"string_value": "FLAG"}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (("fan_out.first", "fan_out.7"), "parameters.penstock.fan_out.7: no step '7'"),
        (
            ('"10"', '"no"'),
            "parameters.penstock.fan_out_limit: 'no' is not a whole number above 0 up to 1e+06",
        ),
        (('"0.5"', '"0.5 5"'), "parameters.penstock.default.OUT: '0.5 5': expected a number"),
        (("default.OUT", "default.LOST"), "parameters.penstock.default.LOST: no step makes"),
        (('"FLAG" } }', '"FLAG >" } }'), "parameters.penstock.if.1: 'FLAG >': expected"),
    ],
)
def test_wrong_flows_are_told_with_their_path(
    tmp_path: Path, changed: tuple[str, str], found: str
) -> None:
    [problem] = problems(tmp_path, ENSEMBLE + STEPS + FLOW.replace(*changed))
    assert problem.startswith(found)
