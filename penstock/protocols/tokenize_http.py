"""vLLM's routes for tokens over HTTP: tokens of a text or chat, text of tokens, the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.json import encode

from penstock.llm.language_model import LanguageModel
from penstock.protocols.http import Exchange
from penstock.protocols.text_answers import TextCall
from penstock.wire.documented import DetokenizeAnswer, TokenizeAnswer
from penstock.wire.openai_prompts import read_detokenize, read_tokenize
from penstock.wire.openai_v1 import check_tokens, template_options


@dataclass(frozen=True, slots=True)
class TokenizeHttp:
    """Handles admitted requests. `_find` returns a model by name; without a name, the only one."""

    _find: Callable[[str | None], LanguageModel]

    def describe(self, exchange: Exchange) -> None:
        known = self._find(None).vocabulary
        names = {"eos_token": None, "bos_token": None, **known.names}
        exchange.reply_json(encode({**names, "chat_template": known.template or None}))

    def tokenize(self, exchange: Exchange) -> None:
        asked = read_tokenize(exchange.body)
        call = TokenizeCall(
            exchange=exchange,
            model=self._find(asked.model),
            field="messages" if asked.prompt is None else "prompt",
            is_counted=False,
            has_texts=bool(asked.return_token_strs),
        )
        if asked.prompt is None:
            call.tokenize_chat(asked.messages or (), template_options(asked))
        else:
            call.tokenize([asked.prompt], is_whole=asked.add_special_tokens)

    def detokenize(self, exchange: Exchange) -> None:
        name, tokens = read_detokenize(exchange.body)
        model = self._find(name)
        check_tokens("tokens", tokens, model.num_tokens)
        text = model.vocabulary.decode(tokens, keeps_special=True)
        exchange.reply_json(encode(DetokenizeAnswer(text)))


@dataclass(slots=True, kw_only=True)
class TokenizeCall(TextCall):
    """A request for the tokens of one text or chat."""

    # Whether the text of each token is returned too.
    has_texts: bool

    def take(self, tokens: Sequence[list[int]]) -> None:
        (found,) = tokens
        known = self.model.vocabulary
        texts = [known.token(each) for each in found] if self.has_texts else None
        answer = TokenizeAnswer(len(found), self.model.max_length, found, texts)
        self.exchange.reply_json(encode(answer))
