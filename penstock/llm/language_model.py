"""A language model as the catalog serves it: one version with its engine and its renderer.

`submit` takes text requests, and refuses tensors with the paths to use instead.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from penstock.config import ModelConfig
from penstock.errors import InvalidRequest, PenstockError, TooLarge, Unsupported
from penstock.llm.engine import MAX_CHOICES
from penstock.llm.engine_supervisor import EngineLife
from penstock.llm.generation import Generation, GenerationSink
from penstock.llm.messages import GenerateRequest, Ready, TextSource, pack_tokens
from penstock.llm.open_generations import OpenGenerations
from penstock.llm.renderer import Asker, Renderer, RendererLife, TextLimits
from penstock.llm.settings import check_packages, settings_of
from penstock.llm.token_bytes import Vocabulary
from penstock.processes.child import StartLife
from penstock.sampling_params import SamplingParams
from penstock.serving.explain import Explanation, InstanceState
from penstock.serving.metrics import ModelMetrics
from penstock.serving.quotas import Quotas
from penstock.serving.served import ModelProcess
from penstock.types import Request

TENSORS = (
    "a language model takes no tensors; ask /v1/chat/completions, /v1/completions or "
    "/v2/models/{name}/generate"
)
# The code of errors about prompts that do not fit the context, as in OpenAI's API.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
# Prompts: texts, or lists of tokens.
Given = Sequence[str | list[int]]


class LanguageModel:
    """One version of a language model. ConfigError on creation if its parameters are invalid."""

    mode = "continuous"

    def __init__(
        self,
        config: ModelConfig,
        start_life: StartLife = EngineLife,
        start_renderer: StartLife = RendererLife,
        limits: TextLimits | None = None,
        *,
        quotas: Quotas | None = None,
    ) -> None:
        """`limits` override the renderer limits of the configuration."""
        self.config = config
        self.metrics = ModelMetrics(config.name, config.version, config.metric_tags)
        # When it was loaded, in seconds since 1970.
        self.loaded_at = 0
        self._settings = settings = settings_of(config)
        # How many sequences may wait for their first token.
        self.max_waiting = settings.max_waiting
        self._open = OpenGenerations(self.metrics, settings, start_life=start_life, quotas=quotas)
        self._engine = self._open.engine
        source = TextSource(settings.path, settings.is_made_up, settings.parses_special)
        limits = limits or TextLimits(job_s=settings.text_timeout_s, max_waiting=self.max_waiting)
        self._renderer = Renderer(config.name, source, limits, start_renderer)
        self._ids = itertools.count()

    # Lifecycle.

    async def start(self) -> None:
        check_packages()
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as both:
                vocabulary = both.create_task(self._renderer.process.start())
                both.create_task(self._engine.process.start())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._open.vocabulary = vocabulary.result()
        self.metrics.load_s = time.monotonic() - began
        self.loaded_at = int(time.time())

    async def refresh(self) -> None:
        """Do nothing: all figures are here."""

    async def drain(self) -> None:
        await self._renderer.drain()
        await self._open.drain()

    async def close(self) -> None:
        """Stop both processes. Waiting requests fail with "the model is unloaded"."""
        await asyncio.gather(self._engine.close(), self._renderer.close())

    # State for the catalog.

    @property
    def is_ready(self) -> bool:
        return self._engine.state == "READY"

    @property
    def shown_state(self) -> str:
        return self._engine.state

    @property
    def reason(self) -> str:
        return self._engine.reason

    @property
    def num_waiting(self) -> int:
        return self._open.metrics.num_waiting

    @property
    def processes(self) -> Sequence[ModelProcess]:
        """The engine's process."""
        ready = self._engine.ready
        built = {} if ready is None else ready.built
        return [ModelProcess(0, self.config.device, self._engine.process.pid, self.is_ready, built)]

    def explain(self) -> Explanation:
        (place,) = self.processes
        settings, ready = self._settings, self._engine.ready
        doing: Literal["idle", "busy"] = "idle" if self._open.is_idle else "busy"
        state = doing if self.is_ready else "not ready"
        return Explanation(
            model=self.config.name,
            version=self.config.version,
            state=self.shown_state,
            mode="continuous",
            mode_reason="a language model: sequences join and leave between steps",
            policy={
                "max_num_seqs": str(settings.max_sequences),
                "max_num_batched_tokens": str(settings.max_tokens),
                # The engine may have chosen another one than the configured.
                "dtype": settings.dtype if ready is None else ready.built["dtype"],
            },
            instances=[InstanceState(0, state, place.pid, place.device, place.gpu_memory_bytes)],
            refused={name: count for name, count in self.metrics.num_refused.items() if count},
            notes=list(self.config.warnings),
        )

    # Requests.

    @property
    def vocabulary(self) -> Vocabulary:
        return self._open.vocabulary

    @property
    def num_tokens(self) -> int:
        """Vocabulary size: the larger of the model's and its tokenizer's."""
        return max(self._ready.vocabulary, self.vocabulary.num_tokens)

    @property
    def max_length(self) -> int:
        """Context length: the tokens of a prompt and its answer together."""
        return self._ready.max_length

    @property
    def _ready(self) -> Ready:
        if self._engine.ready is None:
            raise self._engine.not_ready()
        return self._engine.ready

    @property
    def max_chars(self) -> int:
        """Longest text that may fit the context: a longer one has too many tokens for sure."""
        return self.max_length * self.vocabulary.longest_token

    def encode(self, given: Given, is_whole: bool, asker: Asker) -> None:
        """Tokenize each text and pass the results to the asker; token lists pass unchanged.
        TooLarge, before any work, if a text has too many characters; Overloaded if the queue is
        full."""
        for each in given:
            if isinstance(each, str) and len(each) > self.max_chars:
                raise TooLarge(
                    f"the text has {len(each)} characters; {self.max_length} tokens have at most "
                    f"{self.max_chars}"
                )
        texts = [each for each in given if isinstance(each, str)]
        mixed = asker if len(texts) == len(given) else Mixed(given, asker)
        self._renderer.encode(texts, is_whole, mixed)

    def encode_chat(
        self, messages: Sequence[Mapping[str, object]], options: Mapping[str, object], asker: Asker
    ) -> None:
        """Apply the chat template, tokenize the result and pass the tokens to the asker."""
        self._renderer.encode_chat(messages, options, self.max_chars, asker)

    def new_generation(
        self, tokens: Sequence[int], params: SamplingParams, sink: GenerationSink
    ) -> Generation:
        """Return a request of one prompt, with the model's stop tokens and a seed. InvalidRequest
        if prompt and output exceed the model's length."""
        if params.n > MAX_CHOICES:
            raise InvalidRequest(f"n is {params.n}; expected at most {MAX_CHOICES}", "n")
        max_tokens, left = params.max_tokens, self.max_length - len(tokens)
        if left < (1 if max_tokens is None else max_tokens):
            asked = f" and {max_tokens} are to follow" if max_tokens else ""
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens{asked}; expected at most {self.max_length} "
                "together",
                code=CONTEXT_LENGTH_EXCEEDED,
            )
        stops = params.stop_token_ids
        params = replace(
            params,
            seed=secrets.randbits(62) if params.seed is None else params.seed,
            # 0: the client wants the prompt only. Prefill still samples a token, which is dropped.
            max_tokens=1 if max_tokens == 0 else max_tokens,
            stop_token_ids=stops if params.ignore_eos else stops | self.vocabulary.stop_tokens,
        )
        request = GenerateRequest(next(self._ids), pack_tokens(tokens), params)
        return Generation(request, sink)

    def submit(self, request: Request | Generation) -> None:
        """Take a text request, whose sink gets every outcome; refuse tensors."""
        if isinstance(request, Generation):
            self._open.submit(request)
            return
        error = Unsupported(TENSORS.replace("{name}", self.config.name))
        self.refused(error, time.monotonic())
        request.respond(error)

    def cancel(self, request: Request | Generation) -> None:
        """Cancel a text request. Safe at any time; tensor requests have ended on submission."""
        if isinstance(request, Generation):
            self._open.cancel(request)

    def refused(self, error: PenstockError, received: float) -> None:
        self._open.metrics.refused(error, time.monotonic() - received)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Merges tokenized texts with the prompts that came as tokens, in the original order."""

    given: Given
    asker: Asker

    def is_gone(self) -> bool:
        return self.asker.is_gone()

    def encoded(self, tokens: list[list[int]]) -> None:
        found = iter(tokens)
        self.asker.encoded([next(found) if isinstance(each, str) else each for each in self.given])

    def failed(self, error: Exception) -> None:
        self.asker.failed(error)
