"""Why a grammar cannot be used, in words about what the client sent. Pure.

llguidance says what was wrong with the grammar that it compiles, which is often one that the server
has made of a request, in words of its own options and limits. Those are translated here, and what
quotes the grammar of the server is cut. Also decides whether the client is to blame.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from penstock.errors import BackendFailed, InvalidRequest, PenstockError
from penstock.sampling_params import Constraint

MAX_REASON_CHARS = 500
NAMES = {"json_schema": "the JSON schema", "regex": "the regular expression"}
TOO_COMPLEX = "it is too large or too complex"
# Limits of llguidance; also reached while a grammar is used.
LIMITS = re.compile(
    r"initial lexer configuration|lexer precomputation|too many expressions|too many states"
    r"|Current row has \d+ items|step_max_items|fuel|too complex|too large|too big|[Ll]imit"
)
# Defects of the library: nothing that the client sent.
DEFECTS = re.compile(r"panic|internal error", re.IGNORECASE)
# The place in a grammar, where its line is quoted, and what stands before the cause.
PLACE = re.compile(r"\A(?:at )?(\d+)\((\d+)\): ")
QUOTED = re.compile(r"\n\s*\d+ \| .*", re.DOTALL)
WRAPPERS = re.compile(
    r'failed to compile JSON schema: |invalid regex ".*?" \(in regex\): ', re.DOTALL
)
# A message about a regular expression: the text, a caret below it, and the cause.
PATTERN = re.compile(r"regex parse error:\n(.*)\nerror: ([^\n]*)", re.DOTALL)
CAUSES: Sequence[tuple[str, str]] = (
    (r"NoExtension.*", "no text fits it"),
    (r"Unimplemented keys: \[(.*)\]", r"keywords that cannot be enforced: \1"),
    (
        r"oneOf constraints are not supported.*",
        "oneOf is supported only if its schemas exclude each other visibly; use anyOf",
    ),
    (
        r"Resource '(.*?)' is not present.*",
        r"$ref '\1' leads out of the schema; other documents are not read",
    ),
    (r"Pointer '(.*?)' does not exist", r"$ref '#\1' leads nowhere"),
    (
        r"lookarounds not supported.*",
        r"look-around, such as \\b, and anchors within are not supported",
    ),
    (
        r"Unsatisfiable schema: Regex is empty.*",
        "no text fits it: its patterns and values exclude each other",
    ),
    (r"Unsatisfiable schema: (.*)", r"no text fits it: \1"),
    (r"Expected f64 for", "expected a number for"),
)  # fmt: skip


def refusal(constraint: Constraint, message: str) -> PenstockError:
    """Return the error for a grammar that cannot be compiled."""
    if DEFECTS.search(message):
        return BackendFailed("the grammar could not be compiled")
    subject, place = _subject(constraint, message)
    cause = _cause(message)
    if place and cause != TOO_COMPLEX:
        cause = f"{place}: {cause}"
    return InvalidRequest(f"{subject} refused: {cause}"[:MAX_REASON_CHARS])


def failure(constraint: Constraint, message: str) -> PenstockError:
    """Return the error for a grammar that fails while it is used. The client is to blame if its
    grammar exceeds a limit; that a token does not fit is a defect of the server."""
    if not LIMITS.search(message) or DEFECTS.search(message):
        return BackendFailed("structured output failed")
    subject, _ = _subject(constraint, "")
    return InvalidRequest(f"{subject} refused while it was used: {TOO_COMPLEX}")


def no_token(constraint: Constraint) -> InvalidRequest:
    """Return the error for a grammar that no token of the model can follow."""
    subject, _ = _subject(constraint, "")
    return InvalidRequest(f"{subject} refused: the model has no token that continues such a text")


def _subject(constraint: Constraint, message: str) -> tuple[str, str]:
    """Return what of the request is refused, with its verb, and the place in it."""
    found = PLACE.match(message)
    if constraint.tools is None:
        place = f"line {found[1]}, column {found[2]}" if found and constraint.kind == "lark" else ""
        return f"{NAMES.get(constraint.kind, 'the grammar')} is", place
    lines = constraint.text.splitlines()
    line = lines[int(found[1]) - 1] if found and int(found[1]) <= len(lines) else ""
    if rule := re.match(r"f(\d+): ", line):
        return f"the parameters of tool '{constraint.tools[int(rule[1])]}' are", ""
    if constraint.tools and not line.startswith("content: "):
        return "the parameters of the tools are", ""
    return "the JSON schema is", ""


def _cause(message: str) -> str:
    """Translate a message, without the place."""
    text = message.replace("<non-verbose/>", "").strip()
    text = WRAPPERS.sub("", QUOTED.sub("", PLACE.sub("", text, count=1)))
    if found := PATTERN.search(text):
        caret = next((each for each in found[1].splitlines() if set(each) == {" ", "^"}), "")
        # Both lines are indented by four.
        place = f" at character {caret.index('^') - 3}" if caret else ""
        return f"{found[2]}{place}"
    if LIMITS.search(text):
        return TOO_COMPLEX
    for pattern, translation in CAUSES:
        text = re.sub(pattern, translation, text, flags=re.DOTALL)
    return " ".join(text.split())
