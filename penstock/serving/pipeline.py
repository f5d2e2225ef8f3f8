"""A model of several stages: each is an ordinary Model with its own workers, batcher and queue.

A request passes the stages in order; the answer of one is the request to the next, and the last
answer goes to the client. Runs on the core's event loop, like Model, and computes nothing itself.
Its stages come from one configuration: `stages_of` splits off a built-in preprocessing step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.backends.preprocess import NUM_TOKENS, STEP
from penstock.config import (
    CPU,
    IMAGE,
    PREPROCESS_BACKEND,
    BatchPolicy,
    ModelConfig,
    QueuePolicy,
    ScalingConfig,
)
from penstock.errors import BackendFailed, Cancelled, ConfigError, NotReady, PenstockError
from penstock.processes.child import StartLife
from penstock.processes.life import ProcessLife
from penstock.serving.batcher import queue_timeout_s
from penstock.serving.called_models import Callees
from penstock.serving.core_link import ONLY_SHARD, ShardSetup
from penstock.serving.drift import InputDrift
from penstock.serving.elsewhere import NOTHING_ELSEWHERE
from penstock.serving.explain import Explanation
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model import Model
from penstock.serving.plan import Planner
from penstock.serving.quotas import QueueShares, Quotas
from penstock.serving.regions import NO_REGIONS, RegionTable
from penstock.serving.replies import AnswerOrder, is_overload
from penstock.serving.request_queue import QUEUE_TIMEOUT
from penstock.serving.request_recorder import RequestRecorder
from penstock.serving.response_cache import AnswerCache
from penstock.serving.served import ModelProcess
from penstock.serving.tracer import step_of
from penstock.types import Request, Response, Tensor, to_array

log = logging.getLogger("penstock.model")
# A time-out that has passed, where requests are only delayed by it.
PASSED_S = 1e-9
NETWORK = "model"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage by its name, which its metrics have too."""

    name: str
    config: ModelConfig


def stages_of(config: ModelConfig) -> tuple[Stage, ...]:
    """Return the stages of a model with a built-in preprocessing step: the step, and the rest."""
    step = config.preprocess
    assert step is not None
    bare = replace(config, preprocess=None, warmups=(), warnings=(), notes=())
    before = replace(
        bare,
        backend=PREPROCESS_BACKEND,
        artifact=str(config.folder / "config.json"),
        file="",
        outputs=(*step.inputs, NUM_TOKENS),
        batching=_before_batching(config.batching),
        num_instances=1,
        scaling=ScalingConfig(),
        device=CPU,
        spread=(),
        postprocess=None,
        options={STEP: step.function} | ({} if step.image is None else {IMAGE: step.image}),
    )
    policy = _own_timeouts(config.batching)
    network = replace(bare, inputs=step.inputs, padding=step.padding, batching=policy)
    return Stage(step.function, before), Stage(NETWORK, network)


def _before_batching(policy: BatchPolicy) -> BatchPolicy:
    """Return the policy of a stage before the network: its priorities, without waiting."""
    return replace(
        _own_timeouts(policy),
        is_dynamic=True,
        preferred_batch_sizes=(),
        max_queue_delay_s=0.0,
        slo_latency_s=None,
        max_tokens=None,
    )


def _own_timeouts(policy: BatchPolicy) -> BatchPolicy:
    """Return the policy with deadlines from the requests: the pipeline subtracts the time that
    earlier stages took. It also keeps the order of answers."""
    policies = tuple(
        replace(each, default_timeout_s=0.0, allow_timeout_override=True)
        for each in policy.policies
    )
    max_wait_s = policy.max_wait_s
    if max_wait_s is None and any(each.default_timeout_s for each in policy.policies):
        max_wait_s = 0.0  # As in Model, a queue's own time-out replaces the default limit.
    return replace(policy, policies=policies, preserve_ordering=False, max_wait_s=max_wait_s)


