"""The core's part of one model: its workers, its load state, and who is to blame for a death.

Receives the supervisor's events and tells the shards' parts of the model (`core_link.ModelPart`),
which have its requests. There is one for each model, however many shards there are. Runs on the
core's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.processes.channel import socket_pair
from penstock.processes.child import StartLife
from penstock.serving.context import log_about
from penstock.serving.core_link import ModelPart
from penstock.serving.demand_loading import DemandLoading
from penstock.serving.drift_watch import DriftWatch
from penstock.serving.instance import Instance
from penstock.serving.instance_change import REASON, InstanceChange
from penstock.serving.metrics import ModelMetrics
from penstock.serving.proof import agreed
from penstock.serving.quarantine import MAX_BODY_DEATHS, MAX_KEY_DEATHS, Quarantine
from penstock.serving.scaler import InstanceScaler
from penstock.serving.served import ModelProcess
from penstock.serving.shared_page import PageBlocks, add_places, slots_of_workers
from penstock.serving.supervisor import Supervisor, load_timeout_text
from penstock.wire import frames

log = logging.getLogger("penstock.model")

HostState = Literal["LOADING", "READY", "UNAVAILABLE"]
# A shard that has not said in this time what it lost with a worker has lost several requests.
LOST_S = 1.0


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A model's block on the shared page."""

    blocks: PageBlocks
    number: int


@dataclass(slots=True, eq=False)
class Death:
    """A worker's death until all shards have said what they lost with it. `conclude` takes whether
    a request is to blame."""

    instance: Instance
    life: int
    waiting_for: set[int]
    conclude: Callable[[bool], None]
    # For shards that stay silent.
    timer: asyncio.TimerHandle
    losses: list[frames.Lost] = field(default_factory=list)


