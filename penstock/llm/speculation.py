"""Speculative decoding without a draft model: when to draft the next tokens of a sequence, and how
many.

Drafts are guesses from the sequence's own tokens (`ngrams`). A step computes them as one chunk and
samples the token after each of them with the noise of its position, so what is sampled does not
depend on drafts: those that were sampled are kept, and the first other token ends the chunk. As the
noise is independent of the draft, a drafted token is accepted with its probability under the model.

Pure: `draft_length` decides from the share of right guesses and the measured cost of longer steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.llm.ngrams import FIRST_RATE, NgramHistory
from penstock.llm.pace import StepTimeModel, StepWork
from penstock.llm.sequence import Sequence

# Least expected gain of a draft, in tokens per time of a step without drafts.
LEAST_GAIN = 0.05
# Steps between two estimates of the cost, and steps with drafts that it takes.
ESTIMATE_EVERY, MIN_MEASURED = 16, 4
# Steps without drafts, because of their cost, after which one drafts to measure it; and how much.
PROBE_EVERY, PROBE_TOKENS = 64, 4


@dataclass(frozen=True, slots=True)
class DraftCost:
    """Times relative to a step without drafts: once for a sequence that drafts, and per token."""

    fixed: float
    per_token: float


# Assumed before anything is measured.
TYPICAL = DraftCost(0.1, 0.05)


def draft_length(rate: float, cost: DraftCost, num_sequences: int, most: int) -> int:
    """Return the draft length, at most `most`, with which a step of `num_sequences` generates most
    tokens per time if this one drafts; 0 if that promises less than LEAST_GAIN. `rate` of the
    guesses are right, and a draft is kept up to the first wrong one."""
    best, best_speed = 0, num_sequences + LEAST_GAIN
    tokens, survives = float(num_sequences), 1.0
    for count in range(1, most + 1):
        survives *= rate
        tokens += survives
        speed = tokens / (1 + cost.fixed + count * cost.per_token)
        if speed > best_speed:
            best, best_speed = count, speed
    return best


@dataclass(slots=True)
class Speculation:
    """Drafts of all sequences of an engine."""

    # Limit of a draft.
    max_tokens: int
    pace: StepTimeModel
    _cost: DraftCost = TYPICAL
    _num_sequences: int = 1
    _num_steps: int = 0
    # The last step that drafted.
    _drafted_at: int = 0
    _is_probe: bool = False
    # Whether drafts would pay if all guesses were right.
    _pays: bool = True

    def begin_step(self, work: StepWork) -> None:
        """`work`: of the next step, if nothing is drafted."""
        if self._num_steps % ESTIMATE_EVERY == 0:
            self._cost = self._estimate(work)
        self._num_steps += 1
        self._num_sequences = max(1, work.num_generating)
        self._is_probe = self._num_steps - self._drafted_at >= PROBE_EVERY
        self._pays = self._best_length(1.0) > 0 and self._is_in_time(work)
        self._is_probe = self._is_probe and self._is_in_time(work)

    def length(self, sequence: Sequence) -> int:
        """Return how many tokens to draft after the sequence's last known one."""
        # Masks of a grammar would be needed for each draft.
        if not (self._pays or self._is_probe) or sequence.params.constraint is not None:
            return 0
        history = sequence.history
        if history is None:
            history = sequence.history = NgramHistory(sequence.num_prompt)
        history.note(sequence.tokens)
        if history.source is None:
            return 0
        found = self._best_length(history.rate)
        if not found and self._is_probe and history.rate >= FIRST_RATE:
            return min(PROBE_TOKENS, self.max_tokens)
        return found

    def draft(self, sequence: Sequence, most: int) -> list[int]:
        """Return at most `most` drafted tokens."""
        length = min(self.length(sequence), most)
        if length <= 0 or sequence.history is None:
            return []
        self._drafted_at, self._is_probe = self._num_steps, False
        return sequence.history.guess(sequence.tokens, length)

    def _is_in_time(self, work: StepWork) -> bool:
        """Return whether others get their tokens in the promised time if all sequences draft."""
        target_s, num = self.pace.targets.tpot_s, work.num_generating
        if target_s is None or num < 2:
            return True
        cost = num * (self._cost.fixed + self.max_tokens * self._cost.per_token)
        return self.pace.step_s(work) * (1 + cost) <= target_s

    def _best_length(self, rate: float) -> int:
        return draft_length(rate, self._cost, self._num_sequences, self.max_tokens)

    def _estimate(self, work: StepWork) -> DraftCost:
        pace = self.pace
        if pace.num_drafting < MIN_MEASURED:
            return TYPICAL
        step_s = max(pace.step_s(work), 1e-9)
        one, two = (
            pace.step_s(replace(work, num_drafting=1, num_drafted=count)) for count in (1, 2)
        )
        per_token = (two - one) / step_s
        return DraftCost(max(0.0, one / step_s - 1 - per_token), per_token)
