"""Hundreds of malformed requests against one real server: each is refused with a reason, in time,
and nobody else notices."""

import contextlib
import json
import queue
import re
import socket
from collections.abc import Iterator

import grpc
import malformed
import pytest
from malformed import Http, Rpc
from served import Served
from tritonclient.grpc import service_pb2 as pb

# Generous: these take milliseconds.
ANSWER_S = 30.0
# What an error must never show.
SECRETS = re.compile(r"0x[0-9a-f]{6,}|/usr/|/tmp/|File \"|Traceback|memfd")


class HttpPeer:
    """A client's connection, kept open."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S)
        self._file = self.sock.makefile("rb")

    def send(self, data: bytes) -> None:
        # A server that has seen enough closes while we still send.
        with contextlib.suppress(ConnectionError):
            self.sock.sendall(data)

    def answer(self) -> tuple[int, dict[str, str], bytes] | None:
        """None when the connection ends instead."""
        try:
            line = self._file.readline()
        except ConnectionError:
            return None
        if not line:
            return None
        headers = {}
        while (each := self._file.readline().strip()) != b"":
            name, _, value = each.decode("latin-1").partition(": ")
            headers[name.lower()] = value
        return int(line.split()[1]), headers, self._file.read(int(headers["content-length"]))

    def close(self) -> None:
        self._file.close()
        self.sock.close()


class Bystander:
    """Somebody who was there before, and wants nothing but right answers."""

    def __init__(self, server: Served) -> None:
        self._http = HttpPeer(server.port)
        self._channel = grpc.insecure_channel(server.grpc_address)
        self._infer = unary(self._channel, "ModelInfer")
        self.num_asked = 0

    def check_http(self) -> None:
        self.num_asked += 1
        values = [self.num_asked, 2, 3, -4]
        self._http.send(malformed.one(values, "good"))
        status, _, body = self._http.answer()
        assert (status, json.loads(body)["outputs"][0]["data"]) == (200, values)

    def check_grpc(self) -> None:
        self.num_asked += 1
        content = b"%16d" % self.num_asked
        asked = malformed.raw(contents=(content,), model="good").SerializeToString()
        answer = pb.ModelInferResponse.FromString(self._infer(asked, timeout=ANSWER_S))
        assert list(answer.raw_output_contents) == [content]

    def close(self) -> None:
        self._http.close()
        self._channel.close()


def unary(channel: grpc.Channel, method: str) -> grpc.UnaryUnaryMultiCallable:
    """Bytes to bytes, so that messages can be wrong."""
    path = method if "/" in method else f"/inference.GRPCInferenceService/{method}"
    return channel.unary_unary(path)


@pytest.fixture(scope="module", params=["1", "2"], ids=["core", "shards"])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    root = malformed.write_repository(tmp_path_factory.mktemp("repository"))
    served = Served(root, "--shards", request.param, grpc=True)
    processes = {process.pid for process in served.processes()}
    yield served
    assert {process.pid for process in served.processes()} == processes
    assert served.terminate() == 0


@pytest.fixture(scope="module")
def bystander(server: Served) -> Iterator[Bystander]:
    made = Bystander(server)
    made.check_http()
    made.check_grpc()
    yield made
    made.close()


@pytest.mark.parametrize("case", malformed.HTTP, ids=lambda case: case.name)
def test_http(server: Served, bystander: Bystander, case: Http) -> None:
    with contextlib.closing(HttpPeer(server.port)) as peer:
        refuse(peer, case)
    bystander.check_http()


def refuse(peer: HttpPeer, case: Http) -> None:
    if case.status == 0:
        peer.send(case.data)
        peer.sock.shutdown(socket.SHUT_WR)
        assert peer.answer() is None
    else:
        # Whatever follows a message that could be two is not a request.
        smuggled = malformed.one(model="good") if case.closes else b""
        peer.send(case.data + (b"" if case.is_endless else smuggled))
        status, headers, body = peer.answer()
        assert status == case.status, body
        error = json.loads(body)["error"]
        check_words(case.words, error)
        assert headers["content-type"] == "application/json"
        if case.closes:
            assert headers["connection"] == "close"
            assert peer.answer() is None


@pytest.mark.parametrize("case", malformed.GRPC, ids=lambda case: case.name)
def test_grpc(server: Served, bystander: Bystander, case: Rpc) -> None:
    with grpc.insecure_channel(server.grpc_address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            unary(channel, case.method)(case.data, timeout=ANSWER_S)
        assert caught.value.code().name == case.code, caught.value.details()
        check_words(case.words, caught.value.details())
    bystander.check_grpc()
    bystander.check_http()


def test_grpc_over_one_stream(server: Served, bystander: Bystander) -> None:
    """Each is told what is wrong, and the stream goes on."""
    cases = [case for case in malformed.GRPC if case.method == "ModelInfer"]
    asked: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(server.grpc_address) as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = stream(iter(asked.get, None), timeout=60)
        for case in cases:
            asked.put(case.data)
            answer = pb.ModelStreamInferResponse.FromString(next(answers))
            assert not answer.infer_response.outputs, case.name
            check_words(case.words, answer.error_message)
        bystander.num_asked += 1
        asked.put(malformed.raw(model="good").SerializeToString())
        answer = pb.ModelStreamInferResponse.FromString(next(answers))
        assert (answer.error_message, len(answer.infer_response.outputs)) == ("", 1)
        asked.put(None)
        assert list(answers) == []
    bystander.check_http()


def check_words(words: tuple[str, ...], error: str) -> None:
    assert error
    for word in words:
        assert word in error
    assert not SECRETS.search(error)


def test_the_lists_are_as_long_as_they_should_be() -> None:
    assert len(malformed.HTTP) >= 150 and len(malformed.GRPC) >= 50
    for cases in (malformed.HTTP, malformed.GRPC):
        assert len({case.name for case in cases}) == len(cases)


def test_afterwards_nothing_was_run_and_nothing_is_held(
    server: Served, bystander: Bystander
) -> None:
    """Runs last. Each model has memory for one batch, so what leaked would be missing now."""
    counts = succeeded(server)
    assert counts.pop("good") == bystander.num_asked
    assert set(counts.values()) == {0}
    for name, (datatype, dims) in malformed.MODELS.items():
        status, body = fill(server, name, datatype, dims)
        assert status == 200, body
    pending = re.findall(
        rb"^nv_inference_pending_request_count{.*} (\d+)", server.get("/metrics")[1], re.M
    )
    assert pending == [b"0"] * len(malformed.MODELS)


def succeeded(server: Served) -> dict[str, int]:
    stats = json.loads(server.get("/v2/models/stats")[1])["model_stats"]
    return {each["name"]: int(each["inference_stats"]["success"]["count"]) for each in stats}


def fill(server: Served, model: str, datatype: str, dims: list[str]) -> tuple[int, bytes]:
    """A whole batch of zeros."""
    itemsize = {"STRING": 4, "FP16": 2, "BF16": 2, "FP64": 8, "UINT64": 8, "INT8": 1, "BOOL": 1}
    inputs, size = [], 0
    for index, each in enumerate(dims):
        shape = [malformed.MAX_BATCH, *(abs(int(dim)) for dim in each.split(","))]
        num_elements = 1
        for dim in shape:
            num_elements *= dim
        nbytes = num_elements * itemsize.get(datatype, 4)
        size += nbytes
        inputs.append(
            {
                "name": f"x{index or ''}",
                "datatype": datatype.replace("STRING", "BYTES"),
                "shape": shape,
                "parameters": {"binary_data_size": nbytes},
            }
        )
    message = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    peer = HttpPeer(server.port)
    peer.send(malformed.binary(message, bytes(size), model))
    status, _, body = peer.answer()
    peer.close()
    return status, body
