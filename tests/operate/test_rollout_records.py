"""Events, figures and metrics of rollouts."""

from dataclasses import replace

import pytest

from penstock.config import BatchPolicy, ModelConfig, SequencePolicy
from penstock.errors import InvalidRequest
from penstock.operate.rollout_promise import RolloutPromise
from penstock.operate.rollout_records import (
    check_alike,
    describe_start,
    event_figures,
    figures_of,
    scrape,
    unfinished,
)
from penstock.operate.rollout_state import RolloutCheck, RolloutPlan, RolloutState
from penstock.serving.split_counts import OutputCounts, SplitCounts
from penstock.types import TensorSpec
from penstock.wire.version_rows import HistoryEvent

ONE = ModelConfig(
    name="m",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)),),
    outputs=(TensorSpec("y", "FP32", (10,)),),
    max_batch_size=8,
    batching=BatchPolicy(8),
)
TWO = replace(ONE, version="2")
STATE = RolloutState("m", "1", "2", "canary", 0.25, 1, (0.05, 0.25, 1.0), 1e9)


def test_versions_that_differ_only_inside_can_share_requests() -> None:
    check_alike(ONE, replace(TWO, backend="onnxruntime", max_batch_size=2, num_instances=3))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (ONE, "version 1 is served already"),
        (replace(TWO, inputs=()), r"input x is FP32 \[4\] and missing"),
        (
            replace(TWO, outputs=(TensorSpec("y", "FP16", (10,)),)),
            r"output y is FP32 \[10\] and FP16 \[10\]",
        ),
        (replace(TWO, sequences=SequencePolicy()), "requests of a sequence would go to both"),
        (replace(TWO, is_decoupled=True), "any number of responses, which are not compared"),
        (replace(TWO, max_batch_size=0), "only one of them has a batch dimension"),
        (replace(TWO, backend="llm"), "only one of them is a language model"),
    ],
)
def test_versions_that_clients_see_differently_cannot(other: ModelConfig, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        check_alike(ONE, other)


def test_versions_of_a_language_model_can_share_texts() -> None:
    check_alike(*(replace(each, backend="llm") for each in (ONE, TWO)))


def test_the_first_event_says_what_must_be_kept() -> None:
    text = describe_start(RolloutPlan(reason="faster"), RolloutPromise(source="no SLO"))
    assert text == (
        "faster: latency as the stable version, errors <= 0.1 %, disagreement <= 5 %, "
        "compute time <= 1.25 x (no SLO); steps: 5 %, 25 %, 50 %, 100 %"
    )


def test_figures_have_the_mean_and_the_largest_distance_of_each_output() -> None:
    counts = SplitCounts(num_compared=4, num_disagreeing=1.0)
    counts.outputs["y"] = OutputCounts(4, 1.0, 0.2, 0.15)
    figures = figures_of(counts, 0.51234)
    assert figures["distance of y"] == 0.05
    assert figures["largest distance of y"] == 0.15
    assert (figures["compared_rows"], figures["disagreeing_rows"]) == (4, 1)
    assert figures["compute_time_ratio"] == 0.5123


def test_events_hold_the_checks_behind_a_decision() -> None:
    check = RolloutCheck("errors", "holds", "fine", 0.0, 0.001, 0.2, 400)
    state = replace(STATE, checks=(check,), figures={"compared_rows": 3})
    figures = event_figures(state)
    assert (figures["share"], figures["compared_rows"]) == (0.25, 3)
    assert figures["checks"] == [
        {"name": "errors", "state": "holds", "live": 0.0, "promised": 0.001, "e_value": 0.2}
    ]


def event(kind: str) -> HistoryEvent:
    return HistoryEvent("2026-11-18T00:00:00+00:00", kind, "2", ("1",))


@pytest.mark.parametrize(
    ("kinds", "is_open"),
    [
        ([], False),
        (["promoted"], False),
        (["canary started"], True),
        (["shadow started", "canary step"], True),
        (["canary started", "canary step", "promoted"], False),
        (["canary started", "rolled back"], False),
        (["canary started", "rollout stopped", "canary started"], True),
        (["canary started", "pruned"], True),
    ],
)
def test_a_rollout_without_an_end_is_found(kinds: list[str], is_open: bool) -> None:
    assert (unfinished([event(kind) for kind in kinds]) is not None) == is_open


def test_metrics_of_running_and_ended_rollouts() -> None:
    running = replace(STATE, figures={"compared_rows": 7, "disagreeing_rows": 0.5})
    ended = replace(STATE, model="n", decision="rolled back")
    lines = [line for family in scrape([running, ended]) for line in family.lines]
    assert lines == [
        'penstock_rollout_state{model="m",version="2",decision="running"} 1',
        'penstock_rollout_state{model="n",version="2",decision="rolled back"} 1',
        'penstock_rollout_share{model="m",version="2"} 0.25',
        'penstock_rollout_compared_rows{model="m",version="2"} 7',
        'penstock_rollout_disagreeing_rows{model="m",version="2"} 0.5',
    ]
    assert scrape([]) == []
