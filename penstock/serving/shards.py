"""The shards of a server, as the core sees them: the models that they have open and published.

A shard in a process of its own takes requests (`serving.shard`); here are the core's ends: a
`ModelPart` per shard and stage that sends frames, and `ShardedModel`, a version whose requests are
in the shards. Language models have their own (`llm.sharded_text`), and so have models whose
requests are the core's (`owned_model`). Knows neither how shards are
started nor their sockets: `protocols.shard_processes` does. Belongs to the core's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from penstock.config import ModelConfig
from penstock.errors import ConfigError, NotReady, PenstockError
from penstock.processes.child import StartLife
from penstock.serving.batches import NUM_RECENT
from penstock.serving.core_requests import CoreRequests
from penstock.serving.drift import InputDrift
from penstock.serving.explain import Explanation, SeenShape, mode_of
from penstock.serving.metrics import ModelMetrics
from penstock.serving.metrics_record import MetricsRecord, add
from penstock.serving.model_host import HostBlock, ModelHost
from penstock.serving.parcels import Parcels
from penstock.serving.pipeline import stages_of
from penstock.serving.regions import Region
from penstock.serving.request_recorder import RequestRecorder
from penstock.serving.served import ModelProcess
from penstock.serving.shard import (
    ModelReading,
    decode_explanation,
    decode_readings,
    without_gauges,
)
from penstock.serving.shared_page import PageBlocks, PageLayout, num_slots
from penstock.serving.split_counts import SplitCounts
from penstock.types import Request
from penstock.wire import frames

log = logging.getLogger("penstock.shards")

# A shard that does not answer a question in this time is killed.
ANSWER_S = 5.0


class ShardGone(PenstockError):
    """The shard's process has ended; its successor starts from what is published then."""


class ShardSession(Protocol):
    """The process of a shard."""

    @property
    def parcels(self) -> Parcels:
        """The memory for tensors to and from it."""

    def send(self, frame: frames.Frame, fds: tuple[int, ...] = ()) -> None: ...

    async def ask(self, question: frames.ShardQuestion) -> bytes:
        """Return its answer; raise ShardGone when it has ended."""

    def kill(self) -> None: ...


class RemotePart:
    """A shard's part of one stage, in another process (`core_link.ModelPart`)."""

    def __init__(self, number: int, session: ShardSession) -> None:
        self._number = number
        self._session = session

    @property
    def is_idle(self) -> bool:
        return True

    @property
    def last_answered(self) -> float:
        return 0.0

    def open_model(self, proved: frames.ModelProved) -> None:
        self._tell(proved)

    def load_failed(self, problems: Sequence[str]) -> None:
        """Do nothing: shards open a model once it is loaded."""

    def set_worker(self, worker: frames.SetWorker, sock: socket.socket) -> None:
        with sock:
            self._session.send(frames.ToPart(self._number, worker), (sock.fileno(),))

    def died(self, died: frames.Died) -> None:
        self._tell(died)

    def verdict(self, verdict: frames.Verdict) -> None:
        self._tell(verdict)

    def set_quarantine(self, quarantine: frames.SetQuarantine) -> None:
        self._tell(quarantine)

    def set_reason(self, reason: str) -> None:
        self._tell(frames.SetReason(reason))

    def may_try(self) -> None:
        self._tell(frames.TryGranted())

    def scaled(self, scaled: frames.Scaled) -> None:
        self._tell(scaled)

    def resized(self, resized: frames.Resized) -> None:
        self._tell(resized)

    def vacate(self, index: int) -> bool:
        """Return True: sequences are the core's."""
        return True

    def occupy(self, index: int) -> None:
        """Do nothing, likewise."""

    def tick(self) -> None:
        """Do nothing: the shard has a clock of its own."""

    def _tell(self, message: frames.ToPartMessage) -> None:
        self._session.send(frames.ToPart(self._number, message))


class PartHost(Protocol):
    """The core's part of what shards have parts of: one stage of a model, or a language model."""

    number: int

    def receive(self, shard: int, message: frames.FromPartMessage) -> None: ...


