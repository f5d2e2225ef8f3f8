"""The v2 protocol over gRPC, from the client's side. One channel, which gRPC shares safely between
threads; errors of the server are those of `penstock.errors`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Must precede the import: gRPC would log lost connections into the caller's output.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

import grpc
from tritonclient.grpc import service_pb2

from penstock import errors
from penstock.api.endpoint import Access, Endpoint, ModelMetadata
from penstock.errors import PenstockError
from penstock.types import Array, RequestedOutput, Tensor, TensorSpec
from penstock.wire import v2_pb
from penstock.wire.statuses import STATUSES

SERVICE = "/inference.GRPCInferenceService/"
NO_LIMIT = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
# Errors by gRPC status: the first kind of each, or else BackendFailed.
ERRORS: Mapping[str, type[PenstockError]] = {
    "UNAUTHENTICATED": errors.NotAllowed,
    **{status.grpc: kind for kind, status in reversed(STATUSES.items())},
}


class GrpcCalls:
    def __init__(self, endpoint: Endpoint, access: Access) -> None:
        self._endpoint = endpoint
        self._timeout_s = access.timeout_s
        key = access.api_key
        self._metadata = (("authorization", f"Bearer {key}"),) if key else None
        if endpoint.is_tls:
            issuers = Path(access.ca_file).read_bytes() if access.ca_file else None
            credentials = grpc.ssl_channel_credentials(issuers)
            self._channel = grpc.secure_channel(endpoint.authority, credentials, NO_LIMIT)
        else:
            self._channel = grpc.insecure_channel(endpoint.authority, NO_LIMIT)

    def is_server_ready(self) -> bool:
        return bool(self._ask("ServerReady").ready)

    def is_model_ready(self, model: str, version: str) -> bool:
        return bool(self._ask("ModelReady", name=model, version=version).ready)

    def models(self) -> Sequence[str]:
        return [each.name for each in self._ask("RepositoryIndex", ready=True).models]

    def metadata(self, model: str, version: str) -> ModelMetadata:
        found = self._ask("ModelMetadata", name=model, version=version)
        inputs, outputs = (tuple(map(_spec, each)) for each in (found.inputs, found.outputs))
        return ModelMetadata(found.name, tuple(found.versions), found.platform, inputs, outputs)

    def extensions(self) -> Sequence[str]:
        return list(self._ask("ServerMetadata").extensions)

    def register(self, name: str, key: str, nbytes: int) -> None:
        self._ask("SystemSharedMemoryRegister", name=name, key=key, byte_size=nbytes)

    def unregister(self, name: str) -> None:
        self._ask("SystemSharedMemoryUnregister", name=name)

    def infer(
        self,
        model: str,
        version: str,
        tensors: Sequence[Tensor],
        outputs: Sequence[RequestedOutput] = (),
        places: Mapping[str, memoryview] | None = None,
    ) -> dict[str, Array]:
        """As `HttpCalls.infer`."""
        message = v2_pb.make_infer(model, version, tensors, outputs)
        return v2_pb.read_answer(self._send("ModelInfer", message), places)

    def generate(self, model: str, version: str, fields: dict[str, object]) -> str:
        text = "text is generated over HTTP; use an http:// URL"
        raise errors.Unsupported(f"{self._endpoint.url}: {text}")

    def close(self) -> None:
        self._channel.close()

    def _ask(self, method: str, **fields: object) -> Any:
        return self._send(method, getattr(service_pb2, f"{method}Request")(**fields))

    def _send(self, method: str, message: Any) -> Any:
        call = self._channel.unary_unary(
            SERVICE + method,
            request_serializer=type(message).SerializeToString,
            response_deserializer=getattr(service_pb2, f"{method}Response").FromString,
        )
        try:
            return call(message, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._error(error) from None

    def _error(self, error: Any) -> PenstockError:
        code, text = error.code().name, error.details() or error.code().name
        if code == "UNAVAILABLE" and "failed to connect" in text:
            text = "no server is listening there; start one with: penstock serve MODEL"
        if code == "UNAUTHENTICATED":
            text += "; give a key by api_key="
        return ERRORS.get(code, errors.BackendFailed)(f"{self._endpoint.url}: {text}")


def _spec(tensor: Any) -> TensorSpec:
    return TensorSpec(tensor.name, tensor.datatype, tuple(tensor.shape))
