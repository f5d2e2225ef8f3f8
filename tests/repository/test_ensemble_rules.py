"""What makes an ensemble impossible: by its steps alone, and by the models that they run."""

from dataclasses import replace

import pytest

from penstock.config import BatchPolicy, EnsembleStep, ModelConfig
from penstock.repository.ensemble_rules import (
    adapt_shape,
    find_cycle,
    graph_problems,
    member_problems,
    output_fits,
    unused_inputs,
)
from penstock.types import TensorSpec


def spec(name, shape=(3,), datatype="FP32", **more):
    return TensorSpec(name, datatype, shape, **more)


def config(name, inputs, outputs, max_batch=4, steps=()):
    backend = "ensemble" if steps else "null"
    policy = BatchPolicy(max(1, max_batch))
    return ModelConfig(name, "1", backend, "", inputs, outputs, max_batch, policy, steps=steps)


def step(model, inputs, outputs):
    return EnsembleStep(model, "", inputs, outputs)


FIRST = step("first", {"x": "IN"}, {"y": "between"})
SECOND = step("second", {"x": "between"}, {"y": "OUT"})
IN, OUT = (spec("IN"),), (spec("OUT"),)
MEMBER = config("first", (spec("x"),), (spec("y"),))


def ensemble(*steps, max_batch=4, inputs=()):
    return config("both", inputs or IN, OUT, max_batch, steps or (FIRST, SECOND))


def members(first=MEMBER, second=MEMBER):
    return (first, replace(second, name="second"))


def test_a_chain_has_no_problems():
    assert graph_problems(ensemble()) == []
    assert member_problems(ensemble(), members()) == []
    assert unused_inputs(ensemble()) == []


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ((FIRST,), ["output: no step makes 'OUT'"]),
        (
            (FIRST, SECOND, step("third", {"x": "IN"}, {"y": "OUT"})),
            ["ensemble_scheduling.step[2].output_map: 'OUT' is made by step 1 already"],
        ),
        (
            (step("first", {"x": "IN"}, {"y": "OUT", "z": "IN"}),),
            [
                "ensemble_scheduling.step[0].output_map: 'IN' is an input of the ensemble; "
                "no step can make it"
            ],
        ),
        (
            (SECOND,),
            [
                "ensemble_scheduling.step[0].input_map: 'x' takes 'between', which no step makes "
                "and no request brings"
            ],
        ),
        (
            (step("a", {"x": "IN", "w": "q"}, {"y": "p"}), step("b", {"x": "p"}, {"y": "q"})),
            ["output: no step makes 'OUT'", "ensemble_scheduling.step: a cycle: "],
        ),
        (
            (step("a", {"x": "IN", "w": "OUT"}, {"y": "OUT"}),),
            ["ensemble_scheduling.step: a cycle: step 0 (a) -> step 0 (a)"],
        ),
    ],
)
def test_a_wrong_graph_is_told(steps, found):
    problems = graph_problems(ensemble(*steps))
    assert len(problems) == len(found)
    assert all(told.startswith(start) for told, start in zip(problems, found, strict=True))


def test_an_input_that_no_step_takes_is_told():
    found = unused_inputs(ensemble(inputs=(*IN, spec("IDLE"))))
    assert found == ["input: 'IDLE' has no effect; no step takes it"]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        (
            {"max_batch_size": 2},
            "model 'first' has max_batch_size 2, less than the ensemble's of 4",
        ),
        ({"inputs": (spec("q"),)}, "model 'first' has no input 'x'; it has q"),
        ({"outputs": (spec("q"),)}, "model 'first' has no output 'y'; it has q"),
        (
            {"inputs": (spec("x"), spec("w"))},
            "input_map lacks 'w', which model 'first' needs",
        ),
        (
            {"inputs": (spec("x", datatype="INT8"),)},
            "input 'x' of model 'first' is INT8 [-1, 3], but input 'IN' of the ensemble is FP32 "
            "[-1, 3]",
        ),
        (
            {"inputs": (spec("x", (3, 2)),)},
            "input 'x' of model 'first' is FP32 [-1, 3, 2], but input 'IN' of the ensemble is "
            "FP32 [-1, 3]",
        ),
    ],
)
def test_a_member_that_does_not_fit_is_told(changed, found):
    told = member_problems(ensemble(), members(replace(MEMBER, **changed)))
    assert f"ensemble_scheduling.step[0]: {found}" in told