@dataclass(slots=True, eq=False)
class StageHost:
    """One stage of a model: its host, and the metrics that scrapes show."""

    number: int
    host: ModelHost
    # What the core counts: restarts, deaths, load time.
    metrics: ModelMetrics

    def receive(self, shard: int, message: frames.FromPartMessage) -> None:
        match message:
            case frames.Lost() as lost:
                self.host.lost(shard, lost)
            case frames.Answered():
                self.host.answered()
            case frames.MayTry(is_patient):
                self.host.ask_try(shard, is_patient)
            case frames.Tried():
                self.host.tried(shard)
            case frames.Hung(index, life):
                self.host.hung(index, life)
            case frames.Left(index, life):
                self.host.left(shard, index, life)
            case frames.PartLoad() as load:
                self.host.scaler.report(shard, load)
            case frames.Wake():
                self.host.scaler.wake()


class ShardedVersion:
    """A version whose requests are in the shards, of any kind. Figures are those of the last
    `refresh`."""

    # Time for a shard to open it; None: any.
    open_s: float | None = ANSWER_S
    # The shards record.
    recorder: RequestRecorder | None = None

    def __init__(self, config: ModelConfig, shards: Shards) -> None:
        self.config = config
        self.number = next(shards.numbers)
        self.num_waiting = 0
        # Those of the core's own models, whose code calls this one.
        self.of_core = CoreRequests(config, self.number)
        self._shards = shards
        # What shards that have ended had counted.
        self._retired: list[ModelReading] = []
        # The last readings of the others, by shard.
        self._readings: Mapping[int, ModelReading] = {}
        self._is_closing = False

    @property
    def parts(self) -> Sequence[PartHost]:
        raise NotImplementedError

    @property
    def opening(self) -> frames.OpenModel:
        raise NotImplementedError

    @property
    def drift(self) -> Sequence[InputDrift]:
        """How live inputs compare with the evidence; empty without tensors to compare."""
        return ()

    async def drain(self) -> None:
        await self._shards.ask_all(frames.DrainModel(self.number), limit_s=None)

    def join(self, shard: int, session: ShardSession) -> None:
        """Let a shard that has opened the model serve it."""
        raise NotImplementedError

    def leave(self, shard: int) -> None:
        """Forget a shard that has ended, but not what it had counted."""
        if (reading := self._readings.get(shard)) is not None:
            self._retired.append(without_gauges(reading))
            self._readings = {n: each for n, each in self._readings.items() if n != shard}

    def count(self, readings: Mapping[int, ModelReading]) -> None:
        """Use what the shards have counted, by shard. One that is silent, and so is killed, keeps
        its last reading until it has ended: counters must not go back."""
        self._readings = {**self._readings, **readings}
        self.num_waiting = sum(each.num_waiting for each in self._readings.values())

    def split_counts(self, rollout: int) -> SplitCounts:
        """Return what all shards have counted for the rollout of which this is the candidate."""
        total = SplitCounts(rollout=rollout)
        for reading in (*self._retired, *self._readings.values()):
            if reading.split is not None and reading.split.rollout == rollout:
                total.merge(reading.split)
        return total

    def submit(self, request: Request) -> None:
        """Take a request of the core itself, for one of the shards."""
        self.of_core.submit(request)

    def cancel(self, request: Request) -> None:
        self.of_core.cancel(request)

    def refused(self, error: PenstockError, received: float) -> None:
        """Do nothing: shards count."""


