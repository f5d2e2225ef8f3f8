"""Triton's generate extension over HTTP for models of tensors: an answer whole, or any number of
them as server-sent events.

Only translates (`wire.generate_tensors`). A stream starts with its first answer, so that earlier
refusals get their own HTTP status. A client that disconnects cancels its request.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import BackendFailed, PenstockError
from penstock.protocols import access_log
from penstock.protocols.http import JSON, Exchange
from penstock.protocols.http_errors import http_status, reply_error
from penstock.protocols.text_answers import EVENTS, counted
from penstock.serving.served import Served
from penstock.serving.traffic_split import TrafficSplit
from penstock.types import Request, Response
from penstock.wire import generate_tensors
from penstock.wire.generate_tensors import ONE_ONLY, GeneratedAnswers
from penstock.wire.v2_request import apply_parameters


def generate(
    exchange: Exchange, model: Served, split: TrafficSplit | None, is_stream: bool, is_logged: bool
) -> None:
    """Submit a request; what is wrong with it is raised."""
    with counted(model, exchange.received):
        found = generate_tensors.read(exchange.body, model.config)
        kind = StreamedAnswers if is_stream else WholeResponse
        sink = kind(exchange, model, GeneratedAnswers(found.id), is_logged)
        inputs = list(found.tensors.values())
        request = Request(sink, inputs, exchange.received, id=found.id)
        apply_parameters(request, found.parameters)
    request.caller = exchange.caller
    sink.request = request
    exchange.abandon = sink.abandon
    if split is not None:
        split.watch(request, model)
    model.submit(request)


@dataclass(slots=True, eq=False)
class GenerateSink:
    """The sink of a request; dropping `request` breaks the cycle of the two."""

    exchange: Exchange
    model: Served
    answers: GeneratedAnswers
    is_logged: bool
    request: Request | None = None

    def abandon(self) -> None:
        if self.request is not None:
            self.model.cancel(self.request)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        if final:
            self.request = None
        try:
            if isinstance(answer, PenstockError):
                self.fail(answer)
            else:
                self.take(answer, final)
        except PenstockError as error:
            self.fail(error)
            self.abandon()
        except Exception:  # Keep serving.
            self.exchange.reply_bug()
            self.abandon()
        if final and self.is_logged:
            access_log.ended("http", self.model.config, request, answer)

    def take(self, answer: Response, final: bool) -> None:
        raise NotImplementedError

    def fail(self, error: PenstockError) -> None:
        reply_error(self.exchange, error)


@dataclass(slots=True, eq=False)
class WholeResponse(GenerateSink):
    """`/generate`: exactly one answer."""

    body: bytes | None = None

    def take(self, answer: Response, final: bool) -> None:
        if not answer.is_empty:
            if self.body is not None:
                raise BackendFailed(ONE_ONLY)
            self.body = self.answers.whole(answer)
        if final:
            if self.body is None:
                raise BackendFailed(ONE_ONLY)
            self.exchange.reply(200, JSON, (self.body,))


@dataclass(slots=True, eq=False)
class StreamedAnswers(GenerateSink):
    """`/generate_stream`: an event for each answer."""

    def take(self, answer: Response, final: bool) -> None:
        data = b"" if answer.is_empty else self.answers.event(answer)
        if not self.exchange.is_streaming:
            self.exchange.start_stream(200, EVENTS)
        self.exchange.stream(data)
        if final:
            self.exchange.end_stream()

    def fail(self, error: PenstockError) -> None:
        """An error of the model is an event, also if it is the first; a refusal is none."""
        if not self.exchange.is_streaming:
            if not isinstance(error, BackendFailed):
                reply_error(self.exchange, error)
                return
            self.exchange.start_stream(http_status(error, self.exchange.head.path), EVENTS)
        self.exchange.stream(self.answers.error(error))
        self.exchange.end_stream()
