"""The real podman: images of the repository's Containerfile, and containers of them.

Storage, configuration and the base image are under .bench/containers, so that images of others are
neither used nor removed. Containers use the network of this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".bench" / "containers"
EXAMPLES = ROOT / "examples" / "repository"
PROGRAMS = ("podman", "buildah", "runc", "conmon", "debootstrap")
INSTALL = "apt-get install podman buildah runc catatonit debootstrap"
# crun does not run in hybrid control groups; ulimits must not exceed those of this shell.
CONTAINERS_CONF = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
netns = "host"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
STORAGE_CONF = """
[storage]
driver = "overlay"
graphroot = "{folder}/storage"
runroot = "{folder}/run"
"""
LIBRARIES = "localhost/penstock-libraries"
# A release of Debian whose Python is new enough.
RELEASE, PACKAGES = "trixie", "python3,python3-venv,ca-certificates"
BASE = f"localhost/penstock-base:{RELEASE}"
# How pip reaches its packages from this machine, also while an image is built.
PIP_FILES = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
PIP_VARIABLES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY")
# The layers that are not empty, the last one first.
LAYERS = ("Penstock", "its libraries", "Debian packages, user")
# compose.yaml and the Deployment ask for the same.
HARDENED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
SECRET = "0123456789abcdef-infer"
KEYS = f"""
[[key]]
name = "client"
secret = "{SECRET}"
scopes = ["infer", "metrics"]
"""

LIST_PROCESSES = """
import os
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/cmdline") as line:
        state = stat.read().rpartition(")")[2].split()[0]
        print(pid, state, line.read().replace("\\0", " ").replace("\\n", " "))
