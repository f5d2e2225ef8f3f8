"""A language model in this process: no network, but the requests of OpenAI's API, the server's
tokenizer, and its engine in a process of its own.

`describe` only reads files; `open` loads. Results arrive on the sender's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.benchmark.exchange import StreamTimes, TimedExchange
from penstock.benchmark.targets import Counters, Description, TargetSpec, in_process
from penstock.benchmark.targets.in_process import LocalTarget, failure_text
from penstock.benchmark.targets.openai import FORMS, body_of, parse_extra
from penstock.config import ModelConfig
from penstock.data import RequestForm, Sample
from penstock.data.files import digest
from penstock.data.recordings import text_tensor
from penstock.errors import ConfigError, PenstockError
from penstock.llm.generation import Generation
from penstock.llm.language_model import LanguageModel
from penstock.llm.messages import TokenEvent
from penstock.llm.settings import path_of, settings_of
from penstock.llm.text import Text
from penstock.llm.text_files import read_text
from penstock.serving import local
from penstock.wire.openai_forms import TokenUsage
from penstock.wire.openai_prompts import CompletionRequest, read_completion
from penstock.wire.openai_v1 import ChatRequest, read_chat


class InProcessText(LocalTarget["ChunkRecorder"]):
    """A model that takes text."""

    _model: LanguageModel | None

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__(spec)
        self._extra = parse_extra(spec.extra)
        self._name = ""
        self._text: Text | None = None

    async def describe(self) -> tuple[Description, RequestForm]:
        _, config = await asyncio.to_thread(in_process.find, self._spec)
        await asyncio.to_thread(self._check_template, config)
        self._name = config.name
        path = path_of(config)
        if path.is_dir():
            hashed = await asyncio.to_thread(in_process.files_digest, path)
        else:
            hashed = await asyncio.to_thread(digest, [path])
        description = self._description(config, f"in process, OpenAI {self._spec.api}", hashed)
        return description, RequestForm(kind=FORMS[self._spec.api])

    def _check_template(self, config: ModelConfig) -> None:
        text = read_text(str(path_of(config)))
        if self._spec.api == "chat" and not text.template:
            problem = "the model has no template for chats; give --api completions"
            raise ConfigError([f"{self._spec.address}: {problem}"])

    async def counters(self) -> Counters | None:
        return None

    async def _load(self, config: ModelConfig) -> LanguageModel:
        # Not with the model's renderer: a sample is encoded when it is sent.
        parses_special = settings_of(config).parses_special
        read = partial(read_text, str(path_of(config)), parses_special=parses_special)
        self._text = await asyncio.to_thread(read)
        model = LanguageModel(await asyncio.to_thread(local.place_here, config))
        await model.start()
        return model

    def _cancel(self, job: ChunkRecorder) -> None:
        if self._model is not None and job.generation is not None:
            self._model.cancel(job.generation)

    def encode(self, sample: Sample) -> ChatRequest | CompletionRequest:
        body = body_of(self._name, self._spec.api, sample, self._extra)
        try:
            return read_chat(body) if self._spec.api == "chat" else read_completion(body)
        except PenstockError as error:
            raise ConfigError([f"input: {error}"]) from None

    def send(self, exchange: TimedExchange) -> None:
        exchange.sent = time.monotonic()
        exchange.stream = StreamTimes()
        recorder = ChunkRecorder(exchange.stream, self._end, exchange)
        self._open[recorder] = exchange
        if self._model is None:
            asyncio.get_running_loop().call_soon(self._end, recorder, "cancelled")
            return
        asked: ChatRequest | CompletionRequest = exchange.item
        try:
            tokens = self._tokens(asked)
            recorder.generation = self._model.new_generation(tokens, asked.params, recorder)
        except PenstockError as error:
            asyncio.get_running_loop().call_soon(recorder.failed, error)
            return
        self._model.submit(recorder.generation)

    def _tokens(self, asked: ChatRequest | CompletionRequest) -> Sequence[int]:
        """Encode the prompt as a server would."""
        assert self._text is not None, "it is read before the model is there"
        if isinstance(asked, ChatRequest):
            return self._text.encode_chat(asked.messages, asked.template_options)
        (prompt,) = asked.prompts
        if isinstance(prompt, str):
            return self._text.encode(prompt, is_whole=asked.has_special_tokens)
        return prompt


@dataclass(slots=True, eq=False)
class ChunkRecorder:
    """Records when the chunks of one answer arrive; `end` takes why the answer is bad, or None."""

    stream: StreamTimes
    end: Callable[[ChunkRecorder, str | None], None]
    exchange: TimedExchange
    generation: Generation | None = None
    text: str = ""

    def token(self, event: TokenEvent) -> None:
        if event.text:
            self.stream.times.append(time.monotonic())
            self.text += event.text

    def finished(self, totals: TokenUsage) -> None:
        if self.exchange.expected:
            self.exchange.answer = [text_tensor(self.text)]
        self.stream.num_input_tokens = totals.num_prompt
        self.stream.num_output_tokens = totals.num_generated
        self.end(self, None if self.stream.times else "empty answer")

    def failed(self, error: PenstockError) -> None:
        self.end(self, failure_text(error))
