"""Metrics of a language model under vLLM's names, with `penstock:` in place of `vllm:`.

Plain counters, with the time as an argument; `text_scrape` makes text of them. `OpenGenerations`
and `EngineSupervisor` report the events. Metrics that every model has (answers, failures, refusals)
are passed on to the model's own metrics. docs/observability.md lists all of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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
from penstock.serving.metrics import Histogram, ModelMetrics

if TYPE_CHECKING:
    from penstock.llm.generation import Generation, SequenceOutput
    from penstock.llm.messages import Ready

# Finish reasons, as in vLLM.
REASONS = ("stop", "length", "abort", "error")
# Totals of an engine that has not reported yet.
NOTHING = StepReport([], 0, 0, 0, 0, 0.0)


class TextMetrics:
    """Metrics of one language model, across restarts of its engine."""

    def __init__(self, model: ModelMetrics) -> None:
        self.model = model
        model.others = partial(scrape, self, model)
        self.num_running = self.num_waiting = 0
        # Share of KV blocks in use.
        self.cache_use = 0.0
        self.num_prompt_tokens = self.num_generated_tokens = 0
        # Prompt tokens looked up in the prefix cache, and found there.
        self.num_asked = self.num_cached = 0
        self.num_preemptions = 0
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
        self.last_report = NOTHING
        self._num_blocks = 0

    # The engine.

    def loaded(self, ready: Ready) -> None:
        """Reset the totals for a new engine."""
        self.last_report = NOTHING
        self._num_blocks = ready.num_blocks
        bounds = token_bounds(ready.max_length)
        if bounds != self.prompt_tokens.bounds:
            self.prompt_tokens, self.generated_tokens = Histogram(bounds), Histogram(bounds)

    def step(self, report: StepReport) -> None:
        last = self.last_report
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.cache_use = 1 - report.num_free_blocks / self._num_blocks if self._num_blocks else 0.0
        self.num_preemptions += report.num_preemptions - last.num_preemptions
        self.num_asked += report.num_asked - last.num_asked
        self.num_cached += report.num_cached - last.num_cached
        if report.num_computed > last.num_computed:
            self.step_tokens.add(report.num_computed - last.num_computed)
        for wait_s in report.waits_s:
            self.queue_s.add(wait_s)
        self.last_report = report

    def idle(self) -> None:
        """Zero the gauges: no client waits, and the engine aborts what it still has."""
        self.num_running = self.num_waiting = 0
        self.cache_use = 0.0

    # Requests.

    def token(self, generation: Generation, output: SequenceOutput, now: float) -> None:
        """Count a token, before `generation` and `output` are updated."""
        self.num_generated_tokens += 1
        if generation.first_at is None:
            self.num_prompt_tokens += generation.num_prompt
            self.first_token_s.add(now - generation.arrived)
        if output.last_at is not None:
            self.next_token_s.add(now - output.last_at)

    def finished(self, generation: Generation, now: float) -> None:
        total_s = now - generation.arrived
        reasons = {each.reason for each in generation.outputs}
        # If any of several texts hit the limit, operators want to see that.
        self.num_ended["length" if "length" in reasons else "stop"] += 1
        self._ended(generation, now)
        self.model.answered(total_s, now - generation.admitted)

    def failed(self, generation: Generation, error: PenstockError, now: float) -> None:
        """Count a failure after admission."""
        is_left = isinstance(error, Cancelled | NotReady)
        self.num_ended["abort" if is_left else "error"] += 1
        self._ended(generation, now)
        self.model.failed("CANCELED" if is_left else "BACKEND")
        self.model.fail_s += max(0.0, now - generation.arrived)

    def refused(self, error: PenstockError, seconds: float) -> None:
        """Count a refusal, before anything was computed."""
        self.model.refused(error)
        self.model.fail_s += max(0.0, seconds)

    def _ended(self, generation: Generation, now: float) -> None:
        self.request_s.add(now - generation.arrived)
        self.prompt_tokens.add(generation.num_prompt)
        numbers = [each.num_tokens for each in generation.outputs]
        self.generated_tokens.add(sum(numbers))
        first_at, last_at = generation.first_at, generation.last_at
        if first_at is not None and last_at is not None and max(numbers) > 1:
            self.mean_token_s.add((last_at - first_at) / (max(numbers) - 1))
