"""A language model as the catalog has it: one version among the others, with its engine.

What asks for text comes by `generate`; a request with tensors is told where to go.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from penstock.config import ModelConfig
from penstock.errors import (
    Cancelled,
    ConfigError,
    NotReady,
    Overloaded,
    PenstockError,
    TooLarge,
    Unsupported,
)
from penstock.llm.generation import Generation
from penstock.llm.gguf import GgufFile
from penstock.llm.language_model import EngineLife, LlmModel
from penstock.llm.settings import settings_of
from penstock.llm.text import Text, numbered, open_text
from penstock.metrics import ModelMetrics
from penstock.serving.explain import Explanation, InstanceState
from penstock.serving.supervisor import StartLife
from penstock.types import Request

TENSORS = (
    "a language model takes no tensors; ask /v1/chat/completions, /v1/completions or "
    "/v2/models/{name}/generate"
)
# Texts, or lists of tokens.
Given = Sequence[str | list[int]]
# Characters of all texts that wait to become tokens: about what one body may have.
MAX_WAITING_SIZE = 1 << 26
# Threads for texts that are long.
NUM_ENCODERS = 2


class Asker(Protocol):
    """Whose texts become tokens in a thread."""

    def is_gone(self) -> bool:
        """Nobody waits any more; asked in that thread."""
        ...

    # On the event loop.

    def encoded(self, tokens: list[list[int]]) -> None: ...

    def failed(self, error: Exception) -> None: ...


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """The engine's process, as an instance."""

    device: str
    pid: int
    is_ready: bool
    gpu_memory_bytes: int
    built: str
    index: int = 0


