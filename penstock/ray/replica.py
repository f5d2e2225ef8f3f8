"""One replica of a model on a Ray cluster: the server's core with worker processes, called through
handles. There is no HTTP inside: messages arrive as `cluster_messages.ClusterCall`.

Ray places it, counts its requests, and drains it before it ends. It lives on the event loop that
Ray runs user code on.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.api.embedded import EmbeddedServer
from penstock.api.serve_options import ServeOptions
from penstock.errors import SHUTTING_DOWN, ConfigError, NotReady, PenstockError
from penstock.export.ray_plan import replica_config
from penstock.protocols.asgi_http import AnswerEvents, AsgiExchange, Event, handle, leave
from penstock.protocols.http_reader import MessageHead
from penstock.ray.cluster_messages import (
    ClusterAnswer,
    ClusterCall,
    decode_call,
    encode_answer,
    header_lines,
    refusal,
)
from penstock.ray.evidence_check import check_evidence
from penstock.repository import layout
from penstock.repository.layout import RepositoryScan
from penstock.repository.model_source import resolve
from penstock.serving.local import check_answers_once
from penstock.serving.management import ManagementCall
from penstock.serving.served import Served
from penstock.types import Array, Buffer, CallbackSink, Request, Response, to_array
from penstock.wire.arrays import Given, InputReader

log = logging.getLogger("penstock.ray")


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """The versions that a replica serves. `digest` changes with the files of the versions, so
    that a changed model is a changed deployment."""

    repository: str
    model: str
    versions: tuple[str, ...]
    digest: str
    evidence: str = "warn"
    drain_s: float = 30.0
    max_body_bytes: int = 64 << 20
    max_json_bytes: int = 8 << 20
    log_requests: bool = False

    @property
    def options(self) -> ServeOptions:
        return ServeOptions(
            shards=1,
            grpc=False,
            metrics=False,
            drain_s=self.drain_s,
            max_body_bytes=self.max_body_bytes,
            max_json_bytes=self.max_json_bytes,
            log_requests=self.log_requests,
        )


def read_versions(repository: str, model: str, versions: Sequence[str] = ()) -> RepositoryScan:
    """Read a model in these versions, whichever are served by now; without any, in those that are.
    ConfigError if one is missing or cannot be loaded."""
    found = resolve(repository).read_one(model)
    there = {config.version for config in found.configs}
    for version in versions:
        if version not in there and model in found.folders:
            found.add(layout.read(found.folders[model] / version))
    if found.problems:
        raise ConfigError(layout.flat(found.problems))
    if versions:
        found.configs = [each for each in found.configs if each.version in versions]
    if not found.configs or len(found.configs) < len(versions):
        listed = ", ".join(sorted(there)) or "none"
        asked = ", ".join(versions)
        raise ConfigError(f"{model}: no version {asked} in {repository}; there: {listed}")
    return found


def assigned_cpus() -> float:
    """Return the CPUs that Ray has assigned to this process; 0 outside of Ray."""
    import ray

    if not ray.is_initialized():
        return 0.0
    found: Mapping[str, float] = ray.get_runtime_context().get_assigned_resources()
    return float(found.get("CPU", 0.0))


def replica_name() -> str:
    """Return Ray's name of this replica."""
    from ray import serve

    name: str = serve.get_replica_context().replica_id.unique_id
    return name


