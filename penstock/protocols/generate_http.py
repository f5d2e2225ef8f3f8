"""Triton's generate extension over HTTP: JSON to any model, the answer whole or as events.

Only translates. Texts to language models have fields of their own (`wire.generate_v2`), and
`text_answers` does the rest; `generate_answers` has models of tensors. Errors have v2's form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import SHUTTING_DOWN, NotReady
from penstock.llm.language_model import LanguageModel
from penstock.protocols.generate_answers import generate
from penstock.protocols.http import Exchange
from penstock.protocols.route_table import find
from penstock.protocols.text_answers import Answer, GenerateCall, StreamedAnswer, counted, guarded
from penstock.protocols.whole_answers import OneEventAnswer, WholeAnswer
from penstock.serving.model_table import ModelTable
from penstock.wire import generate_v2
from penstock.wire.generate_v2 import GenerateForm


@dataclass(frozen=True, slots=True)
class GenerateHttp:
    """Handles requests that have passed the gate."""

    _catalog: ModelTable
    _is_draining: Callable[[], bool] = lambda: False
    _is_logged: bool = False

    def handle(self, exchange: Exchange) -> None:
        with guarded(exchange, self._is_logged):
            match = find(exchange.head.path)
            assert match is not None
            is_stream = match.route.handler == "generate_stream"
            named = match.model_name, match.model_version
            model, split = self._catalog.choose(*named, exchange.head.headers)
            with counted(model, exchange.received):
                if self._is_draining():
                    raise NotReady(SHUTTING_DOWN)
            if not isinstance(model, LanguageModel):
                generate(exchange, model, split, is_stream, self._is_logged)
                return
            with counted(model, exchange.received):
                asked = generate_v2.read(exchange.body, is_stream)
            answer: type[Answer] = OneEventAnswer if is_stream else WholeAnswer
            call = GenerateCall(
                exchange=exchange,
                model=model,
                split=split,
                field="text_input",
                form=GenerateForm(model.config.name, model.config.version, asked),
                params=asked.params,
                answer=StreamedAnswer if asked.is_streamed else answer,
                id=asked.id,
                is_logged=self._is_logged,
                echoed=[asked.text] if asked.is_echoed else (),
                asked=[{"prompt": asked.text}],
            )
            call.tokenize([asked.text])