class ShardedModel(ShardedVersion):
    """A version of a model with tensors (`Served`)."""

    def __init__(self, config: ModelConfig, shards: Shards, start_life: StartLife) -> None:
        """ConfigError if the page has no room for the model."""
        super().__init__(config, shards)
        names = [(config.name, config)]
        if config.is_staged:
            names += [(f"{config.name}:{each.name}", each.config) for each in stages_of(config)]
        stages = names[1:] or names
        self.stages: list[StageHost] = []
        # On the shared page; given back when all its writers have ended.
        self._blocks = shards.blocks.take([num_slots(stage) for _, stage in stages])
        for (name, stage), number in zip(stages, self._blocks, strict=True):
            metrics = ModelMetrics.from_config(config, "" if name == config.name else name)
            block = HostBlock(shards.blocks, number)
            host = ModelHost(stage, start_life, time.monotonic, metrics, block)
            self.stages.append(StageHost(next(shards.numbers), host, metrics))
        self._load_s = 0.0
        self.metrics = self._new_metrics()
        # Of each stage, if there are several: its metrics, and how many requests wait.
        self.stage_figures: list[tuple[ModelMetrics, int]] = []
        self._explanation: Explanation | None = None

    @property
    def parts(self) -> Sequence[PartHost]:
        return self.stages

    @property
    def opening(self) -> frames.OpenModel:
        numbers = tuple(stage.number for stage in self.stages)
        return frames.OpenModel(self.number, self.config, numbers, self._blocks)

    @property
    def is_ready(self) -> bool:
        return not self._is_closing and all(stage.host.is_ready for stage in self.stages)

    @property
    def shown_state(self) -> str:
        if self._is_closing:
            return "UNLOADING"
        states = [stage.host.shown_state for stage in self.stages]
        return next((state for state in states if state != "READY"), "READY")

    @property
    def reason(self) -> str:
        hosts = [stage.host for stage in self.stages]
        reasons = (each.reason or each.demand.reason for each in hosts)
        return next(filter(None, reasons), "")

    @property
    def mode(self) -> str:
        network = self.stages[-1].host
        return mode_of(self.config, network.policy)[0]

    @property
    def processes(self) -> Sequence[ModelProcess]:
        """Those of the network first."""
        found = [each for stage in reversed(self.stages) for each in stage.host.processes]
        return [replace(each, index=index) for index, each in enumerate(found)]

    @property
    def drift(self) -> Sequence[InputDrift]:
        return [state for stage in self.stages for state in stage.host.drift.states]

    async def start(self) -> None:
        """Load the workers, then open the model in all shards."""
        began = time.monotonic()
        results = await asyncio.gather(
            *(stage.host.load() for stage in self.stages), return_exceptions=True
        )
        problems: list[str] = []
        for result in results:
            if isinstance(result, ConfigError):
                problems += result.problems
            elif result is not None:
                raise result
        if problems:
            raise ConfigError(problems)
        self._load_s = time.monotonic() - began
        self.metrics = self._new_metrics()
        await self._shards.open_model(self)

    async def close(self) -> None:
        """Close it in all shards, then stop the workers."""
        self._is_closing = True
        await self._shards.retire_model(self)
        await asyncio.gather(*(stage.host.stop() for stage in self.stages))
        blocks, self._blocks = self._blocks, ()
        self._shards.blocks.give_back(blocks)

    def join(self, shard: int, session: ShardSession) -> None:
        for stage in self.stages:
            stage.host.join(shard, RemotePart(stage.number, session))

    def leave(self, shard: int) -> None:
        for stage in self.stages:
            stage.host.leave(shard)
        super().leave(shard)

    def count(self, readings: Mapping[int, ModelReading]) -> None:
        super().count(readings)
        everything = [*self._retired, *self._readings.values()]
        self.metrics = self._sum(self._new_metrics(), [each.metrics for each in everything])
        self.stage_figures = []
        if len(self.stages) > 1:
            for index, stage in enumerate(self.stages):
                own = stage.metrics
                metrics = own.blank()
                metrics.num_restarts, metrics.load_s = own.num_restarts, own.load_s
                metrics.num_deaths = dict(own.num_deaths)
                counted = [each.stages[index] for each in everything]
                num_waiting = sum(each.stages_waiting[index] for each in self._readings.values())
                self.stage_figures.append((self._sum(metrics, counted), num_waiting))

    def explain(self) -> Explanation:
        if self._explanation is None:
            raise NotReady(f"model '{self.config.name}' is not open in any shard")
        return self._explanation

    async def refresh(self) -> None:
        """Read the explanations of the shards."""
        answers = await self._shards.ask_all(frames.ExplainModel(self.number))
        told = [decode_explanation(answer) for answer in answers.values()]
        if told:
            self._explanation = self._fold(told)

    def _new_metrics(self) -> ModelMetrics:
        metrics = ModelMetrics.from_config(self.config)
        metrics.load_s = self._load_s
        for stage in self.stages:
            metrics.num_restarts += stage.metrics.num_restarts
            metrics.custom.include(stage.metrics.custom)
            for cause, count in stage.metrics.num_deaths.items():
                metrics.num_deaths[cause] += count
        return metrics

    @staticmethod
    def _sum(metrics: ModelMetrics, counted: Sequence[MetricsRecord]) -> ModelMetrics:
        for each in counted:
            add(metrics, each)
        return metrics

    def _fold(self, told: Sequence[Explanation]) -> Explanation:
        """Join what the shards say: a worker is busy if it is for one of them."""
        first = told[0]
        instances, host = [], self.stages[-1].host
        for process in host.processes:
            index, memory = process.index, process.gpu_memory_bytes
            states = {each.instances[index].state for each in told}
            shown = next(s for s in ("busy", "idle", "not ready") if s in states)
            state = replace(first.instances[index], state=shown, pid=process.pid)
            instances.append(replace(state, gpu_memory_bytes=memory))
        recent = sorted((r for each in told for r in each.recent), key=lambda r: r.age_s)
        sizes: dict[int, int] = {}
        refused: dict[str, int] = {}
        for each in told:
            for size, count in each.batch_sizes.items():
                sizes[size] = sizes.get(size, 0) + count
            for reason, count in each.refused.items():
                refused[reason] = refused.get(reason, 0) + count
        shapes: dict[str, SeenShape] = {}
        for seen in (seen for each in told for seen in each.shapes):
            known = shapes.get(seen.shape, SeenShape(seen.shape, 0, 0, 0))
            shapes[seen.shape] = SeenShape(
                seen.shape,
                known.num_requests + seen.num_requests,
                known.num_rows + seen.num_rows,
                known.num_batches + seen.num_batches,
            )
        busiest = max(told, key=lambda each: len(each.recent))
        before = [note for stage in self.stages[:-1] for note in stage.host.drift.alarms]
        notes = [*host.notes, *host.drift.notes, *before, *first.notes]
        return replace(
            busiest,
            state=self.shown_state,
            instances=instances,
            waiting=[lane for each in told for lane in each.waiting],
            recent=recent[:NUM_RECENT],
            num_shapes=max(each.num_shapes for each in told),
            shapes=sorted(shapes.values(), key=lambda seen: -seen.num_requests),
            batch_sizes=dict(sorted(sizes.items())),
            refused=refused,
            notes=notes,
            scaling=host.demand.describe(),
        )


