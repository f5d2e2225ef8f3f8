"""A language model as the catalog serves it: one version with its engine and its renderer.

With several shards, each has one of these, with a renderer of its own and a socket to the engine,
which the core has (`sharded_text`). `submit` takes text requests, and refuses tensors with the
paths to use instead.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from penstock.config import ModelConfig
from penstock.errors import (
    ConfigError,
    InvalidRequest,
    NotReady,
    PenstockError,
    TooLarge,
    Unsupported,
)
from penstock.llm.engine import MAX_CHOICES
from penstock.llm.engine_supervisor import EngineLife, EngineSupervisor
from penstock.llm.generation import Generation, GenerationSink
from penstock.llm.messages import EngineSettings, GenerateRequest, TextSource, pack_tokens
from penstock.llm.open_generations import NO_TEXT, OpenGenerations, TextShard
from penstock.llm.renderer import Asker, Renderer, RendererLife, TextLimits
from penstock.llm.settings import check_packages, settings_of
from penstock.llm.text_recorder import tap
from penstock.llm.token_bytes import Vocabulary
from penstock.llm.tool_formats import Dialect, find_dialect
from penstock.processes.child import StartLife
from penstock.sampling_params import Constraint, SamplingParams
from penstock.serving.core_link import EngineCore
from penstock.serving.drift import InputDrift
from penstock.serving.explain import Explanation, InstanceState
from penstock.serving.metrics import ModelMetrics
from penstock.serving.quotas import Quotas
from penstock.serving.request_recorder import RequestRecorder
from penstock.serving.served import ModelProcess, Served
from penstock.types import Request
from penstock.wire.frames import EngineReady

log = logging.getLogger("penstock.llm")
# Time between attempts of a shard to load its renderer.
LOAD_AGAIN_S = 5.0
# The package that compiles grammars.
GRAMMARS = "llguidance"

TENSORS = (
    "a language model takes no tensors; ask /v1/chat/completions, /v1/completions or "
    "/v2/models/{name}/generate"
)
# The code of errors about prompts that do not fit the context, as in OpenAI's API.
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
# Prompts: texts, or lists of tokens.
Given = Sequence[str | list[int]]


class LanguageModel:
    """One version of a language model, or one shard's part of it. ConfigError on creation if its
    parameters are invalid."""

    mode = "continuous"
    # There are no tensors to compare.
    drift: Sequence[InputDrift] = ()

    def __init__(
        self,
        config: ModelConfig,
        start_life: StartLife = EngineLife,
        start_renderer: StartLife = RendererLife,
        limits: TextLimits | None = None,
        *,
        quotas: Quotas | None = None,
        shard: TextShard | None = None,
    ) -> None:
        """`limits` override the renderer limits of the configuration."""
        self.config = config
        self.metrics = ModelMetrics.from_config(config)
        self._settings = settings = settings_of(config)
        # How many sequences may wait for their first token.
        self.max_waiting = settings.max_waiting
        # The engine, unless the core is in another process.
        self._engine: EngineSupervisor | None = None
        core: EngineCore
        if shard is not None:
            core = shard.core
        else:
            core = self._engine = EngineSupervisor(settings, self.metrics, start_life)
        self.part = OpenGenerations(self.metrics, settings, core, quotas=quotas, shard=shard)
        if self._engine is not None:
            self._engine.join(0, self.part)
        limits = (limits or limits_of(settings)).share(1 if shard is None else shard.num_shards)
        self._renderer = Renderer(config.name, source_of(settings), limits, start_renderer)
        # Loads the renderer of a shard.
        self._loading: asyncio.Task[None] | None = None
        # Why the renderer of a shard cannot load.
        self._problem = ""
        self.recorder: RequestRecorder | None = None
        # Belongs to the vocabulary that was loaded last.
        self._dialect: tuple[Vocabulary, Dialect] | None = None

    # Lifecycle.

    async def start(self) -> None:
        """Load the engine and the renderer. A shard loads the renderer only; the core has loaded
        the same files before, so if it cannot, it tries again until it can."""
        if self._engine is None:
            tried = asyncio.Event()
            self._loading = asyncio.create_task(self._load_renderer(tried))
            await tried.wait()
            return
        check_packages()
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as both:
                vocabulary = both.create_task(self._renderer.process.start())
                both.create_task(self._engine.process.start())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self.part.vocabulary = vocabulary.result()
        self.metrics.load_s = time.monotonic() - began

    async def _load_renderer(self, tried: asyncio.Event) -> None:
        while True:
            try:
                self.part.vocabulary = await self._renderer.process.start()
                self._problem = ""
                return
            except ConfigError as error:
                self._problem = "; ".join(error.problems)
                log.error("%s: the renderer cannot be loaded: %s", self.config.name, self._problem)
            finally:
                tried.set()
            await asyncio.sleep(LOAD_AGAIN_S)

    async def refresh(self) -> None:
        """Do nothing: all figures are here."""

    async def drain(self) -> None:
        await self._renderer.drain()
        await self.part.drain()

    async def close(self) -> None:
        """Stop both processes. Waiting requests fail with "the model is unloaded"."""
        if self._loading is not None:
            self._loading.cancel()
        self.part.close()
        engine = [] if self._engine is None else [self._engine.close()]
        await asyncio.gather(self._renderer.close(), *engine)
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    # State for the catalog.

    @property
    def loaded_at(self) -> int:
        """When it was loaded, in seconds since 1970."""
        return self.part.loaded_at

    @property
    def is_ready(self) -> bool:
        return self.part.state == "READY" and self.vocabulary is not NO_TEXT

    @property
    def shown_state(self) -> str:
        return self.part.state

    @property
    def reason(self) -> str:
        return self.part.reason

    @property
    def num_waiting(self) -> int:
        return self.part.metrics.num_waiting

    @property
    def processes(self) -> Sequence[ModelProcess]:
        """The engine's process, if it belongs to this one."""
        return [] if self._engine is None else [process_of(self.config, self._engine)]

    def explain(self) -> Explanation:
        doing: Literal["idle", "busy"] = "idle" if self.part.is_idle else "busy"
        return explain_text(self, self._settings, self.part.ready, doing)

    # Requests.

    @property
    def vocabulary(self) -> Vocabulary:
        return self.part.vocabulary

    @property
    def dialect(self) -> Dialect:
        """How answers call tools and show reasoning."""
        vocabulary, settings = self.vocabulary, self._settings
        if self._dialect is None or self._dialect[0] is not vocabulary:
            found = find_dialect(vocabulary, settings.tool_parser, settings.reasoning_parser)
            self._dialect = vocabulary, found
        return self._dialect[1]

    @property
    def num_tokens(self) -> int:
        """Vocabulary size: the larger of the model's and its tokenizer's."""
        return max(self._ready.vocabulary, self.vocabulary.num_tokens)

    @property
    def max_length(self) -> int:
        """Context length: the tokens of a prompt and its answer together."""
        return self._ready.max_length

    @property
    def _ready(self) -> EngineReady:
        if self._problem:
            raise NotReady(f"model '{self.config.name}' cannot encode texts: {self._problem}")
        if self.part.ready is None:
            raise self.part.not_ready()
        return self.part.ready

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

    def check_constraint(self, constraint: Constraint, asker: Asker) -> None:
        """Check the grammar of structured output; the asker gets no tokens if it can be used."""
        if importlib.util.find_spec(GRAMMARS) is None:
            raise InvalidRequest(
                f"structured output needs the package '{GRAMMARS}', which is not installed; "
                'pip install "penstock[llm]" brings it'
            )
        self._renderer.check(constraint, asker)

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
        request = GenerateRequest(self.part.new_number(), pack_tokens(tokens), params)
        return Generation(request, sink)

    def submit(self, request: Request | Generation) -> None:
        """Take a text request, whose sink gets every outcome; refuse tensors."""
        if isinstance(request, Generation):
            if self.recorder is not None and not request.is_mirror:
                tap(request, self.recorder)
            self.part.submit(request)
            return
        error = Unsupported(TENSORS.replace("{name}", self.config.name))
        self.refused(error, time.monotonic())
        request.respond(error)

    def cancel(self, request: Request | Generation) -> None:
        """Cancel a text request. Safe at any time; tensor requests have ended on submission."""
        if isinstance(request, Generation):
            self.part.cancel(request)

    def refused(self, error: PenstockError, received: float) -> None:
        self.part.metrics.refused(error, time.monotonic() - received)


