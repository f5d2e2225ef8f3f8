"""Explains what a model's batcher does and why: the answer of `penstock explain`. Pure.

Reads a Model and changes nothing; `why_small` infers from the last batches why they were not
larger. The dataclasses travel as JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from penstock.config import CPU, BatchPolicy, ModelConfig
from penstock.serving.batches import BatchRecord, Shapes
from penstock.serving.plan import Geometry
from penstock.serving.sequence_batcher import SequenceBatcher
from penstock.serving.slo_batcher import SloBatcher

if TYPE_CHECKING:
    from penstock.serving.model import Model

MAX_SHAPES_SHOWN = 20
# Entries of T(b) shown, the largest; with tokens there are many more.
MAX_RUNGS_SHOWN = 11
# A batch is well filled from this share of the maximum rows.
WELL_FILLED = 0.5
# Causes of this share of the batches are worth a sentence.
NOTEWORTHY = 0.2
# From this many shapes on, they are the reason that requests find no others to batch with.
MANY_SHAPES = 4
# A shorter wait counts as none; the clock is read twice on the way.
AT_ONCE_S = 1e-6
# An event loop with this share of a core has no headroom.
BUSY = 0.9

Mode = Literal["fixed", "slo", "unbatched", "continuous", "ensemble", "sequences"]


@dataclass(frozen=True, slots=True)
class InstanceState:
    index: int
    state: Literal["idle", "busy", "not ready"]
    pid: int
    device: str = CPU
    # Measured after its warm-up; 0: not reported.
    gpu_memory_bytes: int = 0
    # Batches it runs at once: one per instance of the model in its worker.
    num_slots: int = 1


@dataclass(frozen=True, slots=True)
class LaneState:
    """The queued requests of one shape, and what they wait for."""

    shape: str
    num_requests: int
    num_rows: int
    oldest_s: float
    waits_for: str
    # Here and below: 0 without a token budget.
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PastBatch:
    """One batch; see `batches.BatchRecord`."""

    age_s: float
    num_rows: int
    num_requests: int
    shape: str
    batch_wait_s: float
    instance_wait_s: float
    compute_s: float
    duration_s: float
    instance: int
    closed_by: str
    outcome: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SeenShape:
    shape: str
    num_requests: int
    num_rows: int
    num_batches: int


@dataclass(frozen=True, slots=True)
class PaceState:
    """T(b) of one shape, and b*, its target batch; in rows, or in tokens with a token budget."""

    shape: str
    target_size: int
    times_s: dict[int, float]
    arrivals_per_s: float


@dataclass(frozen=True, slots=True)
class ProcessState:
    """A process that takes requests: the core, or a shard. `busy` is its recent share of one core;
    `num_connections` is None if unknown."""

    name: str
    pid: int
    busy: float
    num_connections: int | None = None


@dataclass(frozen=True, slots=True)
class StepState:
    """One step of an ensemble: how often its model was asked, and the sums of the times that its
    requests waited in queues, were computed, and took in all. `version` is empty for the latest.
    A step that fans out asks once for each row; one with a condition may be skipped."""

    model: str
    version: str
    num_answered: int
    num_failed: int
    queue_s: float
    compute_s: float
    total_s: float
    num_skipped: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """`verdicts` say why batches were small; `notes` are the model's own remarks on how it is
    served; `processes` are the server's, not the model's."""

    model: str
    version: str
    state: str
    mode: Mode
    mode_reason: str
    policy: dict[str, str]
    instances: list[InstanceState]
    refused: dict[str, int]
    notes: list[str]
    # Language models have none of these: their sequences join and leave between steps.
    waiting: list[LaneState] = field(default_factory=list)
    recent: list[PastBatch] = field(default_factory=list)
    num_shapes: int = 0
    shapes: list[SeenShape] = field(default_factory=list)
    batch_sizes: dict[int, int] = field(default_factory=dict)
    verdicts: list[str] = field(default_factory=list)
    paces: list[PaceState] = field(default_factory=list)
    processes: list[ProcessState] = field(default_factory=list)
    # How many shards the server has, and why.
    shards: str = ""
    # The last decision on the number of instances, and why; since when it is in memory and what it
    # holds if it is loaded on demand. Empty if the number is fixed.
    scaling: str = ""
    # Of an ensemble, in the order of its configuration.
    steps: list[StepState] = field(default_factory=list)


def who_is_busy(processes: Sequence[ProcessState]) -> list[str]:
    """Return sentences about event loops that are the bottleneck; the core is the first process."""
    core, *shards = processes
    found = []
    if core.busy >= BUSY and not shards:
        found.append(
            f"The core's event loop takes {core.busy:.0%} of a core and takes all requests itself: "
            "penstock serve --shards N leaves that to N processes."
        )
    found += [
        f"{each.name} takes {each.busy:.0%} of a core: more of them (--shards) would share its "
        "clients."
        for each in shards
        if each.busy >= BUSY
    ]
    return found


def explain(model: Model, now: float) -> Explanation:
    config, history, policy = model.config, model.history, model.batcher.policy
    mode, reason = mode_of(config, policy)
    paces = _paces(model)
    target = paces[0].target_size if paces else None
    metrics, notes = model.metrics, list(model.notes)
    if metrics.padded_bytes:
        share = 100 * metrics.padding_bytes / metrics.padded_bytes
        text = f"requests were padded to buckets; the filling is {share:.0f} % of their bytes"
        notes.append(text)
    if isinstance(model.batcher, SequenceBatcher):
        notes.append(model.batcher.describe())
    devices = [device for device, _ in config.places]
    # Places beyond those of the configuration are left from a larger number of instances.
    devices += [CPU] * (len(model.workers) - len(devices))
    instances = [
        InstanceState(w.index, w.state, 0, devices[w.index], 0, w.num_slots) for w in model.workers
    ]
    if model.host is not None:
        # Of the places of a model that is scaled, those that are used. A shard shows them all: the
        # core knows.
        instances = [
            replace(instances[each.index], pid=each.pid, gpu_memory_bytes=each.gpu_memory_bytes)
            for each in model.processes
        ]
    return Explanation(
        model=config.name,
        version=config.version,
        state=model.shown_state,
        mode=mode,
        mode_reason=reason,
        policy=describe_policy(config, policy),
        instances=instances,
        waiting=_waiting(model, instances, now),
        recent=[
            PastBatch(now - r.ended, r.num_rows, r.num_requests, show_shapes(r.shapes), *r[4:])
            for r in reversed(history.recent)
        ],
        num_shapes=len(history.shapes),
        shapes=_shapes(model),
        batch_sizes=dict(sorted(metrics.batch_sizes.items())),
        verdicts=why_small(policy, list(history.recent), len(history.shapes), target),
        paces=paces,
        refused={name: count for name, count in metrics.num_refused.items() if count},
        notes=notes,
        scaling="" if model.host is None else model.host.demand.describe(),
    )


def mode_of(config: ModelConfig, policy: BatchPolicy) -> tuple[Mode, str]:
    """Return the batching mode and its reason. `policy` is the batcher's."""
    if config.sequences is not None:
        strategy = "direct" if config.sequences.is_direct else "oldest"
        slots = f"{config.num_sequence_slots} slots in each instance"
        return "sequences", f"sequence_batching, {strategy}: {slots}"
    if config.max_batch_size == 0:
        return "unbatched", "max_batch_size is 0: the model has no batch dimension"
    if config.batching.is_dynamic and not policy.is_dynamic:
        return "unbatched", "what was found at load; see the note"
    if policy.slo_latency_s is not None:
        text = f"penstock.slo promises an answer within {_ms(policy.slo_latency_s)}"
        if not policy.is_dynamic:
            text += "; without dynamic_batching each request runs by itself"
        return "slo", text
    if not policy.is_dynamic:
        return "unbatched", "config.pbtxt has no dynamic_batching"
    if policy.max_batch_size <= 1:
        return "unbatched", "max_batch_size is 1"
    return "fixed", "dynamic_batching without penstock.slo: Triton's rules"


