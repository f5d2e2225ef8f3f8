"""Triton 2.51 and `penstock serve` as processes: where Triton is, what it lacks, its models.

Triton comes from the nvidia-pytriton wheel, of which only the server, its Python backend and the
stub of this Python's version are used. A folder that holds `pytriton` and `nvidia_pytriton.libs` is
its home: the wheel unpacked, or the packages of an environment that it is installed in. The stub
shares arrays with numpy before 2.0 only, so its home should have one, too.
"""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
HOMES = (
    ROOT / ".bench" / "gpu" / "triton",
    ROOT / ".bench" / "triton" / "lib" / f"python{PYTHON}" / "site-packages",
)
LIBPYTHON = f"libpython{PYTHON}.so.1.0"
STUB = "triton_python_backend_stub"
STOP_TIMEOUT_S = 10
POLL_S = 0.1
# What the backend and each of its stubs pass tensors through, in /dev/shm.
SHARED_BYTES = 16 << 20
MIN_SHARED_BYTES = 1 << 20
TAIL_LINES = 12
MAX_ERRORS, MAX_LINE = 4, 1500
ERROR = re.compile(r"^E\d{4} |Error\b|ERROR")


class StartError(Exception):
    """The server did not come up; the text says why, as far as can be told."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to serve the model with Triton."""

    num_instances: int
    delay_us: int = 0

    @property
    def name(self) -> str:
        plural = "instance" if self.num_instances == 1 else "instances"
        delay = f", {self.delay_us / 1e3:g} ms" if self.delay_us else ""
        return f"{self.num_instances} {plural}{delay}"

    @property
    def model(self) -> str:
        return f"x{self.num_instances}_{self.delay_us}us"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# What is started.


@dataclass(slots=True)
class Server:
    """A server and its children, started at once and waited for later; stopped when the block ends,
    however it ends."""

    name: str
    command: Sequence[str]
    port: int
    log_path: Path
    env: Mapping[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        return self

    def wait_until_ready(self, limit_s: float) -> float:
        """Seconds that it was waited for."""
        assert self._process is not None
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            if self._process.poll() is not None:
                raise StartError(f"{self.name} ended with {self._process.returncode}{self.tail()}")
            if self._is_ready():
                return time.monotonic() - began
            time.sleep(POLL_S)
        raise StartError(f"{self.name} is not ready after {limit_s:.0f} s{self.tail()}")

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def lines(self, word: str) -> list[str]:
        """Of its log."""
        return [each for each in self._log() if word in each]

    def _log(self) -> list[str]:
        return self.log_path.read_text(errors="replace").strip().splitlines()

    def tail(self) -> str:
        """Of its log: lines that tell of errors, and the end."""
        lines = self._log()
        errors = [each for each in lines if ERROR.search(each)][:MAX_ERRORS]
        shown = [each[:MAX_LINE] for each in (*errors, "...", *lines[-TAIL_LINES:])]
        return "; its log:\n  " + "\n  ".join(shown)

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        members: list[psutil.Process] = []
        try:
            top = psutil.Process(self._process.pid)
            members = [top, *top.children(recursive=True)]
        except psutil.NoSuchProcess:
            pass
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(members, timeout=STOP_TIMEOUT_S)
        for each in alive:
            try:
                each.kill()
            except psutil.NoSuchProcess:
                continue
        self._process.wait()


def penstock(repository: Path, num_shards: int, log_path: Path) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "penstock", "serve", str(repository)]
    flags = [f"--http-port={port}", "--no-grpc", "--no-metrics", f"--shards={num_shards}"]
    # Triton's models take their memory at the same time; the plan could count them or not.
    flags += ["--gpu-memory-reserve=0", "--drain-s=1"]
    environment = {"PYTHONPATH": os.pathsep.join(packages())}
    return Server("Penstock", [*command, *flags], port, log_path, environment)


