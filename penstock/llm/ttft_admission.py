"""Refuse requests whose first token would come later than the TTFT target.

Pure: it predicts from the scheduler's queue and the step time model. `Engine` asks it.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec.structs import replace

from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.llm.messages import GenerateRequest
from penstock.llm.pace import StepTimeModel, StepWork
from penstock.llm.scheduler import Scheduler
from penstock.llm.sequence import Sequence

PROBE_EVERY = 50
IDLE = StepWork(0, 0)


@dataclass(slots=True)
class TtftAdmission:
    scheduler: Scheduler
    pace: StepTimeModel
    # Requests that were too slow even alone; counted to let a probe through.
    num_too_slow: int = 0

    def refusal(
        self, request: GenerateRequest, running: StepWork, usual: float | None
    ) -> PenstockError | None:
        """Return why the request is refused. `running`: a decode step of the running sequences;
        `usual`: the tokens that a sequence generates on average, if known."""
        promised_s, scheduler = self.pace.targets.ttft_s, self.scheduler
        assert promised_s is not None
        before = [*scheduler.running, *scheduler.waiting]
        if (refusal := self._refusal_alone(request, promised_s)) is not None or not before:
            return refusal
        lefts = [each.num_left for each in before if not each.num_generated]
        own = len(request.tokens) + request.num_following
        if scheduler.shares_prompts:
            # Prompts share each step evenly, so others get at most as much as this one meanwhile.
            lefts = [min(each, own) for each in lefts]
        first_s = self.first_token_s(sum(lefts) + own, running)
        first_s += self._steps_to_a_place(usual) * self.pace.step_s(running)
        if first_s <= promised_s:
            return None
        text = f"the first token would come after {first_s:.2g} s"
        return Overloaded(text, first_s - promised_s, "predicted_late")

    def first_token_s(self, num_tokens: int, running: StepWork) -> float:
        """Predict the time to first token of a prompt that arrives now, while `running` decodes;
        `num_tokens` are those of prompts, up to its last one."""
        budget = self.pace.max_tokens(running, max(1, num_tokens))
        num_steps = -(-num_tokens // max(1, budget - running.num_generating))
        return num_steps * self.pace.step_s(running) + num_tokens * self.pace.prompt_token_s

    def _refusal_alone(self, request: GenerateRequest, promised_s: float) -> PenstockError | None:
        """Refuse a prompt that takes too long even on an idle server, where a retry is pointless.
        One in `PROBE_EVERY` is let through, as the machine may have become faster."""
        num_prompt = len(request.tokens)
        if self.first_token_s(num_prompt, IDLE) <= promised_s:
            return None
        alone_s = self.first_token_s(num_prompt - self._num_cached(request), IDLE)
        if alone_s <= promised_s:
            return None
        self.num_too_slow += 1
        if self.num_too_slow % PROBE_EVERY == 0:
            return None
        return InvalidRequest(
            f"a prompt of {num_prompt} tokens takes {alone_s:.2g} s until its first token, also "
            f"on an idle server; expected at most {promised_s:.3g} s (penstock.ttft_ms); send a "
            "shorter prompt"
        )

    def _num_cached(self, request: GenerateRequest) -> int:
        if request.params.num_prompt_logprobs is not None:
            return 0
        size = self.scheduler.pool.block_size
        params = replace(request.params, max_tokens=1)
        keys = Sequence(-1, list(request.tokens), params).keys(len(request.tokens) - 1, size)
        return len(self.scheduler.pool.find(keys)) * size

    def _steps_to_a_place(self, usual: float | None) -> float:
        """Estimate the steps until a new request gets a batch slot: running sequences end one after
        the other, and queued ones take their slots. Output lengths are taken to be as usual."""

        def left(sequence: Sequence) -> float:
            most = float(sequence.max_tokens)
            expected = most if usual is None else min(most, usual)
            return max(1.0, expected - sequence.num_generated)

        scheduler = self.scheduler
        place = len(scheduler.waiting) - (scheduler.limits.max_sequences - len(scheduler.running))
        if place < 0:
            return 0.0
        lefts = sorted(map(left, scheduler.running))
        rounds, place = divmod(place, max(1, len(lefts)))
        waiting = [left(each) for each in scheduler.waiting]
        mean = sum(waiting) / len(waiting) if waiting else 0.0
        return rounds * mean + (lefts[place] if lefts else 0.0)