def source_of(settings: EngineSettings) -> TextSource:
    return TextSource(settings.path, settings.is_made_up, settings.parses_special)


def limits_of(settings: EngineSettings) -> TextLimits:
    return TextLimits(job_s=settings.text_timeout_s, max_waiting=settings.max_waiting)


def process_of(config: ModelConfig, engine: EngineSupervisor) -> ModelProcess:
    built = {} if engine.ready is None else engine.ready.built
    return ModelProcess(0, config.device, engine.process.pid, engine.state == "READY", built)


def explain_text(
    model: Served,
    settings: EngineSettings,
    ready: EngineReady | None,
    doing: Literal["idle", "busy"],
) -> Explanation:
    """Explain how a language model serves; `doing` is what its engine does if it is ready."""
    state = doing if model.is_ready else "not ready"
    places = model.processes
    return Explanation(
        model=model.config.name,
        version=model.config.version,
        state=model.shown_state,
        mode="continuous",
        mode_reason="a language model: sequences join and leave between steps",
        policy={
            "max_num_seqs": str(settings.max_sequences),
            "max_num_batched_tokens": str(settings.max_tokens),
            # The engine may have chosen another one than the configured.
            "dtype": settings.dtype if ready is None else ready.built["dtype"],
        },
        instances=[
            InstanceState(0, state, each.pid, each.device, each.gpu_memory_bytes) for each in places
        ],
        refused={name: count for name, count in model.metrics.num_refused.items() if count},
        notes=list(model.config.warnings),
    )


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