def triton(
    home: Path, repository: Path, work: Path, num_stubs: int, grpc_port: int | None = None
) -> Server:
    server = home / "pytriton" / "tritonserver"
    port = free_port()
    command = [str(server / "bin" / "tritonserver"), f"--model-repository={repository}"]
    command += [f"--backend-directory={put_together(server, work)}"]
    command += ["--http-address=127.0.0.1", f"--http-port={port}"]
    # More at a time take each other's cores, and none is ready for minutes.
    command += ["--allow-metrics=false", "--model-load-thread-count=3"]
    if grpc_port is None:
        command.append("--allow-grpc=false")
    else:
        command += ["--grpc-address=127.0.0.1", f"--grpc-port={grpc_port}"]
    # It would start every stub once more, only to ask.
    command += ["--disable-auto-complete-config"]
    settings = {"shm-default-byte-size": shared_bytes(num_stubs), "stub-timeout-seconds": 300}
    command += [f"--backend-config=python,{key}={value}" for key, value in settings.items()]
    return Server("Triton", command, port, work / "triton.log", environment(home, work))


# Triton's home.


def find_home(given: Path | None) -> Path:
    homes = (given,) if given is not None else HOMES
    for home in homes:
        if (home / "pytriton" / "tritonserver" / "bin" / "tritonserver").is_file():
            return home
    tried = ", ".join(map(str, homes))
    raise StartError(
        f"no Triton in {tried}; expected a folder with pytriton/tritonserver/bin/tritonserver, as "
        "in an unpacked wheel of nvidia-pytriton 0.7.0. Name it with --triton"
    )


def put_together(server: Path, work: Path) -> Path:
    """The backend with the stub for this Python beside it."""
    stub = server / "python_backend_stubs" / PYTHON / STUB
    if not stub.is_file():
        there = sorted(each.name for each in (server / "python_backend_stubs").iterdir())
        raise StartError(f"no stub for Python {PYTHON} in {server}; there: {', '.join(there)}")
    backends = work / "backends"
    shutil.rmtree(backends, ignore_errors=True)
    shutil.copytree(server / "backends" / "python", backends / "python")
    shutil.copy(stub, backends / "python")
    return backends


