"""Settings in Triton's messages."""

import json

from google.protobuf import json_format
from tritonclient.grpc import service_pb2

from penstock.wire import settings_pb


def test_settings_of_traces_have_lists_of_values() -> None:
    message = service_pb2.TraceSettingRequest(model_name="m")
    message.settings["trace_level"].value.extend(["TIMESTAMPS", "TENSORS"])
    message.settings["trace_rate"].value.append("5")
    message.settings["trace_count"].SetInParent()
    given = json.loads(str(settings_pb.trace_changes(message)["settings"]))
    expected = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": ["5"], "trace_count": []}
    assert given == expected
    assert settings_pb.trace_changes(service_pb2.TraceSettingRequest()) == {}


def test_an_answer_of_traces_is_a_message() -> None:
    body = settings_pb.trace_answer(b'{"trace_level":["OFF"],"trace_rate":"1000"}')
    message = json_format.Parse(body, service_pb2.TraceSettingResponse())
    assert list(message.settings["trace_level"].value) == ["OFF"]
    assert list(message.settings["trace_rate"].value) == ["1000"]


def test_log_settings_have_values_of_their_kind() -> None:
    message = service_pb2.LogSettingsRequest()
    message.settings["log_info"].bool_param = False
    message.settings["log_verbose_level"].uint32_param = 2
    message.settings["log_format"].string_param = "ISO8601"
    message.settings["log_error"].SetInParent()
    given = json.loads(str(settings_pb.log_changes(message)["settings"]))
    expected = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert given == expected | {"log_error": None}
    answer = settings_pb.log_answer(json.dumps(expected).encode())
    found = json_format.Parse(answer, service_pb2.LogSettingsResponse())
    assert found.settings["log_info"].WhichOneof("parameter_choice") == "bool_param"
    assert found.settings["log_verbose_level"].uint32_param == 2
    assert found.settings["log_format"].string_param == "ISO8601"
