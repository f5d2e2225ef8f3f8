"""How model families write calls of tools and their reasoning, and grammars for texts like that.

Pure. The family is found from the chat template, or set by an option. `message_reader` reads what
these formats say.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from penstock.llm.token_bytes import Vocabulary
from penstock.sampling_params import Constraint

THINK, THOUGHT = "<think>", "</think>"
PYTHON_TAG = "<|python_tag|>"
# Tokens at the end of a prompt that may open reasoning.
NUM_LAST_TOKENS = 16
# Calls of one answer that a grammar allows.
MAX_CALLS = 16
# As in `grammars`, for schemas within a grammar.
GUIDANCE = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}
TOOL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
REASONING_PARSERS = ("auto", "none", "think")


class Function(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def parameters(self) -> Mapping[str, object]: ...


@dataclass(frozen=True, slots=True)
class ToolFormat:
    name: str
    # Text before a call, or before the first; empty: a call begins with its object.
    marker: str
    # Around one call.
    before: str
    after: str
    # Around all calls, and between them.
    opening: str
    between: str
    closing: str
    # The key of the arguments.
    key: str
    # With what calls without a marker begin a text.
    starts: Sequence[str] = ()
    # What stands before, between and after calls.
    between_calls: Sequence[str] = ()
    # Whether a call may be a name followed by its arguments.
    has_bare_names: bool = False
    # Length of a call's id: some templates accept 9 characters only.
    num_id_characters: int = 24
    id_prefix: str = "call_"

    def new_id(self) -> str:
        return self.id_prefix + secrets.token_hex(16)[: self.num_id_characters]


HERMES = ToolFormat(
    name="hermes",
    marker="<tool_call>",
    before="<tool_call>\n",
    after="\n</tool_call>",
    opening="",
    between="\n",
    closing="",
    key="arguments",
    between_calls=("<tool_call>", "</tool_call>"),
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    marker="",
    before="",
    after="",
    opening="",
    between="; ",
    closing="",
    key="parameters",
    starts=("{", PYTHON_TAG),
    between_calls=(PYTHON_TAG, ";", ","),
)
MISTRAL = ToolFormat(
    name="mistral",
    marker="[TOOL_CALLS]",
    before="",
    after="",
    opening="[",
    between=", ",
    closing="]",
    key="arguments",
    between_calls=("[TOOL_CALLS]", "[", "]", ","),
    has_bare_names=True,
    num_id_characters=9,
    id_prefix="",
)
FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL)}


def find_format(template: str, option: str = "auto") -> ToolFormat | None:
    """Return the format of a model's calls; None if the template shows none."""
    if option != "auto":
        return FORMATS.get(option)
    if "tools" not in template:
        return None
    if HERMES.marker in template:
        return HERMES
    if MISTRAL.marker in template:
        return MISTRAL
    is_llama = "<|python_tag|>" in template or '"parameters"' in template
    return LLAMA3 if is_llama else None


def has_reasoning(template: str, option: str = "auto") -> bool:
    """Whether answers may begin with reasoning between `<think>` and `</think>`."""
    return THOUGHT in template if option == "auto" else option == "think"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What answers of a model may contain besides their content."""

    format: ToolFormat | None
    has_reasoning: bool
    # Special tokens that are parts of it, by their text.
    tokens: Mapping[str, int]


def find_dialect(vocabulary: Vocabulary, tools: str, reasoning: str) -> Dialect:
    """Return the dialect of a model; the options name it, or are "auto"."""
    found = find_format(vocabulary.template, tools)
    thinks = has_reasoning(vocabulary.template, reasoning)
    names = {THINK, THOUGHT} if thinks else set()
    if found is not None:
        names |= {found.marker, *found.between_calls, "[ARGS]", "[CALL_ID]"}
    special = {vocabulary.token(token): token for token in vocabulary.special}
    tokens = {name: token for name, token in special.items() if name in names}
    return Dialect(found, thinks, tokens)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a text may contain besides its content."""

    format: ToolFormat | None = None
    tools: Sequence[Function] = ()
    is_parallel: bool = True
    # Whether the answer must be calls.
    is_forced: bool = False
    # One function is asked for by its name.
    is_named: bool = False
    has_reasoning: bool = False
    # The prompt ends within reasoning.
    is_thinking: bool = False
    # The id of the marker's token, if it is a special one.
    marker_token: int | None = None


def after_prompt(offer: Offer, vocabulary: Vocabulary, prompt: Sequence[int]) -> Offer:
    """Return the offer for an answer to this prompt, which may end within reasoning."""
    if not offer.has_reasoning:
        return offer
    end = vocabulary.decode(prompt[-NUM_LAST_TOKENS:], keeps_special=True)
    return replace(offer, is_thinking=end.rstrip().endswith(THINK))


def constrain(offer: Offer, constraint: Constraint | None) -> Constraint | None:
    """Return the constraint of the whole text for one of its content, or for forced calls."""
    is_json = constraint is not None and constraint.kind == "json_schema"
    names = tuple(tool.name for tool in offer.tools)
    if offer.is_forced and offer.format is not None:
        return Constraint("lark", _grammar(offer, "calls", _call_rules(offer)), names)
    if constraint is None or not is_json or not (offer.tools or offer.has_reasoning):
        return constraint
    rules = f"content: {_json_rule(json.loads(constraint.text))}\n"
    if offer.tools and offer.format is not None:
        rules += _call_rules(offer)
        return Constraint("lark", _grammar(offer, "content | calls", rules), names)
    return Constraint("lark", _grammar(offer, "content", rules), ())


def _grammar(offer: Offer, body: str, rules: str) -> str:
    start = f"start: {body}\n"
    if offer.is_thinking:
        start = f'start: thought SPACE body\nthought[suffix="{THOUGHT}"]: /(.|\\n)*/\n'
    elif offer.has_reasoning:
        start = f'start: (thought SPACE)? body\nthought[suffix="{THOUGHT}"]: /{THINK}(.|\\n)*/\n'
    if offer.has_reasoning:
        start += f"SPACE: /\\n{{0,2}}/\nbody: {body}\n"
    return start + rules


def _call_rules(offer: Offer) -> str:
    form = offer.format
    assert form is not None
    more = f" ({_text(form.between)} call)~0..{MAX_CALLS - 1}" if offer.is_parallel else ""
    marker = ""
    if form.opening:
        # Tokens of their own are named by their number.
        token = offer.marker_token
        marker = f"{_text(form.marker)} " if token is None else f"<[{token}]> "
    parts = [_text(form.opening), f"call{more}", _text(form.closing)]
    names = " | ".join(f"f{number}" for number in range(len(offer.tools)))
    call = " ".join(filter(None, [_text(form.before), f"({names})", _text(form.after)]))
    lines = [f"calls: {marker}{' '.join(filter(None, parts))}", f"call: {call}"]
    for number, tool in enumerate(offer.tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{form.key}": '
        lines.append(f'f{number}: {_text(head)} {_json_rule(tool.parameters)} "}}"')
    return "\n".join(lines) + "\n"


def _json_rule(schema: object) -> str:
    if schema is True or schema is False:
        schema = {} if schema else {"not": {}}
    assert isinstance(schema, Mapping)
    return f"%json {json.dumps({**schema, 'x-guidance': GUIDANCE})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
