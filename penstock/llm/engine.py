"""The engine loop: plan, run and commit one step after the other.

One thread, no sockets: requests are added and aborted between steps, and every step returns its new
tokens. With an asynchronous runner the next step is planned and launched before the last one is
committed: the end of a sequence is then seen one step late, and its extra token is dropped. The
engine connects parts that do not know each other: the scheduler plans, the runner computes, the
pace limits the size of a step. `engine_main` runs it in a process of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Protocol

from msgspec.structs import replace

from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.llm.constrained import ConstrainedSequences, TokenMasks
from penstock.llm.messages import GenerateRequest, Logprobs, PromptLogprobsChunk, TokenEvent
from penstock.llm.pace import StepTimeModel, StepWork
from penstock.llm.scheduler import BatchStep, NewToken, Scheduler
from penstock.llm.sequence import Reason, Sequence
from penstock.llm.ttft_admission import TtftAdmission

Clock = Callable[[], float]
# Limit of sequences per request.
MAX_CHOICES = 16
# Weight of the newest sequence in the moving average of output lengths.
NEWEST = 0.1
# Leaders that were refused whose followers may still come.
MAX_REFUSED = 256
# Reports between two that tell the load of experts.
LOAD_EVERY = 256


class StepResult(Protocol):
    """Result of a step: one entry for each of its sampled places, in order."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def logprobs(self) -> Many[Logprobs | None]: ...
    @property
    def prompt_logprobs(self) -> Many[PromptLogprobsChunk]: ...

    def constrain(self, masks: TokenMasks) -> None:
        """Sample the constrained sequences, before the next step is run."""


class EngineRunner(Protocol):
    """Runner of steps; it may wait for the device only when the tokens are read."""

    # Steps that may be launched ahead, before the previous one is committed.
    num_ahead: int

    def run(self, step: BatchStep) -> StepResult: ...


@dataclass(frozen=True, slots=True)
class StepInFlight:
    step: BatchStep
    result: StepResult
    began: float


