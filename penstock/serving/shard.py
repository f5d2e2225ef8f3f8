"""The models of a shard that has a process of its own, as the core opens and publishes them.

A shard admits, queues and batches requests; workers, load state and verdicts are the core's. Here
are the shard's ends of both: answers to the core's questions, and a `CoreLink` per stage that sends
frames. Of a language model a shard has the generations, and the core the engine. Knows no protocol
and no socket. Belongs to the shard's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from penstock.config import LLM, ModelConfig
from penstock.errors import NotFound
from penstock.serving.core_link import EngineCore, EnginePart, ModelPart, ShardSetup
from penstock.serving.ensemble import Ensemble
from penstock.serving.explain import Explanation
from penstock.serving.handed_over import HandedOver
from penstock.serving.metrics_record import MetricsRecord, record
from penstock.serving.model import Model
from penstock.serving.model_gauges import NO_GAUGES
from penstock.serving.model_table import LoadFailure, ModelTable
from penstock.serving.parcels import Parcels
from penstock.serving.pipeline import StagePipeline, make_model, stages_of
from penstock.serving.quotas import Quota
from penstock.serving.served import Served
from penstock.serving.shared_page import (
    PageElsewhere,
    SharedPage,
    add_places,
    num_slots,
    slots_of_workers,
)
from penstock.serving.split_counts import SplitCounts
from penstock.serving.traffic_split import renew_split
from penstock.system import logs
from penstock.types import Servable
from penstock.wire import frames

log = logging.getLogger("penstock.shard")

TICK_S = 0.5


@dataclass(frozen=True, slots=True)
class ModelReading:
    """Statistics of one model in one shard: its own and, if it has several stages, theirs."""

    metrics: MetricsRecord
    stages: list[MetricsRecord]
    num_waiting: int
    stages_waiting: list[int]
    # Of the rollout in which the model is the candidate.
    split: SplitCounts | None = None


class RemoteCore:
    """The core in another process: `CoreLink` of one stage, by frames."""

    def __init__(self, part: int, send: Callable[[frames.Frame], None]) -> None:
        self._part = part
        self._send = send
        # The last MayTry that was sent and has no answer yet.
        self._asked: bool | None = None
        self._is_granted = False

    def lost(self, lost: frames.Lost) -> None:
        self._tell(lost)

    def answered(self) -> None:
        self._tell(frames.Answered())

    def may_try(self, is_patient: bool) -> bool:
        if not self._is_granted and self._asked != is_patient:
            self._asked = is_patient
            self._tell(frames.MayTry(is_patient))
        return self._is_granted

    def granted(self) -> None:
        self._asked, self._is_granted = None, True

    def tried(self) -> None:
        self._asked, self._is_granted = None, False
        self._tell(frames.Tried())

    def hung(self, index: int, life: int) -> None:
        self._tell(frames.Hung(index, life))

    def left(self, index: int, life: int) -> None:
        self._tell(frames.Left(index, life))

    def report(self, load: frames.PartLoad) -> None:
        self._tell(load)

    def wake(self) -> None:
        self._tell(frames.Wake())

    def _tell(self, message: frames.FromPartMessage) -> None:
        self._send(frames.FromPart(self._part, message))


class RemoteEngineCore:
    """The core in another process: `EngineCore` of one language model, by frames."""

    def __init__(self, part: int, send: Callable[[frames.Frame], None]) -> None:
        self._part = part
        self._send = send

    def engine_hung(self, life: int, silent_s: float) -> None:
        self._send(frames.FromPart(self._part, frames.EngineHung(life, silent_s)))


# Creates this shard's part of a language model, and what hears of its engine.
MakeText = Callable[[ModelConfig, EngineCore], tuple[Served, EnginePart]]


class CoreHanding(Protocol):
    """The core's requests for one model (`owned_model.HandingProcess`)."""

    def submit(self, message: frames.HandOver) -> None: ...

    def cancel(self, call: int) -> None: ...

    def close(self) -> None: ...


# Creates what takes them; it answers by the function.
TakeHanding = Callable[[Servable, Parcels, Callable[[frames.HandBack], None]], CoreHanding]


