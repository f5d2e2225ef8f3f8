"""Which steps run in which cases: compared with a direct evaluation of many values."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.config import BatchPolicy, EnsembleStep, ModelConfig, TensorDefault
from penstock.repository.ensemble_cases import case_problems, holds, try_cases
from penstock.repository.ensemble_parameters import parse_condition, parse_default
from penstock.types import TensorSpec


def step(makes, condition="", takes="IN"):
    found = parse_condition(condition) if condition else ()
    return EnsembleStep("m", "", {"x": takes}, {"y": makes}, condition=found)


def ensemble(*steps, outputs=("OUT",), **defaults):
    specs = [TensorSpec(name, "FP32", (1,)) for name in ("IN", "a", "b")]
    made = [TensorSpec(name, "FP32", (1,)) for name in outputs]
    found = {name: parse_default(text) for name, text in defaults.items()}
    policy = BatchPolicy(1)
    return ModelConfig(
        "e", "1", "ensemble", "", tuple(specs), tuple(made), 0, policy, steps=steps, defaults=found
    )


def problems(config):
    return case_problems(config, try_cases(config))


def test_two_sides_of_a_condition_make_one_tensor():
    for condition, other in [
        ("a > 0.5", "a <= 0.5"),
        ("a", "not a"),
        ('a == "x"', 'a != "x"'),
        ("a == true", "a == false"),
    ]:
        assert problems(ensemble(step("OUT", condition), step("OUT", other))) == []


def test_three_ways_by_one_number():
    steps = step("OUT", "a < 0"), step("OUT", "a >= 0 and a < 10"), step("OUT", "a >= 10")
    assert problems(ensemble(*steps)) == []
    assert problems(ensemble(*steps[:2])) == [
        "output: 'OUT' does not exist when a is 10; expected a step that makes it then, or "
        "parameters.penstock.default.OUT"
    ]
    overlapping = step("OUT", "a > 9")
    [found] = problems(ensemble(*steps, overlapping))
    assert found.startswith(
        "ensemble_scheduling.step[3].output_map: 'OUT' is made by step 2 as well when a is 10; "
        "only one of them may run: see parameters.penstock.if.3"
    )


def test_cases_of_two_tensors():
    steps = step("OUT", "a and b"), step("OUT", "a and not b"), step("OUT", "not a")
    assert problems(ensemble(*steps)) == []
    [found] = problems(ensemble(steps[0], steps[2]))
    assert "does not exist when a is 1 and b is 0" in found
    both = step("OUT", "a"), step("OUT", "b")
    assert any("as well when a is 1 and b is 1" in each for each in problems(ensemble(*both)))


def test_without_a_condition_a_second_maker_is_always_one_too_many():
    [found] = problems(ensemble(step("OUT"), step("OUT", "a"), OUT="0"))
    assert "'OUT' is made by step 0 as well when a is 1" in found
    # Defaults alone.
    [found] = problems(ensemble(step("OUT"), step("OUT"), OUT="0"))
    assert "'OUT' is made by step 0 as well; only one" in found


def test_a_step_after_one_that_does_not_run_does_not_run_either():
    chain = step("mid", "a"), step("OUT", takes="mid")
    [found] = problems(ensemble(*chain))
    assert found.startswith("output: 'OUT' does not exist when a is 0")
    assert problems(ensemble(*chain, OUT="0")) == []
    assert problems(ensemble(*chain, mid="IN")) == []
    # A condition on a tensor that may be missing.
    late = step("mid", "a"), step("OUT", "mid > 1"), step("OUT", "mid <= 1")
    [found] = problems(ensemble(*late))
    assert "does not exist when a is 0" in found
    assert problems(ensemble(*late, mid="0")) == []


def test_defaults_lead_to_defaults():
    config = ensemble(step("mid", "a"), step("OUT", "b"), OUT="mid", mid="IN")
    assert problems(config) == []
    assert len(problems(ensemble(step("mid", "a"), step("OUT", "b"), OUT="mid"))) == 1


def test_steps_that_never_run_are_told():
    [found] = problems(ensemble(step("OUT", "a > 1 and a < 0"), OUT="0"))
    assert found == "ensemble_scheduling.step[0]: model 'm' never runs, in no case"


def test_texts_and_numbers_do_not_mix():
    config = ensemble(step("OUT", 'a == "x"'), step("OUT", "a > 1"))
    assert problems(config) == [
        "parameters.penstock.if.*: 'a' is compared with a number and with a text"
    ]


def test_too_many_cases_are_refused():
    steps = [step("OUT", f"t{i} > 0") for i in range(9)]
    [found] = problems(ensemble(*steps))
    assert found.startswith("parameters.penstock.if.*: the conditions distinguish 19683 cases")


COMPARISON = st.builds(
    "{} {} {}".format,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    st.integers(-2, 2),
)
CONDITION = st.lists(COMPARISON, min_size=1, max_size=3).map(" and ".join)


@given(st.lists(CONDITION, min_size=1, max_size=4))
def test_the_cases_say_the_same_as_many_values(conditions):
    """All quarters from -4 to 4 of two tensors."""
    config = ensemble(*(step("OUT", each) for each in conditions))
    report = try_cases(config)
    grid = [n / 4 for n in range(-16, 17)]
    counts, ran = set(), set()
    for a in grid:
        for b in grid:
            runs = {
                index
                for index, each in enumerate(config.steps)
                if all(holds(part, {"a": a, "b": b}[part.tensor]) for part in each.condition)
            }
            counts.add(len(runs))
            ran |= runs
    assert report.runs == ran
    assert ("OUT" in report.absent) == (0 in counts)
    assert ("OUT" in report.doubles) == (max(counts) > 1)


def test_values_of_defaults_are_kept():
    config = ensemble(step("OUT", "a"), OUT="3")
    assert config.defaults == {"OUT": TensorDefault(value=3.0)}
    assert try_cases(config).unmade == {"OUT"}