def describe_policy(config: ModelConfig, policy: BatchPolicy) -> dict[str, str]:
    """Describe the policy in force; unset or ignored fields are left out."""
    queue = policy.policies[0]
    preferred = ", ".join(map(str, policy.preferred_batch_sizes)) if policy.is_dynamic else ""
    delay_s = policy.max_queue_delay_s if policy.is_dynamic else 0.0
    timeout = f"{_ms(queue.default_timeout_s)}, then {queue.timeout_action}"
    told = {
        "max_batch_size": str(config.max_batch_size),
        "max_tokens": "" if policy.max_tokens is None else str(policy.max_tokens),
        "preferred_batch_size": preferred,
        "max_queue_delay": _ms(delay_s) if delay_s else "",
        "SLO": _ms(policy.slo_latency_s) if policy.slo_latency_s is not None else "",
        "preserve_ordering": "yes" if policy.preserve_ordering else "",
        "priority_levels": str(policy.num_priorities) if policy.num_priorities else "",
        "queue time-out": timeout if queue.default_timeout_s else "",
        "max_queue_size": str(queue.max_queue_size or policy.max_pending),
        "max_wait": "" if config.sequences is not None else _max_wait(policy),
        "max_sequence_idle": "" if config.sequences is None else _ms(config.sequences.max_idle_s),
    }
    return {name: text for name, text in told.items() if text}


