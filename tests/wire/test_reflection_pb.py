"""What reflection answers; the bytes are those of reflection.proto."""

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from penstock.wire import reflection_pb
from penstock.wire.v2_pb import Proto

REFLECTION = reflection_pb.make_reflection()


def ask(version: str = "v1", **question: str) -> Proto:
    request = reflection_pb.request_type(version)(host="here", **question)
    found = REFLECTION.answer(request, reflection_pb.response_type(version)())
    assert found.valid_host == "here" and found.original_request == request
    return found


def files(answer: Proto) -> list[FileDescriptorProto]:
    found = answer.file_descriptor_response.file_descriptor_proto
    return [FileDescriptorProto.FromString(each) for each in found]


@pytest.mark.parametrize("version", reflection_pb.VERSIONS)
def test_numbers_of_fields_are_those_of_the_protocol(version: str) -> None:
    request_type = reflection_pb.request_type(version)
    for number, name in (
        (3, "file_by_filename"),
        (4, "file_containing_symbol"),
        (6, "all_extension_numbers_of_type"),
        (7, "list_services"),
    ):
        data = bytes([number << 3 | 2, 1]) + b"x"
        assert request_type(**{name: "x"}).SerializeToString() == data
    request = request_type.FromString(b"\x2a\x05\x0a\x01a\x10\x07")
    assert request.file_containing_extension.containing_type == "a"
    assert request.file_containing_extension.extension_number == 7
    response = reflection_pb.response_type(version)()
    response.list_services_response.service.add(name="s")
    assert response.SerializeToString() == b"\x32\x05\x0a\x03\x0a\x01s"
    response = reflection_pb.response_type(version)()
    response.file_descriptor_response.file_descriptor_proto.append(b"f")
    assert response.SerializeToString() == b"\x22\x03\x0a\x01f"
    response = reflection_pb.response_type(version)()
    response.error_response.error_code = 5
    assert response.SerializeToString() == b"\x3a\x02\x08\x05"


@pytest.mark.parametrize(
    ("symbol", "first"),
    [
        ("inference.GRPCInferenceService", "grpc_service.proto"),
        ("inference.GRPCInferenceService.ModelInfer", "grpc_service.proto"),
        ("inference.ModelInferRequest", "grpc_service.proto"),
        ("inference.ModelConfig", "model_config.proto"),
        ("grpc.health.v1.Health", "grpc/health/v1/health.proto"),
        ("grpc.reflection.v1alpha.ServerReflection", "grpc/reflection/v1alpha/reflection.proto"),
    ],
)
def test_a_symbol_leads_to_its_file_and_all_that_it_needs(symbol: str, first: str) -> None:
    found = files(ask(file_containing_symbol=symbol))
    names = {each.name for each in found}
    assert found[0].name == first
    assert all(set(each.dependency) <= names for each in found)
    assert [each.name for each in files(ask(file_by_filename=first))][0] == first


@pytest.mark.parametrize(
    "question",
    [
        {"file_containing_symbol": "inference.Nothing"},
        {"file_containing_symbol": ""},
        # Known to this process, and not a service of this server.
        {"file_containing_symbol": "google.protobuf.FileDescriptorProto"},
        {"file_by_filename": "google/protobuf/descriptor.proto"},
        {"file_by_filename": "/etc/passwd"},
        {"all_extension_numbers_of_type": "nothing"},
    ],
)
def test_what_is_not_served_is_not_found(question: dict[str, str]) -> None:
    assert ask(**question).error_response.error_code == reflection_pb.NOT_FOUND


def test_messages_have_no_extensions() -> None:
    name = "inference.ModelInferRequest"
    found = ask(all_extension_numbers_of_type=name).all_extension_numbers_response
    assert (found.base_type_name, list(found.extension_number)) == (name, [])
    request = reflection_pb.request_type("v1")()
    request.file_containing_extension.containing_type = name
    answer = REFLECTION.answer(request, reflection_pb.response_type("v1")())
    assert answer.error_response.error_code == reflection_pb.NOT_FOUND


def test_an_empty_question_is_invalid() -> None:
    assert ask().error_response.error_code == reflection_pb.INVALID_ARGUMENT
