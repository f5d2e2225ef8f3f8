"""The two messages of grpc.health.v1 (health.proto), in a pool of their own: the default pool may
hold those of grpcio-health-checking, which this server does not need. Pure."""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from penstock.wire.v2_pb import Proto

UNKNOWN, SERVING, NOT_SERVING, SERVICE_UNKNOWN = range(4)
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
_PACKAGE = "grpc.health.v1"
_NAME = "grpc/health/v1/health.proto"


def _make_pool() -> DescriptorPool:
    file = FileDescriptorProto(name=_NAME, package=_PACKAGE, syntax="proto3")
    request = file.message_type.add(name="HealthCheckRequest")
    one = FieldDescriptorProto.LABEL_OPTIONAL
    text, enum = FieldDescriptorProto.TYPE_STRING, FieldDescriptorProto.TYPE_ENUM
    request.field.add(name="service", number=1, label=one, type=text)
    response = file.message_type.add(name="HealthCheckResponse")
    status = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(_STATUSES):
        status.value.add(name=name, number=number)
    kind = f".{_PACKAGE}.HealthCheckResponse.ServingStatus"
    response.field.add(name="status", number=1, label=one, type=enum, type_name=kind)
    service = file.service.add(name="Health")
    for name in ("Check", "Watch"):
        service.method.add(
            name=name,
            input_type=f".{_PACKAGE}.HealthCheckRequest",
            output_type=f".{_PACKAGE}.HealthCheckResponse",
            server_streaming=name == "Watch",
        )
    pool = DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_pool = _make_pool()
FILE = _pool.FindFileByName(_NAME)
HealthCheckRequest: Proto = GetMessageClass(
    _pool.FindMessageTypeByName(f"{_PACKAGE}.HealthCheckRequest")
)
HealthCheckResponse: Proto = GetMessageClass(
    _pool.FindMessageTypeByName(f"{_PACKAGE}.HealthCheckResponse")
)
