"""A language model in this process: no network, but the requests of OpenAI's API, the server's
tokenizer, and its engine in a process of its own.

`describe` only reads files; `open` loads. Results arrive on the sender's event loop.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import penstock
from penstock.benchmark.exchange import StreamTimes, TimedExchange
from penstock.benchmark.targets import Counters, Description, TargetSpec
from penstock.benchmark.targets.in_process import failure_text, file_digest, files_digest, find
from penstock.benchmark.targets.openai import FORMS, body_of, parse_extra
from penstock.benchmark.targets.shared import config_digest
from penstock.config import ModelConfig
from penstock.data import RequestForm, Sample
from penstock.errors import ConfigError, PenstockError
from penstock.llm.generation import Generation, Totals
from penstock.llm.language_model import LanguageModel
from penstock.llm.messages import TokenEvent
from penstock.llm.settings import path_of, settings_of
from penstock.llm.text import Text, read_text
from penstock.repository import pbtxt
from penstock.serving import local
from penstock.wire import openai_v1
from penstock.wire.openai_v1 import ChatRequest, CompletionRequest

SWEEP_S = 0.5
EMPTY = "empty answer"


class InProcessText:
    """Invariant: exchanges are in `_open`, in sending order, until they have ended."""

    # There are no connections: constants for the interface.
    num_connections = 1
    num_waited = 0

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._extra = parse_extra(spec.extra)
        self._name = ""
        self._model: LanguageModel | None = None
        self._text: Text | None = None
        self._open: dict[TimedExchange, Generation] = {}
        self._sweep: asyncio.TimerHandle | None = None
        # Load time in seconds.
        self.load_s: float | None = None

    async def describe(self) -> tuple[Description, RequestForm]:
        _, config = await asyncio.to_thread(find, self._spec)
        await asyncio.to_thread(self._check_template, config)
        self._name = config.name
        description = Description(
            protocol=f"in process, OpenAI {self._spec.api}",
            address=self._spec.address,
            model=config.name,
            version=config.version,
            server=f"penstock {penstock.__version__}",
            backend=config.backend,
            num_instances=config.num_instances,
            config_digest=config_digest(pbtxt.to_json(config)),
            model_digest=await asyncio.to_thread(_digest, path_of(config)),
        )
        return description, RequestForm(kind=FORMS[self._spec.api])

    def _check_template(self, config: ModelConfig) -> None:
        text = read_text(str(path_of(config)))
        if self._spec.api == "chat" and not text.has_template:
            problem = "the model has no template for chats; give --api completions"
            raise ConfigError([f"{self._spec.address}: {problem}"])

    async def counters(self) -> Counters | None:
        return None

    async def open(self, num_connections: int) -> None:
        if self._model is not None:
            return
        _, config = await asyncio.to_thread(find, self._spec)
        self._name = config.name
        began = time.monotonic()
        try:
            # Not with the model's renderer: a sample is encoded when it is sent.
            parses_special = settings_of(config).parses_special
            path = str(path_of(config))
            read = partial(read_text, path, parses_special=parses_special)
            self._text = await asyncio.to_thread(read)
            model = LanguageModel(await asyncio.to_thread(local.placed, config))
            await model.start()
        except ConfigError as error:
            problems = [f"{self._spec.address}: {problem}" for problem in error.problems]
            raise ConfigError(problems) from None
        self._model = model
        self.load_s = time.monotonic() - began
        self._plan_sweep()

    def encode(self, sample: Sample) -> ChatRequest | CompletionRequest:
        body = body_of(self._name, self._spec.api, sample, self._extra)
        try:
            if self._spec.api == "chat":
                return openai_v1.read_chat(body)
            return openai_v1.read_completion(body)
        except PenstockError as error:
            raise ConfigError([f"input: {error}"]) from None

    def send(self, exchange: TimedExchange) -> None:
        exchange.sent = time.monotonic()
        exchange.stream = StreamTimes()
        if self._model is None:
            asyncio.get_running_loop().call_soon(_end, exchange, "cancelled")
            return
        try:
            generation = self._generation(self._model, exchange)
        except PenstockError as error:
            asyncio.get_running_loop().call_soon(_end, exchange, failure_text(error))
            return
        self._open[exchange] = generation
        self._model.submit(generation)

    def _generation(self, model: LanguageModel, exchange: TimedExchange) -> Generation:
        """Make the generation as a server would for the same request."""
        asked: ChatRequest | CompletionRequest = exchange.item
        assert self._text is not None, "it is read before the model is there"
        if isinstance(asked, ChatRequest):
            tokens = self._text.encode_chat(asked.messages, asked.template_options)
        else:
            (prompt,) = asked.prompts
            is_whole = asked.has_special_tokens
            if isinstance(prompt, str):
                tokens = self._text.encode(prompt, is_whole=is_whole)
            else:
                tokens = prompt
        return model.new_generation(tokens, asked.params, ChunkRecorder(exchange, self))

    def ended(self, exchange: TimedExchange, failure: str | None) -> None:
        """End an exchange, unless it has already ended."""
        if self._open.pop(exchange, None) is not None:
            _end(exchange, failure)

    async def close(self) -> None:
        model, self._model = self._model, None
        if self._sweep is not None:
            self._sweep.cancel()
        for exchange in list(self._open):
            self.ended(exchange, "cancelled")
        if model is not None:
            await model.close()

    def _plan_sweep(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._end_late)

    def _end_late(self) -> None:
        latest = time.monotonic() - self._spec.timeout_s
        for exchange, generation in list(self._open.items()):
            if exchange.sent > latest:
                break
            self.ended(exchange, f"no answer within {self._spec.timeout_s:g} s")
            if self._model is not None:
                self._model.cancel(generation)
        self._plan_sweep()


@dataclass(slots=True)
class ChunkRecorder:
    """Records when the chunks of one answer arrive."""

    exchange: TimedExchange
    target: InProcessText

    def token(self, event: TokenEvent) -> None:
        if event.text and self.exchange.stream is not None:
            self.exchange.stream.times.append(time.monotonic())

    def finished(self, totals: Totals) -> None:
        stream = self.exchange.stream
        assert stream is not None
        stream.num_input_tokens = totals.num_prompt
        stream.num_output_tokens = totals.num_generated
        self.target.ended(self.exchange, None if stream.times else EMPTY)

    def failed(self, error: PenstockError) -> None:
        self.target.ended(self.exchange, failure_text(error))


def _end(exchange: TimedExchange, failure: str | None) -> None:
    exchange.done = time.monotonic()
    exchange.failure = failure
    exchange.finish(exchange)


def _digest(path: Path) -> str:
    return files_digest(path) if path.is_dir() else file_digest(path)
