"""Promises from SLOs and evidence."""

from dataclasses import replace

import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.operate.rollout_promise import find_promise
from penstock.types import TensorSpec

PLAIN = ModelConfig(
    name="m",
    version="1",
    backend="onnxruntime",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)),),
    outputs=(TensorSpec("y", "FP32", (10,)),),
    max_batch_size=8,
    batching=BatchPolicy(8),
)
SLO = replace(PLAIN, slo="p99 < 20ms, mean < 5ms, throughput >= 10/s", is_slo_from_evidence=True)


def evidence(digest: str, bound: float = 0.004, compute_s: float = 0.01) -> dict[str, object]:
    return {
        "accuracy": {"metric": "agreement", "loss_bound": bound, "num_examples": 1000},
        "lineage": {"source_digest": digest},
        "measured": {"phases": {"compute": compute_s}, "rows_per_batch": 4.0, "p99": None},
    }


def test_the_slo_promises_shares_of_late_requests() -> None:
    promise = find_promise(PLAIN, SLO, ({}, {}))
    told = [(each.text, each.metric, each.limit_s, each.share) for each in promise.latencies]
    assert told == [
        ("p99 < 20ms", "latency", 0.02, 0.01),
        ("mean < 5ms", "latency", 0.005, None),
    ]
    assert promise.limits == (("latency", 0.02), ("latency", 0.005))
    assert promise.source == "the SLO of the candidate's evidence"


def test_a_candidate_without_an_slo_inherits_that_of_the_stable_version() -> None:
    promise = find_promise(replace(SLO, is_slo_from_evidence=False), PLAIN, ({}, {}))
    assert promise.latencies[0].share == 0.01
    assert promise.source == "the SLO of the stable version's configuration"
    none = find_promise(PLAIN, replace(PLAIN, slo="off"), ({}, {}))
    assert none.latencies == ()


def test_both_versions_may_differ_from_their_original() -> None:
    promise = find_promise(PLAIN, PLAIN, (evidence("a", 0.004), evidence("a", 0.02)))
    assert promise.max_disagreeing == pytest.approx(0.024)
    tiny = find_promise(PLAIN, PLAIN, ({}, evidence("a", 0.001)))
    assert tiny.max_disagreeing == 0.01


@pytest.mark.parametrize(
    ("evidences", "source"),
    [
        (({}, {}), "the default, as the evidence has no agreement"),
        (
            (evidence("a"), evidence("b")),
            "the default, as the versions were made from different originals",
        ),
        (
            ({}, {"accuracy": {"metric": "top1", "loss_bound": 0.01}}),
            "the default, as the evidence has no agreement",
        ),
        (({}, {"accuracy": None}), "the default, as the evidence has no agreement"),
        (
            (evidence("a", 0.6), evidence("a", 0.4)),
            "the default, as the evidence allows any disagreement",
        ),
    ],
)
def test_agreement_has_a_default(evidences: tuple, source: str) -> None:
    promise = find_promise(PLAIN, PLAIN, evidences)
    assert (promise.max_disagreeing, promise.agreement_source) == (0.05, source)


def test_the_operator_overrides_the_agreement() -> None:
    promise = find_promise(PLAIN, PLAIN, ({}, evidence("a")), 0.8)
    assert promise.max_disagreeing == pytest.approx(0.2)


def test_a_candidate_may_cost_what_its_evidence_says_and_a_quarter_more() -> None:
    dearer = find_promise(PLAIN, PLAIN, (evidence("a"), evidence("a", compute_s=0.02)))
    assert dearer.max_cost == pytest.approx(2.5)
    cheaper = find_promise(PLAIN, PLAIN, (evidence("a"), evidence("a", compute_s=0.005)))
    assert cheaper.max_cost == find_promise(PLAIN, PLAIN, ({}, {})).max_cost == 1.25


def test_texts_are_not_compared_row_by_row() -> None:
    text = replace(PLAIN, backend="llm", slo="p99 ttft < 200ms, p50 tpot < 20ms, p99 itl < 1s")
    promise = find_promise(text, text, ({}, {}))
    assert [each.metric for each in promise.latencies] == ["ttft", "tpot"]
    assert (promise.is_text, promise.max_disagreeing, promise.max_cost) == (True, 0.05, None)
    own = find_promise(text, text, ({}, {}), agreement=0.8)
    assert own.max_disagreeing == pytest.approx(0.2)


def test_texts_may_differ_by_the_limits_of_both_evidences() -> None:
    def judged(metric: str, limit: float) -> dict[str, object]:
        return {"accuracy": {"metric": metric, "loss_bound": 0.001, "limit": limit}}

    text = replace(PLAIN, backend="llm")
    for evidences, max_kl in (
        (({}, {}), 0.02),
        (({}, judged("kl", 0.05)), 0.05),
        ((judged("kl", 0.01), judged("kl", 0.05)), 0.06),
        (({}, judged("agreement", 0.05)), 0.02),
    ):
        assert find_promise(text, text, evidences).max_kl == pytest.approx(max_kl)
