"""OpenAI's API over HTTP: completions, chats and models, whole or as a stream of events; also the
entry to embeddings.

Only translates: bodies to requests (`wire.openai_v1`), choices to OpenAI's form, errors to statuses
by one table. `text_answers` does the rest.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from urllib.parse import unquote

from penstock.errors import BackendFailed, InvalidRequest, NotReady, PenstockError
from penstock.llm.language_model import LanguageModel
from penstock.protocols import access_log
from penstock.protocols.http import Exchange
from penstock.protocols.openai_errors import error_event, kind_of, reply_error, reply_method
from penstock.protocols.text_answers import (
    GenerateCall,
    StreamedAnswer,
    TextCall,
    WholeAnswer,
)
from penstock.wire import openai_v1
from penstock.wire.openai_v1 import AnswerChoice, ChunkHead, Known, TokenUsage

log = logging.getLogger("penstock.http")
MODELS = b"/v1/models"
EMBEDDINGS = b"/v1/embeddings"
TOKENIZER = b"/tokenizer_info"
# Paths that the access log covers.
INFERENCE = (b"/v1/completions", b"/v1/chat/completions", EMBEDDINGS)
_JSON = b"Content-Type: application/json\r\n"


class LanguageModels(Protocol):
    def find(self, name: str) -> LanguageModel:
        """Return a model; raises NotFound or NotReady."""

    def known(self) -> Sequence[Known]: ...


class Embeddings(Protocol):
    def handle(self, exchange: Exchange) -> None:
        """Handle a request; the caller answers what this raises."""

    def known(self) -> Sequence[Known]: ...


class OpenAiHttp:
    """Handles requests that have passed the gate."""

    def __init__(
        self,
        models: LanguageModels,
        is_draining: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.time,
        logs_requests: bool = False,
        embeddings: Embeddings | None = None,
    ) -> None:
        self._is_logged = logs_requests
        self._models = models
        self._is_draining = is_draining
        self._clock = clock
        self._posts: dict[bytes, Callable[[Exchange], None]] = {
            b"/v1/completions": self._completions,
            b"/v1/chat/completions": self._chats,
            b"/tokenize": self._tokenize,
            b"/detokenize": self._detokenize,
        }
        if embeddings is not None:
            self._posts[EMBEDDINGS] = embeddings.handle
        self._embeddings = embeddings

    def handle(self, exchange: Exchange) -> None:
        self._guarded(exchange, partial(self._handle, exchange))

    def _guarded(self, exchange: Exchange, answer: Callable[[], None]) -> None:
        try:
            answer()
        except PenstockError as error:
            reply_error(exchange, error)
            if self._is_logged and exchange.head.path in INFERENCE:
                what = {"path": exchange.head.path.decode()}
                status, _ = kind_of(error)
                access_log.refused("http", status, what, exchange.received, type(error).__name__)
        except Exception:  # Answer 500 and keep serving.
            log.exception("while handling %r", exchange.head.path)
            reply_error(exchange, BackendFailed("internal error"))

    def _handle(self, exchange: Exchange) -> None:
        path = exchange.head.path
        if path == MODELS or path.startswith(MODELS + b"/"):
            self._tell_models(exchange)
        elif path == TOKENIZER:
            self._tell_tokenizer(exchange)
        elif (post := self._posts.get(path)) is None:
            text = f"there is no {path.decode('latin-1')[:200]} here"
            body = openai_v1.error(text, "not_found_error")
            exchange.reply(404, _JSON, (body,))
        elif exchange.head.method != b"POST":
            reply_method(exchange, b"POST")
        elif self._is_draining():
            raise NotReady("the server is shutting down")
        else:
            post(exchange)

    def _tell_models(self, exchange: Exchange) -> None:
        head = exchange.head
        if head.method not in (b"GET", b"HEAD"):
            reply_method(exchange, b"GET")
            return
        known = self._known()
        if head.path == MODELS:
            exchange.reply(200, _JSON, (openai_v1.models(known),))
            return
        name = unquote(head.path[len(MODELS) + 1 :].decode("latin-1"))
        found = [each for each in known if each.name == name]
        if not found:
            # Raises NotFound, which lists the models.
            self._models.find(name)
            raise NotReady(f"model '{name}' is loading")
        exchange.reply(200, _JSON, (openai_v1.model(found[0]),))

    def _tell_tokenizer(self, exchange: Exchange) -> None:
        if exchange.head.method not in (b"GET", b"HEAD"):
            reply_method(exchange, b"GET")
            return
        known = self._find(None).vocabulary
        exchange.reply(200, _JSON, (openai_v1.tokenizer_info(known.names, known.template),))

    def _find(self, name: str | None) -> LanguageModel:
        """Return the named model; without a name, as lm-eval asks for tokens, the only one."""
        if name is None:
            names = [each.name for each in self._models.known()]
            if len(names) != 1:
                told = ", ".join(names) or "none"
                raise InvalidRequest(
                    f"model: expected one of those that are loaded: {told}", "model"
                )
            (name,) = names
        return self._models.find(name)

    def _known(self) -> list[Known]:
        """List all models that serve text or embeddings."""
        found = list(self._models.known())
        return found if self._embeddings is None else [*found, *self._embeddings.known()]

    def _completions(self, exchange: Exchange) -> None:
        asked = openai_v1.read_completion(exchange.body)
        form = CompletionForm(self._head("cmpl", asked.model), asked.streaming.has_usage)
        echoed = asked.prompts if asked.is_echoed else ()
        call = self._generate_call(exchange, asked, form, "prompt", echoed)
        call.tokenize(asked.prompts, is_whole=asked.has_special_tokens)

    def _chats(self, exchange: Exchange) -> None:
        asked = openai_v1.read_chat(exchange.body)
        form = ChatForm(self._head("chatcmpl", asked.model), asked.streaming.has_usage)
        call = self._generate_call(exchange, asked, form, "messages")
        call.tokenize_chat(asked.messages, asked.template_options)

    def _generate_call(
        self,
        exchange: Exchange,
        asked: openai_v1.CompletionRequest | openai_v1.ChatRequest,
        form: CompletionForm | ChatForm,
        field: str,
        echoed: Sequence[str | list[int]] = (),
    ) -> GenerateCall:
        return GenerateCall(
            exchange=exchange,
            model=self._models.find(asked.model),
            guarded=self._guarded,
            field=field,
            form=form,
            params=asked.params,
            answer=StreamedAnswer if asked.streaming.is_on else WholeAnswer,
            id=form.head.id,
            is_logged=self._is_logged,
            echoed=echoed,
        )

    def _tokenize(self, exchange: Exchange) -> None:
        asked = openai_v1.read_tokenize(exchange.body)
        call = TokenizeCall(
            exchange=exchange,
            model=self._find(asked.model),
            guarded=self._guarded,
            field="messages" if asked.prompt is None else "prompt",
            is_counted=False,
            has_texts=asked.has_texts,
        )
        if asked.prompt is None:
            call.tokenize_chat(asked.messages, asked.template_options)
        else:
            call.tokenize([asked.prompt], is_whole=asked.has_special_tokens)

    def _detokenize(self, exchange: Exchange) -> None:
        name, tokens = openai_v1.read_detokenize(exchange.body)
        model = self._find(name)
        openai_v1.check_tokens("tokens", tokens, model.num_tokens)
        text = model.vocabulary.decode(tokens, keeps_special=True)
        exchange.reply(200, _JSON, (openai_v1.detokenized(text),))

    def _head(self, prefix: str, model: str) -> ChunkHead:
        return ChunkHead(f"{prefix}-{secrets.token_hex(12)}", int(self._clock()), model)


@dataclass(slots=True, kw_only=True)
class TokenizeCall(TextCall):
    """A request for the tokens of one text or chat."""

    # Whether the text of each token is returned too.
    has_texts: bool

    def take(self, tokens: Sequence[list[int]]) -> None:
        (found,) = tokens
        known = self.model.vocabulary
        texts = [known.token(each) for each in found] if self.has_texts else None
        body = openai_v1.tokenized(found, self.model.max_length, texts)
        self.exchange.reply(200, _JSON, (body,))


@dataclass(frozen=True, slots=True)
class CompletionForm:
    head: ChunkHead
    # Whether a stream ends with the usage.
    has_usage: bool

    def whole(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        return openai_v1.completion(self.head, choices, usage)

    def begin(self, index: int) -> bytes:
        return b""

    def piece(self, choice: AnswerChoice) -> bytes:
        return openai_v1.completion_piece(self.head, choice)

    def end(self, usage: TokenUsage) -> bytes:
        told = openai_v1.completion_usage(self.head, usage) if self.has_usage else b""
        return told + openai_v1.DONE

    def error(self, error: PenstockError) -> bytes:
        return error_event(error) + openai_v1.DONE


@dataclass(frozen=True, slots=True)
class ChatForm:
    head: ChunkHead
    # Whether a stream ends with the usage.
    has_usage: bool

    def whole(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        return openai_v1.chat(self.head, choices, usage)

    def begin(self, index: int) -> bytes:
        return openai_v1.chat_begin(self.head, index)

    def piece(self, choice: AnswerChoice) -> bytes:
        return openai_v1.chat_piece(self.head, choice)

    def end(self, usage: TokenUsage) -> bytes:
        told = openai_v1.chat_usage(self.head, usage) if self.has_usage else b""
        return told + openai_v1.DONE

    def error(self, error: PenstockError) -> bytes:
        return error_event(error) + openai_v1.DONE
