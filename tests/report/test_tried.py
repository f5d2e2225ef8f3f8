"""Every try, in words."""

import pytest
from optimizer import made_optimizations as made

from penstock.optimizer.facts import Facts
from penstock.report.tried import (
    StepOutcome,
    accuracy_text,
    by_stage,
    numerics_text,
    rate_text,
    read_back,
    times_text,
)


def told(stage: str, index: int = 0) -> StepOutcome:
    return dict(by_stage(made.kept()))[stage][index]  # type: ignore[index]


def test_stages_are_in_their_order_and_empty_ones_are_left_out() -> None:
    assert [stage for stage, _ in by_stage(made.kept())] == [
        "baseline",
        "compile",
        "precision",
        "quantise",
        "batching",
        "instances",
        "memory",
    ]
    found = made.kept()
    found.tries = found.tries[8:0:-4]
    assert [stage for stage, _ in by_stage(found)] == ["compile", "quantise"]


def test_a_try_is_told_with_its_last_step_and_all_of_them() -> None:
    found = told("quantise", 1)
    assert found.step == "int8-static(calibrator=entropy, per_channel=yes)"
    tried, steps = found.attempt, "onnx-export → transformer-fusion(heads=12) → int8-static("
    assert str(tried.candidate).startswith(steps)
    assert (tried.outcome, tried.reason) == ("rejected", "top1 may lose 4.4 points")
    assert (found.accuracy, found.rate, found.p99) == ("88.1 %", "≈ 262/s", "-")
    assert [each.is_chosen for _, group in by_stage(made.kept()) for each in group].count(True) == 1
    assert told("instances").is_chosen and told("instances").rate == "304/s"


def test_only_gates_that_were_reached_are_listed() -> None:
    assert list(told("quantise", 1).gates) == [
        "read back",
        "numerics",
        "accuracy",
        "batch times",
        "predicted",
    ]
    assert dict(told("precision").gates) == {}
    assert "p99 < 20ms" not in told("instances").gates["served"]
    assert told("instances").gates["served"].endswith("p99 11.8 ms (11.4-12.2) < 20 ms: kept")


def test_read_back_says_what_was_really_built() -> None:
    text = read_back(made.facts(34))
    assert text == (
        "onnxruntime; weights 3.00 MiB FP32, 22.0 MiB INT8; quantised: 34 MatMul;"
        " providers CPUExecutionProvider; threads 1"
    )
    many = Facts(backend="onnxruntime", quantised={f"Op{i}": i for i in range(1, 12)})
    assert read_back(many).endswith("4 Op4, 6 others")
    odd = Facts(backend="python", batching_problem="rows change each other")
    assert read_back(odd) == "python; not batched: rows change each other"


def test_numerics_say_the_problem_or_the_distance() -> None:
    found = made.numerics(0.021)
    assert numerics_text(found) == (
        "64 examples, largest difference 0.084 (0.021 of a column's range),"
        " least cosine 0.979000, same first choice in 99.2 %"
    )
    found.problems = ["output 'logits' is NaN in 3 examples"]
    assert numerics_text(found) == "output 'logits' is NaN in 3 examples"


def test_accuracy_says_what_was_decided_from() -> None:
    text = accuracy_text(made.judgement())
    assert text == (
        "top1 loses 0.2 points, at most 0.6; 1500 examples (choice), better on 11, worse on 14;"
        " exact binomial on discordant pairs"
    )


def test_batch_times_by_length() -> None:
    assert times_text(made.times()) == (
        "2 instances x 1 thread: length 32: 1 row 4.00 ms, 8 rows 20.8 ms, 16 rows 40.0 ms,"
        " length 128: 1 row 12.0 ms, 8 rows 62.4 ms, 16 rows 120 ms"
    )


@pytest.mark.parametrize(("index", "text"), [(0, "98.0/s"), (1, "≈ 137/s"), (5, "-")])
def test_a_predicted_rate_is_marked(index: int, text: str) -> None:
    assert rate_text(made.tries()[index]) == text


def test_a_language_model_is_told_by_its_tokens() -> None:
    (_, (told,)), *_ = by_stage(made.text())
    assert "60.0 tokens/s" in told.gates["served"] and "rows" not in told.gates["served"]
