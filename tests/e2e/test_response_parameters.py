"""Parameters of the responses of Python models, at clients of both protocols and at callers."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served

CODE = """
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = request.inputs()[0].as_numpy()
        response = pb_utils.InferenceResponse(
            [pb_utils.Tensor("length", np.array([[len(given[0, 0])]], np.int32))],
            parameters=json.loads(given[0, 0]),
        )
        if len(given[0, 0]) % 2:
            return response
        # The other way for a model that is not decoupled.
        sender = request.get_response_sender()
        sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        call = pb_utils.InferenceRequest(
            model_name="telling", inputs=request.inputs(), requested_output_names=["length"]
        )
        text = call.exec().parameters()
        return pb_utils.InferenceResponse([pb_utils.Tensor("told", np.array([[text]], object))])
"""
HEAD = """
backend: "python" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 2000 }
input { name: "text" data_type: TYPE_STRING dims: 1 }
"""
OUTPUT = 'output { name: "length" data_type: TYPE_INT32 dims: 1 }'
TOLD = 'output { name: "told" data_type: TYPE_STRING dims: 1 }'
PARAMETERS = [
    {},
    {"bool": True, "str": "Hello World!", "int": 1024},
    {"str": "é", "negative": -(1 << 63)},
    {"": "", "large": (1 << 63) - 1},
]


@pytest.fixture(scope="module", params=["1", "2"], ids=["1 shard", "2 shards"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    for name, code, output in (("telling", CODE, OUTPUT), ("caller", CALLER, TOLD)):
        (root / name / "1").mkdir(parents=True)
        (root / name / "1" / "model.py").write_text(code)
        (root / name / "config.pbtxt").write_text(HEAD + output)
    with Served(root, "--shards", request.param, grpc=True) as running:
        yield running


def given(library: object, parameters: object) -> list[object]:
    tensor = library.InferInput("text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[json.dumps(parameters)]], object))
    return [tensor]


@pytest.mark.parametrize("is_binary", [True, False], ids=["binary", "JSON"])
def test_http_clients_get_the_parameters(served: Served, is_binary: bool):
    wanted = [httpclient.InferRequestedOutput("length", binary_data=is_binary)]
    with httpclient.InferenceServerClient(served.address, concurrency=8) as client:
        for _ in range(3):
            # Requests of one batch, whose forms are known from the second round on.
            asked = [
                client.async_infer("telling", given(httpclient, each), outputs=wanted)
                for each in PARAMETERS
            ]
            for request, each in zip(asked, PARAMETERS, strict=True):
                answer = request.get_result()
                assert answer.get_response().get("parameters", {}) == each
                assert answer.as_numpy("length") == [[len(json.dumps(each))]]


def test_grpc_clients_get_the_parameters(served: Served):
    with grpcclient.InferenceServerClient(served.grpc_address) as client:
        for each in [*PARAMETERS, *PARAMETERS]:
            answer = client.infer("telling", given(grpcclient, each))
            told = answer.get_response().parameters
            found = {
                key: getattr(told[key], told[key].WhichOneof("parameter_choice")) for key in told
            }
            assert found == each
            assert answer.as_numpy("length") == [[len(json.dumps(each))]]


def test_a_caller_gets_the_parameters(served: Served):
    with httpclient.InferenceServerClient(served.address) as client:
        for each in PARAMETERS:
            answer = client.infer("caller", given(httpclient, each))
            assert json.loads(answer.as_numpy("told")[0, 0]) == each


def test_parameters_of_other_types_fail_the_request(served: Served):
    why = pytest.raises(Exception, match="bool/int/str, found type <class 'float'>")
    with httpclient.InferenceServerClient(served.address) as client, why:
        client.infer("telling", given(httpclient, {"float": 0.5}))
