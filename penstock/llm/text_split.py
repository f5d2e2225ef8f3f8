"""Counts the texts of a rollout, and runs some of them in the other version (mirrors), as
`serving.traffic_split` does with tensors.

A mirror begins when the client has its answer. In a shadow, the candidate first generates from the
same prompt; its text is only counted. Then both versions score the tokens of the answer, and their
mean log-probabilities are compared. Mirrors come after all that clients wait for. Belongs to the
event loop of a shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from msgspec.structs import replace

from penstock.errors import InvalidRequest, PenstockError
from penstock.llm.generation import Generation, GenerationSink
from penstock.llm.language_model import LanguageModel
from penstock.llm.messages import TokenEvent
from penstock.llm.sharded_text import ShardedText
from penstock.sampling_params import SamplingParams
from penstock.serving.divergence import FARTHEST
from penstock.serving.served import Served
from penstock.serving.split_counts import (
    LATENCY,
    LENGTH,
    TPOT,
    TTFT,
    OutputCounts,
    SideCounts,
    SplitCounts,
    is_failure,
)
from penstock.serving.traffic_split import TrafficSplit, is_busy, note_error
from penstock.types import CANCELLED
from penstock.wire.frames import SplitRule
from penstock.wire.openai_forms import TokenUsage

# Priority of mirrors: the lowest.
LAST = 2**62
# Tokens of a prompt and its answer that are scored; answers are cut, longer prompts not scored.
MAX_SCORED = 4096
# The name of the comparison among the outputs in the rollout's figures.
SCORE = "log-probability"
# A text disagrees if its mean log-probability differs by more than MARGIN times the KL divergence
# that is allowed, and DEVIATIONS standard deviations of its tokens' mean.
MARGIN, DEVIATIONS = 5.0, 3.0


def check_alike(stable: Served, candidate: Served) -> None:
    """Raise InvalidRequest unless two loaded versions of a language model read texts alike."""
    models = cast(tuple[LanguageModel | ShardedText, ...], (stable, candidate))
    vocabularies = [each.vocabulary for each in models]
    lengths = [each.max_length for each in models]
    versions = f"versions {stable.config.version} and {candidate.config.version} cannot share texts"
    advice = "promote without a rollout"
    if len({(each.data, each.ends) for each in vocabularies}) > 1:
        raise InvalidRequest(f"{stable.config.name}: {versions}: their tokens differ; {advice}")
    if lengths[1] < lengths[0]:
        text = f"the context is {lengths[1]} tokens instead of {lengths[0]}"
        raise InvalidRequest(f"{stable.config.name}: {versions}: {text}; {advice}")


def watch(split: TrafficSplit, model: Served, generation: Generation) -> None:
    """Count what becomes of a text request that this version is about to get."""
    tokens: list[int] | None = [] if split.takes_mirror() else None
    tap = TextTally(split, model, generation, generation.sink, tokens)
    generation.sink, generation.on_cancel = tap, tap.cancelled


@dataclass(slots=True, eq=False)
class TextTally:
    """Passes everything on to the sink of the request, and counts how it ends."""

    split: TrafficSplit
    model: Served
    generation: Generation
    inner: GenerationSink
    # Those of the first text so far; None: the request is not mirrored.
    tokens: list[int] | None

    def token(self, event: TokenEvent) -> None:
        if self.tokens is not None and event.index == 0:
            self.tokens.append(event.token)
        self.inner.token(event)

    def finished(self, totals: TokenUsage) -> None:
        self.inner.finished(totals)
        note_text(self._side, self.generation, self.split.rule)
        if self.tokens:
            mirror = TextMirror(self.split, self.model, self.generation, self.tokens)
            self.split.begin_mirror(mirror.begin)

    def failed(self, error: PenstockError) -> None:
        self.inner.failed(error)
        self._note(error)

    def cancelled(self) -> None:
        self._note(CANCELLED)

    def _note(self, error: PenstockError) -> None:
        spans_s = _spans_s(self.generation, self.split.clock())
        note_error(self._side, error, spans_s, self.split.rule)

    @property
    def _side(self) -> SideCounts:
        return self.split.side(self.model)


def note_text(side: SideCounts, generation: Generation, rule: SplitRule) -> None:
    """Count a request that has ended with all of its texts."""
    assert generation.last_at is not None
    for metric, span_s in _spans_s(generation, generation.last_at).items():
        side.add(metric, span_s, rule.limits)
    for each in generation.outputs:
        side.add(LENGTH, each.num_tokens, rule.limits)


def note_refusal(split: TrafficSplit, model: Served, error: PenstockError, received: float) -> None:
    """Count a request that has ended before its generations began."""
    span_s = split.clock() - received
    note_error(split.side(model), error, {LATENCY: span_s, TTFT: span_s}, split.rule)


def _spans_s(generation: Generation, now: float) -> Mapping[str, float]:
    """Return what is measured of a request by now, in seconds."""
    first_at = now if generation.first_at is None else generation.first_at
    found = {LATENCY: now - generation.arrived, TTFT: first_at - generation.arrived}
    if (mean_s := generation.mean_token_s) is not None:
        found[TPOT] = mean_s
    return found


# How a copy has ended.
Outcome = Generation | PenstockError


@dataclass(slots=True, eq=False)
class CopySink:
    """The sink of a copy, which no client reads."""

    ended: Callable[[Outcome], None]
    copy: Generation | None = None

    def token(self, event: TokenEvent) -> None:
        """Do nothing: the generation has its counts."""

    def finished(self, totals: TokenUsage) -> None:
        assert self.copy is not None
        self.ended(self.copy)

    def failed(self, error: PenstockError) -> None:
        self.ended(error)


@dataclass(slots=True, eq=False)
class TextMirror:
    """A text that runs in the other version too. Ends once: `dropped` or `mirrored`."""

    split: TrafficSplit
    # The version that has answered, what, and with which tokens.
    model: Served
    answered: Generation
    tokens: Sequence[int]
    # Mean log-probability of the answer's tokens, by whether the candidate has computed it; or why
    # it could not.
    scores: dict[bool, float | PenstockError] = field(default_factory=dict)

    def begin(self) -> None:
        split = self.split
        if is_busy(split.stable if self.model is split.candidate else split.candidate):
            split.dropped()
        elif split.rule.mode == "shadow":
            request = self.answered.request
            params = replace(request.params, priority=LAST)
            self._run(split.candidate, request.tokens, params, self._copied)
        else:
            self._score()

    def _run(
        self,
        model: Served,
        tokens: Sequence[int],
        params: SamplingParams,
        ended: Callable[[Outcome], None],
    ) -> None:
        text_model, sink = cast(LanguageModel, model), CopySink(ended)
        try:
            sink.copy = copy = text_model.new_generation(tokens, params, sink)
        except PenstockError as error:
            ended(error)
            return
        copy.is_mirror, copy.arrived = True, self.split.clock()
        text_model.submit(copy)

    def _copied(self, outcome: Outcome) -> None:
        """Count the candidate's own text, then go on."""
        split = self.split
        side, is_shadow = split.counts.candidate, split.rule.mode == "shadow"
        if isinstance(outcome, Generation):
            if is_shadow:
                note_text(side, outcome, split.rule)
            self._score()
            return
        if is_shadow and is_failure(outcome):
            note_error(side, outcome, {}, split.rule)
        split.dropped()

    def _score(self) -> None:
        """Let both versions score the answer."""
        split, request = self.split, self.answered.request
        # One token is generated after them.
        room = min(MAX_SCORED, cast(LanguageModel, split.stable).max_length - 1)
        if len(request.tokens) >= room:
            split.dropped()
            return
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            num_prompt_logprobs=0,
            priority=LAST,
            cache_salt=request.params.cache_salt,
        )
        self.tokens = self.tokens[: room - len(request.tokens)]
        tokens = [*request.tokens, *self.tokens]
        for model in (split.stable, split.candidate):
            self._run(model, tokens, params, partial(self._scored, model is split.candidate))

    def _scored(self, is_candidate: bool, outcome: Outcome) -> None:
        if isinstance(outcome, Generation):
            found = outcome.prompt_logprobs[self.answered.num_prompt :]
            logprobs = [-math.inf if each is None else each.logprob for each in found]
            self.scores[is_candidate] = math.fsum(logprobs) / len(logprobs)
        else:
            self.scores[is_candidate] = outcome
        if len(self.scores) == 2:
            self._compare(self.scores[False], self.scores[True])

    def _compare(self, stable: float | PenstockError, candidate: float | PenstockError) -> None:
        split = self.split
        if isinstance(stable, PenstockError):
            split.dropped()
            return
        if isinstance(candidate, PenstockError):
            if not is_failure(candidate):
                split.dropped()
                return
            candidate = -math.inf
        split.mirrored()
        difference = candidate - stable
        distance = abs(difference) if math.isfinite(difference) else math.inf
        note_distance(split.counts, distance, len(self.tokens), split.rule.max_kl)


def note_distance(counts: SplitCounts, distance: float, num_tokens: int, max_kl: float) -> None:
    """Count a text whose mean log-probabilities differ by so much."""
    wrong = float(distance > max_distance(num_tokens, max_kl))
    shown = min(distance, FARTHEST)
    counts.outputs.setdefault(SCORE, OutputCounts()).merge(OutputCounts(1, wrong, shown, shown))
    counts.num_compared += 1
    counts.num_disagreeing += wrong


def max_distance(num_tokens: int, max_kl: float) -> float:
    """Return by how much the mean log-probabilities of a text may differ. If the log-ratio of a
    token's probabilities is normal with a mean of the KL divergence, its variance is twice that."""
    return MARGIN * max_kl + DEVIATIONS * math.sqrt(2 * max_kl / num_tokens)