@dataclass(slots=True)
class Engine:
    """Invariant: a request is in `_sequences` until all its sequences have ended."""

    scheduler: Scheduler
    runner: EngineRunner
    pace: StepTimeModel
    clock: Clock
    # Limit of the queue; further requests are refused.
    max_waiting: int = 1024
    # The runner's; above 0 only for an asynchronous one.
    num_ahead: int = 0
    # Returns the tokens of each expert since the last time; empty without experts.
    read_expert_load: Callable[[], tuple[int, ...]] = tuple
    # Prompt logprobs not yet taken by the caller.
    prompt_logprobs: list[PromptLogprobsChunk] = field(default_factory=list)
    # None: requests with a constraint are refused.
    constrained: ConstrainedSequences | None = None
    # Requests that a grammar ended, with the error; not yet taken by the caller.
    failures: dict[int, PenstockError] = field(default_factory=dict)
    _in_flight: deque[StepInFlight] = field(default_factory=deque)
    # Moving average of the tokens that a sequence generates.
    _usual: float | None = None
    # Time of the last commit.
    _committed: float = 0.0
    _sequences: dict[int, list[Sequence]] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    _admission: TtftAdmission = field(init=False)
    # Calls of `take_expert_load` until the next one that reads it.
    _num_unread: int = 0
    # The leaders that were refused last, and why: requests that follow them are refused too.
    _refused: dict[int, PenstockError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._admission = TtftAdmission(self.scheduler, self.pace)

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._in_flight

    def has(self, request: int) -> bool:
        """Whether the request has sequences that have not ended."""
        return request in self._sequences

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; raise InvalidRequest if it can never run, Overloaded if too late."""
        params = request.params
        if params.max_tokens is None:
            # As many as fit the context after the prompt.
            left = self.scheduler.limits.max_length - len(request.tokens)
            params = replace(params, max_tokens=left)
        self._check(request, params.max_tokens or 0)
        arrived = self.clock()
        is_cached = params.num_prompt_logprobs is None
        made: list[Sequence] = []
        self._sequences[request.id] = made
        for index in range(params.n):
            if index:
                # Each has another seed, and the first alone reports prompt logprobs.
                params = replace(params, seed=(params.seed or 0) + 1, num_prompt_logprobs=None)
            number, tokens = next(self._ids), list(request.tokens)
            sequence = Sequence(number, tokens, params, arrived, request.id, index, is_cached)
            sequence.leader = made[0] if made else None
            made.append(sequence)
            self.scheduler.add(sequence)
            if self.constrained is not None and params.constraint is not None:
                self.constrained.add(sequence)

    def give_up(self, request: int, reason: Reason = "abort") -> None:
        """Abort a request; its blocks are free for the next step."""
        for sequence in self._sequences.pop(request, []):
            self.scheduler.end(sequence, reason)
            self._forget(sequence)

    def end(self, request: int, index: int) -> None:
        """End one sequence of a request because of a stop string in its text."""
        sequences = self._sequences.get(request)
        if sequences is not None:
            self.scheduler.end(sequences[index], "stop")
            self._forget_ended(request)

    def step(self) -> list[TokenEvent]:
        """Launch the next step, and return the new tokens of the oldest step in flight; empty if
        there is nothing to do."""
        if self.constrained is not None:
            self._note_failures(self.constrained.release())
        began = self.clock()
        limit = self.scheduler.limits.max_tokens
        work = self._work()
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.begin_step(work)
        step = self.scheduler.plan(self.pace.max_tokens(work, limit))
        self.scheduler.note_begun(step, began)
        if not step.chunks:
            if not self._in_flight and self.constrained is not None:
                self.constrained.pause()
            return self._finish() if self._in_flight else []
        events: list[TokenEvent] = []
        if any(chunk.sequence.params.has_penalties for chunk in step.chunks):
            # Penalties depend on tokens that are still in flight.
            while self._in_flight:
                events += self._finish()
        result, finished = self._run(step)
        events += finished
        self._in_flight.append(StepInFlight(step, result, began))
        while len(self._in_flight) > self.num_ahead:
            events += self._finish()
        return events

    def _run(self, step: BatchStep) -> tuple[StepResult, list[TokenEvent]]:
        """Launch a step; return it and the events of steps that had to end before. The masks of
        constrained sequences depend on all tokens before: they are computed while the model runs,
        which nothing else of the step waits for."""
        constrained = self.constrained
        if constrained is None or not constrained.has(step):
            return self.runner.run(step), []
        masks = None if self._in_flight else constrained.fill(step)
        result = self.runner.run(step)
        events: list[TokenEvent] = []
        while self._in_flight:
            events += self._finish()
        found = (masks or constrained.fill(step)).result()
        self._note_failures(found.failures)
        result.constrain(found)
        return result, events

    def _note_failures(self, failures: Mapping[Sequence, PenstockError]) -> None:
        for sequence, error in failures.items():
            if sequence.request in self._sequences:
                self.failures[sequence.request] = error
                self.give_up(sequence.request, "error")

    def _reason(self, new: NewToken) -> Reason:
        """Return why the sequence ends with this token, or "". A constrained one ends if its text
        is complete."""
        sequence = new.sequence
        if self.constrained is None or not self.constrained.accept(sequence, new.token):
            return new.reason
        self.scheduler.end(sequence, "stop")
        # Also if it has reached its limit with this token.
        sequence.reason = "stop"
        return "stop"

    def _finish(self) -> list[TokenEvent]:
        """Commit the oldest step in flight."""
        done = self._in_flight.popleft()
        step, result = done.step, done.result
        tokens, logprobs = result.tokens, result.logprobs
        self.prompt_logprobs += [
            each for each in result.prompt_logprobs if each.request in self._sequences
        ]
        new = self.scheduler.commit(step, tokens)
        reasons = [self._reason(each) for each in new]
        now = self.clock()
        self.pace.add(_work_of(step), now - max(done.began, self._committed))
        self._committed = now
        events = [
            TokenEvent(
                sequence.request,
                sequence.index,
                token,
                reason,
                sequence.num_found,
                logprobs[place],
            )
            for (sequence, token, place, _), reason in zip(new, reasons, strict=True)
        ]
        for event in events:
            if event.reason:
                self._forget_ended(event.request)
        return events

    def take_expert_load(self) -> tuple[int, ...]:
        """Return new tokens of each expert, or nothing: they are read rarely while the engine is
        busy, because that costs a copy from the device."""
        self._num_unread = 0 if self.is_idle else self._num_unread - 1
        if self._num_unread > 0:
            return ()
        self._num_unread = LOAD_EVERY
        return self.read_expert_load()

    def fail(self) -> list[int]:
        """End all requests after a failed step, and return their ids."""
        self._in_flight.clear()
        requests = list(self._sequences)
        for request in requests:
            self.give_up(request, "error")
        return requests

    def _check(self, request: GenerateRequest, max_tokens: int) -> None:
        num_prompt = len(request.tokens)
        if max_tokens < 1:
            raise InvalidRequest(f"{max_tokens} tokens are asked for; expected at least 1")
        if not self.scheduler.fits(num_prompt, max_tokens):
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens and {max_tokens} are asked for; expected at "
                f"most {self.scheduler.limits.max_length} together"
            )
        if request.params.n > MAX_CHOICES:
            raise InvalidRequest(f"n is {request.params.n}; expected at most {MAX_CHOICES}")
        if request.params.constraint is not None and self.constrained is None:
            raise InvalidRequest("this engine has no grammars")
        refusal = self._refusal(request)
        if refusal is not None:
            if request.num_following:
                self._refused[request.id] = refusal
                if len(self._refused) > MAX_REFUSED:
                    del self._refused[next(iter(self._refused))]
            raise refusal

    def _refusal(self, request: GenerateRequest) -> PenstockError | None:
        if len(self.scheduler.waiting) >= self.max_waiting:
            return Overloaded(f"{len(self.scheduler.waiting)} requests wait already")
        if request.leader is not None:
            # The leader was added before, and may have ended since.
            return self._refused.get(request.leader)
        if self.pace.targets.ttft_s is None or not self.pace.is_known:
            return None
        return self._admission.refusal(request, self._work(), self._usual)

    def _work(self) -> StepWork:
        """Work of a decode step of the running sequences."""
        running = [each for each in self.scheduler.running if each.num_generated]
        return StepWork(0, len(running), sum(len(each.tokens) for each in running))

    def _forget_ended(self, request: int) -> None:
        sequences = self._sequences.get(request, [])
        if sequences and all(each.state == "ended" for each in sequences):
            del self._sequences[request]
            for each in sequences:
                self._forget(each)

    def _forget(self, sequence: Sequence) -> None:
        if self.constrained is not None:
            self.constrained.forget(sequence)
        # A request for logprobs of the prompt scores it; its length is not that of a usual text.
        is_text = sequence.params.num_prompt_logprobs is None
        if is_text and sequence.reason in ("stop", "length"):
            known = sequence.num_generated if self._usual is None else self._usual
            self._usual = known + NEWEST * (sequence.num_generated - known)


def _work_of(step: BatchStep) -> StepWork:
    generating = [each for each in step.chunks if each.start >= each.sequence.num_prompt]
    num_context = sum(chunk.end for chunk in generating)
    drafts = [len(chunk.draft) for chunk in generating if chunk.draft]
    num_prompt = step.num_tokens - len(generating) - sum(drafts)
    return StepWork(num_prompt, len(generating), num_context, len(drafts), sum(drafts))
