"""The two models and the 1,000 requests made for each of them.

Every request has its own id and its own values, and the answer to it is known beforehand. A
workload is written as a file of complete HTTP requests, so that the load generator only copies
bytes. Nothing here knows which server will get them, only which protocol it speaks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

NUM_REQUESTS = 1000
Floats = npt.NDArray[np.float32]
Encoding = Literal["v2-binary", "v2-json", "litserve", "bentoml"]


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    input_name: str
    output_name: str
    row_shape: tuple[int, ...]
    # Allowed difference, relative above 1. A batched convolution may round otherwise than a single
    # one; a copy may not.
    tolerance: float


IDENTITY = Model("identity", "INPUT0", "OUTPUT0", (16,), 0.0)
DIGITS = Model("digits", "image", "logits", (1, 8, 8), 1e-4)
MODELS = {model.name: model for model in (IDENTITY, DIGITS)}


@dataclass(frozen=True, slots=True)
class Examples:
    """Inputs and the answers that ONNX Runtime gives for them, one row per request."""

    model: Model
    inputs: Floats
    outputs: Floats


def make_examples(model: Model, onnx_path: Path) -> Examples:
    import onnxruntime

    rng = np.random.default_rng(20260801)
    shape = (NUM_REQUESTS, *model.row_shape)
    if model is DIGITS:  # grey levels as in the data set of handwritten digits
        inputs = (rng.integers(0, 17, shape) / 16).astype(np.float32)
    else:
        inputs = rng.standard_normal(shape, dtype=np.float32)
    session = onnxruntime.InferenceSession(onnx_path, providers=["CPUExecutionProvider"])
    rows = [session.run([model.output_name], {model.input_name: row[None]})[0] for row in inputs]
    return Examples(model, inputs, np.concatenate(rows))


def write_workload(examples: Examples, encoding: Encoding, port: int, path: Path) -> None:
    requests = [
        http_request(examples.model, encoding, port, f"r{i}", row)
        for i, row in enumerate(examples.inputs)
    ]
    markers = {"v2-json": '"data"', "litserve": '"output"'}
    lengths = ",".join(str(len(request)) for request in requests)
    settings = [
        f"binary = {str(encoding == 'v2-binary').lower()}",
        f"has_ids = {str(encoding.startswith('v2')).lower()}",
        f"marker = '{markers.get(encoding, '')}'",
        f"tolerance = {examples.model.tolerance}",
        f"num_values = {examples.outputs.shape[1]}",
        f"lengths = {{{lengths}}}",
    ]
    head = f"return {{ {', '.join(settings)} }}\n".encode()
    path.write_bytes(b"".join([head, *requests, examples.outputs.tobytes()]))


def http_request(
    model: Model, encoding: Encoding, port: int, request_id: str, row: Floats
) -> bytes:
    targets = {"litserve": "/predict", "bentoml": f"/{model.name}"}
    target = targets.get(encoding, f"/v2/models/{model.name}/infer")
    headers = {"Host": f"127.0.0.1:{port}", "Content-Type": "application/json"}
    if encoding == "v2-binary":
        header, payload = binary_body(model, request_id, row)
        headers["Content-Type"] = "application/octet-stream"
        headers["Inference-Header-Content-Length"] = str(len(header))
        body = header + payload
    else:
        body = json_body(model, encoding, request_id, row)
    headers["Content-Length"] = str(len(body))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {target} HTTP/1.1\r\n{head}\r\n".encode() + body


def binary_body(model: Model, request_id: str, row: Floats) -> tuple[bytes, bytes]:
    payload = row.tobytes()
    header = {
        "id": request_id,
        "inputs": [
            {
                "name": model.input_name,
                "shape": [1, *model.row_shape],
                "datatype": "FP32",
                "parameters": {"binary_data_size": len(payload)},
            }
        ],
        "outputs": [{"name": model.output_name, "parameters": {"binary_data": True}}],
    }
    return json.dumps(header, separators=(",", ":")).encode(), payload


def json_body(model: Model, encoding: Encoding, request_id: str, row: Floats) -> bytes:
    # The shortest spelling of an FP32 value, the same text for every server.
    values = "[" + ",".join(str(value) for value in row.ravel()) + "]"
    match encoding:
        case "litserve":
            return f'{{"input":{values}}}'.encode()
        case "bentoml":
            return f'{{"inputs":[{values}]}}'.encode()
    tensor = f'"name":"{model.input_name}","shape":{[1, *model.row_shape]},"datatype":"FP32"'
    return f'{{"id":"{request_id}","inputs":[{{{tensor},"data":{values}}}]}}'.encode()
