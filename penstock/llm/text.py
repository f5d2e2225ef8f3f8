"""A model's tokenizer and chat template: turns text and messages into tokens.

Both come with the model (`text_files`) and may loop or exhaust memory, so a server runs them in a
process of their own (`renderer_main`), never in the core.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from jinja2 import Template
from tokenizers import Tokenizer

from penstock.errors import BackendFailed, InvalidRequest, PenstockError, TooLarge, error_text
from penstock.llm.chat_template import TemplateRefused, compile_template
from penstock.llm.control_tokens import ControlTokens
from penstock.llm.token_bytes import Vocabulary
from penstock.llm.token_reader import read_vocabulary

log = logging.getLogger("penstock.text")
Messages = Sequence[Mapping[str, object]]
# Length limit of the error messages that a template raises.
MAX_REASON_CHARS = 500
# The plainest chat: a template that cannot render it is broken.
PLAIN_MESSAGES = ({"role": "user", "content": "Hello"},)


@dataclass(eq=False)
class Text:
    """The tokenizer and chat template of one model. Safe for several threads."""

    tokenizer: Tokenizer
    template: str = ""
    stop_tokens: frozenset[int] = frozenset()
    # Special tokens by the names that templates use (`bos_token` and so on).
    names: Mapping[str, str] = field(default_factory=dict)
    # Special tokens within messages are special, not text.
    parses_special: bool = False

    def __post_init__(self) -> None:
        # Files may ask for truncation or padding, which serving never wants.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return replace(
            read_vocabulary(self.tokenizer),
            stop_tokens=self.stop_tokens,
            names=self.names,
            template=self.template,
        )

    def encode(self, text: str, *, is_whole: bool = True) -> list[int]:
        """Return the tokens of a text; `is_whole`: with the special tokens that the model wants
        around it. Releases the GIL."""
        # The only call of the library that releases the GIL.
        (found,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=is_whole)
        tokens: list[int] = found.ids
        return tokens

    def encode_chat(
        self,
        messages: Messages,
        options: Mapping[str, object] | None = None,
        max_chars: int | None = None,
    ) -> list[int]:
        """Return the tokens of a chat prompt. Special tokens within messages are text. Raise
        InvalidRequest if the template refuses the messages, TooLarge if it produces more than
        `max_chars` characters."""
        if self.parses_special:
            return self.encode(self.chat(messages, options, max_chars), is_whole=False)
        control = self._control
        marked = [control.escape(message) for message in messages]
        text = self.chat(marked, control.escape(options or {}), max_chars)
        found = control.encode(text)
        return self.encode(text, is_whole=False) if found is None else found

    def chat(
        self,
        messages: Messages,
        options: Mapping[str, object] | None = None,
        max_chars: int | None = None,
    ) -> str:
        """Render messages with the template; raises the errors of `encode_chat`."""
        if not self.template:
            raise InvalidRequest("the model has no chat template; use /v1/completions")
        try:
            return self._render(messages, options or {}, max_chars)
        except PenstockError:
            raise
        except TemplateRefused as error:
            reason = error_text(error)[:MAX_REASON_CHARS]
            raise InvalidRequest(f"the chat template refuses the messages: {reason}") from None
        except MemoryError:
            raise BackendFailed("the chat template needs more memory than it may use") from None
        except Exception as error:  # Code of a model folder, run on data of a client.
            log.warning("the chat template cannot render messages: %s", error_text(error))
            if self._is_template_broken(max_chars):
                text = "the model's chat template has an error: it renders no messages; see the log"
                raise BackendFailed(text) from None
            raise InvalidRequest("the chat template cannot render the messages") from None

    def _render(
        self, messages: Messages, options: Mapping[str, object], max_chars: int | None
    ) -> str:
        """Raise TooLarge as soon as there are too many characters: a template may loop."""
        values = {"add_generation_prompt": True, **options, **self.names, "messages": messages}
        parts, num_chars = [], 0
        for part in self._compiled.generate(values):
            num_chars += len(part)
            if max_chars is not None and num_chars > max_chars:
                raise TooLarge(f"the chat template makes more than {max_chars} characters of them")
            parts.append(part)
        return "".join(parts)

    def _is_template_broken(self, max_chars: int | None) -> bool:
        """Whether the template fails on the plainest messages too, whatever a client sends."""
        try:
            self._render(PLAIN_MESSAGES, {}, max_chars)
        except (TemplateRefused, PenstockError):
            return False
        except Exception:  # Code of a model folder.
            return True
        return False

    @cached_property
    def _control(self) -> ControlTokens:
        return ControlTokens(self.tokenizer)

    @cached_property
    def _compiled(self) -> Template:
        return compile_template(self.template)
