"""Grammars of structured output: the seam to llguidance.

Clients send grammars, so each is compiled first in a fork of the renderer process, under limits of
time and memory (`grammar_check`), and only then in the engine. llguidance's own limits bound the
work of a step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from penstock.errors import error_text
from penstock.llm.grammar_errors import TOO_COMPLEX, no_token, refusal
from penstock.llm.token_bytes import Vocabulary
from penstock.sampling_params import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Symbols of a grammar, and states of its lexer, which take about 2 kB each.
MAX_GRAMMAR_SIZE, MAX_LEXER_STATES = 200_000, 20_000
# Size of all its regular expressions, before their first step.
MAX_START_FUEL = 300_000
# Work of one mask: 100,000 are about 7 ms.
MAX_STEP_FUEL = 100_000
# Seconds of the first mask: a step waits for its masks. Those of usual grammars take milliseconds.
MAX_MASK_S = 0.1
# Whitespace between the parts of JSON: bounded, or a model could write nothing else.
SPACES = r"[\x20\x0A\x0D\x09]{1,16}"
JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": SPACES, "lenient": False}
# Bytes of the longest token that a forced text is split into.
LONGEST_TOKEN = 32


class ByteTokens:
    """A vocabulary as llguidance wants it, with one more token that ends a text."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        num = vocabulary.num_tokens
        self.tokens = [vocabulary.piece(token) for token in range(num)] + [b"<end of text>"]
        self.eos_token_id = num
        silent = (token for token in range(num) if not vocabulary.has_text(token))
        self.special_token_ids = [*silent, num]
        self._encode = encode
        special = set(self.special_token_ids)
        self._numbers = {
            piece: token for token, piece in enumerate(self.tokens) if token not in special
        }

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the tokens of a text that the grammar forces. Those of the model's tokenizer,
        unless it changes the text."""
        data = text.encode() if isinstance(text, str) else text
        found = self._encode(data.decode("utf-8", "replace"))
        is_same = b"".join(self.tokens[token] for token in found) == data
        return found if is_same else self._split(data)

    def _split(self, data: bytes) -> list[int]:
        """Split greedily; stop at a byte that no token begins with."""
        found: list[int] = []
        while data:
            sizes = range(min(len(data), LONGEST_TOKEN), 0, -1)
            size = next((size for size in sizes if data[:size] in self._numbers), 0)
            if not size:
                break
            found.append(self._numbers[data[:size]])
            data = data[size:]
        return found


class Grammars:
    """Compiles grammars for the tokens of one vocabulary. Safe for several threads."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], list[int]]) -> None:
        """`encode` returns the tokens of a text, without special ones around it."""
        from llguidance import LLParserLimits, LLTokenizer

        # The last token of the masks means that the text may end.
        self.end_token = vocabulary.num_tokens
        num = self.end_token + 1
        self.num_words = -(-num // 32)
        tokens = ByteTokens(vocabulary, encode)
        self._tokenizer = LLTokenizer(tokens, n_vocab=num, eos_token=[self.end_token])  # type: ignore[arg-type]
        self._limits = LLParserLimits(
            initial_lexer_fuel=MAX_START_FUEL,
            step_lexer_fuel=MAX_STEP_FUEL,
            max_lexer_states=MAX_LEXER_STATES,
            max_grammar_size=MAX_GRAMMAR_SIZE,
            verbose_errors=False,
        )

    def compile(self, constraint: Constraint) -> LLMatcher:
        """Return a matcher at the start of a text; InvalidRequest if the grammar is invalid or
        exceeds a limit."""
        from llguidance import LLMatcher

        try:
            grammar = _grammar(constraint)
        except (ValueError, RecursionError) as error:
            raise refusal(constraint, error_text(error)) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise refusal(constraint, matcher.get_error())
        return matcher

    def check(self, constraint: Constraint) -> None:
        """Compile a grammar and compute its first mask; InvalidRequest if that fails."""
        matcher = self.compile(constraint)
        began = time.thread_time()
        mask = matcher.compute_bitmask()
        took_s = time.thread_time() - began
        if matcher.is_error():
            raise refusal(constraint, matcher.get_error())
        if took_s > MAX_MASK_S:
            raise refusal(constraint, TOO_COMPLEX)
        if not any(mask):
            raise no_token(constraint)


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    kind, text = constraint.kind, constraint.text
    if kind == "json_schema":
        schema = json.loads(text)
        # true and false are schemas too.
        schema = {} if schema is True else schema
        if not isinstance(schema, dict):
            raise ValueError("a schema is an object")
        return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)  # type: ignore[arg-type]
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "ebnf":
        try:
            text = any_to_lark(text)
        except Exception as error:  # The converter raises plain Exception.
            raise ValueError(error_text(error)) from None
    return LLMatcher.grammar_from_lark(text)
