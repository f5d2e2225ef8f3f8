"""`penstock serve` as a subprocess, for tests that want the real thing."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from waiting import wait_until

from penstock.serving.shared_page import SharedPage

EXAMPLES = Path(__file__).parents[2] / "examples" / "repository"
SHARD = "penstock.protocols.shard_main"


class Served:
    """A server on a free port; `terminate` asserts that it leaves no process behind. With `grpc` it
    answers that too, at `grpc_address`. `prefix` is a command that runs the server's command in its
    own process, such as `prlimit`. The log is a file without a name in `log_folder`. It has one
    shard unless the flags or TEST_SHARDS say otherwise, so that it is the same on all machines;
    several all accept."""

    def __init__(
        self,
        path: Path,
        *flags: str,
        grpc: bool = False,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
        log_folder: Path | None = None,
    ) -> None:
        command = [*prefix, sys.executable, "-m", "penstock", "serve", str(path)]
        command += ["--http-port", "0"]
        command += ["--metrics-port", "0"]
        command += ["--grpc-port", "0"] if grpc else ["--no-grpc"]
        if "--shards" not in flags:
            command += ["--shards", os.environ.get("TEST_SHARDS", "1")]
        if "--shard-accept" not in flags:
            command += ["--shard-accept", "all"]
        self.errors = tempfile.TemporaryFile("w+", dir=log_folder)  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | (environment or {}),
        )
        lines = self._logged() if "json" in flags else self.process.stdout
        for line in lines:
            if match := re.search(r"https?://127\.0\.0\.1:(\d+)/v2", line):
                self.address = f"127.0.0.1:{match[1]}"
                self.port = int(match[1])
                break
        else:
            self.process.wait()
            self.errors.seek(0)
            raise AssertionError(self.errors.read())
        if grpc:
            self.grpc_address = next(lines).split()[-1]
        self.metrics_url = next(lines).split()[-1]

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """It ends well; after a failed test it is killed."""
        if kind is None:
            assert self.terminate() == 0
        elif self.process.poll() is None:
            processes = self.processes()
            self.process.kill()
            psutil.wait_procs(processes, timeout=60)
            self.finish(processes)

    def _logged(self) -> Iterator[str]:
        """What a log of JSON lines says of addresses. Does not move the file's position, which is
        where the server writes."""
        num_told = 0
        while self.process.poll() is None:
            whole = os.pread(self.errors.fileno(), 1 << 20, 0).rpartition(b"\n")[0]
            records = map(json.loads, whole.splitlines())
            texts = [record["msg"] for record in records if "address" in record]
            yield from texts[num_told:]
            num_told = len(texts)
            time.sleep(0.05)

    def logged(self) -> str:
        """All of its stderr so far."""
        return os.pread(self.errors.fileno(), 1 << 22, 0).decode()

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def workers(self) -> list[psutil.Process]:
        return self._running("penstock.serving.worker")

    def kill_workers(self) -> None:
        """Kill all workers at once: while they die, the server sends none of them anything. A
        request that a dying server repeats with the next victim would have lost two workers."""
        workers = self.workers()
        senders = [self.process.pid, *(each.pid for each in self._running(SHARD))]
        for pid in senders:
            os.kill(pid, signal.SIGSTOP)
        try:
            for worker in workers:
                worker.kill()
        finally:
            for pid in senders:
                os.kill(pid, signal.SIGCONT)

    def shards(self) -> list[psutil.Process]:
        """Shards that take connections by now."""
        found = self._running(SHARD)
        return [each for each in found if num_sockets(each, psutil.CONN_LISTEN)]

    def has_shards(self, number: int) -> bool:
        """Whether so many shards take connections, and new connections go to all of them."""
        if len(self.shards()) != number:
            return False
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(self.metrics_url, timeout=5) as answer:
                text = answer.read().decode()
            return re.findall(r"^penstock_shard_accepts{.*} 0$", text, re.M) == []
        return True  # The metrics need a key.

    def _running(self, module: str) -> list[psutil.Process]:
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline():
                    found.append(process)
        return found

    def num_ready_instances(self) -> int:
        """Count the workers of all models, without spares."""
        lines = self.get("/metrics")[1].decode().splitlines()
        ready = [line for line in lines if line.startswith("penstock_ready_instances")]
        return sum(int(line.split()[-1]) for line in ready)

    def get(self, path: str) -> tuple[int, bytes]:
        return self._open(f"http://{self.address}{path}", None)

    def post(self, path: str, body: bytes = b"") -> tuple[int, bytes]:
        return self._open(f"http://{self.address}{path}", body)

    def status(self, path: str) -> int:
        return self.get(path)[0]

    def infer(self, model: str, name: str, datatype: str, data: list) -> tuple[int, dict]:
        """One row, as JSON."""
        tensor = {"name": name, "datatype": datatype, "shape": [1, len(data)], "data": data}
        body = json.dumps({"inputs": [tensor]}).encode()
        status, answer = self._open(f"http://{self.address}/v2/models/{model}/infer", body)
        return status, json.loads(answer)

    def _open(self, url: str, body: bytes | None) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        processes = self.processes()
        self.process.send_signal(signal.SIGTERM)
        return self.finish(processes)

    def finish(self, processes: list[psutil.Process]) -> int:
        code = self.process.wait(timeout=60)
        self.process.stdout.close()
        self.errors.close()
        # The reaper ends after the core.
        wait_until(lambda: not any(map(is_alive, processes)))
        return code


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended too: its parent has not reaped it yet."""
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def num_sockets(process: psutil.Process, status: str = psutil.CONN_ESTABLISHED) -> int:
    """Of TCP; none when the process has gone."""
    with contextlib.suppress(psutil.Error):
        return sum(each.status == status for each in process.net_connections("tcp"))
    return 0


