"""Read one call of a tool as it is generated: an object with a name and arguments. Pure.

Arguments are passed on as they were written, piece by piece. Only the outer object is parsed:
whether arguments are valid JSON is not checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal

import msgspec

SPACES = " \n\r\t"
ARGUMENTS = ("arguments", "parameters")
NOTHING = "{}"
_json = msgspec.json.Decoder()


class CallScanner:
    """Invariant: `name` is one of the offered names, and is set before arguments are passed on."""

    def __init__(self, names: Collection[str], *, is_bare: bool = False) -> None:
        """`is_bare`: the name comes before the object, which is that of the arguments."""
        self.name = ""
        self.is_done = False
        self.has_failed = False
        self._names = names
        self._is_bare = is_bare
        self._state: Literal["bare", "open", "key", "colon", "value", "comma"] = (
            "bare" if is_bare else "open"
        )
        self._key = ""
        # The value or key that is being read.
        self._text = ""
        self._arguments = ""
        self._has_arguments = False
        # Open brackets of a value, and whether it is within a string.
        self._depth = 0
        self._is_string = self._is_escaped = False

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the call."""
        steps: dict[str, Callable[[str], None]] = {
            "bare": self._bare, "open": self._open, "key": self._read_key,
            "colon": self._colon, "value": self._value, "comma": self._comma,
        }  # fmt: skip
        for place, character in enumerate(text):
            steps[self._state](character)
            if self.is_done or self.has_failed:
                return place + 1
        return len(text)

    def take_arguments(self) -> str:
        """Return the arguments that are new."""
        found, self._arguments = self._arguments, ""
        return found

    def _bare(self, character: str) -> None:
        if character != "{":
            self._text += character
            return
        # Newer templates put more marks behind the name.
        self._set_name(self._text.split("[")[0].strip(SPACES))
        self._key, self._text, self._state = ARGUMENTS[0], "", "value"
        self._value(character)

    def _open(self, character: str) -> None:
        if character == "{":
            self._state = "key"
        elif character not in SPACES:
            self.has_failed = True

    def _read_key(self, character: str) -> None:
        if not self._text and character == "}":
            self._finish()
        elif self._text or character == '"':
            self._text += character
            if self._ends_string(character):
                self._key, self._text, self._state = self._decoded(), "", "colon"
        elif character not in SPACES:
            self.has_failed = True

    def _colon(self, character: str) -> None:
        if character == ":":
            self._state = "value"
        elif character not in SPACES:
            self.has_failed = True

    def _value(self, character: str) -> None:
        if not self._text and not self._depth and character in SPACES:
            return
        is_scalar = bool(self._text) and not self._depth and self._text[0] not in '"{['
        if is_scalar and character in ",}" + SPACES:
            self._take_value()
            self._comma(character)
            return
        is_kept = (
            self._key in ARGUMENTS
            and (self._depth or character in "{[")
            and not (self._text.startswith('"'))
        )
        if is_kept:
            self._has_arguments = True
            self._arguments += character
            self._text = self._text or character
        else:
            self._text += character
        self._count(character)

    def _count(self, character: str) -> None:
        """Follow strings and brackets; take the value when it is complete."""
        if self._is_string or character == '"':
            if self._ends_string(character) and not self._depth:
                self._take_value()
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._take_value()

    def _ends_string(self, character: str) -> bool:
        if not self._is_string:
            self._is_string = True
            return False
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_string = False
            return True
        return False

    def _take_value(self) -> None:
        if self._key == "name":
            self._set_name(self._decoded())
        elif self._key in ARGUMENTS and not self._has_arguments:
            # A text that holds JSON, or null.
            self._arguments = self._decoded() or NOTHING
            self._has_arguments = True
        self._text, self._state = "", "comma"
        if self._is_bare:
            self._finish()

    def _comma(self, character: str) -> None:
        if character == ",":
            self._state = "key"
        elif character == "}":
            self._finish()
        elif character not in SPACES:
            self.has_failed = True

    def _finish(self) -> None:
        self.is_done = not self.has_failed and bool(self.name)
        self.has_failed = not self.is_done
        if self.is_done and not self._has_arguments:
            self._arguments = NOTHING

    def _set_name(self, name: str) -> None:
        if name in self._names:
            self.name = name
        else:
            self.has_failed = True

    def _decoded(self) -> str:
        """Return the string that was read; empty for any other value."""
        try:
            found = _json.decode(self._text)
        except (msgspec.DecodeError, UnicodeError):
            return ""
        return found if isinstance(found, str) else ""