@dataclass(slots=True, eq=False)
class Journey:
    """One client request on its way through the stages; the sink of the stages' requests.

    Invariant: `inner` is the request that `stages[at]` has, until the client's request ends.
    """

    owner: StagePipeline
    request: Request
    timeout_s: float | None
    at: int = 0
    inner: Request | None = None

    def submit(self, tensors: Sequence[Tensor], now: float) -> None:
        """Send the tensors to the present stage."""
        request, owner = self.request, self.owner
        is_last = self.at == len(owner.models) - 1
        outputs = request.outputs if is_last else ()
        # Stages do not count mirrors as requests, as the whole does not.
        make = type(request)
        inner = make(self, tensors, request.timings.received, id=request.id, outputs=outputs)
        owner.models[self.at].metrics.has_mirrors |= request.is_mirror
        inner.caller, inner.priority = request.caller, request.priority
        inner.chain = request.chain
        inner.parameters = request.parameters
        inner.takes_arrays = is_last and request.takes_arrays
        # A stage that is scaled to zero knows how long requests wait for its first instance.
        timeout_s = request.timeout_s if owner.models[self.at].is_cold else self.timeout_s
        if timeout_s is not None:
            left_s = request.timings.queued + timeout_s - now
            if left_s <= 0 and not owner.is_delayed(request):
                owner.finish(self, QUEUE_TIMEOUT)
                return
            inner.timeout_s = max(PASSED_S, left_s)
        self.inner = inner
        owner.models[self.at].submit(inner)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self._add_times(request)
        if isinstance(answer, PenstockError) or self.at == len(self.owner.models) - 1:
            self.owner.finish(self, answer)
            return
        try:
            tensors = self._take(answer)
        except Exception:  # A request that cannot be handed on must still end.
            log.exception("%s: a stage's answer cannot be handed on", self.owner.config.name)
            self.owner.finish(self, BackendFailed("internal error; this is a bug"))
            return
        self.at += 1
        self.submit(tensors, self.owner.clock())

    def _take(self, answer: Response) -> list[Tensor]:
        """Copy a stage's outputs, which are only borrowed, and note the number of tokens."""
        tensors: list[Tensor] = []
        for each in answer.outputs:
            if each.name == NUM_TOKENS.name:
                self.request.num_tokens = int(to_array(each).sum())
            else:
                tensors.append(Tensor(each.name, each.datatype, each.shape, bytes(each.data)))
        return tensors

    def _add_times(self, inner: Request) -> None:
        """Add the waits of a stage to those of the client's request. What earlier stages compute
        counts as input of the network."""
        timings, own = inner.timings, self.request.timings
        if self.request.steps is not None:
            name = self.owner.stages[self.at].name
            self.request.steps.append(step_of(f"{self.owner.config.name}:{name}", timings))
        if not timings.dispatched:
            return
        # Queueing is a span from `queued` on, so each stage prolongs it.
        own.dispatched = (own.dispatched or own.queued) + timings.dispatched - timings.queued
        own.instance_wait_s += timings.instance_wait_s
        if self.at < len(self.owner.models) - 1:
            own.compute_s = (own.compute_s[0] + sum(timings.compute_s), 0.0, 0.0)
        else:
            first, infer_s, output_s = timings.compute_s
            own.compute_s = (own.compute_s[0] + first, infer_s, output_s)


