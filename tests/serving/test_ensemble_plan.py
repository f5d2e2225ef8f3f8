"""Which steps of an ensemble run, and when: pure."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.config import BatchPolicy, EnsembleStep, ModelConfig, TensorDefault
from penstock.errors import BackendFailed
from penstock.repository.ensemble_cases import holds
from penstock.repository.ensemble_parameters import parse_condition, parse_default
from penstock.repository.ensemble_rules import graph_problems
from penstock.serving.ensemble_plan import EnsemblePlanner, StepProgress
from penstock.types import TensorSpec, from_array, to_array


def ensemble(steps, inputs=("IN",), outputs=("OUT",), **defaults):
    """`steps` are the maps, and perhaps a condition."""
    specs = [tuple(TensorSpec(name, "FP32", (1,)) for name in each) for each in (inputs, outputs)]
    made = tuple(
        EnsembleStep(f"m{i}", "", *maps, condition=parse_condition(*text) if text else ())
        for i, (*maps, text) in enumerate((*each[:2], each[2:]) for each in steps)
    )
    found = {name: parse_default(text) for name, text in defaults.items()}
    policy = BatchPolicy(1)
    return ModelConfig("e", "1", "ensemble", "", *specs, 0, policy, steps=made, defaults=found)


def number(value):
    return from_array("t", "FP32", np.array([value], np.float32))


def value_of(tensor):
    return tensor.value if isinstance(tensor, TensorDefault) else to_array(tensor).item()


def begin(config, outputs=(), **given):
    """The progress of a request with these inputs."""
    plan = EnsemblePlanner(config).plan(list(given), outputs)
    progress = StepProgress(plan, {name: number(value) for name, value in given.items()})
    return progress, progress.begin()


# Two branches that meet.
DIAMOND = ensemble(
    [
        ({"x": "IN"}, {"y": "left", "z": "unused"}),
        ({"x": "IN"}, {"y": "right"}),
        ({"a": "left", "b": "right"}, {"y": "OUT"}),
        ({"x": "right"}, {"y": "SIDE"}),
    ],
    outputs=("OUT", "SIDE"),
)


def test_independent_steps_begin_together_and_a_join_waits_for_both():
    progress, ready = begin(DIAMOND, ["OUT"], IN=1)
    assert ready == [0, 1]
    assert progress.finish(0, {"left": number(2)}) == []
    assert progress.finish(1, {"right": number(3)}) == [2]
    assert not progress.is_over
    assert progress.finish(2, {"OUT": number(4)}) == []
    assert progress.is_over and value_of(progress.tensors["OUT"]) == 4


def test_tensors_are_held_while_something_reads_them():
    progress, _ = begin(DIAMOND, ["OUT"], IN=1)
    assert list(progress.tensors) == ["IN"]
    progress.use("IN")
    progress.use("IN")
    progress.finish(0, {"left": number(2), "unused": number(9)})
    assert list(progress.tensors) == ["left"]


def test_only_what_the_wanted_outputs_need_is_run():
    planner = EnsemblePlanner(DIAMOND)
    plan = planner.plan(["IN"], ["SIDE"])
    assert [step is not None for step in plan.steps] == [False, True, False, True]
    assert planner.plan(["IN"], []).num_steps == 4
    assert planner.plan(["IN"], ["SIDE"]) is plan


def test_members_are_asked_for_needed_outputs_only():
    plan = EnsemblePlanner(DIAMOND).plan(["IN"], ["OUT"])
    assert [each.name for each in plan.steps[0].asked] == ["y"]
    assert plan.uses == {"OUT": 1, "IN": 2, "left": 1, "right": 1}
    assert [step.makes for step in plan.steps[:2]] == [("left",), ("right",)]


def test_steps_do_without_optional_inputs_that_a_request_lacks():
    config = ensemble([({"x": "IN", "w": "MORE"}, {"y": "OUT"})], inputs=("IN", "MORE"))
    planner = EnsemblePlanner(config)
    assert planner.plan(["IN"], []).steps[0].inputs == (("x", "IN"),)
    assert len(planner.plan(["MORE", "IN"], []).steps[0].inputs) == 2


SWITCH = ensemble(
    [
        ({"x": "IN"}, {"y": "score"}),
        ({"x": "IN"}, {"y": "OUT"}, "score > 0.5"),
        ({"x": "IN"}, {"y": "fast"}, "score <= 0.5"),
        ({"x": "fast"}, {"y": "OUT"}),
    ],
)


def test_a_condition_chooses_the_branch():
    progress, ready = begin(SWITCH, IN=1)
    assert ready == [0]
    assert progress.finish(0, {"score": number(0.75)}) == [1]
    assert progress.skipped == [2, 3]
    progress.finish(1, {"OUT": number(5)})
    assert progress.is_over
    progress, _ = begin(SWITCH, IN=1)
    assert progress.finish(0, {"score": number(0.25)}) == [2]
    assert progress.skipped == [1]
    assert progress.finish(2, {"fast": number(3)}) == [3]
    assert not progress.is_over
    progress.finish(3, {"OUT": number(4)})
    assert progress.is_over and value_of(progress.tensors["OUT"]) == 4


def test_a_value_takes_the_place_of_what_no_step_makes():
    config = ensemble([({"x": "IN"}, {"y": "OUT"}, "IN > 0")], OUT="-1")
    progress, ready = begin(config, IN=0)
    assert ready == [] and progress.is_over and progress.skipped == [0]
    assert value_of(progress.tensors["OUT"]) == -1


def test_a_tensor_takes_the_place_of_what_no_step_makes():
    """An optional step before another: without it, the other gets what the first would get."""
    config = ensemble(
        [({"x": "IN"}, {"y": "sharp"}, "IN > 0"), ({"x": "sharp"}, {"y": "OUT"})], sharp="IN"
    )
    progress, ready = begin(config, IN=-3)
    assert ready == [1] and value_of(progress.use("sharp")) == -3
    progress, ready = begin(config, IN=3)
    assert ready == [0]
    progress.use("IN")
    assert progress.finish(0, {"sharp": number(8)}) == [1]
    assert list(progress.tensors) == ["sharp"]


def test_steps_whose_tensors_nothing_reads_any_more_do_not_run():
    """`costly` is for the branch that is not taken."""
    config = ensemble(
        [
            ({"x": "IN"}, {"y": "score"}),
            ({"x": "score"}, {"y": "costly"}),
            ({"x": "costly"}, {"y": "OUT"}, "score > 1"),
            ({"x": "IN"}, {"y": "OUT"}, "score <= 1"),
        ]
    )
    progress, _ = begin(config, IN=1)
    ready = progress.finish(0, {"score": number(0)})
    # It is decided before the condition of its reader, so it runs; the answer does not wait.
    assert ready == [1, 3]
    progress.finish(3, {"OUT": number(1)})
    assert progress.is_over


def test_a_condition_that_cannot_be_decided_is_an_error():
    progress, _ = begin(SWITCH, IN=1)
    with pytest.raises(BackendFailed, match="'score' is NaN"):
        progress.finish(0, {"score": number(np.nan)})


@st.composite
def flows(draw):
    """Any graph of steps, alternatives, optional steps and defaults that loads."""
    steps, defaults, tensors = [], {}, ["IN", "a"]
    for number_ in range(draw(st.integers(1, 6))):
        name, known = f"t{number_}", list(tensors)
        takes = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3))
        maps = {f"x{n}": tensor for n, tensor in enumerate(takes)}, {"y": name}
        kind = draw(st.sampled_from(["plain", "either", "value", "tensor"]))
        reads, limit = draw(st.sampled_from(known)), draw(st.integers(-2, 2))
        if kind == "plain":
            steps.append(maps)
        else:
            steps.append((*maps, f"{reads} > {limit}"))
        if kind == "either":
            steps.append(({"x": draw(st.sampled_from(known))}, {"y": name}, f"{reads} <= {limit}"))
        elif kind == "value":
            defaults[name] = str(draw(st.integers(-2, 2)))
        elif kind == "tensor":
            defaults[name] = draw(st.sampled_from(known))
        tensors.append(name)
    order = draw(st.permutations(steps))
    outputs = draw(st.lists(st.sampled_from(tensors[2:]), min_size=1, unique=True))
    config = ensemble(order, inputs=("IN", "a"), outputs=tuple(outputs), **defaults)
    assume(graph_problems(config) == [])
    return config


def compute(index, values):
    """What step `index` makes of its inputs: numbers around those in conditions."""
    return (3 * sum(values) + index) % 7 - 3


def evaluate(config, given):
    """The values of all tensors, and the steps that run, by trying until nothing changes."""
    values, ran, is_new = dict(given), set(), True
    while is_new:
        is_new = False
        for index, step in enumerate(config.steps):
            needed = [*step.inputs.values(), *(each.tensor for each in step.condition)]
            if index in ran or not all(name in values for name in needed):
                continue
            if all(holds(each, values[each.tensor]) for each in step.condition):
                ran.add(index)
                values[step.outputs["y"]] = compute(
                    index, [values[n] for n in step.inputs.values()]
                )
                is_new = True
        if not is_new:
            # Defaults of tensors whose steps can all be decided, as all that they read is there.
            for name, default in config.defaults.items():
                makers = [step for step in config.steps if step.outputs["y"] == name]
                reads = {each for step in makers for each in step.inputs.values()}
                reads |= {each.tensor for step in makers for each in step.condition}
                if name in values or not reads <= values.keys():
                    continue
                if not default.tensor or default.tensor in values:
                    values[name] = values[default.tensor] if default.tensor else default.value
                    is_new = True
    return values, ran


@given(flows(), st.integers(-3, 3), st.integers(-3, 3), st.data())
def test_every_step_is_decided_once_and_the_answer_is_right(config, first, second, data):
    """In any graph, whatever the order in which steps end."""
    expected, may_run = evaluate(config, {"IN": first, "a": second})
    progress, ready = begin(config, IN=first, a=second)
    begun = []
    while not progress.is_over:
        index = ready.pop(data.draw(st.integers(0, len(ready) - 1)))
        begun.append(index)
        step = config.steps[index]
        values = [value_of(progress.use(name)) for name in step.inputs.values()]
        assert values == [expected[name] for name in step.inputs.values()]
        ready += progress.finish(index, {step.outputs["y"]: number(compute(index, values))})
    assert len(begun) == len(set(begun))
    assert set(begun) <= may_run and not set(begun) & set(progress.skipped)
    for spec in config.outputs:
        assert value_of(progress.tensors[spec.name]) == expected[spec.name]
    if not ready:
        assert set(progress.tensors) == {spec.name for spec in config.outputs}
