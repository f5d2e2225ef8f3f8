"""Real worker processes: started, killed, hung, restarted, and gone when they should be."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from doubles import RecordingSink
from waiting import until, wait_until

from penstock.config import BatchPolicy, MemoryPolicy, ModelConfig
from penstock.errors import BackendFailed, ConfigError
from penstock.serving.model import Model
from penstock.types import Request, TensorSpec, from_array
from penstock.wire import frames

CONFIG = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "INT64", (4,)),),
    outputs=(TensorSpec("y", "INT64", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8, is_dynamic=True),
    memory=MemoryPolicy(spill_bytes=1 << 16),
    options={"null.crash_on": "13", "null.hang_on": "14"},
)


def ask(first: int) -> Request:
    values = np.array([[first, 1, 2, 3]])
    return Request(RecordingSink(), [from_array("x", "INT64", values)], time.monotonic())


def children(*besides: psutil.Process) -> dict[int, str]:
    """Command lines of this process's children by process id, empty for a zombie. Without the
    reaper, and without those that tests before left."""
    found = {}
    for child in psutil.Process().children():
        try:
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            command = ""
        if "processes/reaper.py" not in command and child not in besides:
            found[child.pid] = command
    return found


def workers() -> set[int]:
    return {pid for pid, command in children().items() if "penstock.serving.worker" in command}


def run(scenario, config: ModelConfig = CONFIG) -> None:
    async def main() -> None:
        model = Model(config)
        try:
            await model.start()
            await scenario(model)
        finally:
            pids = [instance.pid for instance in model.host.instances if instance.pid]
            await model.close()
        assert not any(psutil.pid_exists(pid) for pid in pids)

    asyncio.run(main())


def test_a_worker_is_a_process_of_its_own_and_computes():
    async def scenario(model):
        request = ask(1)
        model.submit(request)
        await until(lambda: request.is_done)
        assert request.sink.outputs[0]["y"].tolist() == [[1, 1, 2, 3]]
        (instance,) = model.host.instances
        assert instance.pid not in (0, os.getpid())
        assert instance.ready.timings.keys() == {1, 2, 4, 8}, "every rung is warm"

    run(scenario)


def test_a_worker_writes_nothing_into_the_models_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    (tmp_path / "helper.py").write_text("def double(x):\n    return x * 2\n")
    file = tmp_path / "model.py"
    file.write_text(
        "from helper import double\ndef infer(inputs):\n    return {'y': double(inputs['x'])}\n"
    )

    async def scenario(model):
        request = ask(1)
        model.submit(request)
        await until(lambda: request.is_done)
        assert request.sink.outputs[0]["y"].tolist() == [[2, 2, 4, 6]]

    run(scenario, replace(CONFIG, backend="python", artifact=str(file), options={}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["helper.py", "model.py"]


def test_a_restart_that_cannot_load_the_model_says_why(tmp_path: Path, caplog):
    file = tmp_path / "model.py"
    good = "def infer(inputs):\n    return {'y': inputs['x']}\n"
    file.write_text(good)

    async def scenario(model):
        (instance,) = model.host.instances
        file.write_text("def infer(:\n")
        os.kill(instance.pid, signal.SIGKILL)
        await until(lambda: "worker cannot load the model: 1/model.py: line 1: " in caplog.text)
        file.write_text(good)
        await until(lambda: model.host.instances[0].is_ready)

    run(scenario, replace(CONFIG, backend="python", artifact=str(file), options={}))


def test_kill_9_loses_nothing_and_the_worker_comes_back():
    async def scenario(model):
        (instance,) = model.host.instances
        first_pid = instance.pid
        requests = [ask(i) for i in range(5)]
        for request in requests:
            model.submit(request)
        os.kill(first_pid, signal.SIGKILL)
        await until(lambda: all(request.is_done for request in requests))
        assert [r.sink.error for r in requests] == [None] * 5
        assert instance.pid != first_pid
        assert model.metrics.num_restarts == 1
        assert model.metrics.num_deaths == {"crash": 1, "hang": 0}

    run(scenario)


def test_a_request_that_kills_its_worker_fails_alone():
    async def scenario(model):
        requests = [ask(i) for i in (1, 13, 2)]
        for request in requests:
            model.submit(request)
        await until(lambda: all(request.is_done for request in requests))
        assert [type(r.sink.error) for r in requests] == [type(None), BackendFailed, type(None)]
        assert "was killed by SIGABRT" in str(requests[1].sink.error)

    run(scenario)


def test_a_hang_is_killed_after_its_limit():
    async def scenario(model):
        request = ask(14)
        model.submit(request)
        await until(lambda: request.is_done)
        assert isinstance(request.sink.error, BackendFailed)
        assert model.metrics.num_restarts == 2
        assert model.metrics.num_deaths == {"crash": 0, "hang": 2}

    run(scenario, replace(CONFIG, hang_s=0.2))


def test_a_stopped_process_counts_as_a_hang():
    async def scenario(model):
        (instance,) = model.host.instances
        os.kill(instance.pid, signal.SIGSTOP)
        request = ask(1)
        model.submit(request)
        await until(lambda: request.is_done)
        assert request.sink.error is None

    run(scenario, replace(CONFIG, hang_s=0.2))


def test_descriptors_do_not_leak_over_restarts():
    def num_fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def scenario(model):
        (instance,) = model.host.instances
        counts = []
        for _ in range(3):
            pid = instance.pid
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: instance.is_ready and instance.pid != pid)
            counts.append(num_fds())
        assert len(set(counts)) == 1, counts

    run(scenario)


def no_process(*_: object, **__: object) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize(
    "call", ["subprocess.Popen", "os.pidfd_open", "os.memfd_create", "mmap.mmap"]
)
def test_a_restart_that_fails_is_tried_again_and_leaves_nothing(call, monkeypatch):
    async def scenario(model):
        (instance,) = model.host.instances
        before = len(os.listdir("/proc/self/fd"))
        pid = instance.pid
        others = [each for each in psutil.Process().children() if each.pid != pid]
        with monkeypatch.context() as patch:
            patch.setattr(call, no_process)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: instance.num_restarts >= 3)
            assert instance.pid == 0
        await until(lambda: instance.is_ready)
        await until(lambda: len(os.listdir("/proc/self/fd")) == before)
        await until(lambda: children(*others).keys() == {instance.pid})

    run(scenario)


def test_a_worker_that_cannot_be_told_what_to_load_is_started_again(monkeypatch):
    async def scenario(model):
        (instance,) = model.host.instances
        pid = instance.pid
        with monkeypatch.context() as patch:
            patch.setattr("socket.send_fds", no_room)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: instance.num_restarts >= 2)
        await until(lambda: instance.is_ready)

    def no_room(*_: object) -> None:
        raise OSError(105, "No buffer space available")

    run(scenario)


def test_model_code_sees_no_secrets_of_the_server_but_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Neither in its environment nor in that of the processes it starts."""
    (tmp_path / "model.py").write_text(
        "import os, subprocess, sys\n"
        "from pathlib import Path\n"
        "here = Path(__file__).parent\n"
        "(here / 'own').write_text(' '.join(os.environ))\n"
        "child = subprocess.run(['env'], capture_output=True, text=True)\n"
        "(here / 'child').write_text(child.stdout)\n"
        "def infer(inputs):\n    return {'y': inputs['x']}\n"
    )
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    monkeypatch.setenv("MODEL_TOKEN", "wanted")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    async def scenario(model):
        names = (tmp_path / "own").read_text().split()
        assert "AWS_SECRET_ACCESS_KEY" not in names
        assert {"MODEL_TOKEN", "OMP_NUM_THREADS", "PATH", "CUDA_DEVICE_ORDER"} <= set(names)
        assert "hidden" not in (tmp_path / "child").read_text()
        assert "MODEL_TOKEN=wanted" in (tmp_path / "child").read_text()
        initial = Path(f"/proc/{model.host.instances[0].pid}/environ").read_bytes()
        assert b"hidden" not in initial

    config = replace(CONFIG, backend="python", artifact=str(tmp_path / "model.py"), options={})
    run(scenario, replace(config, env=("MODEL_TOKEN",)))