class ShardTable(ModelTable):
    """The published models: a copy of the core's table. Of the quotas, only shares of queues are
    checked here: requests per second are leased."""

    def set_shares(self, shares: Mapping[bytes, float]) -> None:
        self.quotas.replace({key: Quota(queue_share=share) for key, share in shares.items()})

    def publish(self, frame: frames.Publish, models: Mapping[int, Served]) -> None:
        self._models = {}
        for name, numbers in frame.models.items():
            # A model that is not open here any more is being retired: the server shuts down.
            found = [models[number] for number in numbers if number in models]
            if found:
                self._models[name] = {each.config.version: each for each in found}
        self._latest = {
            name: versions[max(versions, key=int)] for name, versions in self._models.items()
        }
        failures = frame.failures.items()
        self._failures = {name: LoadFailure(name, problems) for name, problems in failures}
        self._awaited = set(frame.awaited)
        self._set_splits(frame.splits, models)
        self.tracer.use(frame.tracing)
        if frame.logging is not None and frame.logging != self.log_switches:
            self.log_switches = frame.logging
            logs.switch(frame.logging)

    def _set_splits(
        self, rules: Mapping[str, frames.SplitRule], models: Mapping[int, Served]
    ) -> None:
        """Split requests by these rules; counts of rollouts that go on are kept."""
        known, self.splits, self._candidates = self.splits, {}, {}
        self.rules = dict(rules)
        for name, rule in rules.items():
            stable, candidate = self._latest.get(name), models.get(rule.number)
            if stable is not None and candidate is not None:
                self._candidates[name] = candidate
                self.splits[name] = renew_split(known.get(name), rule, stable, candidate)