class StagePipeline:
    """Invariant: an admitted request is in exactly one stage, or done. Statistics count each
    client request once; those of the stages are theirs alone."""

    def __init__(
        self,
        config: ModelConfig,
        stages: Sequence[Stage],
        *,
        start_life: StartLife = ProcessLife,
        clock: Callable[[], float] = time.monotonic,
        quotas: Quotas | None = None,
        shards: Sequence[ShardSetup] = (),
    ) -> None:
        """`shards` are for the stages, if the model is served by several shards."""
        self.config = config
        self.clock = clock
        self.stages = tuple(stages)
        self._metrics = ModelMetrics.from_config(config)
        self.models: list[Model] = []
        for index, stage in enumerate(stages):
            shard = shards[index] if shards else ONLY_SHARD
            name = f"{config.name}:{stage.name}"
            metrics = ModelMetrics.from_config(config, name)
            model = Model(
                stage.config, start_life=start_life, clock=clock, metrics=metrics, shard=shard
            )
            self.models.append(model)
        policy = config.batching
        self._quotas = quotas or Quotas()
        num_levels = max(1, policy.num_priorities)
        # What is of the pipeline as a whole is shown in the block of its first stage.
        elsewhere = shards[0].elsewhere if shards else NOTHING_ELSEWHERE
        self._shares = QueueShares(self._quotas, policy.max_pending, num_levels, elsewhere)
        # Checks requests before any stage runs; lengths are known only to the stages.
        self._planner = Planner(replace(config, batching=replace(policy, max_tokens=None)), 0)
        self._order = AnswerOrder(clock, elsewhere) if policy.preserve_ordering else None
        # Set by the owner if requests are recorded; those of stages are not.
        self.recorder: RequestRecorder | None = None
        # Set by the owner if answers are kept, likewise.
        self.cache: AnswerCache | None = None
        # The requests that it has admitted and not answered.
        self._journeys: dict[Request, Journey] = {}
        self._is_closing = False

    async def start(self) -> None:
        """Start all stages at once. ConfigError, with the problems of all, if one cannot load."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            starting = [group.create_task(_start(model)) for model in self.models]
        problems = [problem for task in starting for problem in task.result()]
        if problems:
            raise ConfigError(problems)
        self._metrics.load_s = time.monotonic() - began

    async def refresh(self) -> None:
        """Do nothing: all figures are here."""

    async def drain(self) -> None:
        """Wait until everything admitted has been answered: a stage hands on before it is idle."""
        if self.cache is not None:
            await self.cache.drain()
        for model in self.models:
            await model.drain()

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(model.close() for model in self.models))
        if self._order is not None:
            self._order.close()
        if self.recorder is not None:
            self.recorder.close()
            self.recorder = None

    def tick(self) -> None:
        """Show other shards again what is here, whatever happened to the page."""
        self._shares.show()
        if self._order is not None:
            self._order.tick()

    @property
    def metrics(self) -> ModelMetrics:
        """Statistics of the clients' requests; batches are those of the network."""
        found, network = self._metrics, self.models[-1].metrics
        found.num_inferences = network.num_inferences
        found.num_executions = network.num_executions
        found.batches, found.batch_tokens = network.batches, network.batch_tokens
        found.padded_bytes, found.padding_bytes = network.padded_bytes, network.padding_bytes
        found.num_restarts = sum(model.metrics.num_restarts for model in self.models)
        for cause in found.num_deaths:
            found.num_deaths[cause] = sum(m.metrics.num_deaths[cause] for m in self.models)
        return found

    @property
    def is_ready(self) -> bool:
        return all(model.is_ready for model in self.models)

    @property
    def shown_state(self) -> str:
        states = [model.shown_state for model in self.models]
        return next((state for state in states if state != "READY"), "READY")

    @property
    def reason(self) -> str:
        return next((model.reason for model in self.models if model.reason), "")

    @property
    def mode(self) -> str:
        return self.models[-1].mode

    @property
    def num_waiting(self) -> int:
        return sum(model.num_waiting for model in self.models)

    @property
    def num_running(self) -> int:
        return sum(model.num_running for model in self.models)

    @property
    def processes(self) -> Sequence[ModelProcess]:
        """Those of the network first."""
        found = [each for model in reversed(self.models) for each in model.processes]
        return [replace(each, index=index) for index, each in enumerate(found)]

    @property
    def drift(self) -> Sequence[InputDrift]:
        """Drift of the clients' inputs, and of the network's own."""
        return [state for model in self.models for state in model.drift]

    def explain(self) -> Explanation:
        """Explain the network's batches; the other stages are notes."""
        told = self.models[-1].explain()
        refused = {name: count for name, count in self.metrics.num_refused.items() if count}
        notes = [*self.config.warnings, *self.config.notes, *told.notes]
        hosts = [model.host for model in self.models[:-1] if model.host is not None]
        notes += [note for host in hosts for note in host.drift.alarms]
        for stage, model in zip(self.stages, self.models, strict=True):
            notes.append(_describe(stage.name, model))
        return replace(told, state=self.shown_state, refused=refused, notes=notes)

    def submit(self, request: Request) -> None:
        if self.recorder is not None:
            self.recorder.see(request)
        cache = None if self._is_closing else self.cache
        if cache is None or not cache.answers(request, self._go_on, self._order):
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        try:
            self._admit(request)
        except PenstockError as error:
            if not request.is_mirror:
                self.refused(error, request.timings.received)
            request.respond(error)
            return
        now = request.timings.queued = self.clock()
        journey = self._journeys[request] = Journey(self, request, self._timeout_s(request))
        if self._quotas.is_active:
            self._shares.enter(request, request.caller, level=self._level(request))
        if self._order is not None and not request.is_mirror:
            request.turn = self._order.enter()
        tensors, request.inputs, request.rows = request.inputs, (), None
        journey.submit(tensors, now)

    def cancel(self, request: Request) -> None:
        """Cancel a request in whatever stage it is; the stage answers at once."""
        if self.cache is not None and self.cache.cancel(request):
            return
        journey = self._journeys.get(request)
        if journey is not None and journey.inner is not None:
            self.models[journey.at].cancel(journey.inner)

    def refused(self, error: PenstockError, received: float) -> None:
        self._metrics.refused(error)
        self._metrics.fail_s += max(0.0, self.clock() - received)

    def _admit(self, request: Request) -> None:
        if self._is_closing:
            raise NotReady(f"model '{self.config.name}' is being unloaded")
        fit = self._planner.known.get(request.form) or self._planner.fit(request)
        request.num_rows = fit.plan.num_rows
        if self._quotas.is_active:
            self._shares.check(request.caller, self.clock(), self._level(request))

    def _level(self, request: Request) -> int:
        return self.config.batching.level(request.priority)

    def _timeout_s(self, request: Request) -> float | None:
        """Return how long the request may wait and, with an SLO, take."""
        policy = self.config.batching
        asked = request.timeout_s
        if policy.slo_latency_s is not None:
            return policy.slo_latency_s if asked is None else min(asked, policy.slo_latency_s)
        return queue_timeout_s(self._queue_policy(request), asked) or None

    def is_delayed(self, request: Request) -> bool:
        """Whether a request that waited too long runs behind the others instead of failing."""
        is_delay = self._queue_policy(request).timeout_action == "DELAY"
        return is_delay and self.config.batching.slo_latency_s is None

    def _queue_policy(self, request: Request) -> QueuePolicy:
        return self.config.batching.policy(self._level(request) + 1)

    def finish(self, journey: Journey, answer: Response | PenstockError) -> None:
        """End the client's request; called once for each, by its journey."""
        request = journey.request
        journey.inner = None
        del self._journeys[request]
        if self._shares.held:
            self._shares.leave(request)
        request.timings.completed = now = self.clock()
        if isinstance(answer, PenstockError):
            self._count_failure(request, answer, now)
        else:
            self._metrics.passed(request)
            arrays, named = answer.arrays, (self.config.name, self.config.version)
            answer = Response(*named, answer.outputs, arrays=arrays)
        if self._order is None or request.is_mirror:
            request.respond(answer)
        else:
            self._order.respond(request, answer)

    def _count_failure(self, request: Request, error: PenstockError, now: float) -> None:
        if request.is_mirror:
            return
        waited_s = now - request.timings.received
        self._metrics.fail_s += waited_s
        if isinstance(error, Cancelled):
            self._metrics.failed("CANCELED", error, self._metrics.is_late(waited_s))
        elif isinstance(error, BackendFailed):
            self._metrics.failed("BACKEND", error)
        else:
            self._metrics.refused(error)
        if is_overload(error):
            self._shares.refused(len(self._journeys), now, self._level(request))


