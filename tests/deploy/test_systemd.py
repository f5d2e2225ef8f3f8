"""The unit of deploy/systemd under a real systemd, which is the first process of a container.
Run by `make verify-deploy`."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from podman import EXAMPLES, KEYS, ROOT, SECRET, Podman

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

UNIT = ROOT / "deploy" / "systemd" / "penstock.service"
CONTAINERFILE = """
FROM {image}
USER 0:0
# A user of the unit's name would be taken instead of a dynamic one.
RUN userdel penstock
RUN apt-get update && apt-get install --yes --no-install-recommends systemd systemd-sysv \
    && rm -rf /var/lib/apt/lists/*
"""
# A machine with both kinds of control groups has version 2 here; systemd gets a group of it.
UNIFIED = Path("/sys/fs/cgroup/unified")
# Shorter times than those of the unit, so that the watchdog is seen to act.
IMPATIENT = "[Service]\nWatchdogSec=3\nTimeoutAbortSec=2\nRestartSec=0\n"
DROP_IN = "/etc/systemd/system/penstock.service.d/impatient.conf"
ASK = f"""
import json, sys, urllib.request
headers = {{"X-API-Key": "{SECRET}"}}
url = "http://127.0.0.1:8000" + sys.argv[1]
body = sys.stdin.buffer.read() or None
with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
    print(answer.read().decode())
"""


class Machine:
    """A container whose first process is systemd."""

    def __init__(self, podman: Podman, name: str) -> None:
        self._podman = podman
        self.name = name

    def run(self, *command: str) -> str:
        return self._podman.run("exec", self.name, *command, timeout_s=120)

    def show(self, field: str) -> str:
        return self.run("systemctl", "show", "--value", f"--property={field}", "penstock").strip()

    def wait_for(self, field: str, value: str, limit_s: float = 60) -> None:
        ends = time.monotonic() + limit_s
        while self.show(field) != value:
            assert time.monotonic() < ends, self.run("journalctl", "--unit=penstock", "--no-pager")
            time.sleep(0.2)


@pytest.fixture(scope="module")
def machine(
    podman: Podman, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("systemd")
    (folder / "Containerfile").write_text(CONTAINERFILE.format(image=image))
    (folder / "keys.toml").write_text(KEYS)
    (folder / "keys.toml").chmod(0o600)
    tag, name = "localhost/penstock-systemd:test", "penstock-systemd"
    podman.run("build", "--isolation=chroot", f"--tag={tag}", str(folder), timeout_s=600)
    mounts = {
        UNIT: "/etc/systemd/system/penstock.service",
        folder / "keys.toml": "/etc/penstock/keys.toml",
        EXAMPLES: "/srv/penstock/models",
    }
    options = [f"--volume={path}:{there}:ro" for path, there in mounts.items()]
    group = UNIFIED / name
    if UNIFIED.is_dir():
        group.mkdir(exist_ok=True)
        options.append(f"--volume={group}:/sys/fs/cgroup:rw")
    # Services get name spaces of their own, which needs CAP_SYS_ADMIN; no network but loopback.
    options += ["--systemd=always", "--cap-add=SYS_ADMIN", "--network=none", "--no-healthcheck"]
    command = ["--detach", f"--name={name}", *options, "--entrypoint=/sbin/init", tag]
    podman.run("run", *command)
    made = Machine(podman, name)
    try:
        # systemd leaves the mounts of a container private, and credentials are mounts.
        made.run("mount", "--make-rshared", "/")
        podman.run_unchecked("exec", name, "systemctl", "is-system-running", "--wait")
        yield made
    finally:
        podman.run("rm", "--force", "--time=0", name)
        podman.run("rmi", "--force", tag)
        if group.is_dir():
            for each in sorted(group.rglob("*"), reverse=True):
                if each.is_dir():
                    each.rmdir()
            group.rmdir()


def test_systemd_finds_nothing_wrong(machine: Machine):
    assert machine.run("systemd-analyze", "verify", "/etc/systemd/system/penstock.service") == ""
    flags = ["--offline=true", "--no-pager", "/etc/systemd/system/penstock.service"]
    text = machine.run("systemd-analyze", "security", *flags)
    [level] = re.findall(r"Overall exposure level for penstock.service: ([\d.]+)", text)
    print(f"\nexposure level of the unit: {level} of 10")
    assert float(level) <= 2.0


def test_started_means_ready_and_stopped_means_drained(podman: Podman, machine: Machine):
    began = time.monotonic()
    machine.run("systemctl", "start", "penstock")
    started_s = time.monotonic() - began
    assert machine.show("ActiveState") == "active"
    ask = ["python3", "-c", ASK]
    assert '"ready":true' in machine.run("sh", "-c", f"{_quoted(ask)} /v2/health/ready </dev/null")
    digit = json.dumps(json.loads((ROOT / "examples" / "digit.json").read_text()))
    infer = f"printf '%s' '{digit}' | {_quoted(ask)} /v2/models/digits/infer"
    assert "three" in machine.run("sh", "-c", infer)
    pid = machine.show("MainPID")
    status = machine.run("cat", f"/proc/{pid}/status")
    found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (int(found["CapEff"], 16), found["NoNewPrivs"], found["Seccomp"]) == (0, "1", "2")
    # A user that systemd has made.
    assert 61184 <= int(found["Uid"].split()[0]) <= 65519
    machine.run("systemctl", "stop", "penstock")
    assert (machine.show("Result"), machine.show("ExecMainStatus")) == ("success", "0")
    print(f"\nsystemctl start returned after {started_s:.1f} s, when the models were ready")


def test_a_server_that_hangs_or_dies_is_started_again(machine: Machine):
    write = (
        f"mkdir -p $(dirname {DROP_IN}); printf '{IMPATIENT.encode('unicode_escape').decode()}' >"
    )
    machine.run("sh", "-c", f"{write} {DROP_IN}; systemctl daemon-reload")
    machine.run("systemctl", "start", "penstock")
    began = time.monotonic()
    machine.run("sh", "-c", f"kill -STOP {machine.show('MainPID')}")
    machine.wait_for("NRestarts", "1")
    machine.wait_for("ActiveState", "active")
    print(f"\na stuck server was ready again after {time.monotonic() - began:.1f} s")
    machine.run("sh", "-c", f"kill -KILL {machine.show('MainPID')}")
    machine.wait_for("NRestarts", "2")
    machine.wait_for("ActiveState", "active")
    machine.run("systemctl", "stop", "penstock")


def _quoted(words: list[str]) -> str:
    return " ".join("'" + word.replace("'", "'\\''") + "'" for word in words)
