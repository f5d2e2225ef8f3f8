"""The engine loop: plan, run and commit one step after the other.

One thread, no sockets: requests are added and aborted between steps, and every step returns its new
tokens. With an asynchronous runner the next step is planned and launched before the last one is
committed: the end of a sequence is then seen one step late, and its extra token is dropped. The
engine connects parts that do not know each other: the scheduler plans, the runner computes, the
pace limits the size of a step and predicts whether a request would be in time. `engine_main` runs
it in a process of its own.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.errors import InvalidRequest, Overloaded, PenstockError
from penstock.llm.pace import Pace, Work
from penstock.llm.params import Likelihood, PromptPart, Sampling
from penstock.llm.scheduler import Scheduler, Step
from penstock.llm.sequence import Ending, Reason, Sequence

Clock = Callable[[], float]
PROBE_EVERY = 50
# Weight of the newest sequence in the moving average of output lengths.
NEWEST = 0.1


class Ran(Protocol):
    """Result of a step: one entry for each sampled sequence, in order."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def likelihoods(self) -> Many[Likelihood | None]: ...
    @property
    def prompts(self) -> Mapping[int, PromptPart]:
        """Prompt logprobs, by sequence id."""


class Runs(Protocol):
    """Runner of steps; it may wait for the device only when the tokens are read."""

    def run(self, step: Step, samplings: dict[int, Sampling]) -> Ran: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: one prompt, continued `num` times. A client's request with several prompts becomes
    one of these for each prompt; admission is decided for all of them with the first."""

    id: int
    tokens: Many[int]
    sampling: Sampling
    ending: Ending
    num: int = 1
    priority: int = 0
    salt: str = ""
    # For requests of several prompts. Others: the id of the first. First: the tokens of the others.
    leader: int | None = None
    num_following: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A new token of one sequence of a request."""

    request: int
    # Which of the request's sequences.
    index: int
    token: int
    reason: Reason
    # Prompt tokens found in the cache.
    num_found: int
    likelihood: Likelihood | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """Logprobs of a part of a request's prompt."""

    request: int
    part: PromptPart


@dataclass(frozen=True, slots=True)
class UnderWay:
    step: Step
    ran: Ran
    began: float


@dataclass(frozen=True, slots=True)
class Limits:
    # Limit of the queue; further requests are refused.
    max_waiting: int = 1024
    max_sequences_of_request: int = 16


