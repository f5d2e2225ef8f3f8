"""Requests and answers as a client sees them, through the server's own codec."""

import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

from penstock.errors import BackendFailed, PenstockError
from penstock.types import Request, Response, from_array, to_array
from penstock.wire.v2 import Codec
from penstock.wire.v2_client import (
    Values,
    decode_answer,
    decode_outputs,
    encode_infer,
    encode_region,
    region_path,
)
from penstock.wire.v2_templates import encode_answer

ARRAYS = {
    "x": ("FP32", np.arange(6, dtype=np.float32).reshape(1, 2, 3)),
    "ids": ("INT64", np.array([[7, 8]])),
    "text": ("BYTES", np.array([[b"a", b"\xff"]], object)),
}


class Sink:
    def respond(self, request: Request, answer: Response | PenstockError, final: bool) -> None:
        raise AssertionError("nobody answers")


def test_the_server_reads_what_the_client_writes() -> None:
    values = [Values.of(name, datatype, array) for name, (datatype, array) in ARRAYS.items()]
    head, body = encode_infer(values)
    request = Codec().decode_infer(body, head, Sink(), time.monotonic())
    found = {each.name: (each.datatype, tuple(each.shape)) for each in request.inputs}
    assert found == {name: (kind, array.shape) for name, (kind, array) in ARRAYS.items()}


def test_the_client_reads_what_the_server_writes() -> None:
    values = [Values.of("x", "FP32", ARRAYS["x"][1])]
    head, body = encode_infer(values)
    request = Codec().decode_infer(body, head, Sink(), time.monotonic())
    outputs = [from_array(name, kind, array) for name, (kind, array) in ARRAYS.items()]
    answer, buffers = encode_answer(request, Response("m", "1", outputs))
    found = decode_answer(len(answer), answer + b"".join(bytes(each) for each in buffers))
    assert found.keys() == ARRAYS.keys()
    for name, (_, array) in ARRAYS.items():
        assert found[name].tolist() == array.tolist()


def test_outputs_are_read_in_binary_and_in_json() -> None:
    outputs = [from_array(name, kind, array) for name, (kind, array) in ARRAYS.items()]
    body = {
        "outputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 2, 3], "data": [0, 1, 2, 3, 4, 5]},
            {"name": "ids", "datatype": "INT64", "shape": [1, 2], "data": [7, 8]},
            {"name": "text", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]},
        ]
    }
    found = decode_outputs(0, msgspec.json.encode(body))
    assert [bytes(each.data) for each in found[:2]] == [bytes(each.data) for each in outputs[:2]]
    assert to_array(found[2]).tolist() == [[b"a", b"b"]]
    head, whole = encode_infer([Values.of("x", "FP32", ARRAYS["x"][1])])
    request = Codec().decode_infer(whole, head, Sink(), time.monotonic())
    answer, buffers = encode_answer(request, Response("m", "1", outputs))
    binary = decode_outputs(len(answer), answer + b"".join(bytes(each) for each in buffers))
    assert [bytes(each.data) for each in binary] == [bytes(each.data) for each in outputs]
    for wrong in (
        b"{}",
        b'{"outputs": [{"name": "x", "datatype": "FP32", "shape": [9], "data": [1]}]}',
    ):
        with pytest.raises(BackendFailed, match="cannot be read"):
            decode_outputs(0, wrong)


def test_shared_memory_is_registered_as_with_triton() -> None:
    path = "/v2/systemsharedmemory/region/a%2Fb/register"
    assert region_path("a/b", "register") == path
    body = {"key": "/k", "offset": 0, "byte_size": 64}
    assert msgspec.json.decode(encode_region("/k", 64)) == body


def test_an_answer_that_is_none() -> None:
    with pytest.raises(BackendFailed, match="cannot be read"):
        decode_answer(2, b"{}")


def test_several_threads_may_be_the_first_to_read_an_answer() -> None:
    script = (
        "import sys, threading\n"
        "from penstock.wire.v2_client import decode_answer\n"
        "sys.setswitchinterval(1e-6)\n"
        'head = b\'{"outputs":[{"name":"y","datatype":"FP32","shape":[1],\'\n'
        'head += b\'"parameters":{"binary_data_size":4}}]}\'\n'
        "barrier = threading.Barrier(16)\n"
        "def read():\n"
        "    barrier.wait()\n"
        "    decode_answer(len(head), head + bytes(4))\n"
        "threads = [threading.Thread(target=read) for _ in range(16)]\n"
        "for thread in threads:\n    thread.start()\n"
        "for thread in threads:\n    thread.join()\n"
    )
    for _ in range(5):
        subprocess.run([sys.executable, "-c", script], check=True)