def _max_wait(policy: BatchPolicy) -> str:
    if policy.slo_latency_s is not None:
        return ""
    if policy.max_wait_s is not None:
        return _ms(policy.max_wait_s) if policy.max_wait_s else "unlimited"
    queue = policy.policies[0]
    if queue.default_timeout_s or queue.max_queue_size:
        return ""
    return "the larger of 1 s and 10 times the largest batch"


def why_small(
    policy: BatchPolicy, recent: Sequence[BatchRecord], num_shapes: int, target_size: int | None
) -> list[str]:
    """Return sentences, the most important first. `target_size` is b* in slo mode."""
    if not recent:
        return ["No batch has run yet."]
    if policy.max_batch_size <= 1:
        return ["max_batch_size is at most 1: every request runs by itself."]
    if not policy.is_dynamic:
        return [
            "dynamic_batching is not set, or not possible: every request runs by itself, with "
            f"{_rows(_mean_rows(recent))}."
        ]
    mean_rows = _mean_rows(recent)
    per_request = sum(r.num_rows for r in recent) / sum(r.num_requests for r in recent)
    most = policy.max_batch_size
    if policy.max_tokens is not None:
        mean_tokens = sum(record.num_tokens for record in recent) / len(recent)
        if mean_tokens >= WELL_FILLED * policy.max_tokens:
            text = f"{mean_tokens:.0f} of at most {policy.max_tokens} tokens"
            return [f"Batches are well filled: {text} on average, in {_rows(mean_rows)}."]
    if mean_rows >= WELL_FILLED * most:
        text = f"Batches are well filled: {mean_rows:.1f} of at most {most} rows on average."
        if per_request > 1.5:
            text += f" Requests carry {per_request:.1f} rows each already."
        return [text]
    found = [*_by_close(policy, recent, num_shapes, target_size), *_by_load(recent)]
    found.sort(key=lambda item: -item[0])
    summary = f"Batches hold {mean_rows:.1f} rows on average; at most {most} are allowed."
    return [summary, *(sentence for _, sentence in found)]


def _by_load(recent: Sequence[BatchRecord]) -> list[tuple[float, str]]:
    """Return sentences about batches that emptied the queue, with their shares."""
    took_all = [r for r in recent if r.closed_by == "queue empty"]
    at_once = [r for r in took_all if r.instance_wait_s < AT_ONCE_S]
    after_wait = [r for r in took_all if r.instance_wait_s >= AT_ONCE_S]
    found: list[tuple[float, str]] = []
    if (share := len(at_once) / len(recent)) >= NOTEWORTHY:
        text = f"Instances were idle when requests came: {share:.0%} of the batches left at once, "
        text += f"with {_rows(_mean_rows(at_once))}; more load would batch by itself."
        found.append((share, text))
    if (share := len(after_wait) / len(recent)) >= NOTEWORTHY:
        num_requests = sum(record.num_requests for record in after_wait) / len(after_wait)
        text = f"Everything that waited went along in {share:.0%} of the batches: about "
        text += f"{num_requests:.1f} requests come while a batch runs; more of them in flight "
        found.append((share, text + "would make larger batches."))
    return found


def _by_close(
    policy: BatchPolicy, recent: Sequence[BatchRecord], num_shapes: int, target_size: int | None
) -> list[tuple[float, str]]:
    """Return sentences about what closed the batches, with their shares."""
    preferred = ", ".join(map(str, policy.preferred_batch_sizes))
    unit = "rows" if policy.max_tokens is None else "tokens"
    sentences = {
        "other shape": f"{num_shapes} shapes were seen and each has its own lane: {{}} of the "
        "batches left while only other shapes waited; pad on the client, or declare paddable axes.",
        "preferred size": f"{{}} of the batches closed at a preferred size ({preferred}); take "
        "preferred_batch_size out if larger ones are wanted.",
        "delay expired": _by_delay(policy, recent),
        "SLO target": f"{{}} of the batches closed at b* = {target_size} {unit}: a larger batch "
        "would take too long for the SLO.",
        "token budget": f"{{}} of the batches closed at the budget of {policy.max_tokens} tokens "
        "(penstock.max_tokens): the next request had more than were left.",
        "SLO deadline": "{} of the batches closed because one more request would have made the "
        "most urgent one late.",
        "rerun": "{} of the batches were requests that ran again alone after a failure.",
        "no room": "{} of the batches found no room for more in shared memory; raise "
        "penstock.max_slabs or penstock.spill_bytes.",
    }
    found: list[tuple[float, str]] = []
    for closed_by, sentence in sentences.items():
        share = sum(record.closed_by == closed_by for record in recent) / len(recent)
        if share >= NOTEWORTHY:
            found.append((share, sentence.format(f"{share:.0%}")))
    return found


