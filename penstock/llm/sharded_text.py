"""A language model whose requests are in the shards: the core has its engine, each shard a socket
to it and a renderer (`language_model`). Belongs to the core's event loop.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from penstock.config import ModelConfig
from penstock.errors import NotReady
from penstock.llm.engine_supervisor import EngineLife, EngineSupervisor
from penstock.llm.language_model import explain_text, limits_of, process_of, source_of
from penstock.llm.open_generations import NO_TEXT
from penstock.llm.renderer import Renderer, RendererLife
from penstock.llm.settings import check_packages, settings_of
from penstock.llm.text_metrics import TextMetrics, decode_record
from penstock.processes.child import StartLife
from penstock.serving.explain import Explanation
from penstock.serving.metrics import ModelMetrics
from penstock.serving.metrics_record import add
from penstock.serving.served import ModelProcess
from penstock.serving.shard import ModelReading
from penstock.serving.shards import PartHost, ShardedVersion, Shards, ShardSession
from penstock.wire import frames


class RemoteEnginePart:
    """A shard's part of a language model, in another process (`core_link.EnginePart`)."""

    def __init__(self, number: int, session: ShardSession) -> None:
        self._number = number
        self.session = session

    def set_engine(self, engine: frames.SetEngine, sock: socket.socket) -> None:
        with sock:
            self.session.send(frames.ToPart(self._number, engine), (sock.fileno(),))

    def engine_ended(self, ended: frames.EngineEnded) -> None:
        self.session.send(frames.ToPart(self._number, ended))


class EngineHost:
    """The engine, as shards ask for it (`shards.PartHost`)."""

    def __init__(self, number: int, engine: EngineSupervisor) -> None:
        self.number = number
        self._engine = engine

    def receive(self, shard: int, message: frames.FromPartMessage) -> None:
        if isinstance(message, frames.EngineHung):
            self._engine.engine_hung(message.life, message.silent_s)


class ShardedText(ShardedVersion):
    """`Served`. ConfigError on creation if its parameters are invalid."""

    mode = "continuous"
    # Shards load a renderer, which has a limit of its own.
    open_s = None

    def __init__(
        self,
        config: ModelConfig,
        shards: Shards,
        start_life: StartLife = EngineLife,
        start_renderer: StartLife = RendererLife,
    ) -> None:
        super().__init__(config, shards)
        self._settings = settings = settings_of(config)
        # What the core counts: restarts, deaths, load time.
        self._own_metrics = ModelMetrics.from_config(config)
        self._engine = EngineSupervisor(settings, self._own_metrics, start_life)
        self._host = EngineHost(next(shards.numbers), self._engine)
        # Loads the model's tokenizer and template once, before shards do.
        self._renderer = Renderer(
            config.name, source_of(settings), limits_of(settings), start_renderer
        )
        self.vocabulary = NO_TEXT
        self._joined: dict[int, ShardSession] = {}
        self.count({})

    @property
    def parts(self) -> Sequence[PartHost]:
        return [self._host]

    @property
    def opening(self) -> frames.OpenModel:
        return frames.OpenModel(self.number, self.config, (self._host.number,), ())

    async def start(self) -> None:
        """Load the engine; meanwhile try the tokenizer, then let the shards load it."""
        check_packages()
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._open_in_shards())
                both.create_task(self._engine.process.start())
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._own_metrics.load_s = time.monotonic() - began
        self.count(self._readings)

    async def _open_in_shards(self) -> None:
        self.vocabulary = await self._renderer.process.start()
        await self._renderer.close()
        await self._shards.open_model(self)

    async def refresh(self) -> None:
        """Read what the shards have counted."""
        await self._shards.read()

    async def close(self) -> None:
        """Close it in all shards, then stop the engine."""
        self._is_closing = True
        await asyncio.gather(self._shards.retire_model(self), self._renderer.close())
        await self._engine.close()
        self._joined.clear()

    def join(self, shard: int, session: ShardSession) -> None:
        if self._joined.get(shard) is not session:
            self._joined[shard] = session
            self._engine.join(shard, RemoteEnginePart(self._host.number, session))

    def leave(self, shard: int) -> None:
        self._joined.pop(shard, None)
        self._engine.leave(shard)
        super().leave(shard)

    def count(self, readings: Mapping[int, ModelReading]) -> None:
        super().count(readings)
        own = self._own_metrics
        metrics = own.blank()
        metrics.num_restarts, metrics.load_s = own.num_restarts, own.load_s
        metrics.num_deaths = dict(own.num_deaths)
        text = TextMetrics(metrics)
        if self._engine.ready is not None:
            text.loaded(self._engine.ready)
        for each in (*self._retired, *self._readings.values()):
            add(metrics, each.metrics)
        retired = [decode_record(each.metrics.others) for each in self._retired]
        # What a shard that has ended heard of the engine is not true any more.
        text.add([replace(each, reported_at=-math.inf) for each in retired])
        text.add([decode_record(each.metrics.others) for each in self._readings.values()])
        self.metrics, self.num_waiting = metrics, text.num_waiting
        self._is_busy = bool(text.num_running or text.num_waiting)

    @property
    def max_length(self) -> int:
        """Context length: the tokens of a prompt and its answer together."""
        if self._engine.ready is None:
            raise NotReady(f"model '{self.config.name}' is not ready: {self.reason}")
        return self._engine.ready.max_length

    # State for the catalog.

    @property
    def is_ready(self) -> bool:
        return not self._is_closing and self._engine.state == "READY"

    @property
    def shown_state(self) -> str:
        return "UNLOADING" if self._is_closing else self._engine.state

    @property
    def reason(self) -> str:
        return self._engine.reason

    @property
    def processes(self) -> Sequence[ModelProcess]:
        """The engine's process."""
        return [process_of(self.config, self._engine)]

    def explain(self) -> Explanation:
        doing: Literal["idle", "busy"] = "busy" if self._is_busy else "idle"
        return explain_text(self, self._settings, self._engine.ready, doing)
