"""Read an answer as it is generated: reasoning, content, and calls of tools. Pure.

Text that may be the beginning of a marker is held back until that is clear. A call is passed on
once its name is known, its arguments as they come. What looks like a call but is none (no JSON, or
a function that was not offered) is content.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from penstock.llm.call_scanner import CallScanner
from penstock.llm.tool_formats import THINK, THOUGHT, Offer
from penstock.wire.openai_forms import CallDelta

SPACES = " \n\r\t"


@dataclass(slots=True)
class MessageDelta:
    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class MessageReader:
    """Reads one answer. After `end` nothing is added."""

    def __init__(self, offer: Offer) -> None:
        self._offer = offer
        self._reasoning = Reasoning(offer.is_thinking) if offer.has_reasoning else None
        self._calls = Calls(offer) if offer.tools and offer.format is not None else None

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as it is known."""
        return self._reasoning is not None and self._reasoning.is_open

    def add(self, text: str, *, is_last: bool = False) -> MessageDelta:
        found = MessageDelta()
        if self._reasoning is not None:
            found.reasoning, text = self._reasoning.add(text, is_last)
        if self._calls is None:
            found.content = text
        else:
            self._calls.add(text, found)
            if is_last:
                self._calls.end(found)
        return found


class Reasoning:
    """Separates reasoning at the beginning of a text from what follows."""

    def __init__(self, is_thinking: bool) -> None:
        self._state: Literal["before", "inside", "spaces", "after"] = (
            "inside" if is_thinking else "before"
        )
        # Spaces at the beginning are layout too.
        self._has_begun = False
        self._held = ""

    @property
    def is_open(self) -> bool:
        return self._state == "inside"

    def add(self, text: str, is_last: bool) -> tuple[str, str]:
        """Return the reasoning and the text after it."""
        reasoning = ""
        if self._state == "before":
            text = self._begin(text, is_last)
        if self._state == "inside":
            reasoning, text = self._inside(text, is_last)
        if self._state == "spaces":
            text = text.lstrip(SPACES)
            self._state = "after" if text else "spaces"
        return reasoning, text if self._state == "after" else ""

    def _begin(self, text: str, is_last: bool) -> str:
        self._held += text
        start = self._held.lstrip(SPACES)
        if start.startswith(THINK):
            self._state, self._held = "inside", ""
            return start[len(THINK) :].lstrip(SPACES)
        if is_last or not THINK.startswith(start):
            self._state = "after"
            return self._held
        return ""

    def _inside(self, text: str, is_last: bool) -> tuple[str, str]:
        self._held += text
        if not self._has_begun:
            self._held = self._held.lstrip(SPACES)
            self._has_begun = bool(self._held)
        found, mark, rest = self._held.partition(THOUGHT)
        if mark:
            self._state, self._held = "spaces", ""
            return found.rstrip(SPACES), rest
        # Spaces before the end are its layout.
        kept = "" if is_last else _may_begin(self._held, THOUGHT)
        found = self._held[: len(self._held) - len(kept)]
        spaces = "" if is_last else found[len(found.rstrip(SPACES)) :]
        self._held = spaces + kept
        return found[: len(found) - len(spaces)], ""


def _may_begin(text: str, marker: str) -> str:
    """Return the end of a text with which the marker may begin."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return text[-size:]
    return ""


class Calls:
    """Finds calls in a text, and passes on the rest as content."""

    def __init__(self, offer: Offer) -> None:
        assert offer.format is not None
        self._form, self._is_parallel = offer.format, offer.is_parallel
        self._is_forced = offer.is_forced
        self._names = frozenset(tool.name for tool in offer.tools)
        self.num_calls = 0
        # "rest": what follows the calls of an answer is dropped.
        self._state: Literal["start", "text", "gap", "call", "rest"] = "start"
        # Text not yet read.
        self._held = ""
        # Text from the marker on, until its call is passed on.
        self._raw = ""
        self._scanner = CallScanner(self._names)

    def add(self, text: str, found: MessageDelta) -> None:
        self._held += text
        steps = {
            "start": self._start, "text": self._text, "gap": self._gap,
            "call": self._call, "rest": self._drop,
        }  # fmt: skip
        while self._held and steps[self._state](found):
            pass

    def end(self, found: MessageDelta) -> None:
        """Pass on what was held back, unless it belongs to calls. In an answer that must be calls,
        all of it does: a limit of tokens has cut it."""
        is_content = self._state in ("start", "text")
        is_broken = self._state == "call" and not self._scanner.name
        if not self._is_forced and (is_content or is_broken or not self.num_calls):
            found.content += self._raw + self._held
        self._held = self._raw = ""

    # Each reads a part of the held text, and returns whether there may be more to read.

    def _start(self, found: MessageDelta) -> bool:
        """Spaces before a call are no content; without a marker, calls can only be here."""
        form = self._form
        text = self._held.lstrip(SPACES)
        begins = [each for each in (form.marker, *form.starts) if each]
        if not text or any(each.startswith(text) and each != text for each in begins):
            return False
        if any(text.startswith(each) for each in begins):
            self._open_gap(len(self._held) - len(text))
        else:
            self._state = "text"
        return True

    def _text(self, found: MessageDelta) -> bool:
        marker = self._form.marker
        place = self._held.find(marker) if marker else -1
        if place >= 0:
            found.content += self._held[:place]
            self._held = self._held[place:]
            self._open_gap(0)
            return True
        kept = _may_begin(self._held, marker) if marker else ""
        found.content += self._held[: len(self._held) - len(kept)]
        self._held = kept
        return False

    def _open_gap(self, num_spaces: int) -> None:
        self._raw, self._held = self._held[:num_spaces], self._held[num_spaces:]
        self._state = "gap"

    def _gap(self, found: MessageDelta) -> bool:
        """Skip what stands before, between and after calls."""
        form, held = self._form, self._held
        skipped = (*SPACES, *form.between_calls)
        if any(each.startswith(held) and each != held for each in skipped):
            return False
        part = next((each for each in skipped if held.startswith(each)), None)
        if part is not None:
            self._raw += part
            self._held = held[len(part) :]
            return True
        is_bare = form.has_bare_names and (held[0].isalnum() or held[0] == "_")
        if held[0] != "{" and not is_bare:
            self._go_on_as_text(found)
        elif self.num_calls and not self._is_parallel:
            self._state = "rest"
        else:
            self._scanner = CallScanner(self._names, is_bare=is_bare)
            self._state = "call"
        return True

    def _go_on_as_text(self, found: MessageDelta) -> None:
        """What follows is no call, nor is what came before it if no call was passed on since."""
        if self._raw.strip(SPACES) and not self.num_calls:
            found.content += self._raw
        self._raw, self._state = "", "text"

    def _call(self, found: MessageDelta) -> bool:
        scanner = self._scanner
        was_named = bool(scanner.name)
        num = scanner.feed(self._held)
        self._raw += self._held[:num]
        self._held = self._held[num:]
        if scanner.has_failed and not scanner.name:
            found.content += self._raw
            self._raw, self._state = "", "text"
            return True
        if scanner.name and not was_named:
            found.calls.append(CallDelta(self.num_calls, scanner.name))
            self.num_calls += 1
        if scanner.name:
            self._raw = ""
            if arguments := scanner.take_arguments():
                found.calls.append(CallDelta(self.num_calls - 1, arguments=arguments))
        if scanner.has_failed:
            self._state = "rest"
        elif scanner.is_done:
            self._state = "gap"
        return True

    def _drop(self, found: MessageDelta) -> bool:
        self._held = ""
        return False