class TextModel:
    """ConfigError at once where its parameters make no sense."""

    def __init__(self, config: ModelConfig, start_life: StartLife = EngineLife) -> None:
        self.config = config
        self.metrics = ModelMetrics(config.name, config.version, config.metric_tags)
        # When it was loaded, in seconds since 1970.
        self.loaded_at = 0
        self._settings = settings_of(config)
        self._start_life = start_life
        self._engine: LlmModel | None = None
        # Beside the event loop, which has its own to do.
        self._encoders = ThreadPoolExecutor(NUM_ENCODERS, f"encode {config.name}")
        # With the characters of each.
        self._encoding: dict[asyncio.Task[None], int] = {}

    # Life.

    async def start(self) -> None:
        began = time.monotonic()
        text = await asyncio.to_thread(read_text, self._settings.path, self._settings.is_made_up)
        self._engine = LlmModel(
            self.config.name, self._settings, text, self._start_life, metrics=self.metrics
        )
        await self._engine.start()
        self.metrics.load_s = time.monotonic() - began
        self.loaded_at = int(time.time())

    async def drain(self) -> None:
        while self._encoding:
            await asyncio.wait(self._encoding)
        if self._engine is not None:
            await self._engine.drain()

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        # Whose texts are still encoded is told that it is closed.
        while self._encoding:
            await asyncio.wait(self._encoding)
        self._encoders.shutdown()

    # What the catalog shows.

    @property
    def is_ready(self) -> bool:
        return self._engine is not None and self._engine.state == "READY"

    @property
    def shown_state(self) -> str:
        return "LOADING" if self._engine is None else self._engine.state

    @property
    def reason(self) -> str:
        return "" if self._engine is None else self._engine.reason

    @property
    def mode(self) -> str:
        return "continuous"

    @property
    def labels(self) -> dict[str, str]:
        return {"model": self.config.name, "version": self.config.version}

    @property
    def num_waiting(self) -> int:
        return 0 if self._engine is None else self._engine.metrics.num_waiting

    @property
    def instances(self) -> Sequence[EnginePlace]:
        engine = self._engine
        ready = None if engine is None else engine.ready
        built = {} if ready is None else ready.built
        memory = built.get("gpu_memory_bytes", "0")
        return [
            EnginePlace(
                self.config.device,
                0 if engine is None else engine.pid,
                self.is_ready,
                int(memory) if memory.isdigit() else 0,
                ", ".join(f"{key}={value}" for key, value in built.items()),
            )
        ]

    def explain(self) -> Explanation:
        (place,) = self.instances
        settings = self._settings
        return Explanation(
            model=self.config.name,
            version=self.config.version,
            state=self.shown_state,
            mode="continuous",
            mode_reason="a language model: sequences join and leave between steps",
            policy={
                "max_num_seqs": str(settings.max_sequences),
                "max_num_batched_tokens": str(settings.max_tokens),
                "dtype": settings.dtype,
            },
            instances=[
                InstanceState(0, self._doing, place.pid, place.device, place.gpu_memory_bytes)
            ],
            waiting=[],
            recent=[],
            num_shapes=0,
            shapes=[],
            batch_sizes={},
            verdicts=[],
            paces=[],
            refused={name: count for name, count in self.metrics.num_refused.items() if count},
            notes=list(self.config.warnings),
        )

    @property
    def _doing(self) -> Literal["idle", "busy", "not ready"]:
        if not self.is_ready:
            return "not ready"
        return "busy" if self._loaded.num_open else "idle"

    # Requests.

    @property
    def text(self) -> Text:
        return self._loaded.text

    @property
    def max_length(self) -> int:
        """Of a text, prompt and all."""
        ready = self._loaded.ready
        if ready is None:
            raise self._not_ready()
        return ready.max_length

    def check_lengths(self, given: Given) -> None:
        """TooLarge, before anything is computed, where one has more tokens than a text may have."""
        most = self.max_length * self.text.longest_token
        for each in given:
            if isinstance(each, str) and len(each) > most:
                raise TooLarge(
                    f"the text has {len(each)} characters, more than {self.max_length} tokens "
                    "can be"
                )

    def encoded(self, given: Given, *, is_whole: bool = True) -> list[list[int]]:
        """The tokens of each; tokens are what they are."""
        text = self.text
        return [
            text.encode(each, is_whole=is_whole) if isinstance(each, str) else each
            for each in given
        ]

    def encode_aside(
        self,
        given: Given,
        is_whole: bool,
        asker: Asker,
    ) -> None:
        """The same in a thread, while others are answered. Overloaded where as many wait for that
        as may wait for a token, or their texts are too much to keep."""
        size = sum(len(each) for each in given)
        if len(self._encoding) >= self.max_waiting:
            raise Overloaded(f"{len(self._encoding)} requests wait already")
        if self._encoding and sum(self._encoding.values()) + size > MAX_WAITING_SIZE:
            raise Overloaded(f"texts of more than {MAX_WAITING_SIZE} characters wait already")
        task = asyncio.get_running_loop().create_task(self._encode_aside(given, is_whole, asker))
        self._encoding[task] = size
        task.add_done_callback(self._encoding.pop)

    async def _encode_aside(self, given: Given, is_whole: bool, asker: Asker) -> None:
        def encode() -> list[list[int]]:
            if asker.is_gone():
                raise Cancelled("the client left")
            return self.encoded(given, is_whole=is_whole)

        try:
            found = await asyncio.get_running_loop().run_in_executor(self._encoders, encode)
        except Exception as error:  # Of somebody else's library, for whoever asked.
            asker.failed(error)
        else:
            asker.encoded(found)

    @property
    def max_waiting(self) -> int:
        """Texts that may wait for their first token."""
        return self._settings.max_waiting

    def generate(self, generation: Generation) -> None:
        """Every outcome goes to its sink, refusals too."""
        self._loaded.submit(generation)

    def give_up(self, generation: Generation) -> None:
        """Nobody waits any more. Safe at any time."""
        self._loaded.cancel(generation)

    def submit(self, request: Request) -> None:
        error = Unsupported(TENSORS.replace("{name}", self.config.name))
        self.refused(error, time.monotonic())
        request.respond(error)

    def cancel(self, request: Request) -> None:
        """It was refused at once."""

    def refused(self, error: PenstockError, received: float) -> None:
        self.metrics.refused(error)
        self.metrics.fail_s += max(0.0, time.monotonic() - received)

    @property
    def _loaded(self) -> LlmModel:
        if self._engine is None:
            raise self._not_ready()
        return self._engine

    def _not_ready(self) -> NotReady:
        return NotReady(
            f"model '{self.config.name}' is not ready: {self.reason or 'it is loading'}"
        )


def read_text(path: str, is_made_up: bool) -> Text:
    """The tokenizer of a model's files; of made-up weights numbers will do."""
    where = Path(path)
    if is_made_up and not (where.parent / "tokenizer.json").is_file():
        return numbered()
    if is_made_up:
        where = where.parent
    if where.suffix != ".gguf":
        return open_text(where, {})
    try:
        file = GgufFile(where)
    except OSError as error:
        raise ConfigError([f"{where.name}: cannot be read: {error.strerror}"]) from None
    try:
        return open_text(where, file.metadata)
    finally:
        file.close()
