"""A model behind the v2 protocol (KServe, Triton) over HTTP: Penstock, Triton, MLServer and others.

Asks the server for the model's inputs and configuration, and reads the server's own counters.
Messages are made by `v2_requests` and sent by `http_client`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import Counters, Description, TargetSpec
from penstock.benchmark.targets.http_client import HttpClient, NoAnswer, ask
from penstock.benchmark.targets.http_messages import (
    HttpAnswer,
    check_headers,
    error_text,
    request_bytes,
)
from penstock.benchmark.targets.shared import (
    config_digest,
    counters_of,
    form_of,
    tensors_of,
)
from penstock.benchmark.targets.v2_requests import RequestTemplate, find_place
from penstock.data import RequestForm, Sample
from penstock.errors import ConfigError
from penstock.types import DATATYPES, TensorSpec

TIMING = b"Penstock-Timing: 1\r\n"
MAX_FORMS = 1024
MAX_MODELS_TOLD = 20


class _Tensor(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class _Metadata(msgspec.Struct):
    name: str
    inputs: list[_Tensor]
    versions: list[str] | None = None
    platform: str = ""


class _Server(msgspec.Struct):
    name: str
    version: str = ""
    extensions: list[str] = []


class _Group(msgspec.Struct):
    count: int = 1
    gpus: list[int] = []


class _InputConfig(msgspec.Struct):
    name: str = ""
    optional: bool = False


class _Config(msgspec.Struct):
    """The fields of a model's configuration that matter here."""

    max_batch_size: int = 0
    backend: str = ""
    platform: str = ""
    instance_group: list[_Group] = []
    input: list[_InputConfig] = []


class _Ready(msgspec.Struct):
    name: str
    state: str = ""


