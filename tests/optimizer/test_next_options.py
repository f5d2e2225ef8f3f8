"""A missed SLO ends with what could be done, each with a rate."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from optimizer import made_optimizations as made
from served_builds import a_config, a_table

from penstock.optimizer import first_line, wording
from penstock.optimizer.candidates import Build, Skip, Step
from penstock.optimizer.findings import Contender, Findings
from penstock.optimizer.next_options import Missed, next_options
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import FallbackLayer, NextOption, Optimization
from penstock.profiling.results import StepTime
from penstock.slo import parse


def missed_run(
    found: Optimization | None = None,
    *,
    device: str = "cuda:0",
    rate: float | None = 400.0,
    slo: str = "p99 < 100ms at 1000/s",
    **changed: object,
) -> Missed:
    """A model that reaches 400 of 1000 requests a second, on one GPU."""
    found = found or made.missed()
    found.chosen = made.FUSED
    found.tries, found.skipped = [], []
    found.after = made.served(0.2, 400.0, 100)
    measured = None if rate is None else made.around(rate)
    found.after = msgspec.structs.replace(found.after, max_rate=measured)
    config = replace(a_config(), backend="pytorch", device=device)
    build = Build(made.FUSED, Path("m"), config)
    times = {(count, 8): a_table(0.0, 0.002, instances=count) for count in (1, 2)}
    shapes = [
        ((Step("batching", {"mode": "fixed", "max_batch": "8"}), instances(count)), predicted)
        for count, predicted in ((2, 380.0), (1, 300.0))
    ]
    contender = Contender(build, made.facts(), times, shapes, is_lossy=False)
    contender = replace(contender, **changed)
    plan = Plan("m.onnx", "m", "out", slo=parse(slo))
    return Missed(found, Findings(), plan, contender, num_cores=8)


def instances(count: int) -> Step:
    return Step("instances", {"instances": str(count), "threads": "8"})


def by_name(missed: Missed) -> dict[str, NextOption]:
    return {each.name: each for each in next_options(missed)}


def test_more_gpus_are_modelled_from_the_measured_rate() -> None:
    option = by_name(missed_run())["more GPUs"]
    # 0.95 of 400 each.
    assert option.text.startswith("3 GPUs with 95% of the measured 400/s each")
    assert option.rate == pytest.approx(1140.0)
    assert option.is_enough and not option.is_measured


def test_on_cpus_they_are_machines() -> None:
    assert by_name(missed_run(device="cpu"))["more machines"].text.startswith("3 machines")


def test_what_is_kept_at_a_lower_rate_is_measured() -> None:
    option = by_name(missed_run())["lower rate"]
    assert (option.rate, option.is_measured, option.is_enough) == (400.0, True, False)


def test_without_a_measured_rate_it_is_not_said_to_be() -> None:
    found = by_name(missed_run(rate=None))
    assert "lower rate" not in found
    assert "predicted 380/s" in found["more GPUs"].text


def test_a_smaller_model_has_its_share_of_the_work_and_where_it_is() -> None:
    missed = missed_run()
    attempt = made.attempt(made.FUSED, "compile", "kept", "")
    layers = {"convolution kernel": 0.003, "other kernel": 0.001}
    attempt.step_time = StepTime(8, layers, 50, 0.004, 0.0, 0.0, 0.0)
    missed.found.tries.append(attempt)
    text = by_name(missed)["smaller model"].text
    assert "at most 40% of the work" in text
    assert "convolution kernels take 75 %" in text


def test_where_one_request_is_too_slow_no_gpu_helps() -> None:
    slow = {(1, 8): a_table(0.25, 0.0)}
    found = by_name(missed_run(times=slow, rate=0.0))
    assert "more GPUs" not in found
    assert "at most 40% of the work" in found["smaller model"].text


def test_what_accuracy_refused_comes_with_its_predicted_rate() -> None:
    missed = missed_run()
    attempt = made.attempt(made.QUANTISED, "quantise", "rejected", "")
    attempt.accuracy = msgspec.structs.replace(made.judgement(), is_passed=False)
    attempt.predicted_rate = 1500.0
    attempt.fallback = [FallbackLayer("head", "MatMul", 0.9, 0.001)]
    missed.found.tries.append(attempt)
    option = by_name(missed)["another precision"]
    assert (option.rate, option.is_enough) == (1500.0, True)
    assert str(made.QUANTISED) in option.text and "with head in float" in option.text
    attempt.predicted_rate = 300.0
    assert "another precision" not in by_name(missed)


def test_a_way_to_serve_that_is_predicted_to_do_more_is_named() -> None:
    steps = (Step("batching", {"mode": "fixed", "max_batch": "64"}), instances(2))
    option = by_name(missed_run(shapes=[(steps, 900.0)]))["another batch"]
    assert "max_batch=64" in option.text and option.rate == 900.0


def test_more_instances_where_the_gpu_is_idle() -> None:
    idle = {(count, 8): a_table(0.01, 0.0001, instances=count) for count in (1, 2)}
    option = by_name(missed_run(times=idle))["more instances"]
    assert option.text.startswith("4 instances")
    # Two of them reach 380 by prediction, one 300.
    assert option.rate == pytest.approx(400 * 380 / 300)


def test_what_was_out_of_time_wants_a_larger_budget() -> None:
    missed = missed_run()
    missed.found.skipped = [Skip(name, "", cut_by="time") for name in "abcde"]
    option = by_name(missed)["more time"]
    assert option.text == "a larger --budget, for a, b, c and 2 more"
    assert option.rate is None and not option.is_enough


def test_those_that_are_enough_come_first() -> None:
    missed = missed_run()
    missed.found.skipped = [Skip("fp8", "", cut_by="time")]
    assert [each.is_enough for each in next_options(missed)] == [True, True, False, False]


def test_the_first_line_ends_with_the_first_of_them() -> None:
    found = made.missed()
    found.next_options = [NextOption("more GPUs", "3 GPUs", 1140.0, is_enough=True)]
    line = first_line.headline(found)
    assert line.endswith("next: more GPUs: 3 GPUs (modelled 1140/s, enough)")
    assert wording.next_options(found) == ["more GPUs: 3 GPUs (modelled 1140/s, enough)"]
