"""A model of this process as a target: described from its files, loaded when opened."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from child_processes import children_running
from e2e.served import null_model
from suites.target import TargetContract

import penstock
from penstock.benchmark.exchange import TimedExchange
from penstock.benchmark.targets import TargetSpec
from penstock.benchmark.targets.in_process import InProcess, failure_text, files_digest
from penstock.data import Sample
from penstock.errors import BackendFailed, ConfigError, Overloaded
from penstock.repository import layout, versions
from penstock.types import TensorSpec

Body = Callable[[InProcess], Coroutine[Any, Any, Any]]
PHASES = ["decode", "queue_batch", "queue_instance", "compute_input", "compute_infer"]


def opened(spec: TargetSpec, body: Body) -> Any:
    async def whole() -> Any:
        target = InProcess(spec)
        await target.describe()
        await target.open(1)
        try:
            return await body(target)
        finally:
            await target.close()

    return asyncio.run(whole())


def described(spec: TargetSpec) -> Any:
    return asyncio.run(InProcess(spec).describe())


def problems(spec: TargetSpec) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        described(spec)
    return list(caught.value.problems)


def number(value: int = 1) -> Sample:
    return Sample({"x": np.array([[value]], np.int32)})


async def ended(target: InProcess, item: Any, count: int = 1) -> list[TimedExchange]:
    done: list[TimedExchange] = []
    event = asyncio.Event()
    loop_thread = asyncio.get_running_loop()

    def finish(exchange: TimedExchange) -> None:
        assert asyncio.get_running_loop() is loop_thread
        done.append(exchange)
        if len(done) == count:
            event.set()

    for _ in range(count):
        target.send(TimedExchange(time.monotonic(), item, finish))
    async with asyncio.timeout(60):
        await event.wait()
    return done


class TestContract(TargetContract):
    @pytest.fixture(autouse=True)
    def _model(self, tmp_path: Path) -> None:
        self._path = null_model(tmp_path, "m") / "m"

    def spec(self) -> TargetSpec:
        return TargetSpec(str(self._path))

    def sample(self) -> Sample:
        return number()

    def misfit(self) -> Sample:
        return Sample({"x": np.zeros((1, 2), np.int32)})


# What it is


def test_describes_itself_from_its_files(examples: Path) -> None:
    told, form = described(TargetSpec(str(examples / "digits")))
    assert told.protocol == "in process"
    assert (told.model, told.version, told.backend) == ("digits", "1", "onnxruntime")
    assert told.server == f"penstock {penstock.__version__}"
    assert (told.num_instances, told.max_batch_size) == (1, 64)
    assert (form.kind, form.has_batch) == ("tensors", True)
    assert form.inputs == (TensorSpec("image", "FP32", (1, 8, 8)),)
    digest = hashlib.sha256((examples / "digits" / "1" / "model.onnx").read_bytes()).hexdigest()
    listed = hashlib.sha256(f"{digest}  model.onnx\n".encode()).hexdigest()
    assert told.model_digest == listed
    assert len(told.config_digest) == 64


def test_describing_loads_nothing(tmp_path: Path) -> None:
    null_model(tmp_path, "heavy", load_ms=1e8)

    async def body() -> None:
        target = InProcess(TargetSpec(str(tmp_path / "heavy")))
        told, _ = await target.describe()
        assert told.model == "heavy"
        assert target.load_s is None
        assert await target.counters() is None
        await target.close()

    asyncio.run(body())


def test_a_model_of_a_repository_is_chosen_by_name_and_version(examples: Path) -> None:
    told, form = described(TargetSpec(str(examples), model="simple", version="1"))
    assert (told.model, told.version) == ("simple", "1")
    assert [spec.name for spec in form.inputs] == ["INPUT0", "INPUT1"]


def test_the_newest_version_unless_another_is_asked_for(tmp_path: Path) -> None:
    null_model(tmp_path, "m", config="version_policy { all {} }")
    (tmp_path / "m" / "2").mkdir()
    assert described(TargetSpec(str(tmp_path / "m")))[0].version == "2"
    assert described(TargetSpec(str(tmp_path / "m"), version="1"))[0].version == "1"
    assert problems(TargetSpec(str(tmp_path / "m"), version="3")) == [
        f"{tmp_path / 'm'}: m has no version 3; there: 1, 2"
    ]


def test_a_file_by_itself_is_a_target_whose_digest_is_that_of_the_file(
    tmp_path: Path, examples: Path
) -> None:
    path = tmp_path / "mine.onnx"
    content = (examples / "simple" / "1" / "model.onnx").read_bytes()
    path.write_bytes(content)
    told, form = described(TargetSpec(str(path)))
    assert (told.model, told.version) == ("mine", "1")
    assert [spec.name for spec in form.inputs] == ["INPUT0", "INPUT1"]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "other").write_text("not of the model")
    assert described(TargetSpec(str(path)))[0].model_digest == told.model_digest
    # An unknown field of the message changes the bytes, not the model.
    path.write_bytes(content + b"\xa2\x06\x00")
    assert described(TargetSpec(str(path)))[0].model_digest != told.model_digest


def test_what_cannot_be_found(tmp_path: Path, examples: Path) -> None:
    (text,) = problems(TargetSpec(str(tmp_path / "none")))
    assert "no such file or folder" in text
    assert problems(TargetSpec(str(examples), model="nope")) == [
        f"{examples}: holds no model 'nope'; there: digits, identity, simple, text_length"
    ]
    assert problems(TargetSpec(str(examples))) == [
        f"{examples}: holds digits, identity, simple, text_length; say which by --model"
    ]


def test_problems_of_the_configuration_are_told(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "nothing"')
    texts = problems(TargetSpec(str(tmp_path / "m")))
    assert texts and all(text.startswith(f"{tmp_path / 'm'}: m: ") for text in texts)


def test_digest_of_a_committed_version_is_that_of_its_files(tmp_path: Path) -> None:
    null_model(tmp_path / "old", "m")
    (config,) = layout.read(tmp_path / "old" / "m").configs
    (tmp_path / "file").write_text("weights")
    (tmp_path / "new").mkdir()
    version = versions.commit(tmp_path / "new", "m", {"weights": tmp_path / "file"}, config)
    folder = tmp_path / "new" / "m" / version
    committed = files_digest(folder)
    (folder / "manifest.json").unlink()
    (folder / ".hidden").write_text("what an editor left behind")
    assert files_digest(folder) == committed
    (folder / "weights").write_text("others")
    assert files_digest(folder) != committed


def test_digest_changes_with_contents_and_names(tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a", "1"), ("a", "2"), ("b", "1")):
        folder = tmp_path / f"{name}{content}"
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / name).write_text(content)
        digests.add(files_digest(folder))
    assert len(digests) == 3


# Exchanges


def test_loading_is_timed_and_every_exchange_ends_once(examples: Path) -> None:
    async def body(target: InProcess) -> None:
        assert target.load_s is not None and target.load_s > 0
        item = target.encode(Sample({"image": np.zeros((2, 1, 8, 8), np.float32)}))
        exchanges = await ended(target, item, 50)
        assert len(set(map(id, exchanges))) == 50
        for exchange in exchanges:
            assert exchange.failure is None
            assert exchange.due <= exchange.sent <= exchange.done
        counters = await target.counters()
        assert counters is not None
        assert (counters.num_success, counters.num_inferences) == (50, 100)
        assert counters.num_fail == 0
        assert counters.batch_wait_ns is not None
        assert 0 < counters.num_executions <= 50

    opened(TargetSpec(str(examples / "digits")), body)


def test_inputs_of_different_sizes_are_told_apart(tmp_path: Path) -> None:
    null_model(tmp_path, "m")

    async def body(target: InProcess) -> None:
        for num_rows in (1, 3, 2, 3, 1):
            item = target.encode(Sample({"x": np.ones((num_rows, 1), np.int32)}))
            before = await target.counters()
            (exchange,) = await ended(target, item)
            after = await target.counters()
            assert exchange.failure is None
            assert before is not None and after is not None
            assert after.num_inferences - before.num_inferences == num_rows

    opened(TargetSpec(str(tmp_path / "m")), body)


def test_some_exchanges_say_where_their_time_went(tmp_path: Path) -> None:
    null_model(tmp_path, "m", a_ms=2)

    async def body(target: InProcess) -> None:
        item = target.encode(number())
        exchanges = [exchange for _ in range(6) for exchange in await ended(target, item)]
        assert [exchange.phases is not None for exchange in exchanges] == [False, False, True] * 2
        for exchange in exchanges[2::3]:
            phases = exchange.phases
            assert phases is not None
            assert list(phases) == [*PHASES, "compute_output", "total"]
            assert 0.002 <= phases["compute_infer"] <= phases["total"]
            assert phases["total"] <= exchange.done - exchange.sent

    opened(TargetSpec(str(tmp_path / "m"), timing_every=3), body)
    assert_none_is_timed(tmp_path / "m")


def assert_none_is_timed(path: Path) -> None:
    async def body(target: InProcess) -> None:
        (exchange,) = await ended(target, target.encode(number()))
        assert exchange.phases is None

    opened(TargetSpec(str(path), timing_every=0), body)


def test_a_request_that_fails_is_told_by_its_class(tmp_path: Path) -> None:
    null_model(tmp_path, "m", fail_on=13)

    async def body(target: InProcess) -> None:
        (failed,) = await ended(target, target.encode(number(13)))
        assert failed.failure == "backend failed: null.fail_on: a row starts with N"
        assert failed.done >= failed.sent
        (good,) = await ended(target, target.encode(number()))
        assert good.failure is None

    opened(TargetSpec(str(tmp_path / "m")), body)


def test_a_full_queue_refuses(tmp_path: Path) -> None:
    policy = "default_queue_policy { max_queue_size: 2 }"
    null_model(tmp_path, "m", max_batch=1, batching=policy, a_ms=50)

    async def body(target: InProcess) -> None:
        exchanges = await ended(target, target.encode(number()), 10)
        failures = {exchange.failure for exchange in exchanges}
        assert failures == {None, "overloaded: Exceeds maximum queue size: N waiting"}

    opened(TargetSpec(str(tmp_path / "m")), body)


def test_an_answer_that_takes_too_long_is_none(tmp_path: Path) -> None:
    null_model(tmp_path, "m", max_batch=1, stall_on=7, stall_ms=4000)

    async def body(target: InProcess) -> None:
        exchanges = await ended(target, target.encode(number(7)))
        assert [exchange.failure for exchange in exchanges] == ["no answer within 0.2 s"]
        (other,) = await ended(target, target.encode(number(1)))
        assert other.failure == "no answer within 0.2 s"
        # Its cancellation came back meanwhile, and ends nothing again.
        assert len(exchanges) == 1

    opened(TargetSpec(str(tmp_path / "m"), timeout_s=0.2), body)


def test_closing_cancels_what_is_under_way(tmp_path: Path) -> None:
    null_model(tmp_path, "m", a_ms=100)
    seen: list[TimedExchange] = []

    async def body() -> None:
        target = InProcess(TargetSpec(str(tmp_path / "m")))
        await target.describe()
        await target.open(1)
        item = target.encode(number())
        for _ in range(3):
            target.send(TimedExchange(time.monotonic(), item, seen.append))
        await target.close()
        assert [exchange.failure for exchange in seen] == ["cancelled"] * 3
        (late,) = await ended(target, item)
        assert late.failure == "cancelled"
        await target.close()

    asyncio.run(body())
    assert len(seen) == 3


def test_the_worker_is_a_process_that_goes_with_the_target(tmp_path: Path) -> None:
    null_model(tmp_path, "m")
    before = set(psutil.Process().children())

    async def body(target: InProcess) -> list[psutil.Process]:
        return [each for each in children_running("penstock.serving.worker") if each not in before]

    (worker,) = opened(TargetSpec(str(tmp_path / "m")), body)
    assert not worker.is_running()


def test_a_model_that_cannot_be_loaded_leaves_no_process(tmp_path: Path) -> None:
    null_model(tmp_path, "m", wrong=1)
    before = set(psutil.Process().children())

    async def body(target: InProcess) -> None:
        pass

    with pytest.raises(ConfigError):
        opened(TargetSpec(str(tmp_path / "m")), body)
    assert set(psutil.Process().children()) <= before


def test_large_inputs_arrive_whole(tmp_path: Path) -> None:
    """The model looks at the last row too, which is copied last."""
    rows = 16 * 1024
    null_model(tmp_path, "m", max_batch=rows, fail_on=9)

    async def body(target: InProcess) -> None:
        for last, failure in ((1, None), (9, "backend failed: null.fail_on: a row starts with N")):
            values = np.ones((rows, 1), np.int32)
            values[-1] = last
            (exchange,) = await ended(target, target.encode(Sample({"x": values})))
            assert exchange.failure == failure

    opened(TargetSpec(str(tmp_path / "m")), body)


def test_input_that_does_not_fit_is_refused_in_words(examples: Path) -> None:
    async def body(target: InProcess) -> None:
        target.encode(Sample({"image": np.zeros((8, 8), np.float32)}))

    with pytest.raises(ConfigError, match=r"input 'image': shape \[8, 8\] does not fit"):
        opened(TargetSpec(str(examples / "digits")), body)


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    null_model(tmp_path, "m", wrong=1)

    async def body() -> None:
        target = InProcess(TargetSpec(str(tmp_path / "m")))
        with pytest.raises(ConfigError) as caught:
            await target.open(1)
        (text,) = caught.value.problems
        assert text.startswith(f"{tmp_path / 'm'}: ")
        assert "null.wrong: unknown" in text
        await target.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (Overloaded("wait 5 ms"), "overloaded: wait N ms"),
        (BackendFailed("no"), "backend failed: no"),
    ],
)
def test_failures_by_class(error: Overloaded | BackendFailed, text: str) -> None:
    assert failure_text(error) == text
