"""The thread of traces: bounded, and a collector that fails or hangs delays nobody."""

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

from penstock.config import TraceConfig
from penstock.serving.trace_writer import TraceJob, TraceWriter
from penstock.wire.trace_records import TracedStep, TraceRecord

STEP = TracedStep("m", 1.0, 2.0, (0.1, 0.1, 0.1), 3.0)
JOB = TraceJob(TraceRecord("", "http", "m", "1", "", 0.5, STEP, 3.0, 3.5))


class BlockedTarget:
    """Takes traces once it is released; fails if it has an error."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.sizes: list[int] = []
        self.error: OSError | None = None
        self.is_closed = False

    def write(self, jobs: Sequence[TraceJob]) -> int:
        self.released.wait()
        if self.error is not None:
            raise self.error
        self.sizes.append(len(jobs))
        return len(jobs)

    def close(self) -> None:
        self.is_closed = True


class Collector:
    """A receiver of OTLP over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                outer.bodies.append(json.loads(data))
                self.send_response(outer.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_what_does_not_fit_is_dropped_and_counted() -> None:
    target = BlockedTarget()
    writer = TraceWriter(target, max_waiting=3, pause_s=0.0)
    for _ in range(9):
        writer.put(JOB)
    target.released.set()
    writer.close()
    assert writer.num_written + writer.num_dropped == 9
    # The thread may have taken some before the queue was full.
    assert 3 <= writer.num_written < 9
    assert target.is_closed


def test_what_waits_is_written_at_the_end_in_bounded_batches() -> None:
    target = BlockedTarget()
    target.released.set()
    writer = TraceWriter(target, max_together=4, pause_s=60.0)
    for _ in range(10):
        writer.put(JOB)
    writer.close()
    assert sum(target.sizes) == 10 and max(target.sizes) <= 4


def test_a_full_batch_is_written_without_waiting() -> None:
    target = BlockedTarget()
    target.released.set()
    writer = TraceWriter(target, max_together=4, pause_s=3600.0)
    for _ in range(4):
        writer.put(JOB)
    wait_until(lambda: writer.num_written == 4)
    writer.close()


def test_a_failure_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    target = BlockedTarget()
    target.error = OSError(28, "No space left on device")
    target.released.set()
    writer = TraceWriter(target, max_together=1, pause_s=0.0)
    with caplog.at_level(logging.INFO, "penstock.traces"):
        for _ in range(3):
            writer.put(JOB)
        wait_until(lambda: writer.num_lost == 3)
        target.error = None
        writer.put(JOB)
        wait_until(lambda: writer.num_written == 1)
        writer.close()
    texts = [each.message for each in caplog.records]
    assert texts == [
        "traces are dropped: [Errno 28] No space left on device",
        "traces are written again",
    ]


def test_spans_reach_a_collector(collector: Collector) -> None:
    config = TraceConfig("opentelemetry", url=collector.url, resource={"service.name": "mine"})
    writer = TraceWriter.make(config)
    assert writer is not None
    writer.put(JOB)
    writer.close()
    assert writer.num_written == 1
    [resource] = collector.bodies[0]["resourceSpans"]
    assert resource["resource"]["attributes"] == [
        {"key": "service.name", "value": {"stringValue": "mine"}}
    ]
    assert resource["scopeSpans"][0]["spans"][0]["name"] == "InferRequest"


def test_a_collector_that_refuses_loses_the_batch(collector: Collector) -> None:
    collector.status = 500
    config = TraceConfig("opentelemetry", url=collector.url, max_batch_size=1)
    writer = TraceWriter.make(config)
    assert writer is not None
    writer.put(JOB)
    wait_until(lambda: writer.num_lost == 1)
    collector.status = 200
    writer.put(JOB)
    wait_until(lambda: writer.num_written == 1)
    writer.close()


def test_a_collector_that_is_gone_loses_only_traces() -> None:
    writer = TraceWriter.make(TraceConfig("opentelemetry", url="http://127.0.0.1:1/v1/traces"))
    assert writer is not None
    writer.put(JOB)
    writer.close()
    assert (writer.num_written, writer.num_dropped) == (0, 1)


@pytest.mark.parametrize("mode", ["triton", "chrome"])
def test_files_are_lists(tmp_path: Path, mode: str) -> None:
    writer = TraceWriter.make(TraceConfig(mode, file=str(tmp_path / "t")))
    assert writer is not None
    for _ in range(3):
        writer.put(JOB)
    writer.close()
    found = json.loads((tmp_path / "t").read_text())
    assert {each.get("id", each.get("tid")) for each in found} == {1, 2, 3}


def test_without_a_file_there_is_no_writer() -> None:
    assert TraceWriter.make(TraceConfig()) is None
