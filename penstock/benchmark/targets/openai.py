"""A language model behind OpenAI's API (vLLM, SGLang, llama.cpp and others): chat or completions,
always streamed, so that the arrival of each chunk is seen."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec
from msgspec.structs import astuple

from penstock.benchmark.exchange import StreamTimes, TimedExchange
from penstock.benchmark.targets import Description, TargetSpec, http_messages
from penstock.benchmark.targets.http_client import HttpTarget, list_models
from penstock.benchmark.targets.http_connection import CUT, StatusReader
from penstock.benchmark.targets.http_messages import Causes, HttpAnswer, Url
from penstock.benchmark.targets.shared import in_short
from penstock.data import RequestForm, Sample
from penstock.data.recordings import text_tensor
from penstock.errors import ConfigError

PATHS = {"chat": "/chat/completions", "completions": "/completions"}
FORMS = {"chat": "messages", "completions": "prompt"}
EVENTS = b"text/event-stream"
DONE = b"[DONE]"
MAX_EVENT_BYTES = 1 << 20
# Statuses of servers that list no models but still answer requests.
WITHOUT_LIST = (404, 405, 501)
# Names in the Server header that belong to a proxy or HTTP stack, not to the model server.
CARRIERS = ("uvicorn", "nginx", "envoy", "istio-envoy", "cloudflare", "caddy", "granian")


class _Delta(msgspec.Struct):
    """The fields of a delta that count as text."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[object] | None = None


class _Choice(msgspec.Struct):
    """`delta` is for chats, `text` for completions."""

    delta: _Delta | None = None
    text: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: object = None


_events = msgspec.json.Decoder(_Event)


class _Model(msgspec.Struct):
    id: str
    owned_by: str | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


class NotEvents(ValueError):
    """The data is not an event stream, or an event is far too large."""


class EventParser:
    """Parses server-sent events (WHATWG HTML, section 9.2), split anywhere. Lines end with LF, CR
    or CRLF. Comments and fields other than `data` are skipped."""

    def __init__(self) -> None:
        # The incomplete line, and the data of the incomplete event.
        self._line = b""
        self._data: list[bytes] = []
        self._num_bytes = 0
        self._follows_return = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of each event that is now complete."""
        if not data:
            return []
        # The LF of a CRLF whose CR already ended a line.
        skip = 1 if self._follows_return and data[:1] == b"\n" else 0
        self._follows_return = data.endswith(b"\r")
        data = data[skip:]
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._line = (self._line + data).split(b"\n")
        events: list[bytes] = []
        for line in lines:
            self._end_line(line, events)
        if len(self._line) + self._num_bytes > MAX_EVENT_BYTES:
            raise NotEvents(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def end(self) -> list[bytes]:
        """End the stream. The standard drops an event without an empty line after it, but some
        servers omit that line at the end."""
        events: list[bytes] = []
        if self._line:
            self._end_line(self._line, events)
        self._end_line(b"", events)
        self._line = b""
        return events

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
                self._num_bytes = 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value.removeprefix(b" ")
            self._data.append(value)
            self._num_bytes += len(value) + 1


class StreamReader(StatusReader):
    """Reads one answer. A chunk is an event with text, of the answer or of its reasoning."""

    def __init__(self, exchange: TimedExchange, causes: Causes, now: Callable[[], float]) -> None:
        super().__init__(exchange, causes)
        self._now = now
        self._parser = EventParser()
        self._stream = StreamTimes()
        self._kind = b""
        self._num_told: int | None = None
        self._is_done = False
        self._failure: str | None = None
        self._text = ""

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self._status = status
        self._kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if self._is_stream:
            self._exchange.stream = self._stream

    @property
    def _is_stream(self) -> bool:
        return self._status == 200 and self._kind == EVENTS

    def chunk(self, data: bytes) -> None:
        if not self._is_stream:
            super().chunk(data)
        elif self._failure is None:
            try:
                self._take(self._parser.feed(data))
            except NotEvents as error:
                self._failure = f"error in the stream: {error}"

    def end(self) -> str | None:
        if self._status != 200:
            return self._cause()
        if not self._is_stream:
            kind = self._kind.decode("latin-1") or "of no content type"
            return f"the answer is no event stream but {in_short(kind)}"
        if self._failure is None:
            self._take(self._parser.end())
        stream, told = self._stream, self._num_told
        stream.num_output_tokens = len(stream.times) if told is None else told
        if self._exchange.expected:
            self._exchange.answer = [text_tensor(self._text)]
        if self._failure is None and not self._is_done:
            return CUT
        return self._failure or (None if stream.times else "empty answer")

    def _take(self, events: list[bytes]) -> None:
        now = self._now()
        for data in events:
            if self._is_done or self._failure is not None:
                return
            if data.strip() == DONE:
                self._is_done = True
            else:
                self._take_event(data, now)

    def _take_event(self, data: bytes, now: float) -> None:
        try:
            event = _events.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._failure = f"error in the stream: {in_short(str(error))}"
            return
        if event.error is not None:
            self._failure = f"error in the stream: {in_short(http_messages.error_text(data))}"
            return
        usage = event.usage or _Usage()
        if usage.prompt_tokens is not None:
            self._stream.num_input_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self._num_told = usage.completion_tokens
        choices = event.choices or ()
        if any(each.text or any(astuple(each.delta or _Delta())) for each in choices):
            self._stream.times.append(now)
        if self._exchange.expected:
            deltas = (each.text or (each.delta or _Delta()).content for each in choices)
            self._text += "".join(filter(None, deltas))


class OpenAI(HttpTarget):
    """Call `describe` first: it finds the model's name if none was given."""

    def __init__(self, spec: TargetSpec) -> None:
        url, self._base, self._api = find_place(spec)
        super().__init__(spec, url, lambda each: StreamReader(each, self._causes, time.monotonic))
        self._extra = parse_extra(spec.extra)
        self._model = spec.model

    async def describe(self) -> tuple[Description, RequestForm]:
        answer = await self._ask(f"{self._base}/models")
        model = self._find_model(answer)
        self._model = model.id
        description = Description(
            protocol=f"OpenAI {self._api}",
            address=self._spec.address,
            model=model.id,
            server=await self._server(model, answer.headers.get(b"server", b"")),
        )
        return description, RequestForm(kind=FORMS[self._api])

    def encode(self, sample: Sample) -> bytes:
        data = body_of(self._model, self._api, sample, self._extra)
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        path = self._base + PATHS[self._api]
        return http_messages.request_bytes(self._url, "POST", path, headers | self._headers, data)

    def _find_model(self, answer: HttpAnswer) -> _Model:
        asked, where = self._spec.model, f"{self._url.origin}{self._base}/models"
        if asked and answer.status in WITHOUT_LIST:
            return _Model(asked)
        try:
            models = answer.decode(_Models).data
        except ValueError as error:
            raise ConfigError([f"{where}: this is no OpenAI server ({error})"]) from None
        found = [model for model in models if asked in ("", model.id)]
        if len(found) == 1:
            return found[0]
        told = list_models((model.id for model in models), "none at all")
        if asked:
            raise ConfigError([f"{where}: no model '{asked}'; there is {told}"])
        raise ConfigError([f"{where}: say by --model which one is meant; there is {told}"])

    async def _server(self, model: _Model, header: bytes) -> str:
        """Return name and version. vLLM is named as the models' owner, and has `/version`."""
        name = header.decode("latin-1").strip()
        if not name or name.partition("/")[0].lower() in CARRIERS:
            name = model.owned_by or ""
        try:
            answer = await self._ask(self._base.removesuffix("/v1") + "/version")
            return f"{name} {answer.decode(_Version).version}".strip()
        except (ConfigError, ValueError):
            return name


