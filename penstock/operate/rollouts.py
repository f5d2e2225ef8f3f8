"""Canary and shadow rollouts of a server: starts them, asks the judge once a second, and acts.

Runs on the core's event loop, touches the disk off it. Nothing on disk changes before a promotion
but the history: a server that is killed during a rollout serves the stable version again, and notes
that when it starts. The catalog splits the requests; `rollout_judge` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from penstock.config import LLM
from penstock.errors import ConfigError, InvalidRequest, NotFound, PenstockError
from penstock.llm import text_split
from penstock.operate import model_folders, promotion
from penstock.operate.ensemble_checks import check_ensembles
from penstock.operate.off_loop import off_loop
from penstock.operate.promotion import Change, Grounds, cannot_write
from penstock.operate.rollout_judge import RolloutJudge, RolloutVerdict
from penstock.operate.rollout_measures import Batches, RolloutReading, since
from penstock.operate.rollout_promise import RolloutPromise, find_promise
from penstock.operate.rollout_records import (
    CANARY,
    SHADOW,
    STEP,
    STOPPED,
    check_alike,
    describe_start,
    event_figures,
    figures_of,
    labels_of,
    num_deaths,
    unfinished,
)
from penstock.operate.rollout_state import Decision, RolloutPlan, RolloutState
from penstock.repository import history, layout, staging
from penstock.repository import manifest as manifests
from penstock.repository.history import Cause, HistoryEvent
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.metrics import ModelMetrics
from penstock.serving.served import Served
from penstock.serving.shards import ShardedVersion
from penstock.wire.frames import SplitRule

log = logging.getLogger("penstock.rollout")
TICK_S = 1.0
RESTARTED = "the server restarted; the stable version is served"
GONE = "the model was loaded again or unloaded"
# The actor of what the judge decides, in the history.
JUDGE = "penstock"


@dataclass(frozen=True, slots=True)
class Record:
    """Counts of a version since it was loaded."""

    batches: Batches
    num_deaths: int

    @classmethod
    def of(cls, metrics: ModelMetrics) -> Record:
        batches = {
            size: (each.count, each.input_s + each.infer_s + each.output_s)
            for size, each in metrics.batches.items()
        }
        return cls(batches, num_deaths(metrics))

    def since(self, before: Record) -> Record:
        return Record(since(self.batches, before.batches), self.num_deaths - before.num_deaths)


@dataclass(slots=True, eq=False)
class Rollout:
    """One running rollout."""

    folder: Path
    plan: RolloutPlan
    promise: RolloutPromise
    # Checked at the start; applied by a promotion.
    change: Change
    candidate: Served
    judge: RolloutJudge
    rule: SplitRule
    state: RolloutState
    # Counts of both versions before the rollout.
    stable_before: Record
    candidate_before: Record
    # One change at a time: a tick does not act on a rollout that is being stopped or promoted.
    acting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Rollouts:
    """At most one rollout of each model at a time."""

    def __init__(
        self,
        catalog: Catalog,
        control: Control,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._control = control
        self._clock = clock
        self._running: dict[str, Rollout] = {}
        self._starting: set[str] = set()
        # The last rollout of each model that has ended.
        self._ended: dict[str, RolloutState] = {}
        self._number = 0

    # What operators ask for.

    async def start(
        self, name: str, version: str, plan: RolloutPlan, actor: str = ""
    ) -> HistoryEvent:
        """Load a version beside the served one, and give it the first share of the requests. Return
        the event in the history. InvalidRequest if that cannot be done, and why."""
        if (running := self._running.get(name)) is not None or name in self._starting:
            what = "a rollout" if running is None else f"a rollout of {running.state.candidate}"
            advice = "stop it first: penstock repo rollback"
            raise InvalidRequest(f"{name}: {what} is running; {advice}")
        self._starting.add(name)
        try:
            return await self._start(name, version, plan, actor)
        finally:
            self._starting.discard(name)

    async def _start(self, name: str, version: str, plan: RolloutPlan, actor: str) -> HistoryEvent:
        sources = self._control.sources
        root = await off_loop(lambda: model_folders.find_repository(sources.find(name)))
        await off_loop(partial(model_folders.find_version, root, name, version))
        grounds = Grounds(actor, plan.reason, plan.force)
        change = await off_loop(partial(promotion.prepare, root, name, version, grounds))
        stable, config = self._catalog.find(name), await self._control.read(name, version)
        check_alike(stable.config, config)
        check_ensembles(self._catalog, config)
        folders = root / name / stable.config.version, root / name / version
        evidences = await off_loop(lambda: (_evidence(folders[0]), _evidence(folders[1])))
        promise = find_promise(stable.config, config, evidences, plan.agreement)
        try:
            candidate = await self._catalog.add_candidate(config)
        except PenstockError as error:
            raise InvalidRequest(f"failed to load '{name}/{version}': {error}") from None
        try:
            # What both have done so far is compared with what they do later.
            await self._catalog.refresh()
            if self._catalog.find(name) is not stable:
                raise InvalidRequest(f"{name}: {GONE}; start the rollout again")
            if config.backend == LLM:
                text_split.check_alike(stable, candidate)
        except BaseException:
            await self._catalog.drop_candidate(name)
            raise
        return await self._begin(root / name, plan, promise, change, candidate)

    async def _begin(
        self,
        folder: Path,
        plan: RolloutPlan,
        promise: RolloutPromise,
        change: Change,
        candidate: Served,
    ) -> HistoryEvent:
        """Split the requests with a loaded candidate."""
        name, version, now = change.name, candidate.config.version, self._clock()
        stable = self._catalog.find(name)
        judge = RolloutJudge(plan, promise, now)
        self._number += 1
        shards = self._catalog.shards
        rule = SplitRule(
            self._number,
            plan.mode,
            version,
            share=judge.share,
            header=plan.header,
            hash_header=plan.hash_header,
            salt=secrets.token_bytes(16),
            limits=promise.limits,
            max_kl=promise.max_kl,
            mirrored_per_s=plan.mirrored_per_s / (1 if shards is None else shards.number),
        )
        share, steps = judge.share, (judge.step, plan.steps)
        told = name, stable.config.version, version, plan.mode, share, *steps, time.time()
        state = RolloutState(*told, reason="waiting for the first requests")
        before = Record.of(stable.metrics), Record.of(candidate.metrics)
        rollout = Rollout(folder, plan, promise, change, candidate, judge, rule, state, *before)
        kind = SHADOW if plan.mode == "shadow" else CANARY
        try:
            event = self._event(rollout, kind, describe_start(plan, promise))
            await off_loop(partial(_write_start, change, folder, event))
            if not await self._catalog.split(name, rule):
                raise InvalidRequest(f"{name}: {GONE}")
        except BaseException as error:
            await self._catalog.drop_candidate(name)
            await self._write(rollout, self._event(rollout, STOPPED, f"not started: {error}"))
            raise
        self._running[name] = rollout
        _log(logging.INFO, state, f"{kind} with {share:.3g} of the requests: {event.reason}")
        return event

    async def stop(self, name: str, actor: str = "", reason: str = "") -> HistoryEvent:
        """End a rollout: the stable version gets all requests. NotFound if none is running."""
        if name in self._starting:
            advice = "stop the rollout after that"
            raise InvalidRequest(f"{name}: the candidate is still loading; {advice}")
        if (rollout := self._running.get(name)) is None:
            raise self._not_running(name)
        async with rollout.acting:
            if self._running.get(name) is not rollout:
                raise self._not_running(name)
            why = f"stopped by {actor or 'an operator'}" + (f": {reason}" if reason else "")
            return await self._give_up(rollout, "stopped", why, actor)

    def _not_running(self, name: str) -> NotFound:
        ended = self._ended.get(name)
        how = "" if ended is None else f"; that of version {ended.candidate} was {ended.decision}"
        return NotFound(f"{name}: no rollout is running{how}")

    def is_running(self, name: str) -> bool:
        return name in self._running or name in self._starting

    def state(self, name: str) -> RolloutState | None:
        """Return how the rollout of a model stands, or how its last one ended."""
        running = self._running.get(name)
        return self._ended.get(name) if running is None else running.state

    def states(self) -> dict[str, RolloutState]:
        return self._ended | {name: each.state for name, each in self._running.items()}

    # The life of rollouts.

    async def recover(self) -> None:
        """Note in the histories that rollouts of an earlier server have ended."""
        try:
            for path in self._control.sources.paths:
                await asyncio.to_thread(_recover, path)
        except (OSError, PenstockError) as error:
            log.warning("ends of earlier rollouts cannot be noted: %s", error)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as ticks:
            while True:
                await asyncio.sleep(TICK_S)
                # A promotion takes as long as its files are read: the next tick does not wait.
                ticks.create_task(self._try_tick())

    async def _try_tick(self) -> None:
        try:
            await self.tick()
        except Exception:  # One tick that fails must not leave candidates unwatched.
            log.exception("a look at the rollouts failed; looking again")

    async def tick(self) -> None:
        """Judge all rollouts by what was counted until now, but those that are changing."""
        if not self._running:
            return
        await self._catalog.refresh()
        await asyncio.gather(*map(self._look, list(self._running.values())))

    async def _look(self, rollout: Rollout) -> None:
        name = rollout.state.model
        if rollout.acting.locked():
            return
        async with rollout.acting:
            if self._running.get(name) is rollout:
                try:
                    await self._judge(rollout)
                except Exception:  # One rollout that fails must not leave others unwatched.
                    log.exception("a look at the rollout of %s failed", name)

    async def close(self) -> None:
        """Note in the histories that the server stops; requests are not touched."""
        for name, rollout in list(self._running.items()):
            async with rollout.acting:  # A promotion that has begun ends first.
                if self._running.get(name) is rollout:
                    with contextlib.suppress(OSError, PenstockError):
                        await self._finish(rollout, "stopped", "the server shut down", STOPPED)

    async def _judge(self, rollout: Rollout) -> None:
        name = rollout.state.model
        if self._catalog.rules.get(name) is not rollout.rule:
            await self._finish(rollout, "stopped", GONE, STOPPED)
            return
        reading = self._read(rollout)
        verdict = rollout.judge.tick(reading, self._clock())
        figures = figures_of(reading.counts, rollout.judge.cost_ratio)
        rollout.state = replace(
            rollout.state, reason=verdict.reason, checks=verdict.checks, figures=figures
        )
        match verdict.action:
            case "roll back":
                await self._give_up(rollout, "rolled back", verdict.reason, JUDGE)
            case "promote":
                await self._promote(rollout, verdict)
            case "step":
                await self._step(rollout, verdict)

    def _read(self, rollout: Rollout) -> RolloutReading:
        name, candidate = rollout.state.model, rollout.candidate
        stable = Record.of(self._catalog.find(name).metrics).since(rollout.stable_before)
        own = Record.of(candidate.metrics).since(rollout.candidate_before)
        if isinstance(candidate, ShardedVersion):
            counts = candidate.split_counts(rollout.rule.rollout)
        else:
            counts = self._catalog.splits[name].counts
        return RolloutReading(
            counts,
            stable.batches,
            own.batches,
            stable.num_deaths,
            own.num_deaths,
            candidate.is_ready,
            candidate.reason,
        )

    async def _step(self, rollout: Rollout, verdict: RolloutVerdict) -> None:
        judge, rule = rollout.judge, rollout.rule
        fields = {name: getattr(rule, name) for name in rule.__struct_fields__}
        rollout.rule = SplitRule(**fields | {"share": judge.share, "mode": "canary"})
        was, rollout.state = (
            rollout.state.share,
            replace(rollout.state, mode="canary", share=judge.share, step=judge.step),
        )
        if await self._catalog.split(rollout.state.model, rollout.rule):
            why = f"{verdict.reason}; from {was:.3g} to {judge.share:.3g} of the requests"
            _log(logging.INFO, rollout.state, f"gets more requests: {why}")
            await self._write(rollout, self._event(rollout, STEP, why, JUDGE))

    async def _promote(self, rollout: Rollout, verdict: RolloutVerdict) -> None:
        state, change = rollout.state, rollout.change
        cause = change.cause
        figures = {**cause.figures, **event_figures(state)}
        why = f"{cause.reason}: {verdict.reason}" if cause.reason else verdict.reason
        change = replace(change, cause=replace(cause, actor=JUDGE, reason=why, figures=figures))

        async def commit() -> None:
            await off_loop(change.apply)
            # Here, as a server that stops cancels this call and ends the promotion all the same.
            self._end(rollout, "promoted", verdict.reason)

        try:
            # An ensemble may have been loaded since the rollout began.
            check_ensembles(self._catalog, rollout.candidate.config)
            await self._control.promote_candidate(state.model, commit)
        except PenstockError as error:
            why = f"version {state.candidate} could not be promoted: {error}"
            await self._give_up(rollout, "stopped", why)

    async def _give_up(
        self, rollout: Rollout, decision: Decision, reason: str, actor: str = ""
    ) -> HistoryEvent:
        """Take the requests from the candidate at once, then write why."""
        began = self._clock()
        await self._catalog.drop_candidate(rollout.state.model)
        swap_s = self._clock() - began
        kind = history.ROLLED_BACK if decision == "rolled back" else STOPPED
        return await self._finish(rollout, decision, reason, kind, actor, swap_s=round(swap_s, 3))

    async def _finish(
        self,
        rollout: Rollout,
        decision: Decision,
        reason: str,
        kind: str,
        actor: str = "",
        **figures: float,
    ) -> HistoryEvent:
        event = self._event(rollout, kind, reason, actor, **figures)
        self._end(rollout, decision, reason)
        return await self._write(rollout, event)

    def _end(self, rollout: Rollout, decision: Decision, reason: str) -> None:
        state = rollout.state
        share = 1.0 if decision == "promoted" else 0.0
        ended = replace(state, decision=decision, reason=reason, share=share, ended=time.time())
        rollout.state = self._ended[state.model] = ended
        self._running.pop(state.model, None)
        level = logging.INFO if decision == "promoted" else logging.WARNING
        _log(level, ended, f"is {decision}: {reason}")

    @staticmethod
    def _event(
        rollout: Rollout, kind: str, reason: str, actor: str = "", **figures: float
    ) -> HistoryEvent:
        """Return an event of the history."""
        state, cause = rollout.state, rollout.change.cause
        versions = state.candidate, (state.stable,)
        if kind == history.ROLLED_BACK:
            versions = state.stable, (state.candidate,)
        told = {**event_figures(state), **figures}
        return Cause(kind, actor or cause.actor, reason, told).event(*versions)

    @staticmethod
    async def _write(rollout: Rollout, event: HistoryEvent) -> HistoryEvent:
        """Add an event to the history; a full disk is logged."""
        try:
            await asyncio.to_thread(history.append, rollout.folder, event)
        except OSError as error:
            text = "the history of %s cannot be written: %s"
            log.error(text, rollout.state.model, error.strerror, extra=labels_of(rollout.state))
        return event


def _write_start(change: Change, folder: Path, event: HistoryEvent) -> None:
    """Add the first event to the history. A repository that cannot be written could not be promoted
    in the end, so nothing starts."""
    try:
        with staging.explain_full(str(folder / history.NAME)):
            history.append(folder, event)
    except OSError as error:
        raise cannot_write(change.root, change.name, error) from None


def _evidence(folder: Path) -> Mapping[str, object]:
    manifest = manifests.read(folder)
    return {} if manifest is None else manifest.evidence


def _recover(path: str) -> None:
    try:
        root = model_folders.find_repository(path)
    except ConfigError:
        return  # A model by itself has no versions.
    for name in layout.names(root):
        if not (root / name / history.NAME).is_file():
            continue
        try:
            _note_end(root / name)
        except (OSError, PenstockError) as error:
            log.warning("%s: the end of an earlier rollout cannot be noted: %s", name, error)


def _note_end(folder: Path) -> None:
    begun = unfinished(history.read(folder))
    if begun is not None:
        event = Cause(STOPPED, reason=RESTARTED).event(begun.version, begun.previous)
        history.append(folder, event)
        text = "%s: the rollout of version %s has ended: %s"
        log.warning(text, folder.name, begun.version, RESTARTED)


def _log(level: int, state: RolloutState, text: str) -> None:
    log.log(level, "%s/%s %s", state.model, state.candidate, text, extra=labels_of(state))
