"""What Python models of Triton answer with: codes of errors, integers as numpy makes them, answers
to requests without inputs, and what a plain loop over a decoupled model's responses gives."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from served import Served
from tritonclient.utils import InferenceServerException

CODE = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    async def execute(self, requests):
        return [await self.answer(request) for request in requests]

    async def answer(self, request):
        code = pb_utils.get_input_tensor_by_name(request, "code")
        if code is not None:
            name = code.as_numpy()[0].decode()
            return pb_utils.InferenceResponse(
                error=pb_utils.TritonError(f"told: {name}", getattr(pb_utils.TritonError, name))
            )
        count = pb_utils.get_input_tensor_by_name(request, "count")
        if count is None:
            return self.told(0, 0.0)
        call = pb_utils.InferenceRequest(
            model_name="counted", inputs=[count], requested_output_names=["n"]
        )
        found = [
            int(tensor.as_numpy()[0])
            for response in await call.async_exec(decoupled=True)
            for tensor in response.output_tensors()
        ]
        return self.told(sum(found), len(found) / 2)

    def told(self, total, half):
        # int64, as numpy makes of Python's integers.
        arrays = {"sum": np.array([total]), "half": np.array([half], np.float32)}
        return pb_utils.InferenceResponse([pb_utils.Tensor(*each) for each in arrays.items()])
"""
CONFIG = """
backend: "python" max_batch_size: 0
input { name: "code" data_type: TYPE_STRING dims: 1 optional: true }
input { name: "count" data_type: TYPE_INT32 dims: 1 optional: true }
output { name: "sum" data_type: TYPE_INT32 dims: 1 }
output { name: "half" data_type: TYPE_FP32 dims: 1 }
"""
COUNTED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for n in range(int(request.inputs()[0].as_numpy()[0])):
                tensor = pb_utils.Tensor("n", np.array([n], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTED_CONFIG = """
backend: "python" max_batch_size: 0 model_transaction_policy { decoupled: true }
input { name: "count" data_type: TYPE_INT32 dims: 1 }
output { name: "n" data_type: TYPE_INT32 dims: 1 }
"""
ENSEMBLE = """
platform: "ensemble" max_batch_size: 0
input { name: "count" data_type: TYPE_INT32 dims: 1 }
output { name: "n" data_type: TYPE_INT32 dims: 1 }
ensemble_scheduling {
  step {
    model_name: "counted" model_version: -1
    input_map { key: "count" value: "count" } output_map { key: "n" value: "n" }
  }
}
"""
# Code of TritonError: gRPC's status and HTTP's.
CODES = {
    "UNKNOWN": ("UNKNOWN", "500"),
    "INTERNAL": ("INTERNAL", "500"),
    "NOT_FOUND": ("NOT_FOUND", "404"),
    "INVALID_ARG": ("INVALID_ARGUMENT", "400"),
    "UNAVAILABLE": ("UNAVAILABLE", "503"),
    "UNSUPPORTED": ("UNIMPLEMENTED", "501"),
    "ALREADY_EXISTS": ("ALREADY_EXISTS", "409"),
    "CANCELLED": ("CANCELLED", "499"),
}


def add(root: Path, name: str, code: str, config: str) -> None:
    (root / name / "1").mkdir(parents=True)
    (root / name / "1" / "model.py").write_text(code)
    (root / name / "config.pbtxt").write_text(config)


@pytest.fixture(scope="module", params=["1", "2"], ids=["1 shard", "2 shards"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("models")
    add(root, "told", CODE, CONFIG)
    add(root, "counted", COUNTED, COUNTED_CONFIG)
    add(root, "whole", "", ENSEMBLE)
    with Served(root, "--shards", request.param, grpc=True) as running:
        yield running


def clients(served: Served) -> Iterator[tuple[object, object]]:
    yield grpcclient, grpcclient.InferenceServerClient(served.grpc_address)
    yield httpclient, httpclient.InferenceServerClient(served.address)


def tensor(module: object, name: str, datatype: str, value: object) -> object:
    made = module.InferInput(name, [1], datatype)
    made.set_data_from_numpy(np.array([value], object if datatype == "BYTES" else np.int32))
    return made


@pytest.mark.parametrize("code", CODES)
def test_the_code_of_an_error_chooses_the_status(served: Served, code: str) -> None:
    statuses = []
    for module, client in clients(served):
        with pytest.raises(InferenceServerException, match=f"told: {code}") as refused:
            client.infer("told", [tensor(module, "code", "BYTES", code)])
        statuses.append(refused.value.status().removeprefix("StatusCode."))
        client.close()
    assert tuple(statuses) == CODES[code]


def test_wide_integers_become_what_the_configuration_says(served: Served) -> None:
    for module, client in clients(served):
        answer = client.infer("told", [tensor(module, "count", "INT32", 5)])
        total, half = answer.as_numpy("sum"), answer.as_numpy("half")
        assert (total.dtype, total.tolist()) == (np.int32, [10]), "each response was read in a loop"
        assert (half.dtype, half.tolist()) == (np.float32, [2.5])
        client.close()


def test_a_request_may_be_empty_where_all_inputs_are_optional(served: Served) -> None:
    for _, client in clients(served):
        assert client.infer("told", []).as_numpy("sum").tolist() == [0]
        client.close()


def test_a_member_without_a_response_fails_the_request(served: Served) -> None:
    for module, client in clients(served):
        why = "in ensemble 'whole', model 'counted': gives no tensor 'n' to the ensemble"
        with pytest.raises(InferenceServerException, match=why):
            client.infer("whole", [tensor(module, "count", "INT32", 0)])
        client.close()
