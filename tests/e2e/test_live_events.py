"""The stream of the dashboard from a real server: with several shards, one of them has the client
and the core the figures."""

import contextlib
import http.client
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, null_model
from waiting import wait_until


@pytest.fixture(params=[1, 2])
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    null_model(tmp_path, "echo")
    server = Served(tmp_path, "--shards", str(request.param))
    wait_until(lambda: request.param == 1 or server.has_shards(request.param))
    yield server
    if server.process.poll() is None:
        assert server.terminate() == 0


@contextlib.contextmanager
def listening(served: Served) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
    connection.request("GET", "/dashboard/events")
    answer = connection.getresponse()
    assert answer.status == 200
    try:
        yield answer
    finally:
        answer.close()
        connection.close()


def events(answer: http.client.HTTPResponse) -> Iterator[dict]:
    while line := answer.readline():
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def test_events_come_through_shards_and_end_with_the_server(served: Served) -> None:
    # Several connections, so that each shard has one.
    with listening(served) as one, listening(served) as two, listening(served) as three:
        streams = [events(each) for each in (one, two, three)]
        starts = [next(each) for each in streams]
        assert {start["drawn"][0] for start in starts} == {"answered"}
        for value in range(20):
            assert served.infer("echo", "x", "INT32", [value])[0] == 200
        for stream in streams:
            seen = 0.0
            while seen < 19.5:
                # The first events may be from before the model was loaded.
                for model in next(stream)["models"]:
                    seen = max(seen, sum(int(n) * k for n, k in model["batch_sizes"].items()))
            assert model["num_ready"] == 1 and model["p50_s"] > 0
        processes = served.processes()
        served.process.send_signal(signal.SIGTERM)
        for stream in streams:
            for _ in stream:
                pass
    wait_until(lambda: served.process.poll() is not None)
    assert "cut off" not in served.logged()
    assert served.finish(processes) == 0
