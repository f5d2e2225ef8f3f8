"""What models loaded on demand take: estimated from their files, measured, and remembered."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from doubles import FakeClock, Puppets
from waiting import until

from penstock.config import BatchPolicy, ModelConfig, ScalingConfig
from penstock.serving import measured_models
from penstock.serving.measured_models import WORKER_BYTES, MeasuredModels
from penstock.serving.metrics import ModelMetrics
from penstock.serving.model_host import ModelHost
from penstock.serving.placement import gib
from penstock.types import TensorSpec

MIB = 1 << 20


def run(
    folder: Path, scenario: Callable[[MeasuredModels, ModelConfig, ModelHost], Awaitable[None]]
) -> None:
    async def main() -> None:
        (folder / "weights").write_bytes(bytes(3 * MIB))
        config = ModelConfig(
            name="a",
            version="1",
            backend="null",
            artifact=str(folder / "weights"),
            inputs=(TensorSpec("x", "INT64", (1,)),),
            outputs=(TensorSpec("y", "INT64", (1,)),),
            max_batch_size=4,
            batching=BatchPolicy(4),
            scaling=ScalingConfig(on_demand="true"),
        )
        host = ModelHost(config, Puppets(), FakeClock(), ModelMetrics("a", "1"))
        await scenario(MeasuredModels(lambda device: 7 * MIB), config, host)

    asyncio.run(main())


def test_a_size_is_estimated_once_and_remembered_while_the_files_are_the_same(
    tmp_path: Path,
) -> None:
    async def scenario(models: MeasuredModels, config: ModelConfig, host: ModelHost) -> None:
        files = {Path("weights"): (1, 1)}
        model = models.open(config, host, files)
        await models.read(model, config)
        assert model.sizes == {"cpu": 3 * MIB + WORKER_BYTES} and models.totals == {"cpu": 7 * MIB}
        model.sizes["cpu"] = 5 * MIB
        models.close(host)
        assert not models
        again = models.open(config, host, files)
        await models.read(again, config)
        assert again.sizes == {"cpu": 5 * MIB}
        changed = models.open(config, host, {Path("weights"): (2, 1)})
        assert changed.sizes == {}
        other = models.open(replace(config, version="2"), host, files)
        assert other.sizes == {}

    run(tmp_path, scenario)


def test_a_measurement_under_way_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen: a third model was loaded on the estimates of two that had just become ready."""
    began, may_end = threading.Event(), threading.Event()

    def slowly(pid: int) -> int:
        began.set()
        assert may_end.wait(60)
        return 99 * MIB

    monkeypatch.setattr(measured_models, "proportional_bytes", slowly)

    async def scenario(models: MeasuredModels, config: ModelConfig, host: ModelHost) -> None:
        model = models.open(config, host, {})
        [instance] = host.instances

        class Child:
            class life:
                pid = os.getpid()

        instance.child, instance.is_ready, instance.life = Child(), True, 1
        first = asyncio.create_task(models.measure())
        await until(began.is_set)
        second = asyncio.create_task(models.read(model, config))
        await asyncio.sleep(0.05)
        assert not second.done()
        may_end.set()
        await asyncio.gather(first, second)
        assert model.bytes_on("cpu") == 99 * MIB

    run(tmp_path, scenario)


def test_a_worker_counts_with_what_was_measured_and_not_again_too_soon(tmp_path: Path) -> None:
    async def scenario(models: MeasuredModels, config: ModelConfig, host: ModelHost) -> None:
        model = models.open(config, host, {})
        [instance] = host.instances
        model.sizes["cpu"] = MIB
        assert model.bytes_on("cpu") == MIB, "it is about to start"

        class Child:
            class life:
                pid = os.getpid()

        instance.child, instance.is_ready, instance.life = Child(), True, 1
        await models.measure()
        measured = model.bytes_on("cpu")
        assert measured > MIB and model.sizes["cpu"] == measured
        assert model.describe_memory() == f"{gib(measured)} on cpu"
        model.measured.clear()
        await models.measure(again_s=60.0)
        assert model.measured == {}
        await models.measure()
        assert set(model.measured) == {1}
        [found] = models.residents("cpu")
        assert found.name == "a/1" and models.residents("cpu", but=model) == []

    run(tmp_path, scenario)
