"""Metrics of a language model under vLLM's names, with `penstock:` in place of `vllm:`.

Plain counters, with the time as an argument; `text_scrape` makes text of them. `OpenGenerations`
reports the events. Each shard has its own, and the core adds them up. Metrics that every model has
(answers, failures, refusals) are passed on to the model's own metrics. docs/observability.md lists
all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from penstock.errors import Cancelled, NotReady, PenstockError
from penstock.llm.messages import StepReport
from penstock.llm.text_scrape import (
    FIRST_TOKEN_S,
    NEXT_TOKEN_S,
    REQUEST_S,
    STEP_TOKENS,
    scrape,
    token_bounds,
)
from penstock.serving.histogram import Histogram, HistogramRecord
from penstock.serving.metrics import ModelMetrics
from penstock.serving.metrics_record import add_histogram, record_histogram

if TYPE_CHECKING:
    from penstock.llm.generation import Generation, SequenceOutput
    from penstock.wire.frames import EngineReady

# Finish reasons, as in vLLM.
REASONS = ("stop", "length", "abort", "error")
# Attributes that are added up over shards.
SUMMED = (
    "num_prompt_tokens", "num_generated_tokens", "num_asked", "num_cached", "num_preemptions",
    "num_drafted", "num_accepted",
)  # fmt: skip
HISTOGRAMS = (
    "first_token_s", "next_token_s", "mean_token_s", "request_s", "queue_s", "prompt_tokens",
    "generated_tokens", "step_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextRecord:
    """What one shard has counted for one language model."""

    sums: dict[str, int]
    num_ended: dict[str, int]
    histograms: dict[str, HistogramRecord]
    # As the engine told it last, and when, by the monotonic clock; -inf: the shard is idle.
    num_running: int
    num_waiting: int
    cache_use: float
    reported_at: float
    expert_tokens: tuple[int, ...] = ()


decode_record = msgspec.msgpack.Decoder(TextRecord).decode


class TextMetrics:
    """Metrics of one language model in one shard, across restarts of its engine."""

    def __init__(self, model: ModelMetrics) -> None:
        self.model = model
        model.of_kind = self
        model.others = partial(scrape, self, model)
        model.record_others = self._record
        self.num_running = self.num_waiting = 0
        # Share of KV blocks in use.
        self.cache_use = 0.0
        self.num_prompt_tokens = self.num_generated_tokens = 0
        # Prompt tokens looked up in the prefix cache, and found there.
        self.num_asked = self.num_cached = 0
        self.num_preemptions = 0
        # Drafted tokens of speculative decoding, and those that were accepted.
        self.num_drafted = self.num_accepted = 0
        # Tokens of each expert, in all layers together; empty without experts.
        self.expert_tokens: list[int] = []
        self.num_ended = dict.fromkeys(REASONS, 0)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.next_token_s = Histogram(NEXT_TOKEN_S)
        # Mean time per output token of a request, without the first.
        self.mean_token_s = Histogram(NEXT_TOKEN_S)
        self.request_s = Histogram(REQUEST_S)
        self.queue_s = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(())
        self.generated_tokens = Histogram(())
        self.step_tokens = Histogram(STEP_TOKENS)
        self._limits_s = {each.metric: each.limit_s for each in model.objectives}
        # Time of the engine's last report; -inf: no request is open.
        self._reported_at = -math.inf
        self._num_blocks = 0

    # The engine.

    def loaded(self, ready: EngineReady) -> None:
        self._num_blocks = ready.num_blocks
        bounds = token_bounds(ready.max_length)
        if bounds != self.prompt_tokens.bounds:
            self.prompt_tokens, self.generated_tokens = Histogram(bounds), Histogram(bounds)

    def step(self, report: StepReport, now: float) -> None:
        self._reported_at = now
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.cache_use = 1 - report.num_free_blocks / self._num_blocks if self._num_blocks else 0.0
        self.num_preemptions += report.num_preemptions
        self.num_drafted += report.num_drafted
        self.num_accepted += report.num_accepted
        self.num_asked += report.num_asked
        self.num_cached += report.num_cached
        self.model.busy_s += report.busy_s
        self._add_expert_tokens(report.expert_tokens)
        if report.num_computed:
            self.step_tokens.add(report.num_computed)
        for wait_s in report.waits_s:
            self.queue_s.add(wait_s)

    def _add_expert_tokens(self, tokens: Sequence[int]) -> None:
        before = self.expert_tokens or [0] * len(tokens)
        if tokens:
            self.expert_tokens = [sum(each) for each in zip(before, tokens, strict=True)]

    def idle(self) -> None:
        """Zero the gauges: no client waits, and the engine aborts what it still has."""
        self.num_running = self.num_waiting = 0
        self.cache_use = 0.0
        self._reported_at = -math.inf

    # Shards.

    def _record(self) -> bytes:
        record = TextRecord(
            {name: getattr(self, name) for name in SUMMED},
            dict(self.num_ended),
            {name: record_histogram(getattr(self, name)) for name in HISTOGRAMS},
            self.num_running,
            self.num_waiting,
            self.cache_use,
            self._reported_at,
            tuple(self.expert_tokens),
        )
        return msgspec.msgpack.encode(record)

    def add(self, counted: Sequence[TextRecord]) -> None:
        """Add what shards have counted. What the engine told one of them last is true for all."""
        for each in counted:
            for name, value in each.sums.items():
                setattr(self, name, getattr(self, name) + value)
            for reason, count in each.num_ended.items():
                self.num_ended[reason] += count
            for name, histogram in each.histograms.items():
                add_histogram(getattr(self, name), histogram)
            self._add_expert_tokens(each.expert_tokens)
            if each.reported_at > self._reported_at:
                self._reported_at = each.reported_at
                self.num_running, self.num_waiting = each.num_running, each.num_waiting
                self.cache_use = each.cache_use

    # Requests.

    def token(self, generation: Generation, output: SequenceOutput, now: float) -> None:
        """Count a token, before `generation` and `output` are updated."""
        if generation.is_mirror:
            return
        self.num_generated_tokens += 1
        if generation.first_at is None:
            self.num_prompt_tokens += generation.num_prompt
            self.first_token_s.add(now - generation.arrived)
            if self.model.latencies is not None:
                self.model.latencies.add_first(now - generation.arrived)
        if output.last_at is not None:
            self.next_token_s.add(now - output.last_at)

    def finished(self, generation: Generation, now: float) -> None:
        if generation.is_mirror:
            return
        total_s = now - generation.arrived
        reasons = {each.reason for each in generation.outputs}
        # If any of several texts hit the limit, operators want to see that.
        self.num_ended["length" if "length" in reasons else "stop"] += 1
        self._ended(generation, now)
        self.model.answered(total_s, now - generation.admitted)
        for metric in self._missed(generation, now):
            self.model.num_slow[metric] += 1

    def failed(self, generation: Generation, error: PenstockError, now: float) -> None:
        """Count a failure after admission."""
        if generation.is_mirror:
            return
        is_left = isinstance(error, Cancelled | NotReady)
        self.num_ended["abort" if is_left else "error"] += 1
        self._ended(generation, now)
        total_s = max(0.0, now - generation.arrived)
        is_late = self.model.is_late(total_s) or bool(self._missed(generation, now))
        self.model.failed("CANCELED" if is_left else "BACKEND", error, is_late)
        self.model.fail_s += total_s

    def not_admitted(self, generation: Generation, error: PenstockError, now: float) -> None:
        if not generation.is_mirror:
            self.refused(error, now - (generation.arrived or now))

    def refused(self, error: PenstockError, seconds: float) -> None:
        """Count a refusal, before anything was computed."""
        is_late = seconds > self._limits_s.get("ttft", math.inf) or self.model.is_late(seconds)
        self.model.refused(error, is_late=is_late)
        self.model.fail_s += max(0.0, seconds)

    def _missed(self, generation: Generation, now: float) -> list[str]:
        """Return the limits of the SLO on tokens that the request has missed by now."""
        first_at = now if generation.first_at is None else generation.first_at
        spans_s = {"ttft": first_at - generation.arrived, "tpot": generation.mean_token_s or 0.0}
        return [
            metric
            for metric, span_s in spans_s.items()
            if span_s > self._limits_s.get(metric, math.inf)
        ]

    def _ended(self, generation: Generation, now: float) -> None:
        self.request_s.add(now - generation.arrived)
        self.prompt_tokens.add(generation.num_prompt)
        self.generated_tokens.add(sum(each.num_tokens for each in generation.outputs))
        if (mean_s := generation.mean_token_s) is not None:
            self.mean_token_s.add(mean_s)
