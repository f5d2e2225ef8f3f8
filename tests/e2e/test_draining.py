"""What clients see of a server that gets SIGTERM, over HTTP and gRPC, with one and more shards."""

import contextlib
import http.client
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from served import HeldModel, Served
from tritonclient.grpc import service_pb2, service_pb2_grpc
from waiting import wait_until

SERVING, NOT_SERVING = 1, 2


@pytest.fixture(params=[1, 2])
def num_shards(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def held(tmp_path: Path) -> HeldModel:
    return HeldModel(tmp_path, "held")


@pytest.fixture
def served(tmp_path: Path, held: HeldModel, num_shards: int) -> Iterator[Served]:
    server = Served(tmp_path, "--shards", str(num_shards), grpc=True)
    if num_shards > 1:
        wait_until(lambda: server.has_shards(num_shards))
    yield server
    if server.process.poll() is None:
        server.terminate()


class Watching(threading.Thread):
    """Reads a stream of answers until it ends."""

    def __init__(self, stream) -> None:
        super().__init__(daemon=True)
        self._stream = stream
        self.answers: list = []
        self.code: grpc.StatusCode | None = None
        self.start()

    def run(self) -> None:
        with contextlib.suppress(grpc.RpcError):
            for answer in self._stream:
                self.answers.append(answer)
        self.code = self._stream.code()


def infer_message() -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name="held")
    message.inputs.add(name="x", datatype="INT32", shape=[1, 1])
    message.raw_input_contents.append((7).to_bytes(4, "little"))
    return message


def test_watches_hear_that_the_server_stops_at_once_and_streams_end_unavailable(
    served: Served, held: HeldModel
):
    may_end = threading.Event()

    def requests() -> Iterator[service_pb2.ModelInferRequest]:
        yield infer_message()
        may_end.wait()

    held.hold()
    with grpc.insecure_channel(served.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watches = [
            Watching(health.Watch(health_pb2.HealthCheckRequest(service=name)))
            for name in ("", "held")
        ]
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stream = Watching(stub.ModelStreamInfer(requests()))
        held.wait_until_begun()
        wait_until(lambda: all(watch.answers for watch in watches))
        served.process.send_signal(signal.SIGTERM)
        wait_until(lambda: all(len(watch.answers) == 2 for watch in watches))
        assert [watch.is_alive() for watch in (*watches, stream)] == [True] * 3
        held.release()
        for each in (*watches, stream):
            each.join(60)
        for watch in watches:
            assert [answer.status for answer in watch.answers] == [SERVING, NOT_SERVING]
            assert watch.code == grpc.StatusCode.UNAVAILABLE
        (answer,) = stream.answers
        assert not answer.error_message
        assert stream.code == grpc.StatusCode.UNAVAILABLE
        may_end.set()
    assert served.finish([]) == 0


def infer_body() -> bytes:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1, 1], "data": [7]}
    return json.dumps({"inputs": [tensor]}).encode()


class HttpClient:
    """A connection that stays open for several requests."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def send(self, num_missing: int = 0) -> None:
        """Send an inference, without its last bytes."""
        body = infer_body()
        self.connection.putrequest("POST", "/v2/models/held/infer")
        self.connection.putheader("Content-Length", str(len(body)))
        self.connection.endheaders(body[: len(body) - num_missing])

    def answer(self) -> tuple[int, str | None]:
        """Its status, and whether the connection ends with it."""
        answer = self.connection.getresponse()
        answer.read()
        return answer.status, answer.getheader("Connection")


def test_what_was_sent_is_answered_and_connections_are_closed(served: Served, held: HeldModel):
    clients = [HttpClient(served.port) for _ in range(6)]
    kept, idle, running, begun, stuck, new = clients
    for client in (kept, idle):
        client.send()
        assert client.answer() == (200, None)
    begun.send(num_missing=1)
    stuck.send(num_missing=1)
    held.hold()
    running.send()
    held.wait_until_begun()
    served.process.send_signal(signal.SIGTERM)
    wait_until(lambda: served.status("/v2/health/ready") == 503)
    for client in (kept, new):
        client.send()
        assert client.answer() == (503, "close")
    begun.connection.send(infer_body()[-1:])
    assert begun.answer() == (503, "close")
    held.release()
    assert running.answer() == (200, "close")
    assert stuck.answer() == (503, "close")
    assert idle.connection.sock.recv(1) == b""
    for client in clients:
        client.connection.close()
    assert served.finish([]) == 0


def test_clients_that_connect_until_the_end_are_answered_or_cannot_connect(
    served: Served, held: HeldModel
):
    """No connection that was made is reset, except in the microseconds between the last that is
    accepted and the end of the listener."""
    ended = threading.Event()
    statuses: list[int] = []
    lost: list[str] = []

    def ask() -> None:
        while not ended.is_set():
            client = HttpClient(served.port)
            try:
                client.connection.connect()
            except OSError:
                return
            try:
                client.send()
                statuses.append(client.answer()[0])
            except (OSError, http.client.HTTPException) as error:
                lost.append(repr(error))
            client.connection.close()

    askers = [threading.Thread(target=ask) for _ in range(8)]
    for asker in askers:
        asker.start()
    wait_until(lambda: len(statuses) > 50)
    held.hold()
    served.process.send_signal(signal.SIGTERM)
    wait_until(lambda: 503 in statuses)
    held.release()
    for asker in askers:
        asker.join(60)
    ended.set()
    assert set(statuses) == {200, 503}
    assert len(lost) <= 2, lost
    assert served.finish([]) == 0
