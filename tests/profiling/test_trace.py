"""The trace, as Chrome and Perfetto read it."""

import json

import pytest

from penstock.errors import ConfigError
from penstock.profiling import trace
from penstock.profiling.results import RequestPhase
from penstock.profiling.work import Event


def test_operators_and_buckets_are_spans_in_microseconds(tmp_path) -> None:
    events = [Event("dense", "MatMul", 0.001, 0.002, {"input": "[1, 2]"})]
    buckets = [RequestPhase("decode", 0.001), RequestPhase("compute", 0.004)]
    trace.write(tmp_path / "t.json", "encoder", events, buckets)
    spans = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    seen = {span["name"]: span for span in spans if span["ph"] == "X"}
    assert (seen["dense"]["ts"], seen["dense"]["dur"]) == (pytest.approx(1000), pytest.approx(2000))
    assert seen["dense"]["args"] == {"type": "MatMul", "input": "[1, 2]"}
    assert (seen["compute"]["ts"], seen["compute"]["dur"]) == (1000, 4000)
    assert seen["compute"]["tid"] != seen["dense"]["tid"]
    named = [span["args"]["name"] for span in spans if span["ph"] == "M"]
    assert named == ["penstock: encoder", "operators", "one request"]


def test_a_place_that_cannot_be_written_is_told(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        trace.write(tmp_path / "none" / "t.json", "encoder", [], [])


def test_a_gpu_has_a_line_for_each_lane(tmp_path, gpu) -> None:
    trace.write(tmp_path / "t.json", "encoder", [], [], gpu.timeline)
    spans = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    seen = {span["cat"]: span for span in spans if span["ph"] == "X"}
    assert len({span["tid"] for span in seen.values()}) == 3
    assert (seen["in"]["ts"], seen["in"]["args"]) == (0, {"stream": 13, "bytes": 4096})
    assert seen["compute"]["dur"] == pytest.approx(6000)
    named = [span["args"]["name"] for span in spans if span["ph"] == "M"]
    assert named[-3:] == ["GPU: copies in", "GPU: kernels", "GPU: copies out"]
