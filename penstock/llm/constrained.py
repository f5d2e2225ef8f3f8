"""Sequences whose text a grammar constrains: their matchers, and the masks of a step.

Grammars are compiled and masks are computed in threads, outside of the GIL: the engine's thread
runs the model meanwhile. Called by the engine, which says when tokens are committed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.errors import BackendFailed, InvalidRequest, PenstockError, describe_error
from penstock.llm.grammar_check import NICENESS
from penstock.llm.grammar_errors import failure, no_token
from penstock.llm.scheduler import BatchStep, Chunk
from penstock.llm.sequence import Sequence
from penstock.sampling_params import Constraint
from penstock.types import Array

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

    from penstock.llm.grammars import Grammars

log = logging.getLogger("penstock.llm")

# Compiled grammars that are kept for requests with the same one.
MAX_COMPILED = 32
# Seconds that an engine without other work waits for a grammar at a time.
PAUSE_S = 0.005


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """A bit for each token that may be sampled, in 32-bit words; one row for each constrained
    sequence of a step."""

    words: Array
    # The place of each row among the step's sampled ones.
    places: Many[int]
    # Why sequences cannot go on: InvalidRequest if their grammar is to blame.
    failures: Mapping[Sequence, PenstockError]


@dataclass(slots=True)
class ConstrainedSequences:
    """Invariant: a held sequence is in `_held`, any other constrained one in `_matchers`, until it
    is forgotten."""

    open_grammars: Callable[[], Grammars]
    num_threads: int = 1
    _grammars: Grammars | None = None
    _executor: LLExecutor | None = None
    _compiled: dict[Constraint, Future[LLMatcher]] = field(default_factory=dict)
    _held: dict[Sequence, Future[LLMatcher]] = field(default_factory=dict)
    _matchers: dict[Sequence, LLMatcher] = field(default_factory=dict)
    # On Linux, niceness belongs to a thread: this one has less priority.
    _compiler: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, "grammar", os.nice, (NICENESS,))
    )
    _filler: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "masks"))

    def add(self, sequence: Sequence) -> None:
        """Hold a sequence until its grammar is compiled."""
        constraint = sequence.params.constraint
        assert constraint is not None
        known = self._compiled.pop(constraint, None)
        if known is None:
            known = self._compiler.submit(self._compile, constraint)
        # The last used one is the last to be dropped.
        self._compiled[constraint] = known
        if len(self._compiled) > MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        self._held[sequence] = known
        sequence.is_held = True

    def forget(self, sequence: Sequence) -> None:
        self._held.pop(sequence, None)
        self._matchers.pop(sequence, None)

    def release(self) -> dict[Sequence, PenstockError]:
        """Let sequences start whose grammars are compiled; return those that cannot, with why."""
        failures: dict[Sequence, PenstockError] = {}
        for sequence, compiled in list(self._held.items()):
            if not compiled.done():
                continue
            del self._held[sequence]
            error = compiled.exception()
            if error is None:
                self._matchers[sequence] = compiled.result().deep_copy()
                sequence.is_held = False
            else:
                failures[sequence] = _failed(error)
        return failures

    def pause(self) -> None:
        """Wait a moment for a grammar."""
        if self._held:
            wait(self._held.values(), PAUSE_S, FIRST_COMPLETED)

    def has(self, step: BatchStep) -> bool:
        """Whether a sequence of the step needs a mask."""
        return bool(self._matchers) and any(
            chunk.is_sampled and chunk.sequence in self._matchers for chunk in step.chunks
        )

    def fill(self, step: BatchStep) -> Future[TokenMasks]:
        """Compute the masks of a step; all tokens before it are committed."""
        rows = [
            (place, chunk, self._matchers[chunk.sequence])
            for place, (chunk, _) in enumerate(step.sampled)
            if chunk.sequence in self._matchers and chunk.sequence.state != "ended"
        ]
        return self._filler.submit(self._fill, rows)

    def accept(self, sequence: Sequence, token: int) -> bool:
        """Take a committed token; return whether the text is complete."""
        matcher = self._matchers.get(sequence)
        if matcher is None or sequence.reason == "stop":
            return False
        return matcher.consume_token(token) and matcher.is_stopped() and not matcher.is_error()

    def _compile(self, constraint: Constraint) -> LLMatcher:
        if self._grammars is None:
            self._grammars = self.open_grammars()
        return self._grammars.compile(constraint)

    def _fill(self, rows: Many[tuple[int, Chunk, LLMatcher]]) -> TokenMasks:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        grammars = self._grammars
        assert grammars is not None, "a matcher is there"
        if self._executor is None:
            self._executor = LLExecutor(self.num_threads)
        words = np.zeros((len(rows), grammars.num_words), np.int32)
        if rows:
            matchers = [(matcher, number) for number, (_, _, matcher) in enumerate(rows)]
            fill_next_token_bitmask_par(self._executor, matchers, words)
        failures: dict[Sequence, PenstockError] = {}
        for number, (_, chunk, matcher) in enumerate(rows):
            constraint = chunk.sequence.params.constraint
            assert constraint is not None
            if matcher.is_error():
                error = failure(constraint, matcher.get_error())
                if not isinstance(error, InvalidRequest):
                    log.error("structured output failed: %s", matcher.get_error())
                failures[chunk.sequence] = error
            elif not _set_stops(words[number].view(np.uint32), chunk, grammars.end_token):
                failures[chunk.sequence] = no_token(constraint)
        return TokenMasks(words, [place for place, _, _ in rows], failures)


def _set_stops(words: Array, chunk: Chunk, end_token: int) -> bool:
    """Allow the stop tokens of a sequence only where its text may end, and not before `min_tokens`
    unless it must end. Return whether any token is allowed."""
    params = chunk.sequence.params
    may_end = _has(words, end_token)
    stops = [token for token in params.stop_token_ids if token < end_token]
    for token in (end_token, *stops):
        words[token >> 5] &= ~np.uint32(1 << (token & 31))
    is_held = chunk.end - chunk.sequence.num_prompt < params.min_tokens
    if may_end and not (is_held and words.any()):
        for token in stops:
            words[token >> 5] |= np.uint32(1 << (token & 31))
    return bool(words.any())


def _has(words: Array, token: int) -> bool:
    return bool(words[token >> 5] >> np.uint32(token & 31) & np.uint32(1))


def _failed(error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    log.error("a grammar cannot be compiled", exc_info=error)
    return BackendFailed(f"the grammar could not be compiled: {describe_error(error)}")