class V2HttpTarget:
    """Call `describe` first: the server says what inputs the model takes and how to encode them."""

    load_s: float | None = None

    def __init__(self, spec: TargetSpec) -> None:
        check_headers(spec.headers)
        self._spec = spec
        self._place = find_place(spec)
        self._headers = dict(spec.headers)
        if spec.api_key:
            self._headers["Authorization"] = f"Bearer {spec.api_key}"
            check_headers(self._headers)
        self._client = HttpClient(self._place.url, spec.timeout_s, spec.max_connections)
        self._request_form: RequestForm | None = None
        self._is_binary = spec.is_binary
        self._forms: dict[object, RequestTemplate] = {}
        # Requests until the next one that asks for timings; negative: never.
        self._until_timing = -1

    @property
    def num_connections(self) -> int:
        return self._client.num_connections

    @property
    def num_waited(self) -> int:
        return self._client.num_waited

    async def describe(self) -> tuple[Description, RequestForm]:
        server = await self._ask_server()
        metadata = await self._ask_model()
        config, digest = await self._ask_config()
        self._is_binary = self._spec.is_binary and "binary_tensor_data" in server.extensions
        has_timing = server.name == "penstock" or "penstock_timing" in server.extensions
        if has_timing and self._spec.timing_every > 0:
            self._until_timing = self._spec.timing_every
        form = self._request_form = _request_form(metadata, config)
        self._check_form(form)
        place = self._place
        versions = metadata.versions or []
        description = Description(
            f"v2 HTTP, {'binary' if self._is_binary else 'JSON'}",
            self._spec.address,
            place.model,
            # With several versions, only the server knows which one it uses.
            place.version or (versions[0] if len(versions) == 1 else ""),
            f"{server.name} {server.version}".strip(),
            metadata.platform,
            config_digest=digest,
        )
        if config is not None:
            description.backend = config.backend or config.platform or metadata.platform
            description.max_batch_size = config.max_batch_size
            description.num_instances = _num_instances(config)
        return description, form

    async def counters(self) -> Counters | None:
        try:
            answer = await self._get(self._place.path + "/stats")
            entries = msgspec.json.decode(answer.body)["model_stats"] if answer.is_good else []
            counts = [counters_of(entry) for entry in entries]
        except (NoAnswer, msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
            return None
        return _total(counts) if counts else None

    async def open(self, num_connections: int) -> None:
        await self._client.open(num_connections)

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
        self._client.send(exchange)

    async def close(self) -> None:
        await self._client.close()

    def _form(self, sample: Sample) -> RequestTemplate:
        form = self._request_form
        assert form is not None, "samples are encoded after `describe`"
        tensors = tensors_of(form, sample)
        specs = [TensorSpec(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]
        start = [f"POST {self._place.path}/infer HTTP/1.1", f"Host: {self._place.url.name}"]
        start += [f"{name}: {value}" for name, value in self._headers.items()]
        return RequestTemplate("\r\n".join((*start, "")).encode("latin-1"), specs, self._is_binary)

    # Questions.

    async def _get(self, path: str) -> HttpAnswer:
        url = self._place.url
        return await ask(url, request_bytes(url, "GET", path, self._headers))

    async def _ask(self, path: str) -> HttpAnswer:
        """Ask the server; ConfigError if it does not answer, or requires a key."""
        origin = self._place.url.origin
        try:
            answer = await self._get(path)
        except NoAnswer as error:
            raise ConfigError([f"{origin}: the server cannot be reached: {error}"]) from None
        if answer.status in (401, 403):
            text = error_text(answer.body) or f"status {answer.status}"
            raise ConfigError([f"{origin}: {text}; give a key by --api-key or PENSTOCK_API_KEY"])
        return answer

    async def _ask_server(self) -> _Server:
        path = f"{self._place.prefix}/v2"
        answer = await self._ask(path)
        problem = f"status {answer.status}"
        if answer.is_good:
            try:
                return msgspec.json.decode(answer.body, type=_Server)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                problem = str(error)
        where = self._place.url.origin
        raise ConfigError([f"what answers at {where} is no v2 server (GET {path}: {problem})"])

    async def _ask_model(self) -> _Metadata:
        path, name = self._place.path, f"model '{self._place.model}'"
        answer = await self._ask(path)
        if not answer.is_good:
            raise ConfigError([await self._why_no_model(answer)])
        ready = await self._ask(path + "/ready")
        if not ready.is_good:
            text = error_text(ready.body) or f"status {ready.status}"
            raise ConfigError([f"{self._place.url.origin}: {name} is not ready: {text}"])
        try:
            return msgspec.json.decode(answer.body, type=_Metadata)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            where = f"{self._place.url.origin}{path}"
            raise ConfigError([f"{where}: this does not describe a v2 model: {error}"]) from None

    async def _why_no_model(self, answer: HttpAnswer) -> str:
        """Explain why there is no model. A server may answer with the same status for an unknown
        model and a missing version; its index tells them apart."""
        place = self._place
        text = error_text(answer.body) or f"status {answer.status}"
        index = await self._index()
        if index is None:
            return f"{place.url.origin}: model '{place.model}': {text}"
        states = {entry.name: entry.state for entry in index}
        if place.model in states:
            state = states[place.model].lower()
            note = f" ({state})" if state else ""
            return f"{place.url.origin}: model '{place.model}' cannot be used{note}: {text}"
        told = ", ".join(sorted(states)[:MAX_MODELS_TOLD]) or "no model at all"
        more = ", …" if len(states) > MAX_MODELS_TOLD else ""
        return f"{place.url.origin}: no model '{place.model}'; there is {told}{more}"

    async def _index(self) -> list[_Ready] | None:
        url, path = self._place.url, f"{self._place.prefix}/v2/repository/index"
        headers = self._headers | {"Content-Type": "application/json"}
        try:
            answer = await ask(url, request_bytes(url, "POST", path, headers, b"{}"))
            return msgspec.json.decode(answer.body, type=list[_Ready]) if answer.is_good else None
        except (NoAnswer, msgspec.DecodeError, UnicodeDecodeError):
            return None

    async def _ask_config(self) -> tuple[_Config | None, str]:
        """Return the configuration and its digest; None where the server has none."""
        answer = await self._ask(self._place.path + "/config")
        if not answer.is_good:
            return None, ""
        try:
            config = msgspec.json.decode(answer.body, type=_Config, strict=False)
            digest = config_digest(msgspec.json.decode(answer.body))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None, ""
        return config, digest

    def _check_form(self, form: RequestForm) -> None:
        """Raise ConfigError when no request can be made."""
        if not form.inputs:
            text = "does not say what inputs it takes: declare them there, or give a body by --body"
            raise ConfigError([f"{self._place.url.origin}: model '{self._place.model}' {text}"])
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


def _request_form(metadata: _Metadata, config: _Config | None) -> RequestForm:
    """Remove the batch dimension from the metadata's shapes. Without a configuration, a first
    dimension that every input leaves variable is taken for the batch."""
    if config is not None:
        has_batch = config.max_batch_size > 0
        optional = {entry.name for entry in config.input if entry.optional}
    else:
        has_batch = all(tensor.shape[:1] == [-1] for tensor in metadata.inputs)
        optional = set()
    return form_of(metadata.inputs, has_batch, optional)


def _num_instances(config: _Config) -> int | None:
    groups = config.instance_group
    return sum(group.count * max(1, len(group.gpus)) for group in groups) if groups else None


def _total(counts: Sequence[Counters]) -> Counters:
    """Sum over all versions; a counter that one of them lacks is unknown."""
    columns = zip(*map(msgspec.structs.astuple, counts), strict=True)
    totals: list[Any] = [None if None in column else sum(column) for column in columns]
    return Counters(*totals)
