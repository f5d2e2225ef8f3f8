"""The core's tracing: settings by the API, exact counts, and files."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.config import TraceConfig
from penstock.errors import ConfigError, InvalidRequest
from penstock.serving.trace_control import Traces
from penstock.serving.tracer import Tracer
from penstock.wire.trace_records import TracedStep, TraceRecord

STEP = TracedStep("m", 1.0, 2.0, (0.1, 0.1, 0.1), 3.0)


def record(scope: str = "", trace_id: str = "") -> TraceRecord:
    return TraceRecord(scope, "http", "m", "1", "", 0.5, STEP, 3.0, 3.5, trace_id=trace_id)


class Published:
    """Counts what shards are told."""

    def __init__(self) -> None:
        self.num_awaited = self.num_soon = 0
        self.tracer = Tracer()

    async def publish(self) -> None:
        self.num_awaited += 1

    def publish_soon(self) -> None:
        self.num_soon += 1

    def made(self, config: TraceConfig) -> Traces:
        traces = Traces(self.tracer, self)
        traces.begin(config)
        return traces


def answer(traces: Traces, model: str = "", **settings: object) -> dict[str, Any]:
    given = json.dumps(settings) if settings else None
    found = json.loads(asyncio.run(traces.answer(model, given)))
    assert isinstance(found, dict)
    return found


def test_settings_are_answered_as_triton_does(tmp_path: Path) -> None:
    shards = Published()
    file = str(tmp_path / "t")
    traces = shards.made(TraceConfig(file=file))
    expected = {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_file": file,
        "trace_mode": "triton",
    }
    assert answer(traces) == answer(traces, "m") == expected
    assert shards.num_awaited == 0 and not shards.tracer.is_on
    changed = answer(traces, "m", trace_level=["TIMESTAMPS"], trace_rate="2")
    assert changed == expected | {"trace_level": ["TIMESTAMPS"], "trace_rate": "2"}
    assert answer(traces) == expected
    assert shards.num_awaited == 1 and shards.tracer.is_on
    assert answer(traces, "m", trace_level=None, trace_rate=None) == expected
    assert not shards.tracer.is_on
    assert list(tmp_path.iterdir()) == []


def test_a_count_is_exact_and_ends_sampling(tmp_path: Path) -> None:
    shards = Published()
    traces = shards.made(TraceConfig(levels=("TIMESTAMPS",), count=3, file=str(tmp_path / "t")))
    for _ in range(5):
        traces.receive(record())
    assert not shards.tracer.is_on and shards.num_soon == 1
    assert answer(traces)["trace_count"] == "0"
    assert answer(traces, trace_count="1")["trace_count"] == "1"
    traces.receive(record())
    traces.receive(record())
    traces.close()
    found = json.loads((tmp_path / "t").read_text())
    assert {each["id"] for each in found} == {1, 2, 3, 4}


def test_traces_of_clients_do_not_count() -> None:
    shards = Published()
    config = TraceConfig("opentelemetry", ("TIMESTAMPS",), count=0, url="http://127.0.0.1:1/")
    traces = shards.made(config)
    assert shards.tracer.is_on
    traces.receive(record())
    traces.receive(record(trace_id="ab" * 16))
    traces.close()
    assert traces.writer is not None and traces.writer.num_lost == 1
    [family] = traces.families()
    assert family.lines[1] == 'penstock_traces_total{outcome="dropped"} 1'


def test_what_the_collector_gets_is_told() -> None:
    config = TraceConfig("opentelemetry", url="http://c:1/", resource={"a": "b"})
    traces = Published().made(config)
    shown = answer(traces)
    assert shown["trace_mode"] == "opentelemetry" and shown["url"] == "http://c:1/"
    assert shown["resource.a"] == "b" and shown["bsp_schedule_delay"] == "5000"
    assert "trace_file" not in shown
    with pytest.raises(InvalidRequest, match="TENSORS needs the trace mode triton"):
        answer(traces, trace_level=["TENSORS"])


def test_a_level_without_a_place_is_refused() -> None:
    traces = Published().made(TraceConfig())
    with pytest.raises(InvalidRequest, match="traces have no place to go: start the server with"):
        answer(traces, trace_level=["TIMESTAMPS"])
    assert answer(traces, trace_level=["OFF"], trace_rate="5")["trace_rate"] == "5"
    assert traces.families() == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [("", "it is a folder"), ("no/t", "does not exist"), ("link", "it is a link")],
)
def test_a_file_that_cannot_be_written_stops_the_start(
    tmp_path: Path, name: str, problem: str
) -> None:
    (tmp_path / "link").symlink_to("t")
    with pytest.raises(ConfigError, match=problem):
        Published().made(TraceConfig(file=str(tmp_path / name)))
