"""Answers in the order in which their requests arrived (`preserve_ordering`). Pure."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.types import Request, Response

Answered = tuple[Request, Response | PenstockError]


class AnswerSequencer:
    def __init__(self) -> None:
        self._next_turn = 0
        self._first_open = 0
        self._finished: dict[int, Answered] = {}

    def enter(self) -> int:
        turn = self._next_turn
        self._next_turn += 1
        return turn

    def finish(self, turn: int, answer: Answered) -> list[Answered]:
        """Record the answer of `turn`; return the answers that may leave now, in order."""
        if turn < self._first_open or turn in self._finished:
            return []  # It has already ended, for instance by a cancel; the first answer counts.
        self._finished[turn] = answer
        ready: list[Answered] = []
        while self._first_open in self._finished:
            ready.append(self._finished.pop(self._first_open))
            self._first_open += 1
        return ready


def respond_in_turn(
    sequencer: AnswerSequencer, request: Request, answer: Response | PenstockError
) -> None:
    """Answer the request once all earlier ones have been answered."""
    if isinstance(answer, Response):
        answer.keeper = None
        for output in answer.outputs:
            output.data = bytes(output.data)  # The answer may outlive its slab row.
    for earlier, its_answer in sequencer.finish(request.turn, (request, answer)):
        earlier.respond(its_answer)
