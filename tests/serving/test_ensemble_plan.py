"""Which steps of an ensemble run, and when: pure."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.config import BatchPolicy, EnsembleStep, ModelConfig
from penstock.serving.ensemble_plan import EnsemblePlanner, StepProgress
from penstock.types import TensorSpec


def ensemble(steps, inputs=("IN",), outputs=("OUT",)):
    specs = [tuple(TensorSpec(name, "FP32", (1,)) for name in each) for each in (inputs, outputs)]
    steps = tuple(EnsembleStep(f"m{i}", "", *maps) for i, maps in enumerate(steps))
    policy = BatchPolicy(1)
    return ModelConfig("e", "1", "ensemble", "", *specs, 0, policy, steps=steps)


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
    progress = StepProgress(EnsemblePlanner(DIAMOND).plan(["IN"], ["OUT"]))
    assert progress.begin() == [0, 1]
    assert progress.finish(0) == []
    assert progress.finish(1) == [2]
    assert progress.finish(2) == []
    assert progress.num_left == 0


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


def test_steps_do_without_optional_inputs_that_a_request_lacks():
    config = ensemble([({"x": "IN", "w": "MORE"}, {"y": "OUT"})], inputs=("IN", "MORE"))
    planner = EnsemblePlanner(config)
    assert planner.plan(["IN"], []).steps[0].inputs == (("x", "IN"),)
    assert len(planner.plan(["MORE", "IN"], []).steps[0].inputs) == 2


@given(st.data())
def test_every_needed_step_begins_once_and_after_its_makers(data):
    """In any graph: step i takes tensors of earlier steps, or the request's."""
    num = data.draw(st.integers(1, 8))
    takes = [
        data.draw(st.lists(st.sampled_from(["IN", *(f"t{j}" for j in range(i))]), min_size=1))
        for i in range(num)
    ]
    steps = [
        ({f"x{n}": tensor for n, tensor in enumerate(takes[i])}, {"y": f"t{i}"}) for i in range(num)
    ]
    wanted = data.draw(st.lists(st.sampled_from([f"t{i}" for i in range(num)]), min_size=1))
    config = ensemble(steps, outputs=tuple(f"t{i}" for i in range(num)))
    plan = EnsemblePlanner(config).plan(["IN"], wanted)
    progress, there, begun = StepProgress(plan), {"IN"}, []
    ready = progress.begin()
    while ready:
        index = ready.pop(data.draw(st.integers(0, len(ready) - 1)))
        begun.append(index)
        assert set(takes[index]) <= there
        there.add(f"t{index}")
        ready += progress.finish(index)
    assert progress.num_left == 0
    assert len(begun) == len(set(begun)) == plan.num_steps
    assert set(wanted) <= there