@dataclass(slots=True)
class Engine:
    """Invariant: a request is in `_sequences` until all its sequences have ended."""

    scheduler: Scheduler
    runner: Runs
    pace: Pace
    clock: Clock
    limits: Limits = field(default_factory=Limits)
    # Steps launched ahead, before the previous one is committed; above 0 only for an asynchronous
    # runner.
    num_ahead: int = 0
    # Prompt logprobs not yet taken by the caller.
    told: list[Told] = field(default_factory=list)
    _under_way: deque[UnderWay] = field(default_factory=deque)
    # Moving average of the tokens that a sequence generates.
    _usual: float | None = None
    # Time of the last commit.
    _committed: float = 0.0
    _sequences: dict[int, list[Sequence]] = field(default_factory=dict)
    _samplings: dict[int, Sampling] = field(default_factory=dict)
    # Request id and index of each sequence, by sequence id.
    _places: dict[int, tuple[int, int]] = field(default_factory=dict)
    _ids: itertools.count[int] = field(default_factory=itertools.count)
    # Requests that were too slow even alone; counted to let a probe through.
    _num_too_slow: int = 0
    # The request refused last, and why: requests with it as leader are refused too.
    _refused: tuple[int | None, PenstockError | None] = None, None

    @property
    def is_idle(self) -> bool:
        return not self._sequences and not self._under_way

    def add(self, asked: Asked) -> None:
        """Queue a request; raise InvalidRequest if it can never run, Overloaded if it would be
        late."""
        self._check(asked)
        arrived = self.clock()
        leader: Sequence | None = None
        self._sequences[asked.id] = made = []
        for index in range(asked.num):
            sequence = Sequence(
                next(self._ids),
                list(asked.tokens),
                asked.ending,
                arrived,
                asked.priority,
                asked.salt,
                is_cached=asked.sampling.num_prompt_logprobs is None,
                leader=leader,
            )
            leader = leader or sequence
            made.append(sequence)
            self._places[sequence.id] = asked.id, index
            self._samplings[sequence.id] = _of_number(asked.sampling, index)
            self.scheduler.add(sequence)

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

    def step(self) -> list[Piece]:
        """Launch the next step, and return the new tokens of the oldest step in flight; empty if
        there is nothing to do."""
        began = self.clock()
        work = self._work()
        step = self.scheduler.plan(
            self.pace.max_tokens(
                work.num_generating, work.num_context_tokens, self.scheduler.limits.max_tokens
            )
        )
        self.scheduler.note_begun(step, began)
        if not step.chunks:
            return self._finish() if self._under_way else []
        # Keep them with the step: a sequence may end before it runs.
        samplings = {each.sequence.id: self._samplings[each.sequence.id] for each in step.chunks}
        pieces: list[Piece] = []
        if any(sampling.has_penalties for sampling in samplings.values()):
            # Penalties depend on tokens that are still in flight.
            while self._under_way:
                pieces += self._finish()
        self._under_way.append(UnderWay(step, self.runner.run(step, samplings), began))
        while len(self._under_way) > self.num_ahead:
            pieces += self._finish()
        return pieces

    def _finish(self) -> list[Piece]:
        """Commit the oldest step in flight."""
        done = self._under_way.popleft()
        step, ran = done.step, done.ran
        tokens = ran.tokens
        sampled = [chunk.sequence.id for chunk in step.chunks if chunk.is_sampled]
        likelihoods = dict(zip(sampled, ran.likelihoods, strict=True))
        for number, part in ran.prompts.items():
            if number in self._places:
                self.told.append(Told(self._places[number][0], part))
        new = self.scheduler.commit(step, tokens)
        now = self.clock()
        self.pace.add(_work_of(step), now - max(done.began, self._committed))
        self._committed = now
        pieces = []
        for each in new:
            request, index = self._places[each.sequence.id]
            reason, found = each.sequence.reason, each.sequence.num_found
            likelihood = likelihoods[each.sequence.id]
            pieces.append(Piece(request, index, each.token, reason, found, likelihood))
        for piece in pieces:
            if piece.reason:
                self._forget_ended(piece.request)
        return pieces

    def fail(self) -> list[int]:
        """End all requests after a failed step, and return their ids."""
        self._under_way.clear()
        requests = list(self._sequences)
        for request in requests:
            self.give_up(request, "error")
        return requests

    def _check(self, asked: Asked) -> None:
        num_prompt, max_tokens = len(asked.tokens), asked.ending.max_tokens
        if max_tokens < 1:
            raise InvalidRequest(f"{max_tokens} tokens are asked for; expected at least 1")
        if not self.scheduler.fits(num_prompt, max_tokens):
            limits = self.scheduler.limits
            raise InvalidRequest(
                f"the prompt has {num_prompt} tokens and {max_tokens} are asked for; expected at "
                f"most {limits.max_length} together"
            )
        if asked.num > self.limits.max_sequences_of_request:
            raise InvalidRequest(
                f"n is {asked.num}; expected at most {self.limits.max_sequences_of_request}"
            )
        refusal = self._refusal(asked)
        if refusal is not None:
            if asked.leader is None:
                self._refused = asked.id, refusal
            raise refusal

    def _refusal(self, asked: Asked) -> PenstockError | None:
        if len(self.scheduler.waiting) >= self.limits.max_waiting:
            return Overloaded(f"{len(self.scheduler.waiting)} requests wait already")
        if asked.leader is not None:
            # The leader was added just before and may have ended since.
            leader, refusal = self._refused
            return refusal if leader == asked.leader else None
        promised_s = self.pace.targets.ttft_s
        if promised_s is None or not self.pace.is_known:
            return None
        before = [*self.scheduler.running, *self.scheduler.waiting]
        if (refusal := self._refusal_alone(asked, promised_s)) is not None or not before:
            return refusal
        lefts = [each.num_left for each in before if not each.num_generated]
        if self.scheduler.shares_prompts:
            # Prompts share each step evenly, so others get at most as much as this one meanwhile.
            own = len(asked.tokens) + asked.num_following
            lefts = [min(each, own) for each in lefts]
        left = sum(lefts)
        work = self._work()
        first_s = self.pace.first_token_s(left, len(asked.tokens) + asked.num_following, work)
        first_s += self._steps_to_a_place() * self.pace.step_s(work)
        if first_s <= promised_s:
            return None
        text = f"the first token would come after {first_s:.2g} s"
        return Overloaded(text, first_s - promised_s, "predicted_late")

    def _refusal_alone(self, asked: Asked, promised_s: float) -> PenstockError | None:
        """Refuse a prompt that takes too long even on an idle server, where a retry is pointless.
        One in `PROBE_EVERY` is let through, as the machine may have become faster."""
        num_prompt = len(asked.tokens)
        alone_s = self.pace.first_token_s(0, num_prompt, Work(0, 0))
        if alone_s <= promised_s:
            return None
        num_new = num_prompt - self._num_cached(asked)
        alone_s = self.pace.first_token_s(0, num_new, Work(0, 0))
        if alone_s <= promised_s:
            return None
        self._num_too_slow += 1
        if self._num_too_slow % PROBE_EVERY == 0:
            return None
        return InvalidRequest(
            f"a prompt of {num_prompt} tokens takes {alone_s:.2g} s until its first token, also "
            f"on an idle server; expected at most {promised_s:.3g} s (penstock.ttft_ms); send a "
            "shorter prompt"
        )

    def _num_cached(self, asked: Asked) -> int:
        """Return how many tokens of its prompt are in the cache."""
        if asked.sampling.num_prompt_logprobs is not None:
            return 0
        size = self.scheduler.pool.block_size
        keys = Sequence(-1, list(asked.tokens), asked.ending, salt=asked.salt)
        return len(self.scheduler.pool.found(keys.keys(len(asked.tokens) - 1, size))) * size

    def _steps_to_a_place(self) -> float:
        """Estimate the steps until a new request gets a batch slot: running sequences end one after
        the other, and queued ones take their slots. Output lengths are taken to be as usual."""
        scheduler = self.scheduler
        place = len(scheduler.waiting) - (scheduler.limits.max_sequences - len(scheduler.running))
        if place < 0:
            return 0.0
        left = sorted(self._left(each) for each in scheduler.running)
        rounds, place = divmod(place, max(1, len(left)))
        waiting = [self._left(each) for each in scheduler.waiting]
        mean = sum(waiting) / len(waiting) if waiting else 0.0
        return rounds * mean + (left[place] if left else 0.0)

    def _left(self, sequence: Sequence) -> float:
        """Estimate the tokens that it will still generate."""
        most = float(sequence.ending.max_tokens)
        usual = most if self._usual is None else min(most, self._usual)
        return max(1.0, usual - sequence.num_generated)

    def _work(self) -> Work:
        """Work of a decode step of the running sequences."""
        running = [each for each in self.scheduler.running if each.num_generated]
        return Work(0, len(running), sum(len(each.tokens) for each in running))

    def _forget_ended(self, request: int) -> None:
        sequences = self._sequences.get(request, [])
        if sequences and all(each.state == "ended" for each in sequences):
            del self._sequences[request]
            for each in sequences:
                self._forget(each)

    def _forget(self, sequence: Sequence) -> None:
        if sequence.reason in ("stop", "length"):
            known = sequence.num_generated if self._usual is None else self._usual
            self._usual = known + NEWEST * (sequence.num_generated - known)
        self._places.pop(sequence.id, None)
        self._samplings.pop(sequence.id, None)


def _of_number(sampling: Sampling, index: int) -> Sampling:
    """Vary the seed for each sequence of a request, and report prompt logprobs only once."""
    if not index:
        return sampling
    return replace(sampling, seed=sampling.seed + index, num_prompt_logprobs=None)


def _work_of(step: Step) -> Work:
    generating = [each for each in step.chunks if each.start >= each.sequence.num_prompt]
    num_context = sum(chunk.end for chunk in generating)
    return Work(step.num_tokens - len(generating), len(generating), num_context)
