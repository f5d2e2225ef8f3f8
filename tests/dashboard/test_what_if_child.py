"""Simulated loads: an idle model answers in its batch time, a saturated one does not."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.dashboard import what_if_child
from penstock.dashboard.what_if_child import simulate
from penstock.optimizer.simulate import DISPATCH_S, OVERHEAD_S
from penstock.wire.live import WhatIfJob, WhatIfResult

CONFIG = ModelConfig(
    "m", "1", "null", "", (), (), 8, BatchPolicy(8, is_dynamic=True), slo="p99 < 50ms"
)
SLO = replace(CONFIG, batching=replace(CONFIG.batching, slo_latency_s=0.05))
TIMES_S = {1: 0.010, 8: 0.030}


def job(*rates: float, config: ModelConfig = CONFIG, **changes: object) -> WhatIfJob:
    made = WhatIfJob(config, TIMES_S, False, 1, 2, list(rates), "p99 < 50ms")
    return msgspec.structs.replace(made, **changes)


def test_at_a_low_rate_latency_is_the_time_of_one_row() -> None:
    (found,) = simulate(job(0.1)).predictions
    alone_s = 0.010 + DISPATCH_S + OVERHEAD_S
    assert found.p50_s == pytest.approx(alone_s, rel=0.1)
    assert (found.refused, found.keeps_slo, found.batch_rows) == (0, True, 1)
    assert found.busy < 0.01


def test_latency_batches_and_use_grow_with_the_rate() -> None:
    slow, fast = simulate(job(20.0, 180.0)).predictions
    assert slow.p99_s < fast.p99_s and slow.batch_rows < fast.batch_rows and slow.busy < fast.busy
    assert (slow.rate, fast.rate) == (20, 180)


def test_beyond_the_capacity_an_slo_refuses_and_without_one_the_queue_grows() -> None:
    result = simulate(job(1000.0, config=SLO))
    assert 200 < result.capacity < 270
    (refusing,) = result.predictions
    assert refusing.refused > 0.5 and refusing.keeps_slo is False
    (growing,) = simulate(job(1000.0)).predictions
    assert growing.refused == 0 and growing.p99_s > 1 and growing.busy == pytest.approx(1, abs=0.02)


def test_instances_are_those_that_were_asked_for() -> None:
    (one,) = simulate(job(180.0)).predictions
    (four,) = simulate(job(180.0, num_instances=4)).predictions
    assert four.num_instances == 4 and four.p99_s < one.p99_s


def test_without_an_slo_nothing_is_judged() -> None:
    (found,) = simulate(job(10.0, slo="")).predictions
    assert found.keeps_slo is None


def test_a_dispatch_counts_once() -> None:
    (with_it,) = simulate(job(0.1, has_dispatch=True)).predictions
    (without,) = simulate(job(0.1)).predictions
    assert without.p50_s - with_it.p50_s == pytest.approx(DISPATCH_S, rel=0.2)


def test_it_reads_a_descriptor_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job").write_bytes(msgspec.json.encode(job(5.0)))
    fd = os.open(tmp_path / "job", os.O_RDONLY)
    monkeypatch.setattr(sys, "argv", ["what_if_child", str(fd)])
    monkeypatch.setattr(os, "nice", lambda amount: amount)
    what_if_child.main()
    result = msgspec.json.decode(capsys.readouterr().out, type=WhatIfResult)
    assert len(result.predictions) == 1
