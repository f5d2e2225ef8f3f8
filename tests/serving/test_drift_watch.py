"""The core's watch over a model's inputs: the evidence it reads, and the lines it logs."""

import json
import logging
from pathlib import Path

import msgspec
import numpy as np
import pytest
from doubles import FakeClock

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.serving.drift import WINDOW_S
from penstock.serving.drift_watch import DriftWatch, read_references
from penstock.serving.input_sketch import QuantitySketch
from penstock.serving.input_statistics import collect, watched_inputs
from penstock.types import Array, TensorSpec
from penstock.wire.frames import Sketched

BARE = ModelConfig("m", "2", "null", "", (TensorSpec("x", "FP32", (4,)),), (), 8, BatchPolicy(8))


def config(folder: Path, evidence: dict[str, object]) -> ModelConfig:
    manifest = {"format": 1, "created": "", "files": {}, "evidence": evidence}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    path = str(folder / "manifest.json")
    return ModelConfig("m", "2", "null", "", BARE.inputs, (), 8, BatchPolicy(8), manifest=path)


def rows(seed: int, shift: float = 0.0) -> Array:
    return np.random.default_rng(seed).normal(shift, 1.0, (500, 4)).astype(np.float32)


def statistics() -> dict[str, object]:
    found = collect(watched_inputs(BARE), [{"x": row} for row in rows(1)])
    return {"input_statistics": msgspec.to_builtins(found)}


def report(known: ModelConfig, seen: Array) -> Sketched:
    (reference,) = read_references(known)
    sketch = QuantitySketch(reference, np.array(reference.edges))
    for row in seen:
        sketch.add(np.sort(row))
    return Sketched((sketch.take(),))


def test_alarms_are_logged_when_they_begin_and_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    known, clock = config(tmp_path, statistics()), FakeClock()
    watch = DriftWatch(known, clock)
    assert list(watch.states) == [] and list(watch.notes) == []
    with caplog.at_level(logging.INFO, "penstock.drift"):
        watch.hear(report(known, rows(2, shift=9.0)))
        watch.hear(report(known, rows(3, shift=9.0)))
        clock.advance(2 * WINDOW_S)
        watch.hear(report(known, rows(4)))
        watch.hear(report(known, rows(5)))
    assert [each.levelname for each in caplog.records] == ["WARNING", "INFO"]
    assert caplog.records[0].getMessage().startswith("m/2: inputs have drifted: input 'x': 100%")
    assert caplog.records[1].getMessage() == "m/2: input 'x' is as in the evidence again"
    assert watch.states[0].num_rows == 2000 and "are like those" in watch.notes[0]


def test_a_version_without_evidence_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert read_references(BARE) == []
    assert read_references(config(tmp_path, {})) == []
    watch = DriftWatch(BARE, FakeClock())
    watch.hear(Sketched(()))
    assert list(watch.states) == []


def test_evidence_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evidence\.input_statistics"):
        DriftWatch(config(tmp_path, {"input_statistics": 3}), FakeClock())
