"""Restricted protocols, forwarded headers, and log settings, with one shard and two."""

import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from served import Served
from tritonclient.utils import InferenceServerException
from waiting import wait_until

from penstock.wire import reflection_pb

CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            text = np.array([[request.parameters()]], dtype=np.object_)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", text)]))
        return found
"""
CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_INT32 dims: 1 }
output { name: "y" data_type: TYPE_STRING dims: 1 }
"""
KEYS = """
[[key]]
name = "users"
secret = "sixteen characters"
scopes = ["infer", "admin"]
"""
FLAGS = (
    "--http-restricted-api", "inference,model-config:infer-key=one secret",
    "--http-restricted-api", "logging:Log-Key=another",
    "--grpc-restricted-protocol", "inference,statistics:infer-key=one secret",
    "--http-header-forward-pattern", "^(X-Tenant|my_.*)$",
    "--grpc-header-forward-pattern", "^tenant",
)  # fmt: skip
KEY = {"X-API-Key": "sixteen characters"}
HTTP = {**KEY, "infer-key": "one secret"}
GRPC = {"x-api-key": "sixteen characters", "triton-grpc-protocol-infer-key": "one secret"}
LOGS = {**KEY, "log-key": "another"}


@dataclass
class Guarded:
    """A server with keys and restrictions, and its clients."""

    server: Served
    http: httpclient.InferenceServerClient
    grpc: grpcclient.InferenceServerClient

    def infer(self, headers: dict[str, str]) -> dict[str, Any]:
        x = httpclient.InferInput("x", [1, 1], "INT32")
        x.set_data_from_numpy(np.array([[1]], np.int32))
        given = {"mine": "own"}
        answer = self.http.infer("told", [x], headers=headers, parameters=given)
        return json.loads(answer.as_numpy("y")[0, 0])

    def infer_grpc(self, headers: dict[str, str]) -> dict[str, Any]:
        x = grpcclient.InferInput("x", [1, 1], "INT32")
        x.set_data_from_numpy(np.array([[1]], np.int32))
        answer = self.grpc.infer("told", [x], headers=headers)
        return json.loads(answer.as_numpy("y")[0, 0])

    def status(self, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
        asked = urllib.request.Request(f"http://{self.server.address}{path}", body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def guarded(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Guarded]:
    root = tmp_path_factory.mktemp("guarded")
    (root / "models" / "told" / "1").mkdir(parents=True)
    (root / "models" / "told" / "config.pbtxt").write_text(CONFIG)
    (root / "models" / "told" / "1" / "model.py").write_text(CODE)
    (root / "keys.toml").write_text(KEYS)
    keys, number = ("--api-keys", str(root / "keys.toml")), request.param
    with Served(root / "models", "--shards", number, *keys, *FLAGS, grpc=True) as server:
        wait_until(lambda: number == "1" or server.has_shards(2))
        http = httpclient.InferenceServerClient(server.address)
        grpc = grpcclient.InferenceServerClient(server.grpc_address)
        yield Guarded(server, http, grpc)
        http.close()
        grpc.close()


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(InferenceServerException) as found:
        call()
    return str(found.value)


def test_a_restricted_category_needs_its_header_and_the_key(guarded: Guarded) -> None:
    assert "This API is restricted, expecting header 'infer-key'" in refused(
        lambda: guarded.infer(KEY)
    )
    assert "This API is restricted" in refused(lambda: guarded.infer({**KEY, "infer-key": "One"}))
    assert "API key" in refused(lambda: guarded.infer({"infer-key": "one secret"}))
    assert guarded.infer(HTTP)["mine"] == "own"
    assert guarded.infer({**KEY, "INFER-KEY": "one secret"})["mine"] == "own"
    assert guarded.status("/v2/models/told/config", KEY) == 403
    assert guarded.status("/v2/models/told/config", HTTP) == 200
    # Other categories need the API key only, and health not even that.
    assert guarded.status("/v2/models/stats", KEY) == 200
    assert guarded.status("/v2/health/ready", {}) == 200


def test_a_restricted_method_needs_its_metadata_and_the_key(guarded: Guarded) -> None:
    key = {"x-api-key": "sixteen characters"}
    text = refused(lambda: guarded.infer_grpc(key))
    expected = "This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'"
    assert "PERMISSION_DENIED" in text and expected in text
    # The header of HTTP is another.
    assert expected in refused(lambda: guarded.infer_grpc({**key, "infer-key": "one secret"}))
    restricted = {"triton-grpc-protocol-infer-key": "one secret"}
    assert "UNAUTHENTICATED" in refused(lambda: guarded.infer_grpc(restricted))
    assert guarded.infer_grpc(GRPC) == {}
    guarded.grpc.get_model_config("told", headers=key)
    assert expected in refused(lambda: guarded.grpc.get_inference_statistics("told", headers=key))


def test_headers_that_match_become_parameters(guarded: Guarded) -> None:
    headers = {**HTTP, "X-Tenant": "acme", "my_user": "ann", "other": "x"}
    assert guarded.infer(headers) == {"mine": "own", "x-tenant": "acme", "my_user": "ann"}
    assert guarded.infer(HTTP) == {"mine": "own"}
    metadata = {**GRPC, "tenant": "acme", "tenant-id": "7", "x-tenant": "no"}
    assert guarded.infer_grpc(metadata) == {"tenant": "acme", "tenant-id": "7"}


def test_log_settings_over_both_protocols(guarded: Guarded) -> None:
    assert guarded.status("/v2/logging", KEY) == 403
    first = guarded.http.get_log_settings(headers=LOGS)
    assert first == {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    changes = {"log_info": False, "log_verbose_level": 1, "log_format": "ISO8601"}
    assert guarded.http.update_log_settings(changes, headers=LOGS) == first | changes
    # Each process uses them: the shard that refuses a call writes its line.
    assert guarded.status("/v2/logging", KEY) == 403
    assert re.search(
        r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ .*result=403", guarded.server.logged(), re.M
    )
    key = {"x-api-key": "sixteen characters"}
    shown = guarded.grpc.get_log_settings(headers=key, as_json=True)["settings"]
    assert shown["log_verbose_level"] == {"uint32_param": 1}
    assert shown["log_format"] == {"string_param": "ISO8601"}
    text = refused(lambda: guarded.grpc.update_log_settings({"log_file": "/x"}, headers=key))
    assert "log file location can not be updated through network protocol" in text
    text = refused(lambda: guarded.http.update_log_settings({"log_info": 3}, headers=LOGS))
    assert "expect boolean for 'log_info'" in text
    back = guarded.grpc.update_log_settings(
        {"log_info": True, "log_verbose_level": 0, "log_format": "default"},
        headers=key,
        as_json=True,
    )
    assert back["settings"]["log_info"] == {"bool_param": True}
    assert guarded.http.get_log_settings(headers=LOGS) == first


def test_both_extensions_are_listed(guarded: Guarded) -> None:
    extensions = guarded.http.get_server_metadata(headers=KEY)["extensions"]
    assert {"trace", "logging"} <= set(extensions)


@pytest.mark.parametrize("version", reflection_pb.VERSIONS)
def test_a_client_without_proto_files_calls_by_reflection(guarded: Guarded, version: str) -> None:
    """As grpcurl does: list the services, fetch the files of one, and call a method of it."""
    key = [("x-api-key", "sixteen characters")]
    request_type = reflection_pb.request_type(version)
    with grpc.insecure_channel(guarded.server.grpc_address) as channel:
        info = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_type.SerializeToString,
            reflection_pb.response_type(version).FromString,
        )
        name = "inference.GRPCInferenceService"
        asked = [request_type(list_services=""), request_type(file_containing_symbol=name)]
        listed, files = info(iter(asked), metadata=key, timeout=60)
        services = [each.name for each in listed.list_services_response.service]
        assert services == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
            name,
        ]
        pool = DescriptorPool()
        found = files.file_descriptor_response.file_descriptor_proto
        for data in reversed(found):
            pool.Add(FileDescriptorProto.FromString(data))
        method = pool.FindServiceByName(name).FindMethodByName("ModelReady")
        answer_type = GetMessageClass(method.output_type)
        call = channel.unary_unary(
            f"/{name}/{method.name}",
            lambda message: message.SerializeToString(),
            answer_type.FromString,
        )
        question = GetMessageClass(method.input_type)(name="told")
        assert call(question, metadata=key, timeout=60).ready
        # Many questions at once, none of which the client waits for.
        many = [request_type(file_by_filename="grpc_service.proto")] * 200
        assert len(list(info(iter(many), metadata=key, timeout=60))) == 200
        with pytest.raises(grpc.RpcError) as refused:
            list(info(iter(asked), timeout=60))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        raw = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        )
        with pytest.raises(grpc.RpcError) as refused:
            list(raw(iter([b"\xff\xff"]), metadata=key, timeout=60))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