"""


class Podman:
    """Runs podman's commands in the storage of these tests."""

    def __init__(self) -> None:
        missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
        if missing:
            pytest.fail(f"{', '.join(missing)}: not installed; {INSTALL}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        configs = {"CONTAINERS_CONF": CONTAINERS_CONF, "CONTAINERS_STORAGE_CONF": STORAGE_CONF}
        self._environment = os.environ | {"PATH": _path()}
        for variable, text in configs.items():
            path = FOLDER / f"{variable.lower()}.toml"
            path.write_text(text.format(folder=FOLDER) if "{" in text else text)
            self._environment[variable] = str(path)

    def run(self, *arguments: str, timeout_s: float = 120) -> str:
        """Run a command and return its stdout; fails with its stderr."""
        done = self.run_unchecked(*arguments, timeout_s=timeout_s)
        assert done.returncode == 0, f"podman {' '.join(arguments)}: {done.stderr[-3000:]}"
        return done.stdout

    def run_unchecked(
        self, *arguments: str, timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        command = ["podman", *arguments]
        return subprocess.run(
            command, env=self._environment, capture_output=True, text=True, timeout=timeout_s
        )

    @property
    def environment(self) -> Mapping[str, str]:
        return self._environment

    def inspect(self, image: str) -> dict:
        [found] = json.loads(self.run("image", "inspect", image))
        return found

    def has(self, image: str) -> bool:
        return self.run_unchecked("image", "exists", image).returncode == 0

    def remove(self, tag: str) -> None:
        """Remove an image of `build_image` and its libraries."""
        for name in (f"localhost/penstock:{tag}", f"{LIBRARIES}:{tag}"):
            self.run("rmi", "--force", name, timeout_s=600)

    def remove_untagged(self) -> None:
        """Remove what builds left behind; tagged images stay as a cache."""
        self.run("image", "prune", "--force", timeout_s=600)


def _path() -> str:
    """Debian has some of the programs where only root looks for them."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def make_base(podman: Podman) -> str:
    """Return the base image: TEST_BASE, or Debian's packages by debootstrap, where no registry can
    be reached."""
    if given := os.environ.get("TEST_BASE"):
        return given
    if podman.has(BASE):
        return BASE
    with (
        tempfile.TemporaryDirectory(dir=FOLDER) as root,
        tempfile.NamedTemporaryFile(dir=FOLDER, suffix=".tar") as archive,
    ):
        include = f"--include={PACKAGES}"
        _output(["debootstrap", "--variant=minbase", include, RELEASE, root, _mirror()])
        _output(["tar", "-C", root, "-c", "-f", archive.name, "."])
        podman.run("import", archive.name, BASE, timeout_s=600)
    return BASE


def _mirror() -> str:
    """Return the first of this machine's mirrors that has the release."""
    sites = _output(["apt-get", "indextargets", "--format", "$(SITE)"]).split()
    for site in dict.fromkeys((*sites, "http://deb.debian.org/debian")):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{site}/dists/{RELEASE}/Release", timeout=10).close()
            return site
    pytest.fail(f"no mirror of apt has Debian's {RELEASE}; set TEST_BASE to a base image")


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def build_image(podman: Podman, tag: str, **arguments: str) -> str:
    """Build the repository's Containerfile, with what pip needs on this machine."""
    name = f"localhost/penstock:{tag}"
    arguments = {"BASE": make_base(podman), **arguments}
    for variable in PIP_VARIABLES:
        if variable in os.environ:
            arguments.setdefault(variable, os.environ[variable])
    flags = [f"--build-arg={key}={value}" for key, value in arguments.items()]
    flags += [f"--volume={path}:{path}:ro" for path in PIP_FILES if Path(path).is_file()]
    # HEALTHCHECK is a field of Docker's format.
    flags += ["--format=docker", "--isolation=chroot"]
    # Its own tag keeps the stage that takes longest as a cache.
    libraries = ["--target=libraries", f"--tag={LIBRARIES}:{tag}"]
    podman.run("build", *flags, *libraries, str(ROOT), timeout_s=3600)
    podman.run("build", *flags, f"--tag={name}", str(ROOT), timeout_s=3600)
    return name


def print_layers(podman: Podman, image: str) -> int:
    """Print the layers of our Containerfile with their sizes; return the bytes of all."""
    base = podman.inspect(make_base(podman))
    lines = podman.run("history", "--human=false", "--format=json", image)
    sizes = [each["size"] for each in json.loads(lines) if each["size"]]
    ours = sizes[: -len(base["RootFS"]["Layers"])]
    print(f"\n{image}: {sum(ours) / 1e6:.0f} MB above a base of {base['Size'] / 1e6:.0f} MB")
    for name, num_bytes in zip(LAYERS, ours, strict=True):
        print(f"  {num_bytes / 1e6:8.1f} MB  {name}")
    return sum(ours)


def free_ports(number: int) -> list[int]:
    """Return ports of this machine that are free now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in range(number)]
        return [each.getsockname()[1] for each in sockets]


def port_flags(ports: Sequence[int]) -> list[str]:
    """Return the flags of `penstock serve` for its three ports."""
    names = ("--http-port", "--grpc-port", "--metrics-port")
    return [word for name, port in zip(names, ports, strict=True) for word in (name, str(port))]


@dataclass(frozen=True, slots=True)
class ContainedProcess:
    """A process as its container sees it; the state of zombies is Z."""

    pid: str
    state: str
    command: str


class Container:
    """`penstock serve /models` in a container, on ports of this machine."""

    def __init__(self, podman: Podman, name: str, ports: Sequence[int]) -> None:
        self._podman = podman
        self.name = name
        self.http_port, self.grpc_port, self.metrics_port = ports

    def get(self, path: str, port: int | None = None, body: bytes | None = None) -> tuple[int, str]:
        """Ask with the key of `KEYS`; return the status and the body, or 0 if nobody answers."""
        url = f"http://127.0.0.1:{port or self.http_port}{path}"
        request = urllib.request.Request(url, body, {"X-API-Key": SECRET})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def infer(self, model: str, body: object) -> tuple[int, dict]:
        """Send JSON to a model; return the status and its answer."""
        data = json.dumps(body).encode()
        status, text = self.get(f"/v2/models/{model}/infer", body=data)
        return status, json.loads(text)

    def wait_until_ready(self, limit_s: float = 60) -> None:
        ends = time.monotonic() + limit_s
        while self.get("/v2/health/ready")[0] != 200:
            assert self.is_running and time.monotonic() < ends, self.logs()
            time.sleep(0.05)

    def exec(self, *command: str) -> str:
        return self._podman.run("exec", self.name, *command)

    def processes(self) -> list[ContainedProcess]:
        """List the processes; the image has no ps."""
        lines = self.exec("python3", "-c", LIST_PROCESSES).splitlines()
        return [ContainedProcess(*line.split(" ", 2)) for line in lines]

    @property
    def is_running(self) -> bool:
        text = self._podman.run("inspect", "--format={{.State.Running}}", self.name)
        return text.strip() == "true"

    def logs(self) -> str:
        done = self._podman.run_unchecked("logs", self.name)
        return done.stdout + done.stderr

    def stop(self, grace_s: int = 60) -> int:
        """SIGTERM, SIGKILL after `grace_s`; return the exit code."""
        self._podman.run("stop", f"--time={grace_s}", self.name, timeout_s=grace_s + 60)
        return int(self._podman.run("inspect", "--format={{.State.ExitCode}}", self.name))


@contextlib.contextmanager
def serving(
    podman: Podman,
    image: str,
    models: Path,
    *flags: str,
    options: Sequence[str] = (),
    keys: Path | None = None,
) -> Iterator[Container]:
    """A hardened container that serves a folder of models; `options` are podman's. Removed at the
    end, without waiting."""
    models.chmod(0o755)  # pytest's folders are for this user only.
    ports = free_ports(3)
    name = f"penstock-{ports[0]}"
    mounts = [f"--volume={models}:/models:ro"]
    access = ["--insecure"]
    if keys is not None:
        mounts.append(f"--volume={keys}:/run/secrets/penstock-keys:ro")
        access = ["--api-keys", "/run/secrets/penstock-keys"]
    command = ["serve", "/models", "--host", "0.0.0.0", *access]
    command += port_flags(ports)
    podman.run(
        "run", "--detach", "--name", name, *HARDENED, *mounts, *options, image, *command, *flags
    )
    container = Container(podman, name, ports)
    try:
        container.wait_until_ready()
        yield container
    finally:
        podman.run("rm", "--force", "--time=0", name)