def shared_bytes(num_stubs: int) -> int:
    """Of each region; containers often have little of it."""
    free = shutil.disk_usage("/dev/shm").free
    return max(MIN_SHARED_BYTES, min(SHARED_BYTES, free // (4 * num_stubs)))


def environment(home: Path, work: Path) -> dict[str, str]:
    libraries = [str(home / "nvidia_pytriton.libs"), str(libpython_alone(home, work))]
    if given := os.environ.get("LD_LIBRARY_PATH"):
        libraries.append(given)
    return {
        # The stub looks for its standard library from the first python3 on the path.
        "PATH": f"{Path(sys.base_prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        # As workers of Penstock have it.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "BESIDE_TRITON_PACKAGES": os.pathsep.join([*numpy_for_stub(home, work), *packages()]),
    }


def numpy_for_stub(home: Path, work: Path) -> list[str]:
    """A folder with nothing but the numpy of Triton's home, if it has one for this Python."""
    folder = work / "numpy"
    shutil.rmtree(folder, ignore_errors=True)
    built_for = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any((home / "numpy" / "core").glob(f"_multiarray_umath.{built_for}*")):
        return []
    folder.mkdir(parents=True)
    for name in ("numpy", "numpy.libs"):
        (folder / name).symlink_to((home / name).resolve())
    return [str(folder)]


def packages() -> list[str]:
    """Where this process finds its packages; the standard library is found by itself."""
    own = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    own |= {f"{each}/lib-dynload" for each in own}
    here = str(Path(__file__).resolve().parent)
    found = [each for each in sys.path if Path(each).is_dir() and each not in own | {here}]
    return list(dict.fromkeys([str(ROOT), *found]))


def libpython(home: Path) -> Path:
    for folder in library_folders(home):
        if (folder / LIBPYTHON).is_file():
            return folder / LIBPYTHON
    tried = ", ".join(dict.fromkeys(map(str, library_folders(home))))
    raise StartError(f"no {LIBPYTHON}, which Triton's stub needs, in {tried}")


def libpython_alone(home: Path, work: Path) -> Path:
    """A folder with nothing else in it: beside it may lie a cuDNN that is not torch's own."""
    folder = work / "libpython"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / LIBPYTHON).symlink_to(libpython(home).resolve())
    return folder


def library_folders(home: Path) -> Iterator[Path]:
    """This Python's own first; last the one that came along, of the same minor version."""
    for name in ("LIBDIR", "LIBPL"):
        if value := sysconfig.get_config_var(name):
            yield Path(value)
    for prefix in (sys.base_prefix, sys.prefix, "/usr", "/usr/local"):
        yield Path(prefix) / "lib"
        yield Path(prefix) / "lib" / "x86_64-linux-gnu"
    yield home / "python"


def diagnosis(home: Path, work: Path) -> list[str]:
    """What Triton's parts find on this machine, in lines for whoever must find out why not."""
    lines = [f"Python {sys.version.split()[0]} at {sys.executable}, base {sys.base_prefix}"]
    lines += [f"Triton at {home}", f"/dev/shm has {shutil.disk_usage('/dev/shm').free >> 20} MiB"]
    lines.append(f"{LIBPYTHON}: {libpython(home)}")
    lines.append(f"packages: {', '.join(packages())}")
    server = home / "pytriton" / "tritonserver"
    backends = put_together(server, work) / "python"
    env = {**os.environ, **environment(home, work)}
    lines.append(f"numpy for the stub: {numpy_for_stub(home, work) or 'none before 2.0'}")
    for file in (
        server / "bin" / "tritonserver",
        backends / "libtriton_python.so",
        backends / STUB,
    ):
        lines.append(f"{file.name}: {missing(file, env)}")
    return lines


def missing(file: Path, env: Mapping[str, str]) -> str:
    """Which shared libraries the loader does not find."""
    try:
        told = subprocess.run(
            ["ldd", str(file)], env=dict(env), capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "cannot be looked into without ldd"
    lost = [line.split()[0] for line in told.stdout.splitlines() if "not found" in line]
    if told.returncode and not lost:
        return f"ldd says {told.stderr.strip()[:200]}"
    return f"libraries that are not found: {', '.join(lost)}" if lost else "finds its libraries"


# Its models.


def write_model(repository: Path, name: str, served: Path, variant: Variant, device: str) -> None:
    """`served` is the model's folder in Penstock's repository, whose configuration holds."""
    from penstock.repository import layout as repositories

    (config,) = repositories.read_one(served.parent, served.name).configs
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("triton_model.py"), version / "model.py")
    inputs = ", ".join(
        f'{{ name: "{each.name}" data_type: TYPE_{each.datatype} dims: {list(each.shape)} '
        "allow_ragged_batch: true }"
        for each in config.inputs
    )
    outputs = ", ".join(
        f'{{ name: "{each.name}" data_type: TYPE_{each.datatype} dims: {list(each.shape)} }}'
        for each in config.outputs
    )
    batching = ""
    if variant.delay_us:
        batching = (
            f"preferred_batch_size: [ {config.max_batch_size} ] "
            f"max_queue_delay_microseconds: {variant.delay_us} "
        )
    text = f"""name: "{name}"
backend: "python"
max_batch_size: {config.max_batch_size}
input [ {inputs} ]
output [ {outputs} ]
instance_group [ {{ count: {variant.num_instances} kind: KIND_MODEL }} ]
dynamic_batching {{ {batching}}}
parameters {{ key: "served_by_penstock" value {{ string_value: "{served}" }} }}
parameters {{ key: "device" value {{ string_value: "{device}" }} }}
"""
    (version.parent / "config.pbtxt").write_text(text)
