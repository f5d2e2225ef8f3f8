"""The management API: health, metadata, configuration, statistics, metrics and model control.

Knows no protocol: HTTP handlers and shards translate a call into a `ManagementCall` and
get JSON back, or an error. Runs on the core's event loop. It reads the catalog, and changes which
models are loaded only through `Control`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec

import penstock
from penstock.errors import SHUTTING_DOWN, NotReady
from penstock.repository.pbtxt import to_json
from penstock.serving import latency_scrape
from penstock.serving.called_models import ModelManager
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.custom_metrics import SETTLED_AFTER_S
from penstock.serving.explain import ProcessState, who_is_busy
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.log_settings import parse_log_changes, show_logging
from penstock.serving.metrics import Labels
from penstock.serving.region_registry import Kind, RegionRegistry
from penstock.serving.scrape import (
    HostUse,
    ProcessUsage,
    ScrapeLines,
    ShardUse,
    cpu_s,
    expose,
)
from penstock.serving.served import Served
from penstock.serving.trace_control import Traces
from penstock.system import logs
from penstock.types import Buffer, Parameter
from penstock.wire.documented import ModelDescription, describe_tensors

# Methods of ManagementApi that answer a call, by the names that routes and frames have for them.
_ACTIONS = "live ready server_metadata metadata model_ready config statistics explain index load"
ACTIONS = (*_ACTIONS.split(), "unload", "trace", "logging")
EXTENSIONS = (
    "classification",
    "sequence",
    "sequence(string_id)",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
    # The request header Penstock-Timing, whatever the server is called.
    "penstock_timing",
)
# Span over which CPU use of processes is measured.
BUSY_S = 0.25


@dataclass(frozen=True, slots=True)
class ManagementCall:
    """One call, whatever its protocol. `action` is the name of a handler in the route table."""

    action: str
    model_name: str = ""
    model_version: str = ""
    # `ready` for the index, `config` for a load, `unload_dependents` for an unload; for shared
    # memory, `region` and what is said of it; `settings` of traces and logs, as JSON.
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    # As in `Request.caller`.
    caller: bytes = b""
    # Parameters of a load whose value is the content of a file.
    files: Mapping[str, Buffer] = field(default_factory=dict)


def for_models(manage: Callable[[ManagementCall, bytes], Awaitable[bytes]]) -> ModelManager:
    """Return what answers the management calls of models' code."""

    async def answer(
        action: str,
        name: str,
        version: str,
        parameters: Mapping[str, Parameter],
        files: Mapping[str, Buffer],
        caller: bytes,
    ) -> bytes:
        return await manage(
            ManagementCall(action, name, version, parameters, caller, files), caller
        )

    return answer


# Answers a call with JSON.
Answer = Callable[[ManagementCall], Awaitable[bytes]]