def open_page(served: Served) -> SharedPage:
    """The page of a server's shards and workers."""
    folder = Path(f"/proc/{served.process.pid}/fd")
    link = next(each for each in folder.iterdir() if "penstock-page" in os.readlink(each))
    fd = os.open(link, os.O_RDWR)
    try:
        return SharedPage.open(fd)
    finally:
        os.close(fd)


def null_model(
    root: Path,
    name: str,
    *,
    config: str = "",
    max_batch: int = 4,
    batching: str = "",
    **options: object,
) -> Path:
    """Add a `null` model INT32 [1] -> [1] with `null.*` options to a repository; `batching` is what
    its dynamic_batching holds."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    lines = [
        f'backend: "null" max_batch_size: {max_batch}',
        f"dynamic_batching {{ {batching} }}",
        'input { name: "x" data_type: TYPE_INT32 dims: 1 }',
        'output { name: "y" data_type: TYPE_INT32 dims: 1 }',
        config,
    ]
    for key, value in options.items():
        lines.append(f'parameters {{ key: "null.{key}" value {{ string_value: "{value}" }} }}')
    (folder / "config.pbtxt").write_text("\n".join(lines))
    return root


def python_model(
    root: Path,
    name: str,
    code: str,
    *,
    config: str = "",
    max_batch: int = 4,
    **parameters: object,
) -> Path:
    """Add a `python` model INT32 [1] -> [1] with `penstock.*` parameters to a repository."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(code)
    lines = [
        f'backend: "python" max_batch_size: {max_batch}',
        'input { name: "x" data_type: TYPE_INT32 dims: 1 }',
        'output { name: "y" data_type: TYPE_INT32 dims: 1 }',
        config,
    ]
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "penstock.{key}" value {{ string_value: "{value}" }} }}')
    (root / name / "config.pbtxt").write_text("\n".join(lines))
    return root


HELD = """
import pathlib, time
here = pathlib.Path(__file__).parent
def infer(inputs):
    (here / "begun").touch()
    while (here / "hold").exists():
        time.sleep(0.005)
    return {"y": inputs["x"]}
"""


class HeldModel:
    """A `python` model INT32 [1] -> [1] that computes nothing while it is held: what must happen
    meanwhile may take as long as it needs."""

    def __init__(self, root: Path, name: str, *, config: str = "", max_batch: int = 4) -> None:
        python_model(root, name, HELD, config=config, max_batch=max_batch)
        self._folder = root / name / "1"

    def hold(self) -> None:
        (self._folder / "begun").unlink(missing_ok=True)
        (self._folder / "hold").touch()

    def wait_until_begun(self) -> None:
        wait_until((self._folder / "begun").exists)

    def release(self) -> None:
        (self._folder / "hold").unlink()
