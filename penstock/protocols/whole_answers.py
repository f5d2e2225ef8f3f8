"""Text answers that are sent at once, when all of their choices have ended."""

from __future__ import annotations

from dataclasses import replace

from penstock.protocols.http import JSON
from penstock.protocols.text_answers import EVENTS, Answer, PartialChoice
from penstock.wire.openai_forms import AnswerChoice


class WholeAnswer(Answer):
    def grow(self, choice: PartialChoice, new: AnswerChoice) -> None:
        choice.text += new.text
        choice.reason = new.reason
        choice.logprobs += new.logprobs or ()
        choice.reasoning += new.reasoning
        for call in new.calls:
            if call.name:
                choice.calls.append(call)
            else:
                known = choice.calls[call.index]
                choice.calls[call.index] = replace(
                    known, arguments=known.arguments + call.arguments
                )

    def end(self) -> None:
        choices = [
            AnswerChoice(
                place,
                each.text,
                each.reason,
                each.logprobs if self._has_logprobs else None,
                each.reasoning,
                each.calls,
            )
            for place, each in sorted(self.choices.items())
        ]
        self.reply(self.form.whole(choices, self.usage))

    def reply(self, body: bytes) -> None:
        self.exchange.reply(200, JSON + self.headers, (body,))


class OneEventAnswer(WholeAnswer):
    """A whole answer in one event, for clients that read event streams."""

    def reply(self, body: bytes) -> None:
        self.exchange.reply(200, EVENTS + self.headers, (b"data: " + body + b"\n\n",))