class ManagementApi:
    """Answers calls with JSON; raises PenstockError to refuse. `shards` returns their
    processes. Health needs no key; with `tells_reasons` it says why the server is not ready,
    otherwise it only names the models."""

    def __init__(
        self,
        catalog: Catalog,
        control: Control,
        lifecycle: Lifecycle | None = None,
        server_id: str = "penstock",
        tells_reasons: bool = True,
        shards: Callable[[], Sequence[ShardUse]] = lambda: (),
    ) -> None:
        self.catalog = catalog
        self.control = control
        self.lifecycle = lifecycle or Lifecycle()
        self.server_id = server_id
        self.usage = ProcessUsage()
        # The last use that was read, and when.
        self._last_use: tuple[float, HostUse] | None = None
        self._tells_reasons = tells_reasons
        self.shards = shards
        self.regions = RegionRegistry(catalog.regions, catalog.shards)
        self.traces = Traces(catalog.tracer, catalog.shards)
        # Each makes further families of a scrape; parts that this one does not know add theirs.
        self.families: list[Callable[[], Iterable[ScrapeLines]]] = [
            self.traces.families,
            catalog.memory.families,
        ]
        # Returns how many shards there are, and why.
        self.describe_shards: Callable[[], str] = lambda: ""
        self._answers: dict[str, Answer] = {name: getattr(self, name) for name in ACTIONS} | {
            f"{kind}_shared_memory_{action}": partial(getattr(self, f"{action}_region"), kind)
            for kind in ("system", "cuda")
            for action in ("status", "register", "unregister")
        }

    @property
    def actions(self) -> Sequence[str]:
        return list(self._answers)

    def add(self, answers: Mapping[str, Answer]) -> None:
        """Answer further actions, before any protocol asks for them."""
        self._answers |= answers

    async def answer(self, call: ManagementCall) -> bytes:
        return await self._answers[call.action](call)

    async def live(self, call: ManagementCall) -> bytes:
        return _json({"live": True})

    async def ready(self, call: ManagementCall) -> bytes:
        if self.lifecycle.is_draining:
            raise NotReady(SHUTTING_DOWN)
        if self.lifecycle.is_loading:
            raise NotReady("models are loading")
        if not self.catalog.is_ready:
            raise NotReady(self._why_not_ready())
        return _json({"ready": True})

    async def server_metadata(self, call: ManagementCall) -> bytes:
        version = penstock.__version__
        extensions = (*EXTENSIONS, *self.regions.extensions)
        return _json({"name": self.server_id, "version": version, "extensions": extensions})

    async def metadata(self, call: ManagementCall) -> bytes:
        config = self._find(call).config
        has_batch = config.max_batch_size > 0
        described = ModelDescription(
            config.name,
            self.catalog.versions(config.name),
            config.platform,
            describe_tensors(config.inputs, has_batch),
            describe_tensors(config.outputs, has_batch),
        )
        return _json(described)

    async def model_ready(self, call: ManagementCall) -> bytes:
        model, is_draining = self._find(call), self.lifecycle.is_draining
        if is_draining or not model.is_ready:
            reason = SHUTTING_DOWN if is_draining else model.reason
            raise NotReady(f"Model version not ready: {reason}".removesuffix(": "))
        return _json({"name": model.config.name, "ready": True})

    async def config(self, call: ManagementCall) -> bytes:
        return _json(to_json(self._find(call).config))

    async def statistics(self, call: ManagementCall) -> bytes:
        models = self.catalog.find_all(call.model_name, call.model_version)
        await self.catalog.refresh()
        return _json({"model_stats": [model.metrics.statistics() for model in models]})

    async def explain(self, call: ManagementCall) -> bytes:
        model = self._find(call)
        await model.refresh()
        explanation = model.explain()
        processes = await self._processes()
        verdicts = [*explanation.verdicts, *who_is_busy(processes)]
        shards = self.describe_shards()
        explanation = replace(explanation, verdicts=verdicts, processes=processes, shards=shards)
        return _json(explanation)

    async def index(self, call: ManagementCall) -> bytes:
        return _json(await self.control.index(call.parameters.get("ready", False)))

    async def load(self, call: ManagementCall) -> bytes:
        await self.control.load(call.model_name, call.parameters, call.files)
        return b""

    async def unload(self, call: ManagementCall) -> bytes:
        await self.control.unload(call.model_name, call.parameters.get("unload_dependents", False))
        return b""

    async def status_region(self, kind: Kind, call: ManagementCall) -> bytes:
        """List the caller's shared memory."""
        name = str(call.parameters.get("region", ""))
        return _json(self.regions.status(call.caller, kind, name))

    async def register_region(self, kind: Kind, call: ManagementCall) -> bytes:
        given = call.parameters
        name, nbytes = str(given["region"]), int(given["byte_size"])
        if kind == "system":
            key, offset = str(given["key"]), int(given["offset"])
            await self.regions.register_system(call.caller, name, key, offset, nbytes)
        else:
            handle, device = str(given["raw_handle"]), int(given["device_id"])
            await self.regions.register_cuda(call.caller, name, handle, device, nbytes)
        return b""

    async def unregister_region(self, kind: Kind, call: ManagementCall) -> bytes:
        name = str(call.parameters.get("region", ""))
        await self.regions.unregister(call.caller, kind, name)
        return b""

    async def trace(self, call: ManagementCall) -> bytes:
        """Answer with the trace settings of a model, or the global ones, after a change."""
        if call.model_name:
            self._find(call)
        return await self.traces.answer(call.model_name, call.parameters.get("settings"))

    async def logging(self, call: ManagementCall) -> bytes:
        """Answer with the log settings, after a change."""
        given = str(call.parameters.get("settings", "{}"))
        changed = parse_log_changes(given, self.catalog.log_switches)
        if changed is not None:
            self.catalog.log_switches = changed
            logs.switch(changed)
            if self.catalog.shards is not None:
                await self.catalog.shards.publish()
        return show_logging(self.catalog.log_switches)

    async def metrics(self) -> bytes:
        """Return the metrics as Prometheus text."""
        await self.catalog.refresh()
        # Reading /proc takes a moment per process: not on the event loop.
        host = await self._read_host()
        if any(True for each in self.catalog.pending() for _ in each.metrics.custom):
            # So that what a model has counted for a request is there once that is answered.
            await asyncio.sleep(SETTLED_AFTER_S)
        models, wanted = self.catalog.pending(), self.catalog.metrics_config
        others = [*latency_scrape.families(models, wanted)]
        others += [family for make in self.families for family in make()]
        hidden = latency_scrape.hidden(wanted)
        return expose(models, host, self.shards(), self.regions.usage(), others, hidden)

    async def _read_host(self) -> HostUse:
        """Read the use of machine and processes, unless the last is recent enough."""
        now, last = time.monotonic(), self._last_use
        if last is None or now - last[0] >= self.catalog.metrics_config.interval_s:
            use = await asyncio.to_thread(self.usage.read, list(self._members()))
            self._last_use = last = now, use
        return last[1]

    async def _processes(self) -> list[ProcessState]:
        """Return the core and the shards, with their CPU use over BUSY_S."""
        shown = [ProcessState("core", os.getpid(), 0.0)]
        for shard in self.shards():
            if shard.pid:
                shown.append(ProcessState(shard.name, shard.pid, 0.0, shard.num_connections))
        pids = [each.pid for each in shown]
        before, began = await asyncio.to_thread(cpu_s, pids), time.monotonic()
        await asyncio.sleep(BUSY_S)
        after, took_s = await asyncio.to_thread(cpu_s, pids), time.monotonic() - began
        return [
            replace(each, busy=round((after[each.pid] - before[each.pid]) / took_s, 3))
            for each in shown
            if each.pid in before and each.pid in after
        ]

    def _members(self) -> Iterator[tuple[int, Labels]]:
        """Yield the other processes of this server, with their labels in a scrape."""
        for shard in self.shards():
            if shard.pid:
                yield shard.pid, {"process": "shard", **shard.labels}
        for model in self.catalog:
            for process in model.processes:
                if process.pid:
                    worker = {"process": "worker", **model.config.labels}
                    yield process.pid, {**worker, "instance": str(process.index)}

    def _why_not_ready(self) -> str:
        reasons = {failure.name: "; ".join(failure.problems) for failure in self.catalog.failures}
        for model in self.catalog:
            if not model.is_ready:
                reasons[model.config.name] = model.reason
        told = sorted(reasons)
        if self._tells_reasons:
            told = [f"{name} ({reasons[name]})" if reasons[name] else name for name in told]
        return f"not ready: {', '.join(told)}"

    def _find(self, call: ManagementCall) -> Served:
        return self.catalog.find(call.model_name, call.model_version)


def _json(body: object) -> bytes:
    return msgspec.json.encode(body)
