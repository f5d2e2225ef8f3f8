"""What a scrape shows of a language model's metrics: names, help and histogram bounds of vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.serving.metrics import ModelMetrics
from penstock.serving.scrape import ScrapeLines

if TYPE_CHECKING:
    from penstock.llm.text_metrics import TextMetrics

PREFIX = "penstock:"
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


# By kind: name, help and attribute.
NUMBERS = {
    "gauge": (
        ("num_requests_running", "Texts that steps compute", "num_running"),
        ("num_requests_waiting", "Texts that wait for it", "num_waiting"),
        ("kv_cache_usage_perc", "Share of KV blocks in use (0 to 1)", "cache_use"),
    ),
    "counter": (
        ("prompt_tokens_total", "Tokens of prompts", "num_prompt_tokens"),
        ("generation_tokens_total", "Tokens generated", "num_generated_tokens"),
        ("prefix_cache_queries_total", "Tokens of prompts looked for in the cache", "num_asked"),
        ("prefix_cache_hits_total", "Tokens that were found there", "num_cached"),
        ("num_preemptions_total", "Texts that gave their blocks up to others", "num_preemptions"),
        ("spec_decode_num_draft_tokens_total", "Tokens that were drafted", "num_drafted"),
        ("spec_decode_num_accepted_tokens_total", "Drafts that were kept", "num_accepted"),
    ),
}
MEAN_TOKEN = "request_time_per_output_token_seconds"
HISTOGRAMS = (
    ("time_to_first_token_seconds", "Seconds to the first token", "first_token_s"),
    ("inter_token_latency_seconds", "Seconds from one token to the next", "next_token_s"),
    (MEAN_TOKEN, "Mean seconds of a request's tokens after the first", "mean_token_s"),
    ("e2e_request_latency_seconds", "Seconds of a request", "request_s"),
    ("request_queue_time_seconds", "Seconds until a request is begun", "queue_s"),
    ("request_prompt_tokens", "Tokens of a prompt", "prompt_tokens"),
    ("request_generation_tokens", "Tokens generated for a request", "generated_tokens"),
    ("iteration_tokens_total", "Tokens that a step computes", "step_tokens"),
)


def scrape(metrics: TextMetrics, model: ModelMetrics) -> Sequence[ScrapeLines]:
    labels = {"model_name": model.name, "version": model.version, **model.tags}
    ended = [({**labels, "finished_reason": why}, n) for why, n in metrics.num_ended.items()]
    name, text = f"{PREFIX}request_success_total", "Requests that ended, by why"
    numbers = [
        ScrapeLines.of(PREFIX + name, text, kind, [(labels, round(getattr(metrics, field), 6))])
        for kind, rows in NUMBERS.items()
        for name, text, field in rows
    ]
    histograms = [
        ScrapeLines.of_histograms(PREFIX + name, text, [(labels, getattr(metrics, field))])
        for name, text, field in HISTOGRAMS
    ]
    lines = [*numbers, ScrapeLines.of(name, text, "counter", ended), *histograms]
    if metrics.expert_tokens:
        text = "Tokens that an expert of a mixture has computed, in all layers together"
        loads = [
            ({**labels, "expert": f"{number}"}, num)
            for number, num in enumerate(metrics.expert_tokens)
        ]
        lines.append(ScrapeLines.of(f"{PREFIX}expert_tokens_total", text, "counter", loads))
    return lines
