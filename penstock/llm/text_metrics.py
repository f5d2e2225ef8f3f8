"""Metrics of a language model under vLLM's names, with `penstock:` in place of `vllm:`.

Plain counters, with the time as an argument; text is made only for a scrape. `OpenGenerations` and
`EngineSupervisor` report the events. Metrics that every model has (answers, failures, refusals) are
passed on to the model's own metrics. docs/observability.md lists all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from penstock.errors import Cancelled, NotReady, PenstockError
from penstock.llm.messages import StepReport
from penstock.serving.metrics import Histogram, ModelMetrics
from penstock.serving.scrape import ScrapeLines

if TYPE_CHECKING:
    from penstock.llm.generation import Generation, SequenceOutput
    from penstock.llm.messages import Ready

PREFIX = "penstock:"
# Why an engine ended: it crashed, or it was killed after being silent for too long.
Death = Literal["crash", "hang"]
# Finish reasons, as in vLLM.
REASONS = ("stop", "length", "abort", "error")
# Histogram bounds are those of vLLM, so that its dashboards work.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
NEXT_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
STEP_TOKENS = (1.0, *(float(8 << power) for power in range(12)))


def token_bounds(max_length: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 and so on, up to the longest text."""
    found = []
    power = 1
    while power <= max_length:
        found += [float(step * power) for step in (1, 2, 5) if step * power <= max_length]
        power *= 10
    return tuple(found)


# Totals of an engine that has not reported yet.
NOTHING = StepReport([], 0, 0, 0, 0, 0.0)
# Numbers of a scrape: name, kind, help and attribute.
NUMBERS = (
    ("num_requests_running", "gauge", "Texts that steps compute", "num_running"),
    ("num_requests_waiting", "gauge", "Texts that wait for it", "num_waiting"),
    (
        "kv_cache_usage_perc",
        "gauge",
        "Share of the blocks for keys and values in use (0 to 1)",
        "cache_use",
    ),
    ("prompt_tokens_total", "counter", "Tokens of prompts", "num_prompt_tokens"),
    ("generation_tokens_total", "counter", "Tokens generated", "num_generated_tokens"),
    (
        "prefix_cache_queries_total",
        "counter",
        "Tokens of prompts that were looked for in the cache",
        "num_asked",
    ),
    ("prefix_cache_hits_total", "counter", "Tokens that were found there", "num_cached"),
    (
        "num_preemptions_total",
        "counter",
        "Texts that gave their blocks up to others",
        "num_preemptions",
    ),
)
# Histograms of a scrape: name, help and attribute.
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Seconds to the first token", "first_token_s"),
    ("inter_token_latency_seconds", "Seconds from one token to the next", "next_token_s"),
    (
        "request_time_per_output_token_seconds",
        "Mean seconds of a request's tokens after the first",
        "mean_token_s",
    ),
    ("e2e_request_latency_seconds", "Seconds of a request", "request_s"),
    ("request_queue_time_seconds", "Seconds until a request is begun", "queue_s"),
    ("request_prompt_tokens", "Tokens of a prompt", "prompt_tokens"),
    ("request_generation_tokens", "Tokens generated for a request", "generated_tokens"),
    ("iteration_tokens_total", "Tokens that a step computes", "step_tokens"),
)


class TextMetrics:
    """Metrics of one language model, across restarts of its engine."""

    def __init__(self, model: ModelMetrics) -> None:
        self._model = model
        model.others = self.families
        self.num_running = 0
        self.num_waiting = 0
        # Share of KV blocks in use.
        self.cache_use = 0.0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_asked = 0
        self.num_cached = 0
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
        self._reported = NOTHING
        self._num_blocks = 0

    # The engine.

    def loaded(self, ready: Ready) -> None:
        """Reset the totals for a new engine."""
        self._reported = NOTHING
        self._num_blocks = ready.num_blocks
        bounds = token_bounds(ready.max_length)
        if bounds != self.prompt_tokens.bounds:
            self.prompt_tokens, self.generated_tokens = Histogram(bounds), Histogram(bounds)

    def step(self, report: StepReport) -> None:
        last = self._reported
        self.num_running, self.num_waiting = report.num_running, report.num_waiting
        self.cache_use = 1 - report.num_free_blocks / self._num_blocks if self._num_blocks else 0.0
        self.num_preemptions += report.num_preemptions - last.num_preemptions
        self.num_asked += report.num_asked - last.num_asked
        self.num_cached += report.num_cached - last.num_cached
        if report.num_computed > last.num_computed:
            self.step_tokens.add(report.num_computed - last.num_computed)
        for wait_s in report.waits_s:
            self.queue_s.add(wait_s)
        self._reported = report

    def idle(self) -> None:
        """Zero the gauges: no client waits, and the engine aborts what it still has."""
        self.num_running = self.num_waiting = 0
        self.cache_use = 0.0

    def died(self, cause: Death) -> None:
        self._model.num_deaths[cause] += 1

    def restarted(self) -> None:
        self._model.num_restarts += 1

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
        self._model.answered(total_s, now - generation.admitted)

    def failed(self, generation: Generation, error: PenstockError, now: float) -> None:
        """Count a failure after admission."""
        is_left = isinstance(error, Cancelled | NotReady)
        self.num_ended["abort" if is_left else "error"] += 1
        self._ended(generation, now)
        self._model.failed("CANCELED" if is_left else "BACKEND")
        self._model.fail_s += max(0.0, now - generation.arrived)

    def refused(self, error: PenstockError, seconds: float) -> None:
        """Count a refusal, before anything was computed."""
        self._model.refused(error)
        self._model.fail_s += max(0.0, seconds)

    def _ended(self, generation: Generation, now: float) -> None:
        self.request_s.add(now - generation.arrived)
        self.prompt_tokens.add(generation.num_prompt)
        numbers = [each.num_tokens for each in generation.outputs]
        self.generated_tokens.add(sum(numbers))
        first_at, last_at = generation.first_at, generation.last_at
        if first_at is not None and last_at is not None and max(numbers) > 1:
            self.mean_token_s.add((last_at - first_at) / (max(numbers) - 1))

    # Scrape.

    def families(self) -> Sequence[ScrapeLines]:
        model = self._model
        labels = {"model_name": model.name, "version": model.version, **model.tags}
        ended = [({**labels, "finished_reason": why}, n) for why, n in self.num_ended.items()]
        name, text = f"{PREFIX}request_success_total", "Requests that ended, by why"
        return [
            *(
                ScrapeLines.of(
                    PREFIX + name, text, kind, [(labels, round(getattr(self, field), 6))]
                )
                for name, kind, text, field in NUMBERS
            ),
            ScrapeLines.of(name, text, "counter", ended),
            *(
                ScrapeLines.of_histograms(PREFIX + name, text, [(labels, getattr(self, field))])
                for name, text, field in HISTOGRAMS
            ),
        ]
