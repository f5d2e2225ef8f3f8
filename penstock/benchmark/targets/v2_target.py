"""A model behind the v2 protocol (KServe, Triton) over HTTP: Penstock, Triton, MLServer and others.

Asks the server for the model's inputs and configuration, and reads the server's own counters.
Messages are made by `v2_requests` and sent by `http_client`; `shared_inputs` owns the memory of
inputs that requests do not carry.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import Counters, Description, TargetSpec, combine, shared
from penstock.benchmark.targets.http_client import HttpTarget, NoAnswer, ask, list_models
from penstock.benchmark.targets.http_connection import StatusReader
from penstock.benchmark.targets.http_messages import Causes, request_bytes
from penstock.benchmark.targets.shared import Json, Member, V2Config, V2Metadata
from penstock.benchmark.targets.shared_inputs import SharedInputs, support_problem
from penstock.benchmark.targets.v2_requests import RequestTemplate, V2Address, find_place
from penstock.data import RequestForm, Sample
from penstock.errors import BackendFailed, ConfigError
from penstock.types import DATATYPES, TensorSpec
from penstock.wire.v2_client import HEAD_LENGTH, decode_outputs

TIMING = b"Penstock-Timing: 1\r\n"
MAX_FORMS = 1024


class _Server(msgspec.Struct):
    name: str
    version: str = ""
    extensions: list[str] = []


class _Ready(msgspec.Struct):
    name: str
    state: str = ""


class _Statistics(msgspec.Struct):
    model_stats: list[Json]


class OutputsReader(StatusReader):
    """Reads the outputs of an answer, to compare them with recorded ones."""

    def __init__(self, exchange: TimedExchange, causes: Causes) -> None:
        super().__init__(exchange, causes)
        self._body = bytearray()
        self._head_length = 0

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        super().head(status, headers)
        self._head_length = int(headers.get(HEAD_LENGTH.lower().encode(), 0))

    def chunk(self, data: bytes) -> None:
        super().chunk(data)
        self._body += data

    def end(self) -> str | None:
        failure = super().end()
        if failure is None and self._exchange.expected:
            try:
                self._exchange.answer = decode_outputs(self._head_length, bytes(self._body))
            except BackendFailed as error:
                return shared.in_short(str(error))
        return failure


class V2HttpTarget(HttpTarget):
    """Call `describe` first: the server says what inputs the model takes and how to encode them."""

    def __init__(self, spec: TargetSpec) -> None:
        self._place = find_place(spec)
        read = self._read_answer if spec.reads_answers else None
        super().__init__(spec, self._place.url, read)
        self._request_form: RequestForm | None = None
        self._is_binary = spec.is_binary
        self._shared = SharedInputs() if spec.shared_memory else None
        # Of an ensemble.
        self._members: list[Member] = []
        self._forms: dict[object, RequestTemplate] = {}
        # Requests until the next one that asks for timings; negative: never.
        self._until_timing = -1

    async def describe(self) -> tuple[Description, RequestForm]:
        server = await self._ask_server()
        if self._shared is not None and (problem := support_problem(self._url, server.extensions)):
            raise ConfigError([problem])
        metadata = await self._ask_model()
        config, digest = await self._ask_config(self._place)
        self._members = await shared.find_members(config, self._ask_member)
        self._is_binary = self._spec.is_binary and "binary_tensor_data" in server.extensions
        has_timing = server.name == "penstock" or "penstock_timing" in server.extensions
        if has_timing and self._spec.timing_every > 0:
            self._until_timing = self._spec.timing_every
        form = self._request_form = shared.form_of(metadata, config)
        self._check_form(form)
        place, versions = self._place, metadata.versions or []
        is_shared = self._shared is not None
        sent_as = "binary" if self._is_binary else "JSON"
        description = Description(
            f"v2 HTTP, {'inputs in shared memory' if is_shared else sent_as}",
            self._spec.address,
            place.model,
            # With several versions, only the server knows which one it uses.
            place.version or (versions[0] if len(versions) == 1 else ""),
            f"{server.name} {server.version}".strip(),
            metadata.platform,
            config_digest=digest,
            shared_memory=is_shared,
        )
        if config is not None:
            description.backend = config.backend or config.platform or metadata.platform
            description.max_batch_size = config.max_batch_size
            description.num_instances = config.num_instances
        return description, form

    async def counters(self) -> Counters | None:
        found = await self._count(Member(self._place.model, self._place.version))
        return await shared.add_members(found, self._members, self._count)

    async def _count(self, model: Member) -> Counters | None:
        try:
            answer = await self._ask(self._at(model).path + "/stats")
            counts = [shared.counters_of(entry) for entry in answer.decode(_Statistics).model_stats]
        except (ConfigError, TypeError, ValueError, AttributeError):
            return None
        # Summed over all versions.
        return combine(counts, sum) if counts else None

    async def open(self, num_connections: int) -> None:
        if self._shared is not None:
            await self._shared.register(self._ask_region)
        await super().open(num_connections)

    async def close(self) -> None:
        await super().close()
        if self._shared is not None:
            await self._shared.unregister(self._ask_region)

    def encode(self, sample: Sample) -> bytes:
        tensors = sample.tensors
        key = tuple((name, array.dtype, array.shape) for name, array in tensors.items())
        form = self._forms.get(key)
        if form is None:
            form = self._form(sample)
            if len(self._forms) >= MAX_FORMS:
                self._forms.clear()
            self._forms[key] = form
        return form.message(tensors)

    def send(self, exchange: TimedExchange) -> None:
        self._until_timing -= 1
        if self._until_timing == 0:
            self._until_timing = self._spec.timing_every
            item: bytes = exchange.item
            end = item.find(b"\r\n") + 2
            exchange.item = item[:end] + TIMING + item[end:]
        super().send(exchange)

    def _read_answer(self, exchange: TimedExchange) -> StatusReader:
        return OutputsReader(exchange, self._causes)

    def _form(self, sample: Sample) -> RequestTemplate:
        form = self._request_form
        assert form is not None, "samples are encoded after `describe`"
        tensors = shared.tensors_of(form, sample)
        specs = [TensorSpec(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]
        start = [f"POST {self._place.path}/infer HTTP/1.1", f"Host: {self._url.name}"]
        start += [f"{name}: {value}" for name, value in self._headers.items()]
        place = None
        if self._shared is not None:
            self._shared.check(specs)
            place = self._shared.place
        head = "\r\n".join((*start, "")).encode("latin-1")
        return RequestTemplate(head, specs, self._is_binary, place)

    async def _ask_region(self, path: str, body: bytes, timeout_s: float) -> None:
        """Register or unregister shared memory; ConfigError if the server refuses."""
        answer = await self._ask(self._place.prefix + path, body, timeout_s)
        if not answer.is_good:
            text = f"--shared-memory: the server refused it: {answer.error_text}"
            raise ConfigError([f"{self._url.origin}: {text}"])

    async def _ask_server(self) -> _Server:
        path = f"{self._place.prefix}/v2"
        try:
            return (await self._ask(path)).decode(_Server)
        except ValueError as error:
            text = f"what answers at {self._url.origin} is no v2 server (GET {path}: {error})"
            raise ConfigError([text]) from None

    async def _ask_model(self) -> V2Metadata:
        path, name = self._place.path, f"model '{self._place.model}'"
        answer = await self._ask(path)
        if not answer.is_good:
            raise ConfigError([await self._why_no_model(answer.error_text)])
        ready = await self._ask(path + "/ready")
        if not ready.is_good:
            raise ConfigError([f"{self._url.origin}: {name} is not ready: {ready.error_text}"])
        try:
            return answer.decode(V2Metadata)
        except ValueError as error:
            where = f"{self._url.origin}{path}"
            raise ConfigError([f"{where}: this does not describe a v2 model: {error}"]) from None

    async def _why_no_model(self, text: str) -> str:
        """Explain why there is no model. A server may answer with the same status for an unknown
        model and a missing version; its index tells them apart."""
        url, path = self._url, f"{self._place.prefix}/v2/repository/index"
        where, name = f"{url.origin}: ", f"model '{self._place.model}'"
        headers = self._headers | {"Content-Type": "application/json"}
        try:
            answer = await ask(url, request_bytes(url, "POST", path, headers, b"{}"))
            states = {entry.name: entry.state for entry in answer.decode(list[_Ready])}
        except (NoAnswer, ValueError):
            return f"{where}{name}: {text}"
        if self._place.model in states:
            state = states[self._place.model].lower()
            note = f" ({state})" if state else ""
            return f"{where}{name} cannot be used{note}: {text}"
        return f"{where}no {name}; there is {list_models(states, 'no model at all')}"

    def _at(self, member: Member) -> V2Address:
        return replace(self._place, model=member.name, version=member.version)

    async def _ask_member(self, member: Member) -> V2Config | None:
        return (await self._ask_config(self._at(member)))[0]

    async def _ask_config(self, place: V2Address) -> tuple[V2Config | None, str]:
        """Return the configuration and its digest; None where the server has none."""
        answer = await self._ask(place.path + "/config")
        try:
            return answer.decode(V2Config), shared.config_digest(answer.decode(dict[str, object]))
        except ValueError:
            return None, ""

    def _check_form(self, form: RequestForm) -> None:
        """Raise ConfigError when no request can be made."""
        if not form.inputs:
            text = "does not say what inputs it takes: declare them there, or give a body by --body"
            raise ConfigError([f"{self._url.origin}: model '{self._place.model}' {text}"])
        problems = [
            f"input '{spec.name}': unknown datatype {spec.datatype}"
            for spec in form.inputs
            if spec.datatype not in DATATYPES
        ]
        if not self._is_binary:
            problems += [
                f"input '{spec.name}': {spec.datatype} cannot be sent as JSON, only as binary "
                f"tensors{'' if not self._spec.is_binary else ', which this server does not take'}"
                for spec in form.inputs
                if spec.datatype in ("FP16", "BF16")
            ]
        if problems:
            raise ConfigError(problems)