class Shard:
    """`table` is what requests find. `published` is set when the core has published it first. On
    the `page`, the cells of this `number` are its own. `make_text` creates language models;
    `parcels` is the memory for tensors to and from the core, whose own requests `take_handing`
    takes."""

    def __init__(
        self,
        send: Callable[[frames.Frame], None],
        page: SharedPage,
        number: int,
        make_text: MakeText | None = None,
        parcels: Parcels | None = None,
        take_handing: TakeHanding | None = None,
    ) -> None:
        self._send = send
        self._take_handing = take_handing
        self._make_text = make_text
        self._parcels = parcels
        self._page = page
        self._number = number
        self._loop = asyncio.get_running_loop()
        self.table = ShardTable()
        self.regions = self.table.regions
        self.published = asyncio.Event()
        self._models: dict[int, Served] = {}
        self._numbers: dict[int, tuple[int, ...]] = {}
        self._parts: dict[int, tuple[ModelPart, RemoteCore]] = {}
        # By part: the slots of its workers on the page, and what reads them.
        self._slots: dict[int, tuple[list[range], PageElsewhere]] = {}
        self._engine_parts: dict[int, EnginePart] = {}
        # Models whose requests go to the core.
        self._handed: dict[int, HandedOver] = {}
        # Requests of the core, by the number of their model.
        self._of_core: dict[int, CoreHanding] = {}
        self._epoch = -1
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def receive(self, frame: frames.ToPart, sock: socket.socket | None = None) -> None:
        """Hear what the core says about a stage; `sock` comes with SetWorker and SetEngine."""
        if frame.part in self._engine_parts:
            self._hear_engine(self._engine_parts[frame.part], frame.message, sock)
        elif isinstance(frame.message, frames.HandBack):
            self._hear_answer(frame.part, frame.message)
        elif isinstance(frame.message, frames.HandOver):
            self._submit_for_core(frame.part, frame.message)
        elif isinstance(frame.message, frames.TakeBack):
            if frame.part in self._of_core:
                self._of_core[frame.part].cancel(frame.message.call)
        elif frame.part not in self._parts:
            if sock is not None:
                sock.close()
        elif sock is not None:
            self._connect(frame, sock)
        elif isinstance(frame.message, frames.Resized):
            self._resize(frame.part, frame.message)
        else:
            self._hear(*self._parts[frame.part], frame.message)

    def _resize(self, number: int, resized: frames.Resized) -> None:
        """Use another number of instances, whose slots on the page follow the others."""
        slots, elsewhere = self._slots[number]
        add_places(slots, resized.num_places)
        elsewhere.use_slots(slots[-1].stop)
        part, _ = self._parts[number]
        part.resized(resized)

    def _hear_answer(self, part: int, answer: frames.HandBack) -> None:
        """Hear the core's answer to a request that was handed over."""
        if part in self._handed:
            self._handed[part].hear(answer)
        elif self._parcels is not None:
            self._parcels.free(answer.parcel)

    def _submit_for_core(self, number: int, message: frames.HandOver) -> None:
        """Take a request of the core for a model. One that is closed here meanwhile gets no answer:
        the core ends its requests itself."""
        assert self._parcels is not None and self._take_handing is not None
        if number not in self._models:
            self._parcels.free(message.parcel)
            return

        def tell(answer: frames.HandBack) -> None:
            self._send(frames.FromPart(number, answer))

        if number not in self._of_core:
            model = self._models[number]
            self._of_core[number] = self._take_handing(model, self._parcels, tell)
        self._of_core[number].submit(message)

    @staticmethod
    def _hear(part: ModelPart, core: RemoteCore, message: frames.ToPartMessage) -> None:
        match message:
            case frames.ModelProved() as proved:
                part.open_model(proved)
            case frames.Died() as died:
                part.died(died)
            case frames.Verdict() as verdict:
                part.verdict(verdict)
            case frames.SetQuarantine() as quarantine:
                part.set_quarantine(quarantine)
            case frames.SetReason(text):
                part.set_reason(text)
            case frames.Scaled() as scaled:
                part.scaled(scaled)
            case frames.TryGranted():
                core.granted()
                part.may_try()

    @staticmethod
    def _hear_engine(
        part: EnginePart, message: frames.ToPartMessage, sock: socket.socket | None
    ) -> None:
        match message:
            case frames.SetEngine():
                assert sock is not None
                part.set_engine(message, sock)
            case frames.EngineEnded():
                part.engine_ended(message)

    def _connect(self, frame: frames.ToPart, sock: socket.socket) -> None:
        part, core = self._parts[frame.part]
        worker = frame.message
        assert isinstance(worker, frames.SetWorker)
        try:
            part.set_worker(worker, sock)
        except OSError:  # No memory or descriptors are left; the next worker may find some.
            log.exception("a worker could not be connected")
            core.hung(worker.index, worker.life)

    async def answer(self, question: frames.ShardQuestion) -> bytes:
        match question:
            case frames.OpenModel():
                await self._open_of_kind(question)
            case frames.Publish():
                if question.epoch > self._epoch:
                    self._epoch = question.epoch
                    self.table.publish(question, self._models)
                    self.published.set()
            case frames.DrainModel(model):
                await self._find(model).drain()
            case frames.RetireModel(model):
                await self._retire(model)
            case frames.ReadModels():
                return msgspec.msgpack.encode(self._read())
            case frames.ExplainModel(model):
                return msgspec.msgpack.encode(self._find(model).explain())
        return b""

    async def drain(self) -> None:
        """Wait until everything admitted has been answered."""
        await asyncio.gather(*(model.drain() for model in self._models.values()))

    async def close(self) -> None:
        self._ticker.cancel()
        await asyncio.gather(*(self._retire(number) for number in list(self._models)))
        self.regions.close_all()
        await self.table.caches.close()
        await asyncio.to_thread(self.table.recorders.close)

    async def _open_of_kind(self, opening: frames.OpenModel) -> None:
        config = opening.config
        if config.backend == LLM:
            await self._open_text(opening)
        elif config.has_one_owner:
            self._open_handed(opening)
        elif config.is_ensemble:
            self._open_ensemble(opening)
        else:
            self._open(opening)

    def _open(self, opening: frames.OpenModel) -> None:
        if opening.model in self._models:
            return
        cores = [RemoteCore(number, self._send) for number in opening.parts]
        config = opening.config
        configs = [stage.config for stage in stages_of(config)] if config.is_staged else [config]
        places = zip(opening.parts, cores, configs, opening.blocks, strict=True)
        setups = [self._set_up(*place) for place in places]
        model = make_model(config, quotas=self.table.quotas, shards=setups)
        model.cache = self.table.caches.open(config, model.metrics)
        stages = model.models if isinstance(model, StagePipeline) else [model]
        for number, stage, core in zip(opening.parts, stages, cores, strict=True):
            self._parts[number] = stage.readiness, core
        model.recorder = self.table.recorders.open(config, model.metrics)
        self.table.count_latencies(model)
        self._models[opening.model] = model
        self._numbers[opening.model] = opening.parts

    def _open_handed(self, opening: frames.OpenModel) -> None:
        """Open a model whose requests go to the core."""
        if opening.model in self._models:
            return
        assert self._parcels is not None
        (number,), config = opening.parts, opening.config

        def tell(message: frames.FromPartMessage) -> None:
            self._send(frames.FromPart(number, message))

        model = self._handed[number] = HandedOver(config, self._parcels, tell)
        model.cache = self.table.caches.open(config, model.metrics)
        model.recorder = self.table.recorders.open(config, model.metrics)
        self._models[opening.model] = model
        self._numbers[opening.model] = opening.parts

    def _open_ensemble(self, opening: frames.OpenModel) -> None:
        """Open an ensemble; it finds its members in this shard's table."""
        if opening.model not in self._models:
            model = Ensemble(opening.config, self.table)
            model.recorder = self.table.recorders.open(opening.config, model.metrics)
            self.table.count_latencies(model)
            self._models[opening.model] = model
            self._numbers[opening.model] = opening.parts

    async def _open_text(self, opening: frames.OpenModel) -> None:
        """Open a language model; return when its renderer is loaded."""
        if opening.model in self._models:
            return
        assert self._make_text is not None
        (number,) = opening.parts
        model, part = self._make_text(opening.config, RemoteEngineCore(number, self._send))
        self._engine_parts[number] = part
        model.recorder = self.table.recorders.open(opening.config, model.metrics)
        self.table.count_latencies(model)
        self._models[opening.model] = model
        self._numbers[opening.model] = opening.parts
        await model.start()

    def _set_up(self, part: int, core: RemoteCore, config: ModelConfig, block: int) -> ShardSetup:
        """Connect a stage with the core, and by the page with the other shards and the workers."""
        policy, slots = config.batching, slots_of_workers(config)
        levels, has_budget = max(1, policy.num_priorities), policy.max_tokens is not None
        place = self._page, block, self._number, num_slots(config)
        elsewhere = PageElsewhere(*place, levels, has_budget)
        self._slots[part] = slots, elsewhere
        return ShardSetup(
            core,
            lambda index: elsewhere.has_idle(slots[index]),
            elsewhere,
            lambda index: elsewhere.num_batches(slots[index]),
            self.regions,
            lambda index: elsewhere.busy_s(slots[index], time.monotonic()),
            self.table,
        )

    async def _retire(self, number: int) -> None:
        model = self._models.pop(number, None)
        if model is None:
            return
        await model.close()
        if (handing := self._of_core.pop(number, None)) is not None:
            handing.close()
        for part in self._numbers.pop(number):
            self._parts.pop(part, None)
            self._slots.pop(part, None)
            self._engine_parts.pop(part, None)
            self._handed.pop(part, None)

    def _find(self, number: int) -> Served:
        if number not in self._models:
            raise NotFound(f"model number {number} is not open in this shard")
        return self._models[number]

    def _read(self) -> dict[int, ModelReading]:
        splits = {split.candidate: split.counts for split in self.table.splits.values()}
        return {
            number: _read_model(model, splits.get(model)) for number, model in self._models.items()
        }

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        for part, _ in list(self._parts.values()):
            with contextlib.suppress(OSError):
                part.tick()
        for model in self._models.values():
            if isinstance(model, Model | StagePipeline):
                model.tick()


def _read_model(model: Served, split: SplitCounts | None) -> ModelReading:
    stages: Sequence[Model] = model.models if isinstance(model, StagePipeline) else ()
    records = [record(stage.metrics) for stage in stages]
    waiting = [stage.num_waiting for stage in stages]
    return ModelReading(record(model.metrics), records, model.num_waiting, waiting, split)


def without_gauges(reading: ModelReading) -> ModelReading:
    """Return what stays of a shard that has ended: what it held is gone."""
    stages = [replace(each, gauges=NO_GAUGES) for each in reading.stages]
    return replace(reading, metrics=replace(reading.metrics, gauges=NO_GAUGES), stages=stages)


decode_readings = msgspec.msgpack.Decoder(dict[int, ModelReading]).decode
decode_explanation = msgspec.msgpack.Decoder(Explanation).decode
