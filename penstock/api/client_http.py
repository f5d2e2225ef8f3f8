"""The v2 protocol over HTTP, from the client's side: binary tensors, kept connections, and errors
of the server as those of `penstock.errors`."""

from __future__ import annotations

import http.client
import ssl
import threading
from collections.abc import Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec

from penstock import errors
from penstock.api.endpoint import Access, Endpoint, ModelMetadata
from penstock.errors import PenstockError
from penstock.types import Array, RequestedOutput, Tensor
from penstock.wire import v2_client
from penstock.wire.statuses import STATUSES

# Errors by HTTP status; other statuses are BackendFailed. The text decides which error 503 is.
ERRORS: Mapping[int, type[PenstockError]] = {
    **{status.http: kind for kind, status in STATUSES.items()},
    401: errors.NotAllowed,
    499: errors.DeadlineExceeded,
}
NOT_READY = ("not ready", "loading", "shutting down", "unloaded")
MAX_KEPT = 32


class _Indexed(msgspec.Struct):
    name: str


class _ServerMetadata(msgspec.Struct):
    extensions: list[str] = []


class _Generated(msgspec.Struct):
    text_output: str


# Made when this is imported: msgspec crashes when several threads are the first to use a type.
_METADATA = msgspec.json.Decoder(ModelMetadata)
_INDEX = msgspec.json.Decoder(list[_Indexed])
_SERVER = msgspec.json.Decoder(_ServerMetadata)
_GENERATED = msgspec.json.Decoder(_Generated)
Decoded = TypeVar("Decoded")


class HttpCalls:
    """Thread-safe: each call takes a connection of its own, and keeps it open for the next."""

    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self._endpoint = endpoint
        self._access = access
        self._context: ssl.SSLContext | None = None
        if endpoint.is_tls:
            self._context = ssl.create_default_context(cafile=access.ca_file or None)
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []

    def is_server_ready(self) -> bool:
        return self._send("GET", "/v2/health/ready")[0] == 200

    def is_model_ready(self, model: str, version: str) -> bool:
        status, _, body = self._send("GET", f"{model_path(model, version)}/ready")
        if status == 404:
            raise self._error(status, body)
        return status == 200

    def models(self) -> Sequence[str]:
        body = self._ask("POST", "/v2/repository/index", b'{"ready":true}')
        return [each.name for each in _decode(body, _INDEX)]

    def metadata(self, model: str, version: str) -> ModelMetadata:
        return _decode(self._ask("GET", model_path(model, version)), _METADATA)

    def extensions(self) -> Sequence[str]:
        return _decode(self._ask("GET", "/v2"), _SERVER).extensions

    def register(self, name: str, key: str, nbytes: int) -> None:
        body = v2_client.encode_region(key, nbytes)
        self._ask("POST", v2_client.region_path(name, "register"), body)

    def unregister(self, name: str) -> None:
        self._ask("POST", v2_client.region_path(name, "unregister"))

    def infer(
        self,
        model: str,
        version: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[RequestedOutput] = (),
        places: Mapping[str, memoryview] | None = None,
    ) -> dict[str, Array]:
        """Return all outputs, or only those named; the memory of those that are not in the answer
        is at `places`."""
        head_length, body = v2_client.encode_infer(tensors, outputs)
        headers, path = {v2_client.HEAD_LENGTH: str(head_length)}, model_path(model, version)
        status, answered, answer = self._send("POST", f"{path}/infer", body, headers)
        if status != 200:
            raise self._error(status, answer)
        length = answered.get(v2_client.HEAD_LENGTH.lower(), str(len(answer)))
        return v2_client.decode_answer(int(length), answer, places)

    def generate(self, model: str, version: str, fields: dict[str, object]) -> str:
        body = msgspec.json.encode(fields)
        answer = self._ask("POST", f"{model_path(model, version)}/generate", body)
        return _decode(answer, _GENERATED).text_output

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        status, _, answer = self._send(method, path, body)
        if status != 200:
            raise self._error(status, answer)
        return answer

    def _send(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return status, headers and body. A kept connection that the server
        has closed meanwhile is replaced."""
        access, url = self._access, self._endpoint.url
        sent = dict(headers or {})
        if access.api_key:
            sent["X-API-Key"] = access.api_key
        while True:
            connection, is_new = self._take()
            try:
                connection.request(method, self._endpoint.prefix + path, body or None, sent)
                answer = connection.getresponse()
                read = answer.read()
            except TimeoutError:
                connection.close()
                text = f"{url}: no answer within {access.timeout_s:g} s"
                raise errors.DeadlineExceeded(text) from None
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if is_new:
                    raise errors.NotReady(f"{url}: {_why(error)}") from None
                continue
            self._keep(connection)
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, read

    def _take(self) -> tuple[http.client.HTTPConnection, bool]:
        with self._lock:
            if self._idle:
                return self._idle.pop(), False
        place, timeout_s = (self._endpoint.host, self._endpoint.port), self._access.timeout_s
        if self._context is None:
            return http.client.HTTPConnection(*place, timeout=timeout_s), True
        return http.client.HTTPSConnection(*place, timeout=timeout_s, context=self._context), True

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if connection.sock is not None and len(self._idle) < MAX_KEPT:
                self._idle.append(connection)
                return
        connection.close()

    def _error(self, status: int, body: bytes) -> PenstockError:
        text = f"{self._endpoint.url}: {error_text(status, body)}"
        if status == 401:
            text += "; give a key by api_key="
        if status == 503 and any(word in text for word in NOT_READY):
            return errors.NotReady(text)
        return ERRORS.get(status, errors.BackendFailed)(text)


def error_text(status: int, body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=dict[str, str])["error"]
    except (msgspec.DecodeError, KeyError):
        return f"status {status}"


def model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _decode(body: bytes, decoder: msgspec.json.Decoder[Decoded]) -> Decoded:
    try:
        return decoder.decode(body)
    except msgspec.DecodeError as error:
        raise errors.BackendFailed(f"the server's answer cannot be read: {error}") from None


def _why(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "no server is listening there; start one with: penstock serve MODEL"
    if isinstance(error, http.client.HTTPException):
        return "the answer is not HTTP: is this the server's HTTP port?"
    return f"the server cannot be reached: {error}"