class ModelReplica:
    """The deployment of one model. Handles call `call`, `stream` and, from Python code, `infer`."""

    async def __init__(self, spec: ReplicaSpec, num_cpus: float | None = None) -> None:  # type: ignore[misc]
        """Load the model; ConfigError fails the deployment. `num_cpus` is what Ray has assigned."""
        self._spec = spec
        self._readers: dict[str, InputReader] = {}
        cpus = assigned_cpus() if num_cpus is None else num_cpus
        server = EmbeddedServer(spec.repository, spec.options, owns_repository=False)
        try:
            found = await asyncio.to_thread(self._read, int(cpus))
            await server.start(found)
        except BaseException:
            await server.stop()
            raise
        self._server: EmbeddedServer | None = server
        where = f"{spec.model}/{','.join(spec.versions)}"
        log.info("%s is ready with %g CPUs in process %d", where, cpus, os.getpid())

    def _read(self, num_cpus: int) -> RepositoryScan:
        spec = self._spec
        found = read_versions(spec.repository, spec.model, spec.versions)
        cores = num_cpus or None
        check_evidence(found.configs, spec.evidence, cores)
        found.configs = [replica_config(config, cores) for config in found.configs]
        return found

    def __del__(self) -> Awaitable[None] | None:
        """End the workers, once: Ray calls this when all requests are answered, and awaits it."""
        server, self._server = getattr(self, "_server", None), None
        return None if server is None else server.stop()

    @property
    def _core(self) -> EmbeddedServer:
        if self._server is None:
            raise NotReady(SHUTTING_DOWN)
        return self._server

    async def check_health(self) -> None:
        """Raise if the model cannot answer; Ray replaces a replica that fails three times."""
        catalog = self._core.catalog
        reasons = [f"{each.config.version}: {each.reason}" for each in catalog if not each.is_ready]
        if reasons:
            raise NotReady(f"{self._spec.model} is not ready: {'; '.join(reasons)}")

    async def call(self, data: bytes, prefix: Sequence[int] = ()) -> bytes:
        """Answer a call. `prefix` is for Ray's router: the start of a prompt, hashed by blocks."""
        call = decode_call(data)
        try:
            match call.kind:
                case "http":
                    answer = await self._http(call)
                case "infer":
                    answer = ClusterAnswer(memoryview(await self._infer(call.body)))
                case "manage":
                    answer = ClusterAnswer(memoryview(await self._manage(call)))
        except PenstockError as error:
            answer = refusal(error)
        return encode_answer(answer)

    async def stream(self, data: bytes, prefix: Sequence[int] = ()) -> AsyncIterator[bytes]:
        """Answer an HTTP message in parts: first status and headers, then the body."""
        events = self._events(decode_call(data))
        head = await anext(events)
        headers = header_lines(head["headers"])
        yield encode_answer(ClusterAnswer(status=head["status"], headers=headers))
        async for event in events:
            if event["body"]:
                yield event["body"]

    async def infer(self, inputs: Given, version: str = "") -> dict[str, Array]:
        """Return outputs by name, as `penstock.load(...).infer` does, for other deployments."""
        model = self._core.catalog.find(self._spec.model, version)
        check_answers_once(model.config)
        reader = self._readers.get(model.config.version)
        if reader is None:
            has_batch = model.config.max_batch_size > 0
            reader = InputReader(model.config.inputs, model.config.name, has_batch=has_batch)
            self._readers[model.config.version] = reader
        tensors, form = reader.read(inputs, copy=False)
        answer: asyncio.Future[dict[str, Array]] = asyncio.get_running_loop().create_future()
        request = Request(CallbackSink(partial(_set_arrays, answer)), tensors, time.monotonic())
        request.form = form
        model.submit(request)
        try:
            return await answer
        finally:
            model.cancel(request)

    async def figures(self) -> tuple[str, bytes, bytes]:
        """Return the replica's name, its metrics as Prometheus text, and v2's statistics. Ray asks
        all replicas at once."""
        management = self._core.management
        statistics = await management.statistics(ManagementCall("statistics", self._spec.model))
        return replica_name(), await management.metrics(), statistics

    async def _http(self, call: ClusterCall) -> ClusterAnswer:
        events = self._events(call)
        head = await anext(events)
        parts = [event["body"] async for event in events]
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        headers = header_lines(head["headers"])
        return ClusterAnswer(memoryview(body), head["status"], headers)

    async def _events(self, call: ClusterCall) -> AsyncIterator[Event]:
        """Yield the ASGI events of an answer. Leaving early cancels the request, as does Ray when
        the client disconnects."""
        answer = AnswerEvents()
        head = MessageHead(call.method, call.target, call.headers)
        head.content_length = len(call.body)
        exchange = AsgiExchange(answer, head, call.body)
        handle(self._core.v2, exchange)
        try:
            async for event in answer.events():
                yield event
        finally:
            if not answer.is_complete:
                leave(exchange)

    async def _infer(self, data: Buffer) -> bytes:
        """Answer a ModelInferRequest with a ModelInferResponse."""
        target = FutureTarget(self._core)
        self._core.infer.submit(data, target, b"", time.monotonic())
        try:
            return await target.answer
        finally:
            target.leave()

    async def _manage(self, call: ClusterCall) -> bytes:
        asked = ManagementCall(call.action, self._spec.model, call.version)
        return await self._core.management.answer(asked)


def _set_arrays(
    future: asyncio.Future[dict[str, Array]], request: Request, answer: Response | PenstockError
) -> None:
    """Copy the arrays of an answer, whose memory is only borrowed."""
    if future.done():
        return
    if isinstance(answer, PenstockError):
        future.set_exception(answer)
    else:
        future.set_result({each.name: to_array(each).copy() for each in answer.outputs})


class FutureTarget:
    """The sink of a ModelInferRequest, whose answer is a future of this event loop."""

    is_streamed = False

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        # Rollouts choose versions by headers; a replica has none.
        self.headers: Mapping[bytes, bytes] = {}
        self.id = ""
        self.model: Served | None = None
        self.request: Request | None = None
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
        return self.answer.done()

    def refuse(self, error: PenstockError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def refuse_bug(self) -> None:
        log.exception("while answering an RPC")
        self.refuse(PenstockError("internal error"))

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        self.request = None
        if isinstance(answer, PenstockError):
            self.refuse(answer)
        elif not self.answer.done():
            try:
                # The tensors are only valid until this returns.
                self.answer.set_result(b"".join(self._server.infer.encode(self, request, answer)))
            except PenstockError as error:
                self.refuse(error)
            except Exception:  # Keep serving.
                self.refuse_bug()

    def leave(self) -> None:
        """Cancel the request, unless it has its answer."""
        if self.model is not None and self.request is not None:
            self.model.cancel(self.request)