@dataclass(eq=False)
class Shards:
    """Invariant: a session in `_ready` has every model of `_models` open, and the last published
    table, or is about to be told."""

    # How many shards there are.
    number: int
    _sessions: dict[int, ShardSession] = field(default_factory=dict)
    _models: dict[int, ShardedVersion] = field(default_factory=dict)
    _parts: dict[int, PartHost] = field(default_factory=dict)
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    # Returns what is published now; the epoch is filled in.
    table: Callable[[], frames.Publish] = lambda: frames.Publish(0, {}, {}, ())
    # Returns the memory that clients have registered.
    regions: Callable[[], Sequence[Region]] = lambda: ()
    # Called when a shard has ended.
    on_lost: Callable[[], None] = lambda: None
    _epoch: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.blocks = PageBlocks(PageLayout(self.number))

    def close(self) -> None:
        """Release the shared page, once all models and shards have ended."""
        self.blocks.close()

    async def open(self, shard: int, session: ShardSession) -> None:
        """Tell a new process of a shard all that it must know."""
        self._sessions[shard] = session
        for region in self.regions():
            _send_region(session, region)
        models = list(self._models.values())
        await asyncio.gather(*(self._open(shard, session, model) for model in models))
        await self._ask(session, self._publishing())

    async def _open(self, shard: int, session: ShardSession, model: ShardedVersion) -> None:
        await self._ask(session, model.opening, model.open_s)
        if self._sessions.get(shard) is session:
            model.join(shard, session)
            model.of_core.join(shard, session.parcels, session.send)

    def move_clients(self, shard: int, count: int) -> None:
        """Ask `count` clients of a shard to connect again."""
        if (session := self._sessions.get(shard)) is not None:
            session.send(frames.MoveClients(count))

    def lose(self, shard: int) -> None:
        """Forget a shard whose process has ended."""
        self.blocks.lose_shard(shard)
        self.on_lost()
        if self._sessions.pop(shard, None) is not None:
            for model in self._models.values():
                model.of_core.leave(shard)
                model.leave(shard)

    def receive(self, shard: int, frame: frames.FromPart) -> None:
        if (part := self._parts.get(frame.part)) is not None:
            part.receive(shard, frame.message)

    async def open_model(self, model: ShardedVersion) -> None:
        self._models[model.number] = model
        for part in (*model.parts, model.of_core):
            self._parts[part.number] = part
        sessions = list(self._sessions.items())
        await asyncio.gather(*(self._open(shard, each, model) for shard, each in sessions))

    async def retire_model(self, model: ShardedVersion) -> None:
        if self._models.pop(model.number, None) is not None:
            await self.ask_all(frames.RetireModel(model.number), limit_s=2 * ANSWER_S)
        model.of_core.close()
        for part in (*model.parts, model.of_core):
            self._parts.pop(part.number, None)

    async def publish(self) -> None:
        """Return when all shards use the table as it is now."""
        await self.ask_all(self._publishing())

    async def open_region(self, region: Region) -> None:
        """Return when requests to any shard may use a client's memory."""
        for session in self._sessions.values():
            _send_region(session, region)
        await self.publish()

    async def close_regions(self, numbers: Sequence[int]) -> None:
        """Return when no later request can use this memory of clients."""
        for session in self._sessions.values():
            for number in numbers:
                session.send(frames.CloseRegion(number))
        await self.publish()

    def publish_soon(self) -> None:
        task = asyncio.get_running_loop().create_task(self.publish())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def ask_all(
        self, question: frames.ShardQuestion, limit_s: float | None = ANSWER_S
    ) -> dict[int, bytes]:
        """Return the answers by shard, without those of shards that end meanwhile."""
        sessions = list(self._sessions.items())
        asked = (self._ask(session, question, limit_s) for _, session in sessions)
        answers = await asyncio.gather(*asked)
        numbers = [number for number, _ in sessions]
        return {n: a for n, a in zip(numbers, answers, strict=True) if a is not None}

    async def read(self) -> None:
        """Read what all shards have counted. A shard that is killed loses what it has counted since
        the last time."""
        sessions = dict(self._sessions)
        answers = await self.ask_all(frames.ReadModels())
        # The last reading of a shard that has ended meanwhile was retired.
        readings = {
            shard: decode_readings(answer)
            for shard, answer in answers.items()
            if self._sessions.get(shard) is sessions[shard]
        }
        for number, model in self._models.items():
            model.count({n: each[number] for n, each in readings.items() if number in each})

    def _publishing(self) -> frames.Publish:
        self._epoch += 1
        frame = self.table()
        frame.epoch = self._epoch
        return frame

    @staticmethod
    async def _ask(
        session: ShardSession, question: frames.ShardQuestion, limit_s: float | None = ANSWER_S
    ) -> bytes | None:
        """Return the answer; None if the shard has ended, or is killed because it is silent."""
        with contextlib.suppress(ShardGone):
            try:
                async with asyncio.timeout(limit_s):
                    return await session.ask(question)
            except TimeoutError:
                log.error("a shard did not answer in %.0f s; killing it", limit_s)
                session.kill()
        return None


def _send_region(session: ShardSession, region: Region) -> None:
    fds = () if region.fd is None else (region.fd,)
    session.send(frames.OpenRegion(region.caller, region.memory), fds)
