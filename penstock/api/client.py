"""A client of Penstock, Triton and other v2 servers: numpy arrays and texts in, numpy arrays out,
over HTTP or gRPC. Thread-safe; connections are kept open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.api.client_memory import SharedCalls
from penstock.api.endpoint import Access, Endpoint, ModelMetadata, parse_endpoint
from penstock.errors import InvalidRequest, NotFound, PenstockError, Unsupported
from penstock.types import Array, Tensor
from penstock.wire.arrays import to_tensors

if TYPE_CHECKING:
    from penstock.api.client_grpc import GrpcCalls
    from penstock.api.client_http import HttpCalls
    from penstock.wire.arrays import Given


class Client:
    """A connection to a running server.

    `url` is http://host:port, http://host:port/PREFIX or grpc://host:port, and may name a model, as
    in http://host:port/v2/models/NAME or grpc://host:port/NAME. `model` is the default for all
    calls; without one, the only model of the server is used. Large tensors go through shared memory
    if the server is on this machine and allows it, unless `shared_memory` is False."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str = "",
        timeout_s: float = 60.0,
        ca_file: str = "",
        shared_memory: bool = True,
    ) -> None:
        endpoint = parse_endpoint(url)
        self.url = endpoint.url
        self._model = model or endpoint.model
        self._version = endpoint.version
        self._metadata: dict[tuple[str, str], ModelMetadata] = {}
        access = Access(api_key, timeout_s, ca_file)
        self._opened: HttpCalls | GrpcCalls | None = _open(endpoint, access)
        self._shared = SharedCalls(self._opened, endpoint) if shared_memory else None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client {self.url}>"

    def ready(self, model: str = "") -> bool:
        """Return whether the model can answer; without one, the whole server. A server that cannot
        be reached is not ready."""
        name = model or self._model
        try:
            if name:
                return self._calls.is_model_ready(name, self._version)
            return self._calls.is_server_ready()
        except NotFound:
            raise
        except PenstockError:
            return False

    def models(self) -> list[str]:
        """Return the names of the server's models."""
        return sorted(set(self._calls.models()))

    def metadata(self, model: str = "", version: str = "") -> ModelMetadata:
        """Return inputs, outputs and versions of a model."""
        return self._calls.metadata(self._name(model), version or self._version)

    def infer(self, inputs: Given, *, model: str = "", version: str = "") -> dict[str, Array]:
        """Return the outputs by name. A model that needs one input takes a single array, text or
        list of texts; if the model has a batch dimension, so must the arrays."""
        name, version = self._name(model), version or self._version
        known = self._metadata.get((name, version))
        if known is None:
            known = self._metadata[name, version] = self._calls.metadata(name, version)
        try:
            return self._infer(name, version, to_tensors(inputs, known.inputs, name))
        except InvalidRequest:
            # The model may have been replaced by one with other inputs.
            self._metadata.pop((name, version), None)
            raise

    def _infer(self, name: str, version: str, tensors: Sequence[Tensor]) -> dict[str, Array]:
        calls, shared = self._calls, self._shared
        found = None if shared is None else shared.infer(name, version, tensors)
        if found is not None:
            return found
        found = calls.infer(name, version, tensors)
        if shared is not None:
            shared.learn(name, version, tensors, found)
        # The answer belongs to the caller, who may write to it.
        return {name: array.copy() for name, array in found.items()}

    def generate(self, prompt: str, *, model: str = "", **parameters: object) -> str:
        """Return a language model's continuation of a text. `parameters` are those of OpenAI's
        completions: max_tokens, temperature, stop, seed, ... HTTP only."""
        fields = {"text_input": prompt, "exclude_input_in_output": True, **parameters}
        return self._calls.generate(self._name(model), self._version, fields)

    def close(self) -> None:
        """Close the connections. Later calls raise InvalidRequest."""
        if self._opened is not None:
            if self._shared is not None:
                self._shared.close()
            self._opened.close()
            self._opened = None

    @property
    def _calls(self) -> HttpCalls | GrpcCalls:
        if self._opened is None:
            raise InvalidRequest(f"the client of {self.url} is closed; make a new one")
        return self._opened

    def _name(self, model: str) -> str:
        name = model or self._model
        if name:
            return name
        names = self.models()
        if len(names) != 1:
            listed = f"has {', '.join(names)}" if names else "has no models"
            raise InvalidRequest(f"{self.url} {listed}; say which by model=")
        self._model = names[0]
        return self._model


def _open(endpoint: Endpoint, access: Access) -> HttpCalls | GrpcCalls:
    if endpoint.scheme in ("http", "https"):
        from penstock.api.client_http import HttpCalls

        return HttpCalls(endpoint, access)
    try:
        from penstock.api.client_grpc import GrpcCalls
    except ModuleNotFoundError as error:
        text = f"{endpoint.url}: gRPC needs the package '{error.name}'; use http:// instead"
        raise Unsupported(text) from error
    return GrpcCalls(endpoint, access)
