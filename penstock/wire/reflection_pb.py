"""Messages of grpc.reflection (reflection.proto), in a pool of their own, and what a server says of
its services. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2

from penstock.wire import health_pb
from penstock.wire.v2_pb import Proto

VERSIONS = ("v1", "v1alpha")
# Codes of google.rpc.Code in an error.
INVALID_ARGUMENT, NOT_FOUND = 3, 5
_TEXT, _BYTES = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_BYTES
_INT32, _MESSAGE = FieldDescriptorProto.TYPE_INT32, FieldDescriptorProto.TYPE_MESSAGE
_ONE, _MANY = FieldDescriptorProto.LABEL_OPTIONAL, FieldDescriptorProto.LABEL_REPEATED


def _file(version: str) -> FileDescriptorProto:
    package = f"grpc.reflection.{version}"
    name = f"grpc/reflection/{version}/reflection.proto"
    file = FileDescriptorProto(name=name, package=package, syntax="proto3")
    start = f".{package}."

    def message(name: str, choice: str = "") -> DescriptorProto:
        made = file.message_type.add(name=name)
        if choice:
            made.oneof_decl.add(name=choice)
        return made

    made = message("ServerReflectionRequest", "message_request")
    made.field.add(name="host", number=1, label=_ONE, type=_TEXT)
    for number, name in (
        (3, "file_by_filename"),
        (4, "file_containing_symbol"),
        (6, "all_extension_numbers_of_type"),
        (7, "list_services"),
    ):
        made.field.add(name=name, number=number, label=_ONE, type=_TEXT, oneof_index=0)
    kind = start + "ExtensionRequest"
    made.field.add(
        name="file_containing_extension", number=5, label=_ONE, type=_MESSAGE, type_name=kind,
        oneof_index=0,
    )  # fmt: skip
    made = message("ExtensionRequest")
    made.field.add(name="containing_type", number=1, label=_ONE, type=_TEXT)
    made.field.add(name="extension_number", number=2, label=_ONE, type=_INT32)
    made = message("ServerReflectionResponse", "message_response")
    made.field.add(name="valid_host", number=1, label=_ONE, type=_TEXT)
    kind = start + "ServerReflectionRequest"
    made.field.add(name="original_request", number=2, label=_ONE, type=_MESSAGE, type_name=kind)
    for number, name, answer in (
        (4, "file_descriptor_response", "FileDescriptorResponse"),
        (5, "all_extension_numbers_response", "ExtensionNumberResponse"),
        (6, "list_services_response", "ListServiceResponse"),
        (7, "error_response", "ErrorResponse"),
    ):
        made.field.add(
            name=name, number=number, label=_ONE, type=_MESSAGE, type_name=start + answer,
            oneof_index=0,
        )  # fmt: skip
    made = message("FileDescriptorResponse")
    made.field.add(name="file_descriptor_proto", number=1, label=_MANY, type=_BYTES)
    made = message("ExtensionNumberResponse")
    made.field.add(name="base_type_name", number=1, label=_ONE, type=_TEXT)
    made.field.add(name="extension_number", number=2, label=_MANY, type=_INT32)
    made = message("ListServiceResponse")
    kind = start + "ServiceResponse"
    made.field.add(name="service", number=1, label=_MANY, type=_MESSAGE, type_name=kind)
    message("ServiceResponse").field.add(name="name", number=1, label=_ONE, type=_TEXT)
    made = message("ErrorResponse")
    made.field.add(name="error_code", number=1, label=_ONE, type=_INT32)
    made.field.add(name="error_message", number=2, label=_ONE, type=_TEXT)
    file.service.add(name="ServerReflection").method.add(
        name="ServerReflectionInfo",
        input_type=start + "ServerReflectionRequest",
        output_type=start + "ServerReflectionResponse",
        client_streaming=True,
        server_streaming=True,
    )
    return file


_pool = DescriptorPool()
_files = [_file(version) for version in VERSIONS]
for _each in _files:
    _pool.AddSerializedFile(_each.SerializeToString())


def request_type(version: str) -> Proto:
    return _message_type(version, "ServerReflectionRequest")


def response_type(version: str) -> Proto:
    return _message_type(version, "ServerReflectionResponse")


def _message_type(version: str, name: str) -> Proto:
    return GetMessageClass(_pool.FindMessageTypeByName(f"grpc.reflection.{version}.{name}"))


def _with_dependencies(file: FileDescriptor) -> Iterator[FileDescriptor]:
    """Yield a file and all that it imports, itself first; some perhaps twice."""
    yield file
    for each in file.dependencies:
        yield from _with_dependencies(each)


class Reflection:
    """Answers questions about the services of these files, and nothing else in their pools."""

    def __init__(self, files: Iterable[FileDescriptor]) -> None:
        roots = list(files)
        found = [each for root in roots for each in _with_dependencies(root)]
        self._files = {each.name: each for each in found}
        self._pools = [root.pool for root in roots]
        services = [each for root in roots for each in root.services_by_name.values()]
        self.services = sorted(each.full_name for each in services)
        # Pools do not find methods.
        self._methods = {each.full_name: s.file for s in services for each in s.methods}

    def answer(self, request: Proto, response: Proto) -> Proto:
        """Fill the response to a request of the same version."""
        response.valid_host = request.host
        response.original_request.CopyFrom(request)
        kind = request.WhichOneof("message_request")
        match kind:
            case "list_services":
                for name in self.services:
                    response.list_services_response.service.add(name=name)
                return response
            case "file_by_filename":
                found = self._files.get(request.file_by_filename)
            case "file_containing_symbol":
                found = self._find(request.file_containing_symbol)
            case "all_extension_numbers_of_type":
                # No message of these services has extensions.
                found = self._find(request.all_extension_numbers_of_type)
                if found is not None:
                    name = request.all_extension_numbers_of_type
                    response.all_extension_numbers_response.base_type_name = name
                    return response
            case _:
                found = None
        if found is None:
            is_empty = kind is None
            response.error_response.error_code = INVALID_ARGUMENT if is_empty else NOT_FOUND
            text = "the request asks for nothing" if is_empty else "not found on this server"
            response.error_response.error_message = text
            return response
        files = {each.name: each.serialized_pb for each in _with_dependencies(found)}
        response.file_descriptor_response.file_descriptor_proto.extend(files.values())
        return response

    def _find(self, symbol: str) -> FileDescriptor | None:
        if symbol in self._methods:
            return self._methods[symbol]
        for pool in self._pools:
            try:
                found = pool.FindFileContainingSymbol(symbol)
            except KeyError:
                continue
            if found.name in self._files:
                return found
        return None


def make_reflection() -> Reflection:
    """Return what the server tells of itself."""
    own = (_pool.FindFileByName(each.name) for each in _files)
    return Reflection((service_pb2.DESCRIPTOR, health_pb.FILE, *own))