def body_of(model: str, api: str, sample: Sample, extra: Mapping[str, object]) -> bytes:
    """Encode the request body as JSON."""
    field = FORMS[api]
    value = sample.fields.get(field)
    if not value:
        given = ", ".join(map(str, sample.fields)) or "nothing"
        raise ConfigError([f"input: expected '{field}' for OpenAI {api}, got {given}"])
    body: dict[str, object] = {
        "model": model,
        field: value,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": sample.max_tokens,
        **extra,
    }
    try:
        return msgspec.json.encode({key: value for key, value in body.items() if value is not None})
    except (TypeError, UnicodeEncodeError) as error:
        raise ConfigError([f"input: '{field}' cannot be written as JSON: {error}"]) from None


class OpenAiAddress(NamedTuple):
    """A server and one of its APIs; `base` is the path in front of `/models`."""

    url: Url
    base: str
    api: str


def find_place(spec: TargetSpec) -> OpenAiAddress:
    """Parse the target's address; ConfigError if it is invalid."""
    if spec.api not in PATHS:
        raise ConfigError([f"--api {spec.api}: expected {' or '.join(PATHS)}"])
    url = http_messages.parse_url(spec.address.removeprefix("openai+"))
    if "?" in url.path:
        raise ConfigError([f"{spec.address}: expected no query"])
    path = url.path.rstrip("/")
    for api, end in PATHS.items():
        if path.endswith(end):
            return OpenAiAddress(url, path.removesuffix(end), api)
    return OpenAiAddress(url, path or "/v1", spec.api)


def parse_extra(text: str) -> dict[str, object]:
    """Parse extra fields of each request; null removes one of ours."""
    if not text:
        return {}
    try:
        extra = msgspec.json.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise ConfigError([f"--extra {text}: expected a JSON object: {error}"]) from None
    if not extra.get("stream", True):
        raise ConfigError([f"--extra {text}: answers are always streamed"])
    return extra