def make_model(
    config: ModelConfig,
    start_life: StartLife = ProcessLife,
    quotas: Quotas | None = None,
    shards: Sequence[ShardSetup] = (),
    regions: RegionTable = NO_REGIONS,
    callees: Callees | None = None,
) -> Model | StagePipeline:
    """Return the Servable of a configuration, with as many stages as it has. With `shards`, one for
    each stage, it is one of several shards' parts. Workers of a model with one stage use clients'
    memory themselves. Its code can call `callees`."""
    if config.is_staged:
        stages = stages_of(config)
        shards = shards or [replace(ONLY_SHARD, callees=callees) for _ in stages]
        return StagePipeline(config, stages, start_life=start_life, quotas=quotas, shards=shards)
    shard = shards[0] if shards else replace(ONLY_SHARD, regions=regions, callees=callees)
    return Model(config, start_life=start_life, quotas=quotas, shard=shard)


async def _start(model: Model) -> Sequence[str]:
    """Start a stage; return its problems."""
    try:
        await model.start()
    except ConfigError as error:
        return error.problems
    return ()


def _describe(name: str, model: Model) -> str:
    """Describe a stage in one line."""
    metrics = model.metrics
    phases, count = metrics.phases, max(1, metrics.num_success)
    queue_s = phases["queue"].total / count
    compute_s = sum(phases[f"compute_{each}"].total for each in ("input", "infer", "output"))
    num_rows = metrics.num_inferences / max(1, metrics.num_executions)
    return (
        f"stage {name}: {len(model.workers)} instances, {metrics.num_executions} batches of "
        f"{num_rows:.1f} rows, {queue_s * 1e3:.2f} ms queued and {compute_s / count * 1e3:.2f} ms "
        f"computed a request, {model.num_waiting} waiting"
    )
