"""Requests and answers as a client sees them, through the server's own codec."""

import subprocess
import sys
import time

import numpy as np
import pytest

from penstock.errors import BackendFailed, PenstockError
from penstock.types import Request, Response, from_array
from penstock.wire.v2 import Codec
from penstock.wire.v2_client import Values, decode_answer, encode_infer
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
