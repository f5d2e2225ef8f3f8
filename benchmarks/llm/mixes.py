"""Prompts that run together as nobody would plan it, drawn from a seed: a mix can be run again.

A mix has too few blocks for all (so that some are preempted), a small budget of tokens (so that
prompts come in parts), prompts that begin alike, arrivals at random steps, and requests that are
given up on the way.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ours import Ours, Room, asked
from smollm2 import Prompt
from torch import Tensor

# Requests that are given up, for each one that is not.
GIVEN_UP = 0.25
# So often a step brings somebody new, unless a burst comes.
NEW = 0.25
BURST = 0.04
MAX_BURST = 6


@dataclass(slots=True)
class Request:
    # Of which prompt.
    prompt: int
    tokens: Sequence[int]
    # Given up when it has so many; None: it runs to its end.
    gone_after: int | None
    generated: list[int]
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """One that has all its tokens, or was given up with some."""

    prompt: int
    generated: list[int]
    logits: list[Tensor]
    is_given_up: bool


@dataclass(frozen=True, slots=True)
class Stress:
    """What a mix made the engine do."""

    num_requests: int
    num_given_up: int
    num_preemptions: int
    num_found_tokens: int
    num_prompts_in_parts: int
    num_steps: int
    num_mixed_steps: int
    most_running: int


def alone(ours: Ours, prompt: Prompt, num_tokens: int) -> tuple[list[int], list[Tensor]]:
    """One request in an empty engine, its prompt in one step."""
    length = len(prompt.tokens) + num_tokens
    engine, trace = ours.traced(Room(-(-length // 16), 16, 1, length, length))
    engine.add(asked(0, prompt.tokens, num_tokens))
    generated: list[int] = []
    while not engine.is_idle:
        generated += [piece.token for piece in engine.step()]
    return generated, trace.logits[0]


class Mix:
    def __init__(self, ours: Ours, chosen: dict[int, Prompt], num_tokens: int, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self._num_tokens = num_tokens
        self._waiting = [
            Request(number, prompt.tokens, None, []) for number, prompt in chosen.items()
        ]
        for number in draw.choices(list(chosen), k=max(1, round(GIVEN_UP * len(chosen)))):
            after = draw.randrange(num_tokens)
            self._waiting.append(Request(number, chosen[number].tokens, after, []))
        draw.shuffle(self._waiting)
        self._num_requests = len(self._waiting)
        self.room = _room(draw, max(len(each.tokens) for each in self._waiting) + num_tokens)
        self._engine, self._trace = ours.traced(self.room)
        self._going: dict[int, Request] = {}
        self._most_running = 0

    def run(self) -> list[Ended]:
        """All of them. AssertionError where blocks are not given back."""
        engine = self._engine
        while self._waiting or not engine.is_idle:
            self._arrive()
            for piece in engine.step():
                self._going[piece.request].generated.append(piece.token)
            self._most_running = max(self._most_running, len(engine.scheduler.running))
            self._give_up()
        pool = engine.scheduler.pool
        assert pool.num_free == pool.num_blocks, "blocks are held by nobody"
        return [
            Ended(
                each.prompt,
                each.generated,
                self._trace.logits.get(number, [])[: len(each.generated)],
                each.gone_after is not None,
            )
            for number, each in self._going.items()
        ]

    @property
    def stress(self) -> Stress:
        scheduler, trace = self._engine.scheduler, self._trace
        return Stress(
            self._num_requests,
            sum(each.is_gone for each in self._going.values()),
            scheduler.num_preemptions,
            scheduler.pool.num_found,
            sum(parts > 1 for parts in trace.num_parts.values()),
            trace.num_steps,
            trace.num_mixed_steps,
            self._most_running,
        )

    def _arrive(self) -> None:
        count = self._draw.random() < NEW
        if self._draw.random() < BURST or self._engine.is_idle:
            count = self._draw.randint(1, MAX_BURST)
        for _ in range(min(count, len(self._waiting))):
            request, number = self._waiting.pop(), len(self._going)
            self._going[number] = request
            self._engine.add(asked(number, request.tokens, self._num_tokens))

    def _give_up(self) -> None:
        for number, request in self._going.items():
            after = request.gone_after
            if after is not None and not request.is_gone and len(request.generated) >= after:
                request.is_gone = True
                self._engine.give_up(number)


def _room(draw: random.Random, longest: int) -> Room:
    block_size = draw.choice((4, 8, 16, 32))
    max_sequences = draw.randint(4, 12)
    needed = -(-longest // block_size)
    num_blocks = round(needed * draw.uniform(1.3, 3.0))
    return Room(num_blocks, block_size, max_sequences, max_sequences + draw.randint(1, 40), longest)
