"""The same figures in the same words, wherever they stand."""

import math

import msgspec
import pytest
from optimizer import made_optimizations as made

from penstock.benchmark.stats import Interval
from penstock.optimizer import wording
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Candidate
from penstock.optimizer.results import Optimization, TermVerdict, Try
from penstock.profiling.results import NextStep


def test_shares_of_examples_are_percent_and_other_scores_are_numbers() -> None:
    assert wording.score("top1", 0.9123) == "91.2 %"
    assert wording.score("agreement", 1.0) == "100.0 %"
    assert wording.score("perplexity", 23.456) == "23.46"
    assert wording.score("top1", math.nan) == "-"


@pytest.mark.parametrize(
    ("metric", "amount", "budget", "text"),
    [
        ("top1", 0.006, "top1 drop <= 1 %", "0.6 points"),
        ("top1", 0.01, "top1 drop <= 1 %", "1 point"),
        ("top1", 0.0125, "", "1.25 points"),
        ("mae", 0.0125, "mae rise <= 0.05", "0.0125"),
        ("mae", 0.0125, "mae rise <= 2 % relative", "1.25 % relative"),
        ("top1", 1e300, "", "-"),
        ("top1", math.nan, "", "-"),
    ],
)
def test_losses(metric: str, amount: float, budget: str, text: str) -> None:
    assert wording.loss(metric, amount, budget) == text


def test_accuracy_has_its_bound_and_its_limit() -> None:
    assert (
        wording.accuracy(made.judgement())
        == "top1 91.2 % → 91.0 % (loss at most 0.6 points, limit 1 point)"
    )
    better: Judgement = made.judgement(loss=-0.01, bound=-0.001)
    assert "(no loss, limit 1 point)" in wording.accuracy(better)
    unknown = made.judgement(bound=1e300)
    assert "(loss not known, limit 1 point)" in wording.accuracy(unknown)


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.044, "1.04x"), (1.96, "2.0x"), (3.14, "3.1x"), (34.7, "35x")]
)
def test_ratios(ratio: float, text: str) -> None:
    assert wording.times(ratio) == text


def test_what_is_infinite_or_nothing_is_no_ratio() -> None:
    one, none = Interval(1.0, 0.9, 1.1), Interval(0.0, 0.0, 0.0)
    endless = Interval(math.inf, math.inf, math.inf)
    assert wording.ratio(one, Interval(3.0, 2.9, 3.1)) == 3.0
    assert wording.ratio(None, one) is wording.ratio(one, None) is None
    assert wording.ratio(none, one) is wording.ratio(one, endless) is None
    assert wording.ratio(endless, one) is None


def test_terms_of_every_kind() -> None:
    def text(term: str, value: float, limit: float) -> str:
        measured = Interval(value, value * 0.99, value * 1.01)
        return wording.term(TermVerdict(term, "kept", measured, limit, ""))

    assert text("p99 < 20ms", 0.0121, 0.02) == "p99 12.1 ms (12.0-12.2) < 20 ms"
    assert text("p99 < 20ms", 0.0242, 0.02) == "p99 24.2 ms (24.0-24.4) >= 20 ms"
    assert text("memory <= 2GiB", 2**29, 2**31) == "memory 512 MiB <= 2 GiB"
    assert text("throughput >= 100/s", 120.0, 100.0).startswith("throughput 120/s (")
    assert wording.term(TermVerdict("p50 < 5ms", "not measured", None, 0.005, "s")) == (
        "p50 was not measured (p50 < 5ms)"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.4, "< 1 s"),
        (42.3, "42 s"),
        (412.0, "6 min 52 s"),
        (3780.0, "1 h 3 min"),
        (math.nan, "-"),
    ],
)
def test_spans_of_a_run(seconds: float, text: str) -> None:
    assert wording.span(seconds) == text


class TestNextStep:
    """The profile is of a candidate before anything was quantised."""

    def found(self, chosen: Candidate, *tries: Candidate) -> Optimization:
        listed = [Try(each, "quantise", "rejected", "") for each in tries]
        return msgspec.structs.replace(made.kept(), chosen=chosen, tries=listed)

    def test_is_shown_where_the_profile_is_of_the_chosen_model(self) -> None:
        served = made.FUSED.then(made.BATCHING, made.INSTANCES)
        assert wording.next_step(self.found(made.FUSED)) == "INT8 MatMul: at most 2.4x"
        assert wording.next_step(self.found(served)) == "INT8 MatMul: at most 2.4x"
        assert wording.next_step(self.found(made.EXPORTED)) == ""
        assert wording.next_step(self.found(made.CHOSEN)) == ""

    def test_is_none_that_was_tried(self) -> None:
        found = self.found(made.FUSED, made.QUANTISED)
        assert wording.next_step(found) == "encode is 20 % of a request: at most 1.2x"
        assert found.profile is not None
        found.profile.steps.pop()
        assert wording.next_step(found) == ""

    @pytest.mark.parametrize(("name", "is_left"), [("bf16", False), ("fp16", True)])
    def test_of_sixteen_bits_is_the_one_that_was_not_tried(self, name: str, is_left: bool) -> None:
        found = self.found(made.FUSED, made.FUSED.then(made.HALF))
        assert found.profile is not None
        found.profile.steps = [NextStep(name, "half as wide", 2.0)]
        assert wording.next_step(found) == ("half as wide" if is_left else "")


def test_the_metric_is_known_from_the_budget_before_anything_was_judged() -> None:
    assert wording.metric_of(made.kept()) == "top1"
    assert wording.metric_of(made.interrupted()) == "top1"
    assert wording.metric_of(made.without_data()) == ""


def test_labels_of_steps_without_their_settings() -> None:
    assert wording.short_label("int8-static(calibrator=minmax, kept=2)") == "int8-static"
    assert wording.short_label("as served: batching(mode=slo) → instances") == "as served"
    assert wording.short_label("original") == "original"
    assert wording.short_label("(odd)") == "(odd)"


def test_the_place_of_a_version() -> None:
    assert wording.place(made.kept()) == "models/reviews/1"
    assert wording.place(made.interrupted()) == ""


@pytest.mark.parametrize("out", ["models", "models/"])
def test_where_the_version_is(out: str) -> None:
    found = msgspec.structs.replace(made.kept(), out=out, name="digits", version="3")
    assert wording.place(found) == "models/digits/3"
