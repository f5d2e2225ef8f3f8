"""Triton's generate extension over HTTP: text to a language model, the answer whole or as events.

Only translates (`wire.generate_v2`); `text_answers` does the rest. Errors have v2's form, also for
models that are not language models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.errors import NotReady, PenstockError, Unsupported
from penstock.llm.language_model import LanguageModel
from penstock.protocols import access_log
from penstock.protocols.http import Exchange
from penstock.protocols.http_errors import reply_error, status_of
from penstock.protocols.route_table import find
from penstock.protocols.text_answers import (
    Answer,
    GenerateCall,
    OneEventAnswer,
    StreamedAnswer,
    WholeAnswer,
    counted,
)
from penstock.serving.catalog import Catalog
from penstock.wire import generate_v2
from penstock.wire.generate_v2 import AnswerHead
from penstock.wire.openai_v1 import AnswerChoice, TokenUsage

log = logging.getLogger("penstock.http")


class GenerateHttp:
    """Handles requests that have passed the gate."""

    def __init__(
        self,
        catalog: Catalog,
        is_draining: Callable[[], bool] = lambda: False,
        logs_requests: bool = False,
    ) -> None:
        self._catalog = catalog
        self._is_draining = is_draining
        self._is_logged = logs_requests

    def handle(self, exchange: Exchange) -> None:
        self._guarded(exchange, partial(self._handle, exchange))

    def _guarded(self, exchange: Exchange, answer: Callable[[], None]) -> None:
        try:
            answer()
        except PenstockError as error:
            reply_error(exchange, error)
            if self._is_logged:
                what = {"path": exchange.head.path.decode("latin-1")}
                status, kind = status_of(error), type(error).__name__
                access_log.refused("http", status, what, exchange.received, kind)
        except Exception:  # Answer 500 and keep serving.
            log.exception("while handling %r", exchange.head.path)
            exchange.reply_error(500, "internal error")

    def _handle(self, exchange: Exchange) -> None:
        match = find(exchange.head.path)
        assert match is not None
        is_stream = match.route.handler == "generate_stream"
        model = self._find(match.model_name, match.model_version)
        with counted(model, exchange.received):
            if self._is_draining():
                raise NotReady("the server is shutting down")
            asked = generate_v2.read(exchange.body, is_stream)
        answer: type[Answer] = OneEventAnswer if is_stream else WholeAnswer
        call = GenerateCall(
            exchange=exchange,
            model=model,
            guarded=self._guarded,
            field="text_input",
            form=GenerateForm(AnswerHead(model.config.name, model.config.version, asked)),
            params=asked.params,
            answer=StreamedAnswer if asked.is_streamed else answer,
            id=asked.id,
            is_logged=self._is_logged,
            echoed=[asked.text] if asked.is_echoed else (),
        )
        call.tokenize([asked.text])

    def _find(self, name: str, version: str) -> LanguageModel:
        model = self._catalog.find(name, version)
        if not isinstance(model, LanguageModel):
            raise Unsupported(
                f"generate is for language models; '{name}' takes tensors: ask "
                f"/v2/models/{name}/infer"
            )
        return model


@dataclass(frozen=True, slots=True)
class GenerateForm:
    head: AnswerHead

    def whole(self, choices: Sequence[AnswerChoice], usage: TokenUsage) -> bytes:
        return generate_v2.whole(self.head, choices, usage)

    def begin(self, index: int) -> bytes:
        return b""

    def piece(self, choice: AnswerChoice) -> bytes:
        return generate_v2.event(self.head, choice)

    def end(self, usage: TokenUsage) -> bytes:
        return b""

    def error(self, error: PenstockError) -> bytes:
        return generate_v2.error_event(str(error))
