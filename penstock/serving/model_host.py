"""The core's part of one model: its workers, its load state, and who is to blame for a death.

Receives the supervisor's events and tells the shards' parts of the model (`core_link.ModelPart`),
which have its requests. There is one for each model, however many shards there are. Runs on the
core's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from penstock.config import ModelConfig
from penstock.errors import ConfigError
from penstock.processes.child import StartLife
from penstock.serving.context import log_about
from penstock.serving.core_link import ModelPart
from penstock.serving.instance import Instance
from penstock.serving.metrics import ModelMetrics
from penstock.serving.proof import agreed
from penstock.serving.quarantine import MAX_BODY_DEATHS, MAX_KEY_DEATHS, Quarantine
from penstock.serving.served import ModelProcess
from penstock.serving.supervisor import Supervisor
from penstock.wire import frames

log = logging.getLogger("penstock.model")

HostState = Literal["LOADING", "READY", "UNAVAILABLE"]


@dataclass(slots=True, eq=False)
class Death:
    """A worker's death until all shards have said what they lost with it. `conclude` takes whether
    a request is to blame."""

    instance: Instance
    life: int
    waiting_for: set[int]
    conclude: Callable[[bool], None]
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
    ) -> None:
        self._config = config
        self._clock = clock
        self._metrics = metrics
        self.supervisor = Supervisor(config, start_life)
        # Replaced in place: a spare takes over from a dead worker.
        self.instances: Sequence[Instance] = self.supervisor.instances
        self._quarantine = Quarantine()
        self._parts: dict[int, ModelPart] = {}
        # Workers that the parts know, and those of them that have not answered everything yet
        # although they are leaving.
        self._known: set[int] = set()
        self._leaving: dict[int, set[int]] = {}
        self._deaths: dict[int, Death] = {}
        self.state: HostState = "LOADING"
        # How the model is served and why, if its configuration does not say.
        self.notes: tuple[str, ...] = ()
        self._proved: frames.ModelProved | None = None
        # Done when all instances are warm, or when loading failed and `_load_problems` is set. Not
        # an exception of the future: model and traceback would keep each other alive.
        self._first_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._load_problems: Sequence[str] = ()

    @property
    def processes(self) -> list[ModelProcess]:
        return [each.process for each in self.instances]

    def join(self, shard: int, part: ModelPart) -> None:
        """Let a shard serve the model, now or once it is loaded."""
        self._parts[shard] = part
        if self._proved is not None:
            self._introduce(part, self._proved)

    async def load(self) -> None:
        """Start the workers and wait until all are warm. ConfigError if the model cannot load."""
        self.supervisor.start(self)
        await self._first_ready
        if self._load_problems:
            raise ConfigError(self._load_problems)

    async def stop(self) -> None:
        """Stop the workers after their current batches."""
        await self.supervisor.stop()
        self._parts.clear()

    def attach(self, instance: Instance) -> tuple[int, ...]:
        return self._parts[0].attach(instance.life)

    def detach(self, instance: Instance) -> None:
        self._parts[0].detach(instance.life)

    def receive(self, instance: Instance, data: memoryview) -> bool:
        frame = frames.decode_from_worker(data)
        if isinstance(frame, frames.Done | frames.BatchFailed):
            self._parts[0].answered(instance.index, frame)
            # Usually nothing else is pending then; the next loop iteration reads what is.
            return True
        self.supervisor.handle(instance, frame)
        return False

    def instance_ready(self, instance: Instance) -> None:
        assert instance.ready is not None
        self._metrics.load_s = instance.ready.load_s
        if self._proved is not None:
            for part in self._parts.values():
                self._set_worker(part, instance)
        elif all(each.is_ready for each in self.instances) and not self._first_ready.done():
            self._finish_load([each.ready for each in self.instances if each.ready is not None])

    def instance_leaving(self, instance: Instance) -> None:
        if instance.life not in self._known:
            self.supervisor.let_go(instance)
            return
        self._leaving[instance.life] = set(self._parts)
        for part in list(self._parts.values()):
            self._set_worker(part, instance)

    def instance_died(
        self, instance: Instance, reason: str, conclude: Callable[[bool], None]
    ) -> None:
        if self.state == "READY" and not instance.is_spare:
            self._metrics.num_restarts += 1
            if not instance.is_leaving:
                self._metrics.num_deaths["hang" if instance.is_hung else "crash"] += 1
        self._leaving.pop(instance.life, None)
        if instance.life not in self._known:
            self.detach(instance)
            conclude(False)
            return
        self._known.discard(instance.life)
        death = Death(instance, instance.life, set(self._parts), conclude)
        self._deaths[death.life] = death
        died = frames.Died(instance.index, death.life, reason)
        for part in list(self._parts.values()):
            part.died(died)

    def load_failed(self, problems: Sequence[str]) -> None:
        self.state = "UNAVAILABLE"
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

    def may_try(self, is_patient: bool) -> bool:
        return self.supervisor.spares.can_replace_worker(is_patient)

    def hung(self, index: int, life: int) -> None:
        instance = self.instances[index]
        if instance.life == life:
            self.supervisor.kill_hung(instance)

    def left(self, shard: int, index: int, life: int) -> None:
        """Stop a leaving worker once it has answered all shards."""
        waiting_for = self._leaving.get(life)
        if waiting_for is None:
            return
        waiting_for.discard(shard)
        if not waiting_for:
            del self._leaving[life]
            self.supervisor.let_go(self.instances[index])

    def _finish_load(self, ready: Sequence[frames.WorkerReady]) -> None:
        """Batch and pad as far as every instance proved harmless, and let the shards serve."""
        proof = self.supervisor.proof = agreed([each.proof for each in ready])
        self._proved = proved = frames.ModelProved(
            proof,
            self._metrics.load_s,
            any(each.needs_requests for each in ready),
            tuple(each.timings for each in ready),
            tuple(each.bucket_timings for each in ready),
        )
        self._note(proof)
        self.state = "READY"
        for part in self._parts.values():
            self._introduce(part, proved)
        self._first_ready.set_result(None)

    def _introduce(self, part: ModelPart, proved: frames.ModelProved) -> None:
        """Tell a part all that it must know before it serves."""
        part.open_model(proved)
        self._set_quarantine(part)
        for instance in self.instances:
            if instance.is_ready:
                self._set_worker(part, instance)

    def _set_worker(self, part: ModelPart, instance: Instance) -> None:
        assert instance.child is not None and instance.ready is not None
        self._known.add(instance.life)
        numbers, timings = (instance.index, instance.life), instance.ready.timings
        worker = frames.SetWorker(*numbers, instance.is_leaving, timings)
        part.set_worker(worker, instance.child.send)

    def _note(self, proof: frames.Proof) -> None:
        config, notes = self._config, list(proof.notes)
        if proof.unbatched:
            notes.append(f"served one request at a time: {proof.unbatched}")
        if proof.unpadded:
            notes.append(f"not padded: {proof.unpadded}")
        if config.unkept_note:
            notes.append(config.unkept_note)
        self.notes = (*notes, *config.warnings)
        for note in notes:
            # Notes of the proof are about what was not checked; that is served as configured.
            level = logging.INFO if note in proof.notes else logging.WARNING
            log_about(log, level, config, ": %s", note)

    def _conclude(self, death: Death) -> None:
        del self._deaths[death.life]
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


class DirectLink:
    """The core in the same process: `CoreLink` of one shard's part, by calls."""

    def __init__(self, host: ModelHost, shard: int = 0) -> None:
        self._host = host
        self._shard = shard
        self.answered, self.may_try, self.hung = host.answered, host.may_try, host.hung

    def lost(self, lost: frames.Lost) -> None:
        self._host.lost(self._shard, lost)

    def left(self, index: int, life: int) -> None:
        self._host.left(self._shard, index, life)
