"""What a candidate promises, from its evidence and from that of the stable version. Pure.

A promise is a set of limits on shares: of late requests, failures and rows that disagree. Knows
neither how they are counted nor how they are tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from penstock import slo as slos
from penstock.config import LLM, ModelConfig
from penstock.optimizer.llm import likelihoods
from penstock.serving.split_counts import LATENCY, TPOT, TTFT, Limit

# Share of failed requests: three nines, as services commonly promise.
MAX_FAILED = 0.001
# Share of rows that may disagree if no evidence says how many do; as in `optimizer.output_checks`.
MAX_DISAGREEING = 0.05
# At least this share may disagree, whatever the evidence says: its examples were few, too.
LEAST_DISAGREEING = 0.01
# Compute time of a row over the stable version's, in addition to what the evidence expects.
COST_MARGIN = 1.25
# KL divergence per token, in nats, that texts may have from the original's if no evidence has a
# limit: the optimizer's default.
MAX_KL = likelihoods.DEFAULT.limit
# Metrics of single requests that are counted.
COUNTED = {LATENCY: LATENCY, TTFT: TTFT, TPOT: TPOT}


@dataclass(frozen=True, slots=True)
class LatencyPromise:
    """At most `share` of the values exceed the limit; without a share, their mean does not."""

    text: str
    metric: str
    limit_s: float
    share: float | None


@dataclass(frozen=True, slots=True)
class RolloutPromise:
    # Empty: latency is compared with the stable version's.
    latencies: tuple[LatencyPromise, ...] = ()
    # Where the latencies come from, for people.
    source: str = ""
    max_failed: float = MAX_FAILED
    # None: rows cannot be compared.
    max_disagreeing: float | None = MAX_DISAGREEING
    agreement_source: str = ""
    # Highest ratio of compute times at equal batch sizes; None: not compared.
    max_cost: float | None = COST_MARGIN
    cost_source: str = ""
    is_text: bool = False
    # KL divergence per token by which texts of both versions may differ.
    max_kl: float = MAX_KL

    @property
    def limits(self) -> tuple[Limit, ...]:
        return tuple((each.metric, each.limit_s) for each in self.latencies)


Evidence = Mapping[str, object]


class _Accuracy(msgspec.Struct):
    """What is read of `optimizer.accuracy.Judgement`."""

    metric: str
    loss_bound: float
    limit: float = 0.0


class _Measured(msgspec.Struct):
    """What is read of `optimizer.results.ServedMeasurement`."""

    phases: dict[str, float]
    rows_per_batch: float


def find_promise(
    stable: ModelConfig,
    candidate: ModelConfig,
    evidences: tuple[Evidence, Evidence],
    agreement: float | None = None,
) -> RolloutPromise:
    """Return the promise of a candidate. `evidences` are those of the stable version and of the
    candidate, empty without any. `agreement` overrides that of the evidence."""
    is_text = candidate.backend == LLM
    latencies, source = _latencies(stable, candidate)
    disagreeing: float | None
    disagreeing, agreement_source = _disagreeing(evidences)
    if is_text:
        # What evidence says of them is about tokens, not about whole texts.
        disagreeing, agreement_source = MAX_DISAGREEING, "the default for texts"
    if agreement is not None:
        disagreeing, agreement_source = 1 - agreement, "the promotion's own limit"
    cost, cost_source = _cost(evidences)
    return RolloutPromise(
        latencies,
        source,
        max_disagreeing=disagreeing,
        agreement_source=agreement_source,
        max_cost=None if is_text else cost,
        cost_source=cost_source,
        is_text=is_text,
        max_kl=_max_kl(evidences),
    )


def _latencies(
    stable: ModelConfig, candidate: ModelConfig
) -> tuple[tuple[LatencyPromise, ...], str]:
    for config, whose in ((candidate, "the candidate's"), (stable, "the stable version's")):
        if config.slo in ("", "off"):
            continue
        terms = [each for each in slos.parse(config.slo).terms if isinstance(each, slos.Latency)]
        found = tuple(_latency(each) for each in terms if each.metric in COUNTED)
        if found:
            kind = "evidence" if config.is_slo_from_evidence else "configuration"
            return found, f"the SLO of {whose} {kind}"
    return (), "no SLO is known; latency is compared with the stable version's"


def _latency(term: slos.Latency) -> LatencyPromise:
    share = None
    if term.statistic != "mean":
        # Rounded: 1 - 0.99 is not 0.01.
        share = round(1 - float(term.statistic[1:]) / 100, 6)
    return LatencyPromise(str(term), COUNTED[term.metric], term.limit_s, share)


def _disagreeing(evidences: tuple[Evidence, Evidence]) -> tuple[float, str]:
    """Return the share of rows on which the versions may disagree. Each may differ from the
    original that both were made from; if it is another one, nothing is known."""
    stable, candidate = evidences
    known = [_bound(each) for each in evidences]
    sources = [_source(each) for each in evidences]
    if not candidate or known[1] is None:
        return MAX_DISAGREEING, "the default, as the evidence has no agreement"
    if stable and sources[0] != sources[1]:
        return MAX_DISAGREEING, "the default, as the versions were made from different originals"
    total = sum(each for each in known if each is not None)
    if total >= 1:
        return MAX_DISAGREEING, "the default, as the evidence allows any disagreement"
    return max(LEAST_DISAGREEING, total), "the agreement of the evidence"


def _bound(evidence: Evidence) -> float | None:
    """Return the upper bound of the share of rows that differ from the original's."""
    judged = _accuracy(evidence)
    if judged is None or judged.metric != "agreement":
        return None
    return min(max(0.0, judged.loss_bound), 1.0)


def _max_kl(evidences: tuple[Evidence, Evidence]) -> float:
    """Return the KL divergence that both versions may have from their original, added up."""
    judged = map(_accuracy, evidences)
    limits = [each.limit for each in judged if each is not None and each.metric == "kl"]
    return sum(limits) or MAX_KL


def _accuracy(evidence: Evidence) -> _Accuracy | None:
    try:
        return msgspec.convert(evidence.get("accuracy"), _Accuracy)
    except msgspec.ValidationError:
        return None


def _source(evidence: Evidence) -> object:
    lineage = evidence.get("lineage")
    return lineage.get("source_digest") if isinstance(lineage, dict) else None


def _cost(evidences: tuple[Evidence, Evidence]) -> tuple[float, str]:
    """Return how much longer a row may compute than in the stable version."""
    times = [_compute_s(each) for each in evidences]
    if times[0] and times[1]:
        expected = max(1.0, times[1] / times[0])
        return COST_MARGIN * expected, "the compute times of both evidences, and 25 %"
    return COST_MARGIN, "the stable version's, and 25 %"


def _compute_s(evidence: Evidence) -> float | None:
    """Return the seconds of a batch for each of its rows, as measured."""
    try:
        found = msgspec.convert(evidence.get("measured"), _Measured)
    except msgspec.ValidationError:
        return None
    if found.rows_per_batch <= 0:
        return None
    return found.phases.get("compute", 0.0) / found.rows_per_batch or None