def _by_delay(policy: BatchPolicy, recent: Sequence[BatchRecord]) -> str:
    """Explain expired delays; with many shapes, requests of the same shape are rare."""
    delay = f"max_queue_delay ({_ms(policy.max_queue_delay_s)})"
    num_shapes = len({record.shapes for record in recent})
    if num_shapes < MANY_SHAPES:
        why = "too few requests come in that time"
        return f"{{}} of the batches went when {delay} was over: {why}."
    return (
        f"The last batches had {num_shapes} shapes, and requests share a batch with their own "
        f"shape only: {{}} of the batches went when {delay} was over; pad on the client, or "
        "declare paddable axes."
    )


def _waiting(model: Model, instances: Sequence[InstanceState], now: float) -> list[LaneState]:
    batcher = model.batcher
    states: list[LaneState] = []
    if num := batcher.num_reruns:
        states.append(LaneState("any", num, num, 0.0, "an instance, to run again alone"))
    for lane in batcher.waiting():
        waited_s = now - min(request.timings.queued for request in lane.walk())
        shape, why = _shape(lane.geometry), waits_for(batcher.policy, instances, waited_s)
        counts = lane.num_live, sum(lane.rows)
        states.append(LaneState(shape, *counts, waited_s, why, sum(lane.tokens)))
    return states


def waits_for(policy: BatchPolicy, instances: Sequence[InstanceState], oldest_s: float) -> str:
    """Return why the requests of a lane have not been dispatched."""
    if not any(each.state != "not ready" for each in instances):
        return "an instance: none is ready"
    if not any(each.state == "idle" for each in instances):
        num_busy = sum(each.state == "busy" for each in instances)
        return f"an idle instance ({num_busy} busy)"
    left_s = policy.max_queue_delay_s - oldest_s
    if policy.is_dynamic and policy.slo_latency_s is None and left_s > 0:
        sizes = ", ".join(map(str, policy.preferred_batch_sizes))
        company = f"a preferred size ({sizes})" if sizes else "company"
        return f"{company}, for at most {_ms(left_s)} more"
    return "nothing: it leaves now"


def _paces(model: Model) -> list[PaceState]:
    """Return what slo mode knows, the busiest shape first."""
    batcher = model.batcher
    if not isinstance(batcher, SloBatcher):
        return []
    paces = [
        PaceState(
            _shape(geometry),
            pace.target_size,
            dict(list(pace.times.means_s.items())[-MAX_RUNGS_SHOWN:]),
            pace.arrivals_per_s,
        )
        for geometry, pace in batcher.paces.items()
    ]
    return sorted(paces, key=lambda pace: -pace.arrivals_per_s)[:MAX_SHAPES_SHOWN]


def _shapes(model: Model) -> list[SeenShape]:
    """Return the most frequent shapes."""
    history = model.history
    ordered = sorted(history.shapes.items(), key=lambda item: -item[1].num_requests)
    shown = [(show_shapes(shapes), seen) for shapes, seen in ordered[:MAX_SHAPES_SHOWN]]
    if history.others.num_batches:
        shown.append(("others", history.others))
    return [SeenShape(shape, *astuple(seen)) for shape, seen in shown]


def _shape(geometry: object) -> str:
    return show_shapes(geometry.row_shapes if isinstance(geometry, Geometry) else ())


def show_shapes(shapes: Shapes) -> str:
    """Format the shapes of one row, input by input."""
    return " ".join("[" + ",".join(map(str, shape)) + "]" for shape in shapes)


def _mean_rows(records: Sequence[BatchRecord]) -> float:
    return sum(record.num_rows for record in records) / len(records)


def _rows(count: float) -> str:
    return "1 row" if count == 1 else f"{count:.1f} rows"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
