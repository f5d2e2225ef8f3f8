"""Test servers of language models, with the benchmark as a streaming client of the OpenAI API."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

from penstock.benchmark import pacer
from penstock.benchmark.pacer import Load, Open
from penstock.benchmark.targets import TargetSpec
from penstock.data import InputSpec
from penstock.llm.settings import settings_of
from penstock.optimizer.candidates import Build
from penstock.optimizer.endpoints import ServedEndpoint, patience_s
from penstock.optimizer.llm.text_prompts import Prompts, write_load
from penstock.optimizer.plan import Plan
from penstock.optimizer.served import LOWEST_RATE
from penstock.slo import Latency, Slo

# All answers have the requested length, so all candidates do the same work.
EXTRA = '{"ignore_eos": true}'
# Requests that a level should have, and the longest time to wait for them.
MIN_REQUESTS, MAX_LEVEL_S = 6, 60.0


class TextEndpoint(ServedEndpoint):
    """Endpoint of the OpenAI API. Each level sends new prompts to the server, written to `file`."""

    probe_s = 20.0
    # Answers take seconds, so a level has few of them: rates cannot be known more precisely.
    precision = 0.15
    is_streaming = True

    def __init__(self, build: Build, prompts: Prompts, file: Path, patience_s: float) -> None:
        super().__init__(build, str(file))
        self._prompts = prompts
        self._patience_s = patience_s
        # Every server gets the same prompts, level by level.
        self._levels = itertools.count()

    def target(self, plan: Plan) -> TargetSpec:
        origin = self.address.partition("/v2/")[0]
        return TargetSpec(
            f"openai+{origin}/v1",
            model=self.build.config.name,
            api="chat" if self._prompts.is_chat else "completions",
            timeout_s=self._patience_s,
            extra=EXTRA,
        )

    def inputs(self, plan: Plan) -> InputSpec:
        # The same prompts again would hit the prefix cache.
        level = next(self._levels)
        write_load(self._prompts, Path(self.data), level)
        return InputSpec(path=self.data, seed=plan.seed + level)

    def level_s(self, plan: Plan, load: Load) -> float:
        """Extend the level if too few requests would arrive in the configured time."""
        if not isinstance(load, Open):
            return plan.duration_s
        enough_s = MIN_REQUESTS / max(LOWEST_RATE, pacer.mean_rate(load))
        return max(plan.duration_s, min(MAX_LEVEL_S, enough_s))

    @property
    def num_clients(self) -> int:
        return settings_of(self.build.config).max_sequences


def patience_of(slo: Slo, num_tokens: int) -> float:
    """Return the request timeout, from the SLO's limits for a whole answer or for its parts."""
    limits = {"latency": math.inf, "ttft": math.inf, "tpot": math.inf}
    for term in slo.terms:
        if isinstance(term, Latency) and term.metric in limits:
            limits[term.metric] = min(limits[term.metric], term.limit_s)
    whole_s = min(limits["latency"], limits["ttft"] + num_tokens * limits["tpot"])
    return patience_s(None if math.isinf(whole_s) else whole_s)
