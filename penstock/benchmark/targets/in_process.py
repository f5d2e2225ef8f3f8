"""A model in this process: no network and no protocol, but the server's batcher and workers.

`describe` only reads files; `open` loads. The batcher runs on the sender's event loop, so that a
request needs no thread switch; workers are processes, as in the server, so that driving a device
does not share an interpreter with sending.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

import penstock
from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import Counters, Description, TargetSpec
from penstock.benchmark.targets.shared import config_digest, counters_of, in_short, tensors_of
from penstock.config import ModelConfig
from penstock.data import RequestForm, Sample
from penstock.data.files import digest
from penstock.errors import ConfigError, PenstockError
from penstock.processes.life import ProcessLife
from penstock.repository import layout, onnx_file, pbtxt
from penstock.repository import manifest as manifests
from penstock.repository.model_source import resolve
from penstock.serving import local
from penstock.serving.model import Model
from penstock.serving.pipeline import StagePipeline
from penstock.serving.served import Served
from penstock.types import Request, Response, Tensor

SWEEP_S = 0.5
Job = TypeVar("Job")


class Item:
    """An encoded sample. Items of the same form have the same names, shapes and sizes, so the model
    derives what follows from them once."""

    __slots__ = ("form", "tensors")

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.form = tuple((tensor.name, tensor.shape, len(tensor.data)) for tensor in tensors)


class LocalTarget(Generic[Job]):
    """A model in this process. Invariant: `_open` has the unended jobs in sending order."""

    # There are no connections: constants for the interface.
    num_connections = 1
    num_waited = 0

    def __init__(self, spec: TargetSpec) -> None:
        self._spec = spec
        self._model: Served | None = None
        self._open: dict[Job, TimedExchange] = {}
        self._sweep: asyncio.TimerHandle | None = None
        # Load time in seconds, including warm-up of every batch size.
        self.load_s: float | None = None

    async def _load(self, config: ModelConfig) -> Served:
        raise NotImplementedError

    def _cancel(self, job: Job) -> None:
        raise NotImplementedError

    def _description(self, config: ModelConfig, protocol: str, hashed: str) -> Description:
        return Description(
            protocol=protocol,
            address=self._spec.address,
            model=config.name,
            version=config.version,
            server=f"penstock {penstock.__version__}",
            backend=config.backend,
            num_instances=config.num_instances,
            config_digest=config_digest(pbtxt.to_json(config)),
            model_digest=hashed,
        )

    async def open(self, num_connections: int) -> None:
        if self._model is not None:
            return
        _, config = await asyncio.to_thread(find, self._spec)
        began = time.monotonic()
        try:
            self._model = await self._load(config)
        except ConfigError as error:
            problems = [f"{self._spec.address}: {problem}" for problem in error.problems]
            raise ConfigError(problems) from None
        self.load_s = time.monotonic() - began
        self._plan_sweep()

    async def cancel(self) -> None:
        await self.close()

    async def close(self) -> None:
        model, self._model = self._model, None
        if self._sweep is not None:
            self._sweep.cancel()
        for job in list(self._open):
            self._end(job, "cancelled")
        if model is not None:
            await model.close()

    def _plan_sweep(self) -> None:
        self._sweep = asyncio.get_running_loop().call_later(SWEEP_S, self._end_late)

    def _end_late(self) -> None:
        """Fail timed-out requests; `_open` is in sending order."""
        latest = time.monotonic() - self._spec.timeout_s
        for job, exchange in list(self._open.items()):
            if exchange.sent > latest:
                break
            self._end(job, f"no answer within {self._spec.timeout_s:g} s")
            if self._model is not None:
                self._cancel(job)
        self._plan_sweep()

    def _end(self, job: Job, failure: str | None) -> None:
        """End an exchange, unless it has already ended."""
        if (exchange := self._open.pop(job, None)) is not None:
            exchange.end(time.monotonic(), failure)


class InProcess(LocalTarget[Request]):
    """A model that takes tensors; the sink of its own requests."""

    _model: Model | StagePipeline | None

    def __init__(self, spec: TargetSpec) -> None:
        super().__init__(spec)
        self._form: RequestForm | None = None
        self._num_answered = 0

    async def describe(self) -> tuple[Description, RequestForm]:
        folder, config = await asyncio.to_thread(find, self._spec)
        self._form = RequestForm("tensors", tuple(config.inputs), config.max_batch_size > 0)
        hashed = await asyncio.to_thread(model_digest, folder, config)
        description = self._description(config, "in process", hashed)
        description.max_batch_size = config.max_batch_size
        return description, self._form

    async def counters(self) -> Counters | None:
        """Return None until the model is loaded."""
        return None if self._model is None else counters_of(self._model.metrics.statistics())

    async def _load(self, config: ModelConfig) -> Model | StagePipeline:
        return await local.start(await asyncio.to_thread(local.place_here, config), ProcessLife)

    def _cancel(self, job: Request) -> None:
        assert self._model is not None
        self._model.cancel(job)

    def encode(self, sample: Sample) -> Item:
        assert self._form is not None, "inputs are encoded after `describe`"
        return Item(tensors_of(self._form, sample))

    def send(self, exchange: TimedExchange) -> None:
        exchange.sent = now = time.monotonic()
        item: Item = exchange.item
        request = Request(self, item.tensors, now)
        request.form = item.form
        self._open[request] = exchange
        if self._model is None:
            asyncio.get_running_loop().call_soon(self._end, request, "cancelled")
            return
        self._model.submit(request)

    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        exchange = self._open.pop(request, None)
        if exchange is None:
            return  # It timed out before.
        done, failure = time.monotonic(), None
        if isinstance(answer, PenstockError):
            failure = failure_text(answer)
        elif self._spec.timing_every:
            self._num_answered += 1
            if self._num_answered % self._spec.timing_every == 0:
                exchange.phases = request.timings.phases()
        if exchange.expected and isinstance(answer, Response):
            exchange.answer = [
                Tensor(each.name, each.datatype, each.shape, bytes(each.data))
                for each in answer.outputs
            ]
        exchange.end(done, failure)


def find(spec: TargetSpec) -> tuple[Path, ModelConfig]:
    """Return the model's folder and the configuration of the requested or newest version."""
    found = resolve(spec.address, name=spec.model).read()
    config = found.only(spec.address, spec.version, "say which by --model")
    return found.folders[config.name], config


def model_digest(folder: Path, config: ModelConfig) -> str:
    """Return SHA-256 of a version's files, or of a model that is a file by itself."""
    if layout.has_version_folder(folder, config):
        return files_digest(folder / config.version)
    path = Path(config.artifact)
    weights = onnx_file.weight_files(path) if path.suffix == ".onnx" else []
    return _digest({name: digest([path.parent / name]) for name in (path.name, *weights)})


def files_digest(folder: Path) -> str:
    """Return SHA-256 over the names and digests of a version's files: from the manifest of a
    committed version, otherwise computed. Both give the same digest."""
    manifest = manifests.read(folder)
    if manifest is not None:
        return _digest({name: entry.sha256 for name, entry in manifest.files.items()})
    names = [name for name in manifests.names_below(folder) if (folder / name).is_file()]
    return _digest({name: digest([folder / name]) for name in names})


def _digest(digests: Mapping[str, str]) -> str:
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()


def failure_text(error: PenstockError) -> str:
    """Describe an error by its class: "overloaded: Exceeds maximum queue size"."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(error).__name__).lower()
    return f"{words}: {in_short(str(error))}"