@pytest.mark.slow
def test_a_worker_that_does_not_load_again_in_time_is_killed_and_tried_again(tmp_path: Path):
    (tmp_path / "model.py").write_text(
        "import pathlib, time\n"
        "while (pathlib.Path(__file__).parent / 'wait').exists():\n    time.sleep(0.01)\n"
        "def infer(inputs):\n    return {'y': inputs['x']}\n"
    )

    async def scenario(model):
        (instance,) = model.host.instances
        (tmp_path / "wait").touch()
        os.kill(instance.pid, signal.SIGKILL)
        await until(lambda: instance.num_restarts >= 2)
        request = ask(1)
        model.submit(request)
        (tmp_path / "wait").unlink()
        await until(lambda: request.is_done)
        assert request.sink.error is None

    config = replace(CONFIG, backend="python", artifact=str(tmp_path / "model.py"), options={})
    run(scenario, replace(config, load_timeout_s=8.0))


def test_after_a_poison_request_a_spare_process_is_kept_and_takes_over():
    async def poison(model, number: int) -> None:
        values = np.array([[13, number, 2, 3]])
        request = Request(RecordingSink(), [from_array("x", "INT64", values)], time.monotonic())
        model.submit(request)
        await until(lambda: request.is_done)
        assert isinstance(request.sink.error, BackendFailed)

    async def scenario(model):
        (instance,) = model.host.instances
        assert workers() == {instance.pid}
        await poison(model, 1)
        # How many spares are wanted depends on how long they take to start.
        await until(lambda: model.host.supervisor.spares.has_all)
        spares = workers() - {model.host.instances[0].pid}
        await poison(model, 2)
        # A spare took over after the first death, and died of the same request.
        assert spares - workers()
        await until(lambda: model.host.supervisor.spares.has_all)
        request = ask(1)
        model.submit(request)
        await until(lambda: request.is_done)
        assert request.sink.outputs[0]["y"].tolist() == [[1, 1, 2, 3]]

    before = len(os.listdir("/proc/self/fd"))
    # Tests before this one may have left children of their own.
    others = psutil.Process().children()
    run(scenario)
    assert len(os.listdir("/proc/self/fd")) == before
    assert children(*others) == {}


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_workers_die_with_the_core(end, tmp_path: Path):
    script = tmp_path / "core.py"
    script.write_text(
        "import asyncio, sys\n"
        "sys.path[:0] = sys.argv[1:]\n"
        "from test_supervisor import CONFIG\n"
        "from penstock.serving.model import Model\n"
        "async def main():\n"
        "    model = Model(CONFIG)\n"
        "    await model.start()\n"
        "    print(model.host.instances[0].pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    here = Path(__file__).parent
    core = subprocess.Popen([sys.executable, script, here, here.parent], stdout=subprocess.PIPE)
    with core:
        worker = int(core.stdout.readline())
        core.send_signal(end)
    wait_until(lambda: not psutil.pid_exists(worker))


def test_a_worker_that_fails_by_itself_tells_its_exception(monkeypatch):
    encode = frames.encode

    def garble(frame: frames.Frame) -> bytes:
        return b"\xc1" if isinstance(frame, frames.LoadModel) else encode(frame)

    monkeypatch.setattr("penstock.wire.frames.encode", garble)
    with pytest.raises(ConfigError, match="the worker failed: DecodeError: "):
        run(lambda model: None)
