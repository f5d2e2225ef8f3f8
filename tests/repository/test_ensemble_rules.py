"""What makes an ensemble impossible: by its steps alone, and by the models that they run."""

from dataclasses import replace

import pytest

from penstock.config import BatchPolicy, EnsembleStep, ModelConfig, SequencePolicy
from penstock.repository.ensemble_parameters import parse_condition, parse_default
from penstock.repository.ensemble_rules import (
    adapt_shape,
    find_cycle,
    graph_problems,
    idle_parameters,
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


# Steps that fan out, conditions and defaults.

CROPS = (spec("IN", (-1, 3)),)
FAN = replace(FIRST, fan_out=("IN",), outputs={"y": "OUT"})


def flow(*steps, inputs=IN, outputs=OUT, max_batch=4, **defaults):
    found = {name: parse_default(text) for name, text in defaults.items()}
    config_ = config("both", inputs, outputs, max_batch, steps)
    return replace(config_, defaults=found)


def when(step_, condition):
    return replace(step_, condition=parse_condition(condition))


def test_rows_are_what_the_member_takes_with_one_dimension_more():
    whole = flow(FAN, inputs=CROPS, outputs=(spec("OUT", (-1, 3)),))
    assert graph_problems(whole) == [] and member_problems(whole, (MEMBER,)) == []
    # A row is one row, however small the member's batches are.
    small = replace(MEMBER, max_batch_size=0)
    assert member_problems(whole, (small,)) == []
    [problem] = member_problems(flow(FAN, outputs=whole.outputs), (MEMBER,))
    assert problem == (
        "ensemble_scheduling.step[0]: input 'x' of model 'first', for all rows, is FP32 [-1, -1, "
        "3], "
        "but input 'IN' of the ensemble is FP32 [-1, 3]"
    )
    [problem] = member_problems(flow(FAN, inputs=CROPS), (MEMBER,))
    assert problem.startswith("output 'OUT' of the ensemble is FP32 [-1, 3], but output 'y' of")


def test_a_member_with_sequences_cannot_take_rows():
    whole = flow(FAN, inputs=CROPS, outputs=(spec("OUT", (-1, 3)),))
    ordered = replace(MEMBER, sequences=SequencePolicy())
    [problem] = member_problems(whole, (ordered,))
    assert "model 'first' has sequence_batching, but the rows of 'IN' have no order" in problem


def test_conditions_and_defaults_need_tensors_that_are_always_there():
    optional = spec("MAYBE", is_optional=True)
    whole = flow(when(FIRST, "nothing > 0"), SECOND, OUT="0", between="NO", IN="1")
    assert graph_problems(whole) == [
        "parameters.penstock.if.0: 'nothing', which no step makes and no request brings",
        "parameters.penstock.default.between: 'NO', which no step makes and no request brings",
        "parameters.penstock.default.IN: no step makes 'IN'",
    ]
    whole = flow(
        replace(when(FIRST, "MAYBE > 0"), inputs={"x": "IN", "w": "MAYBE"}, fan_out=("MAYBE",)),
        SECOND,
        inputs=(*IN, optional),
        between="MAYBE",
    )
    assert graph_problems(whole) == [
        "parameters.penstock.if.0: input 'MAYBE' is optional; a condition needs its value",
        "parameters.penstock.fan_out.0: input 'MAYBE' is optional; its rows must be there to be "
        "counted",
        "parameters.penstock.default.between: input 'MAYBE' is optional; a default must be there",
    ]


def test_an_output_that_may_be_missing_is_refused():
    score = spec("score", (1,))
    [problem] = graph_problems(flow(FIRST, when(SECOND, "score > 0.5"), inputs=(*IN, score)))
    assert problem.startswith("output: 'OUT' does not exist when score is 0.5; expected a step")
    whole = flow(FIRST, when(SECOND, "score > 0.5"), inputs=(*IN, score), OUT="between")
    assert graph_problems(whole) == []


def test_conditions_and_defaults_are_part_of_cycles():
    first = when(FIRST, "OUT > 0")
    [problem] = graph_problems(flow(first, SECOND))
    assert problem.startswith("ensemble_scheduling.step: a cycle: step ")
    [problem] = graph_problems(flow(FIRST, SECOND, between="OUT"))
    assert problem.startswith("ensemble_scheduling.step: a cycle: step ")
    steps = step("a", {"x": "IN"}, {"y": "p"}), step("b", {"x": "IN"}, {"y": "q"})
    made = (spec("p"), spec("q"))
    [problem] = graph_problems(flow(*steps, outputs=made, p="q", q="p"))
    assert "a cycle: 'p' -> 'q' -> 'p'" in problem or "a cycle: 'q' -> 'p' -> 'q'" in problem


@pytest.mark.parametrize(
    ("shape", "datatype", "condition", "found"),
    [
        ((2,), "FP32", "score > 0", "'score' must have one element, but input 'score' of the"),
        ((1,), "BYTES", "score > 0", "'score' is compared with a number, but input 'score'"),
        ((1,), "FP32", 'score == "a"', "'score' is compared with a text, but input 'score'"),
    ],
)
def test_conditions_read_one_element_of_their_kind(shape, datatype, condition, found):
    score = spec("score", shape, datatype)
    whole = flow(FIRST, when(SECOND, condition), inputs=(*IN, score), OUT="between")
    [problem] = member_problems(whole, members())
    assert problem.startswith(f"parameters.penstock.if.1: {found}")


@pytest.mark.parametrize(
    ("datatype", "default", "found"),
    [
        ("FP32", '"none"', "is a text"),
        ("FP32", "[]", "is [], which needs a variable dimension"),
        ("INT8", "200", "is 200; expected a whole number from -128 to 127"),
        ("INT8", "0.5", "is 0.5; expected a whole number from -128 to 127"),
        ("BOOL", "2", "is 2; expected true or false"),
        ("BYTES", "2", "is a number"),
        ("BF16", "0.5", ""),
        ("BYTES", '"none"', ""),
        ("FP32", "IN", ""),
    ],
)
def test_defaults_must_fit_their_tensor(datatype, default, found):
    inputs = (spec("IN", (3,), datatype),)
    made = replace(
        MEMBER, inputs=(spec("x", (3,), datatype),), outputs=(spec("y", (3,), datatype),)
    )
    outputs = (spec("OUT", (3,), datatype),)
    whole = flow(when(FAN, "IN > 0"), inputs=inputs, outputs=outputs, OUT=default)
    whole = replace(whole, steps=(replace(whole.steps[0], fan_out=(), condition=()),))
    problems = member_problems(whole, (made,))
    if not found:
        assert problems == []
    else:
        [problem] = problems
        assert problem.endswith(f", but parameters.penstock.default.OUT {found}")


def test_a_tensor_that_is_a_default_must_agree():
    inputs = (*IN, spec("other", (2,)))
    [problem] = member_problems(flow(FIRST, SECOND, inputs=inputs, between="other"), members())
    assert problem == (
        "ensemble_scheduling.step[1]: input 'x' of model 'second' is FP32 [-1, 3], but input "
        "'other' of the ensemble is FP32 [-1, 2]"
    )


def test_parameters_without_effect_are_told():
    whole = flow(FIRST, SECOND, OUT="0")
    whole = replace(whole, options={"penstock.fan_out_limit": "5"})
    assert graph_problems(whole) == []
    assert idle_parameters(whole) == [
        "parameters.penstock.default.OUT: has no effect; a step always makes 'OUT'",
        "parameters.penstock.fan_out_limit: has no effect; no step fans out",
    ]
    assert unused_inputs(flow(FIRST, when(SECOND, "IDLE"), inputs=(*IN, spec("IDLE")))) == []