class ModelHost:
    """The supervisor's listener. `parts` are the shards' parts of the model, by shard; references
    to them are dropped by `stop`, so that an unloaded model is freed without the garbage
    collector."""

    def __init__(
        self,
        config: ModelConfig,
        start_life: StartLife,
        clock: Callable[[], float],
        metrics: ModelMetrics,
        block: HostBlock | None = None,
    ) -> None:
        """`block` is where workers and shards show their load, if there can be several shards."""
        self._config = config
        self._block = block
        self._slots = slots_of_workers(config)
        self._clock = clock
        self._metrics = metrics
        self._load_began = clock()
        self.supervisor = Supervisor(config, start_life)
        # Replaced in place: a spare takes over from a dead worker. Places that no worker has now
        # included.
        self.instances: Sequence[Instance] = self.supervisor.instances
        self._parts: dict[int, ModelPart] = {}
        self.scaler = InstanceScaler(config, self.supervisor, clock, self._parts)
        self.demand = DemandLoading(self.scaler, self._parts, clock)
        if block is not None:
            page, number, slots = block.blocks.page, block.number, self._slots
            self.demand.is_unused = lambda: page.is_unused(number, slots[-1].stop)
            self.demand.last_started = lambda: page.last_started(number, slots[-1].stop)
        # A change of the number of instances in progress.
        self._change: InstanceChange | None = None
        self._quarantine = Quarantine()
        # Workers that the parts know, and the shards that have all answers of leaving workers.
        self._known: set[int] = set()
        self._left: dict[int, set[int]] = {}
        self._deaths: dict[int, Death] = {}
        # The shard that may run suspects, and those that want to, with their patience.
        self._trying: int | None = None
        self._wants_try: dict[int, bool] = {}
        self.state: HostState = "LOADING"
        self.reason = ""
        # How the model is served and why, if its configuration does not say.
        self.notes: tuple[str, ...] = ()
        self.drift = DriftWatch(config, clock)
        self.sketched = self.drift.hear
        self.measured = metrics.custom.add
        self._proved: frames.ModelProved | None = None
        # Done when all instances are warm, or when loading failed and `_load_problems` is set. Not
        # an exception of the future: model and traceback would keep each other alive.
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load_problems: Sequence[str] = ()

    @property
    def is_ready(self) -> bool:
        """Whether a worker can run a batch, or is started when a request comes."""
        if self.state != "READY":
            return False
        has_worker = any(each.is_ready for each in self.instances)
        return has_worker or (self.scaler.is_cold and not self.scaler.refuses)

    @property
    def shown_state(self) -> str:
        return "UNAVAILABLE" if self.state == "READY" and not self.is_ready else self.state

    @property
    def policy(self) -> BatchPolicy:
        """How requests are batched, after what the workers proved."""
        policy = self._config.batching
        is_unbatched = self._proved is not None and self._proved.proof.unbatched
        return replace(policy, is_dynamic=False) if is_unbatched else policy

    @property
    def processes(self) -> list[ModelProcess]:
        return [each.process for each in self.instances if each.is_wanted or each.child]

    def join(self, shard: int, part: ModelPart) -> None:
        """Let a shard serve the model, now or once it is loaded."""
        self._parts[shard] = part
        if self._proved is not None:
            self._introduce(shard, part, self._proved)

    def leave(self, shard: int) -> None:
        """Forget a shard that has ended, with the requests that it had."""
        if self._parts.pop(shard, None) is None:
            return
        self._wants_try.pop(shard, None)
        self.tried(shard)
        self.scaler.forget(shard)
        for death in list(self._deaths.values()):
            self._miss(death, shard)
        for instance in self.instances:
            self._let_go(instance)

    async def load(self) -> None:
        """Start the workers and wait until all are warm. ConfigError if the model cannot load."""
        self._load_began = self._clock()
        self.supervisor.start(self)
        if self.demand.is_lazy:
            # Requests wait for the first worker.
            self._finish_load(frames.ModelProved())
        elif self.demand.is_used:
            self.scaler.wake("it is loaded")
        await self._first_ready
        if self._load_problems:
            raise ConfigError(self._load_problems)

    async def change_instances(self, config: ModelConfig) -> None:
        """Start or stop workers until there are as many as this configuration says, which differs
        in nothing else. ConfigError, and nothing changes, if one cannot be loaded."""
        old, count = self._config, self.scaler.num_wanted
        self._change = InstanceChange(self._resize(config, count))
        try:
            async with asyncio.timeout(config.load_timeout_s):
                await self._change.wait()
        except BaseException as error:
            self._change = None
            self._resize(old, count)
            if isinstance(error, TimeoutError):
                text = load_timeout_text(config.load_timeout_s)
                raise ConfigError([f"{REASON}: {text}"]) from None
            raise
        self._change = None
        self.scaler.tell_executors()

    def _resize(self, config: ModelConfig, count: int) -> list[Instance]:
        """Have `count` instances, if the configuration allows it; return those that are started."""
        self._config = config
        num_places = max(len(self.instances), len(config.places))
        add_places(self._slots, num_places)
        for part in self._parts.values():
            part.resized(frames.Resized(config.num_instances, num_places))
        return self.scaler.resize(config, count, REASON)

    async def stop(self) -> None:
        """Stop the workers after their current batches."""
        self.scaler.close()
        await self.supervisor.stop()
        self._parts.clear()
        for death in self._deaths.values():
            death.timer.cancel()

    def instance_ready(self, instance: Instance) -> None:
        assert instance.ready is not None
        self.scaler.ready(instance)
        if self._proved is not None and self.supervisor.proof is None:
            self._metrics.load_s = instance.start_s
            proved = self._prove([instance.ready])
            for part in self._parts.values():
                part.open_model(proved)
        if self._proved is not None:
            for shard, part in self._parts.items():
                self._set_worker(shard, part, instance)
            self.scaler.tell_executors()
            if self._change is not None:
                self._change.ready(instance)
            return
        wanted = [each for each in self.instances if each.is_wanted]
        if all(each.is_ready for each in wanted) and not self._first_ready.done():
            self._metrics.load_s = self._clock() - self._load_began
            self._finish_load(self._prove([each.ready for each in wanted if each.ready]))
            self.scaler.tell_executors()

    def instance_leaving(self, instance: Instance) -> None:
        self._let_go(instance)
        self.scaler.tell_executors()

    def instance_died(
        self, instance: Instance, reason: str, conclude: Callable[[bool], None]
    ) -> None:
        self.scaler.settled(instance)
        if self._change is not None:
            self._change.died(instance, reason)
        if self.state == "READY":
            self.demand.died(instance, reason)
        is_lost = instance.is_wanted and not instance.is_dismissed
        if self.state == "READY" and not instance.is_spare and is_lost:
            self._metrics.num_restarts += 1
            if not instance.is_leaving:
                self._metrics.num_deaths["hang" if instance.is_hung else "crash"] += 1
        self._left.pop(instance.life, None)
        if instance.life not in self._known:
            conclude(False)
            return
        self._known.discard(instance.life)
        if self._block is not None:
            for slot in self._slots[instance.index]:
                self._block.blocks.page.clear_slot(self._block.number, slot)
        timer = asyncio.get_running_loop().call_later(LOST_S, self._miss_all, instance.life)
        death = Death(instance, instance.life, set(self._parts), conclude, timer)
        self._deaths[death.life] = death
        if not self._parts:
            self._conclude(death)
        died = frames.Died(instance.index, death.life, reason)
        for part in list(self._parts.values()):
            part.died(died)

    def load_failed(self, problems: Sequence[str]) -> None:
        if self.demand.is_lazy and self.state == "READY":
            # Its death follows, and the next request tries again.
            return
        self.state = "UNAVAILABLE"
        self.reason = "; ".join(problems)
        for part in self._parts.values():
            part.load_failed(problems)
        if not self._first_ready.done():
            self._load_problems = problems
            self._first_ready.set_result(None)

    def restarting(self, reason: str) -> None:
        for part in self._parts.values():
            part.set_reason(reason)

    def tick(self) -> None:
        self._quarantine.expire(self._clock())
        for part in self._parts.values():
            part.tick()
        self._grant_try()
        self.scaler.leave_vacated()
        is_scaled = self._config.is_scaled and self._change is None
        is_proved = self.supervisor.proof is not None
        if is_scaled and is_proved and self.state == "READY" and self.scaler.tick():
            self.demand.tell_scaled()

    def lost(self, shard: int, lost: frames.Lost) -> None:
        """Hear what a shard lost with a worker; judge when all have said so."""
        death = self._deaths.get(lost.life)
        if death is None or shard not in death.waiting_for:
            return
        death.waiting_for.discard(shard)
        death.losses.append(lost)
        if not death.waiting_for:
            self._conclude(death)

    def answered(self) -> None:
        self._quarantine.answered()

    def may_try(self, shard: int, is_patient: bool) -> bool:
        """Whether a shard may run a suspect now; if so, no other may before its `tried`."""
        if self._trying not in (None, shard):
            return False
        may = self.supervisor.spares.can_replace_worker(is_patient)
        if may:
            self._trying = shard
        return may

    def ask_try(self, shard: int, is_patient: bool) -> None:
        """Tell the shard, now or later, that it may run a suspect."""
        self._wants_try[shard] = is_patient
        self._grant_try()

    def tried(self, shard: int) -> None:
        if self._trying == shard:
            self._trying = None
            self._grant_try()

    def _grant_try(self) -> None:
        for shard, is_patient in list(self._wants_try.items()):
            if self._trying is None and self.may_try(shard, is_patient):
                del self._wants_try[shard]
                self._parts[shard].may_try()

    def hung(self, index: int, life: int) -> None:
        instance = self.instances[index]
        if instance.life == life:
            self.supervisor.kill_hung(instance)

    def left(self, shard: int, index: int, life: int) -> None:
        """Hear that a shard has all answers of a leaving worker."""
        instance = self.instances[index]
        if instance.life == life:
            self._left.setdefault(life, set()).add(shard)
            self._let_go(instance)

    def _let_go(self, instance: Instance) -> None:
        """Stop a leaving worker once it has answered all shards that know it."""
        knows = set(self._parts) if instance.life in self._known else set()
        if instance.is_leaving and knows <= self._left.get(instance.life, set()):
            self.supervisor.let_go(instance)

    def _prove(self, ready: Sequence[frames.WorkerReady]) -> frames.ModelProved:
        """Return how far these workers, the first ones, proved batching and padding harmless."""
        proof = self.supervisor.proof = agreed([each.proof for each in ready])
        notes = notes_of(self._config, proof)
        self.notes = (*notes, *self._config.warnings)
        for note in notes:
            # Notes of the proof are about what was not checked; that is served as configured.
            level = logging.INFO if note in proof.notes else logging.WARNING
            log_about(log, level, self._config, ": %s", note)
        self._proved = frames.ModelProved(
            proof,
            self._metrics.load_s,
            any(each.needs_requests for each in ready),
            tuple(each.timings for each in ready),
            tuple(each.bucket_timings for each in ready),
        )
        return self._proved

    def _finish_load(self, proved: frames.ModelProved) -> None:
        """Let the shards serve."""
        self._proved = proved
        self.state = "READY"
        for shard, part in self._parts.items():
            self._introduce(shard, part, proved)
        self._first_ready.set_result(None)

    def _introduce(self, shard: int, part: ModelPart, proved: frames.ModelProved) -> None:
        """Tell a part all that it must know before it serves."""
        part.open_model(proved)
        if len(self.instances) > len(self._config.places):
            part.resized(frames.Resized(self._config.num_instances, len(self.instances)))
        self._set_quarantine(part)
        for instance in self.instances:
            if instance.is_ready and not instance.is_leaving:
                self._set_worker(shard, part, instance)
        if self.scaler.is_cold:
            part.scaled(self.scaler.scaled)

    def _set_worker(self, shard: int, part: ModelPart, instance: Instance) -> None:
        """Give a shard and a ready worker a socket to each other."""
        assert instance.ready is not None
        self._known.add(instance.life)
        worker = frames.SetWorker(instance.index, instance.life, instance.ready.timings)
        try:
            ours, theirs = socket_pair()
            with theirs:
                part.set_worker(worker, ours)
                attach = frames.Attach(shard, instance.life)
                fds: tuple[int, ...] = (theirs.fileno(),)
                if self._block is not None:
                    attach.block = self._block.number
                    attach.first_slot = self._slots[instance.index].start
                    fds = (*fds, self._block.blocks.fd)
                instance.send(frames.encode(attach), fds)
        except OSError as error:
            self.supervisor.give_up(instance, f"the worker could not be connected ({error})")

    def _miss_all(self, life: int) -> None:
        """Go on without the shards that have not said what they lost."""
        if (death := self._deaths.get(life)) is not None:
            for shard in list(death.waiting_for):
                self._miss(death, shard)

    def _miss(self, death: Death, shard: int) -> None:
        """Take it that a shard lost several requests: none can be blamed."""
        self.lost(shard, frames.Lost(death.life, 2))

    def _conclude(self, death: Death) -> None:
        if self._deaths.pop(death.life, None) is None:
            return
        death.timer.cancel()
        losses = [each for each in death.losses if each.num_requests]
        is_pinned = sum(each.num_requests for each in losses) == 1
        if is_pinned:
            is_excused = self._pin(losses[0], death.instance)
        else:
            is_excused = bool(losses) and self._quarantine.died_in_company()
        verdict = frames.Verdict(death.life, is_excused, is_pinned, bool(losses))
        for part in list(self._parts.values()):
            part.verdict(verdict)
        death.conclude(is_excused)

    def _pin(self, lost: frames.Lost, instance: Instance) -> bool:
        """Blame the only request that ran on a dead worker, unless the model is broken: return
        whether it is excused. A kill from outside counts against the request, not against its API
        key: operators kill whatever is running."""
        key = b"" if instance.was_killed_outside else lost.key
        num_bodies = len(self._quarantine.bodies)
        verdict = self._quarantine.died(lost.body, key, self._clock())
        if verdict.quarantines_key:
            text = ": an API key is quarantined: its requests killed %d workers"
            log_about(log, logging.WARNING, self._config, text, MAX_KEY_DEATHS)
        if verdict.quarantines_body:
            text = ": a request is quarantined: it killed %d workers"
            log_about(log, logging.WARNING, self._config, text, MAX_BODY_DEATHS)
        if verdict.is_excused and lost.lost_with is not None:
            self.supervisor.excuse(lost.lost_with)
        is_new = verdict.quarantines_key or verdict.quarantines_body
        if is_new or num_bodies != len(self._quarantine.bodies):
            for part in self._parts.values():
                self._set_quarantine(part)
        return verdict.is_excused

    def _set_quarantine(self, part: ModelPart) -> None:
        bodies, keys = dict(self._quarantine.bodies), dict(self._quarantine.keys)
        part.set_quarantine(frames.SetQuarantine(bodies, keys))


def notes_of(config: ModelConfig, proof: frames.Proof) -> list[str]:
    """Return how a model is served and why, if its configuration does not say."""
    notes = list(proof.notes)
    if proof.unbatched:
        notes.append(f"served one request at a time: {proof.unbatched}")
    if proof.unpadded:
        notes.append(f"not padded: {proof.unpadded}")
    if config.unkept_note:
        notes.append(config.unkept_note)
    return notes


class DirectLink:
    """The core in the same process: `CoreLink` of one shard's part, by calls."""

    def __init__(self, host: ModelHost, shard: int = 0) -> None:
        self._host = host
        self._shard = shard
        self.answered, self.hung, self.wake = host.answered, host.hung, host.scaler.wake

    def lost(self, lost: frames.Lost) -> None:
        self._host.lost(self._shard, lost)

    def may_try(self, is_patient: bool) -> bool:
        return self._host.may_try(self._shard, is_patient)

    def tried(self) -> None:
        self._host.tried(self._shard)

    def left(self, index: int, life: int) -> None:
        self._host.left(self._shard, index, life)

    def report(self, load: frames.PartLoad) -> None:
        self._host.scaler.report(self._shard, load)
