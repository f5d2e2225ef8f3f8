"""Parameters of ensembles in config.pbtxt: what their texts mean, and which are refused."""

import pytest

from penstock.config import Comparison, EnsembleStep, TensorDefault
from penstock.repository.ensemble_parameters import (
    parse_condition,
    parse_default,
    read_defaults,
    read_step_parameters,
)

STEPS = (
    EnsembleStep("detector", "", {"image": "IMAGE"}, {"crops": "crops", "boxes": "BOXES"}),
    EnsembleStep("classifier", "", {"x": "crops", "scale": "SCALE"}, {"y": "labels"}),
    EnsembleStep("both", "", {"x": "labels"}, {"y": "OUT"}),
    EnsembleStep("both", "", {"x": "labels"}, {"y": "OUT"}),
)


def read(reader, given, *more):
    """Return what is read, and the problems."""
    problems = []
    found = reader(given, *more, lambda path, text: problems.append(f"{path}: {text}"))
    return found, problems


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score > 0.5", [("score", ">", 0.5)]),
        ("score<=-1e3", [("score", "<=", -1000.0)]),
        ("found", [("found", "!=", 0.0)]),
        ("not found", [("found", "==", 0.0)]),
        ("found == true", [("found", "!=", 0.0)]),
        ("found != true", [("found", "==", 0.0)]),
        ("found == false", [("found", "==", 0.0)]),
        ('lang == "de"', [("lang", "==", "de")]),
        ('lang != "say \\"no\\" and go"', [("lang", "!=", 'say "no" and go')]),
        ("a:0 >= 1 and not b/c and d != 2", [("a:0", ">=", 1), ("b/c", "==", 0), ("d", "!=", 2)]),
    ],
)
def test_conditions(text, expected):
    assert parse_condition(text) == tuple(Comparison(*each) for each in expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "expected comparisons like"),
        ("a = 1", "expected comparisons like"),
        ("a and", "expected comparisons like"),
        ("a or b", "expected comparisons like"),
        ("1 < 2", "expected comparisons like"),
        ('a == "open', "expected comparisons like"),
        ("a == b", "'b' is no constant"),
        ("a > nan", "'nan' is no constant"),
        ('a > "text"', "can be compared by == and != only"),
        ("a < true", "true can be compared by == and != only"),
    ],
)
def test_wrong_conditions_are_refused_with_their_text(text, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        parse_condition(text)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5", TensorDefault(value=0.5)),
        ("true", TensorDefault(value=1.0)),
        ('"none"', TensorDefault(value="none")),
        ('""', TensorDefault(value="")),
        (" [] ", TensorDefault()),
        ("IMAGE", TensorDefault("IMAGE")),
    ],
)
def test_defaults(text, expected):
    assert parse_default(text) == expected


@pytest.mark.parametrize("text", ["", "a b", "= 3", "!", '"open'])
def test_wrong_defaults_are_refused(text):
    with pytest.raises(ValueError, match="expected a number, true, false"):
        parse_default(text)
    assert read(read_defaults, {"penstock.default.X": text, "other": "1"})[1]


def test_steps_are_named_by_number_or_model():
    given = {
        "penstock.fan_out.1": "crops",
        "penstock.if.classifier": "crops > 1",
        "penstock.if.3": "labels",
    }
    steps, problems = read(read_step_parameters, given, STEPS)
    assert problems == []
    assert [step.fan_out for step in steps] == [(), ("crops",), (), ()]
    assert [len(step.condition) for step in steps] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("fan_out.9", "crops", "no step '9'; the steps are 0 (detector), 1 (classifier)"),
        ("fan_out.nobody", "crops", "no step 'nobody'; the steps are"),
        ("if.both", "found", "steps 2, 3 run 'both'; expected a step's number"),
        (
            "fan_out.1",
            "IMAGE",
            "step 1 (classifier) does not take 'IMAGE'; it takes SCALE, crops",
        ),
        ("fan_out.1", " , ", "expected tensors that step 1 takes, of SCALE, crops"),
        ("if.1", "a = 1", "expected comparisons like"),
    ],
)
def test_wrong_parameters_of_steps_are_told_with_their_path(key, text, problem):
    _, [found] = read(read_step_parameters, {f"penstock.{key}": text}, STEPS)
    assert found.startswith(f"parameters.penstock.{key}: ") and problem in found


def test_a_step_has_one_condition():
    given = {"penstock.if.1": "a", "penstock.if.classifier": "b"}
    _, [found] = read(read_step_parameters, given, STEPS)
    assert found == "parameters.penstock.if.classifier: step 1 has one already"
