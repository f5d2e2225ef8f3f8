"""OpenAI's API over HTTP: completions, chats, models and tokens; also the entry to embeddings.

Only translates: bodies to requests (`wire.openai_v1`), choices to OpenAI's form, errors to statuses
by one table. `text_answers` does the rest. The route table has checked paths and methods.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from urllib.parse import unquote

from msgspec.json import encode

from penstock.errors import SHUTTING_DOWN, InvalidRequest, NotFound, NotReady
from penstock.llm.language_model import LanguageModel
from penstock.llm.tool_formats import Offer
from penstock.protocols.embeddings_http import EmbeddingsHttp
from penstock.protocols.http import Exchange
from penstock.protocols.text_answers import GenerateCall, StreamedAnswer, guarded
from penstock.protocols.tokenize_http import TokenizeHttp
from penstock.protocols.whole_answers import WholeAnswer
from penstock.serving.model_table import ModelTable
from penstock.wire import documented as doc
from penstock.wire.documented import OpenAiModel, describe_model
from penstock.wire.openai_forms import ChatForm, CompletionForm
from penstock.wire.openai_prompts import CompletionRequest, read_completion
from penstock.wire.openai_responses import read_responses
from penstock.wire.openai_tools import ToolRequest
from penstock.wire.openai_v1 import ChatRequest, read_chat
from penstock.wire.response_form import ResponseForm, new_id

MODELS = b"/v1/models"
# Paths that the access log covers.
INFERENCE = (b"/v1/completions", b"/v1/chat/completions", b"/v1/responses", b"/v1/embeddings")


class OpenAiHttp:
    """Handles requests that have passed the gate."""

    def __init__(
        self,
        catalog: ModelTable,
        is_draining: Callable[[], bool] = lambda: False,
        logs_requests: bool = False,
    ) -> None:
        self._is_logged = logs_requests
        self._catalog = catalog
        self._is_draining = is_draining
        self._embeddings = EmbeddingsHttp(catalog, logs_requests)
        tokens = TokenizeHttp(self._find)
        self._handlers: dict[bytes, Callable[[Exchange], None]] = {
            MODELS: self._list_models,
            b"/tokenizer_info": tokens.describe,
            b"/v1/completions": self._completions,
            b"/v1/chat/completions": self._chats,
            b"/v1/responses": self._responses,
            b"/v1/embeddings": self._embeddings.handle,
            b"/tokenize": tokens.tokenize,
            b"/detokenize": tokens.detokenize,
        }

    def handle(self, exchange: Exchange) -> None:
        path, is_post = exchange.head.path, exchange.head.method == b"POST"
        with guarded(exchange, self._is_logged and path in INFERENCE):
            if is_post and self._is_draining():
                raise NotReady(SHUTTING_DOWN)
            self._handlers.get(path, self._describe_model)(exchange)

    def _list_models(self, exchange: Exchange) -> None:
        exchange.reply_json(encode(doc.OpenAiModels("list", self._ready_models())))

    def _describe_model(self, exchange: Exchange) -> None:
        name = unquote(exchange.head.path[len(MODELS) + 1 :].decode("latin-1"))
        found = [each for each in self._ready_models() if each.id == name]
        if not found:
            # Raises NotFound, which lists the models.
            self._find(name)
            raise NotReady(f"model '{name}' is loading")
        exchange.reply_json(encode(found[0]))

    def _find(self, name: str | None) -> LanguageModel:
        """Return the named model; without a name, as lm-eval asks for tokens, the only one."""
        model = None if name is None else self._catalog.find(name)
        if isinstance(model, LanguageModel):
            return model
        names = [each.id for each in self._ready_text_models()]
        loaded = ", ".join(names) or "none"
        if name is not None:
            raise NotFound(f"The model '{name}' is no language model; loaded: {loaded}")
        if len(names) != 1:
            raise InvalidRequest(f"model: expected one of those that are loaded: {loaded}", "model")
        return self._find(names[0])

    def _ready_text_models(self) -> list[OpenAiModel]:
        return [
            describe_model(each.config.name, each.loaded_at, each.max_length)
            for each in self._catalog
            if isinstance(each, LanguageModel) and each.is_ready and self._is_served(each)
        ]

    def _is_served(self, model: LanguageModel) -> bool:
        """Whether requests find this version by the model's name: they find one of each model."""
        return self._catalog.find(model.config.name) is model

    def _ready_models(self) -> list[OpenAiModel]:
        return [*self._ready_text_models(), *self._embeddings.ready_models()]

    def _completions(self, exchange: Exchange) -> None:
        asked = read_completion(exchange.body)
        form = CompletionForm(_new_id("cmpl"), int(time.time()), asked.model, asked.has_usage)
        echoed = asked.prompts if asked.is_echoed else ()
        call = self._generate_call(exchange, asked, form, "prompt", echoed)
        call.asked = [{"prompt": each} for each in asked.prompts]
        call.tokenize(asked.prompts, is_whole=asked.has_special_tokens)

    def _chats(self, exchange: Exchange) -> None:
        asked = read_chat(exchange.body)
        form = ChatForm(_new_id("chatcmpl"), int(time.time()), asked.model, asked.has_usage)
        self._chat(exchange, asked, form, "messages")

    def _responses(self, exchange: Exchange) -> None:
        asked = read_responses(exchange.body)
        id, model = new_id("resp"), asked.chat.model
        form = ResponseForm(id, int(time.time()), model, asked.repeated)
        self._chat(exchange, asked.chat, form, "input")

    def _chat(
        self, exchange: Exchange, asked: ChatRequest, form: ChatForm | ResponseForm, field: str
    ) -> None:
        call = self._generate_call(exchange, asked, form, field)
        call.offer = offer_of(call.model, asked.tools)
        call.asked = [{"messages": asked.messages}]
        call.tokenize_chat(asked.messages, asked.template_options)

    def _generate_call(
        self,
        exchange: Exchange,
        asked: CompletionRequest | ChatRequest,
        form: CompletionForm | ResponseForm,
        field: str,
        echoed: Sequence[str | list[int]] = (),
    ) -> GenerateCall:
        self._find(asked.model)
        model, split = self._catalog.choose(asked.model, "", exchange.head.headers)
        assert isinstance(model, LanguageModel), "versions of a rollout are of one kind"
        return GenerateCall(
            exchange=exchange,
            model=model,
            split=split,
            field=field,
            form=form,
            params=asked.params,
            answer=StreamedAnswer if asked.is_streamed else WholeAnswer,
            id=form.id,
            is_logged=self._is_logged,
            echoed=echoed,
            constraint_field=asked.constraint_field,
        )


def offer_of(model: LanguageModel, tools: ToolRequest | None) -> Offer | None:
    """Return what an answer may contain besides its text; InvalidRequest if the model has no
    tools."""
    if not model.is_ready:
        # The renderer, or a refusal for now, comes first.
        return None
    dialect = model.dialect
    if tools is None:
        return Offer(has_reasoning=True) if dialect.has_reasoning else None
    if dialect.format is None:
        raise InvalidRequest(
            f"the chat template of model '{model.config.name}' shows no known form of tool calls; "
            "penstock.tool_parser can name one",
            "tools",
        )
    return Offer(
        dialect.format,
        tools.tools,
        tools.is_parallel,
        tools.is_forced,
        tools.mode == "named",
        dialect.has_reasoning,
        marker_token=dialect.tokens.get(dialect.format.marker),
    )


def _new_id(prefix: str) -> str:
    return f"{prefix}-{secrets.token_hex(12)}"