def test_maker_and_taker_must_agree():
    wrong = replace(MEMBER, outputs=(spec("y", (2,)),))
    assert member_problems(ensemble(), members(first=wrong)) == [
        "ensemble_scheduling.step[1]: input 'x' of model 'second' is FP32 [-1, 3], but output 'y' "
        "of model 'first' is FP32 [-1, 2]"
    ]
    assert member_problems(ensemble(), members(second=wrong)) == [
        "output 'OUT' of the ensemble is FP32 [-1, 3], but output 'y' of model 'second' is FP32 "
        "[-1, 2]"
    ]


def test_variable_sizes_agree_with_any():
    loose = replace(MEMBER, inputs=(spec("x", (-1,)),), outputs=(spec("y", (-1,)),))
    assert member_problems(ensemble(), members(loose, MEMBER)) == []
    assert member_problems(ensemble(), members(MEMBER, loose)) == []


def test_an_optional_input_may_feed_optional_inputs_only():
    inputs = (spec("IN", is_optional=True),)
    [problem] = member_problems(ensemble(inputs=inputs), members())
    assert "input 'IN' of the ensemble is optional, but model 'first' needs 'x'" in problem
    optional = replace(MEMBER, inputs=(spec("x", is_optional=True),))
    assert member_problems(ensemble(inputs=inputs), members(first=optional)) == []


def test_optional_inputs_of_members_need_not_be_mapped():
    more = replace(MEMBER, inputs=(spec("x"), spec("w", is_optional=True)))
    assert member_problems(ensemble(), members(first=more)) == []


def test_members_that_are_not_known_are_not_judged():
    assert member_problems(ensemble(), (None, None)) == []


def test_batching_models_may_be_members_of_one_without():
    alone = replace(MEMBER, max_batch_size=0)
    assert member_problems(ensemble(max_batch=0), members()) == []
    assert member_problems(ensemble(max_batch=0), members(alone, MEMBER)) == []
    # The other way: the batch dimension is one of the tensor's own.
    whole = replace(MEMBER, max_batch_size=0, inputs=(spec("x", (-1, 3)),))
    assert member_problems(ensemble(max_batch=0), members(MEMBER, whole)) == []
    assert member_problems(ensemble(), members(alone, MEMBER)) != []


@pytest.mark.parametrize(
    ("shape", "dims", "has_batch", "expected"),
    [
        ((3,), (3,), True, (1, 3)),
        ((5, 3), (3,), True, (5, 3)),
        ((1, 3), (3,), False, (3,)),
        ((5, 3), (3,), False, (5, 3)),
        ((3,), (3,), False, (3,)),
        ((1, 3), (1, 3), False, (1, 3)),
    ],
)
def test_a_batch_of_one_row_is_added_or_dropped(shape, dims, has_batch, expected):
    assert adapt_shape(shape, spec("x", dims), has_batch) == expected


def test_answers_have_the_declared_shape():
    assert output_fits((2, 3), spec("y"), has_batch=True)
    assert not output_fits((2, 4), spec("y"), has_batch=True)
    assert output_fits((9,), spec("y", (-1,)), has_batch=False)


def test_a_cycle_is_found():
    assert find_cycle({"a": ["b"], "b": []}) == []
    assert sorted(set(find_cycle({"a": ["b"], "b": ["c"], "c": ["a"]}))) == ["a", "b", "c"]
