"""compose.yaml, run by podman-compose. Run by `make verify-deploy`."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from environments import environment
from podman import EXAMPLES, KEYS, ROOT, Container, Podman, free_ports, port_flags

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

# This machine has no bridge for containers, and ports are taken.
OVERRIDE = """
services:
  penstock:
    image: {image}
    container_name: {name}
    network_mode: host
    restart: "no"
    command: {command}
"""


def test_compose_up_and_down(podman: Podman, image: str, tmp_path: Path):
    """With the models and keys where compose.yaml expects them."""
    program = environment("compose", "podman-compose>=1.5") / "podman-compose"
    shutil.copytree(EXAMPLES, tmp_path / "models")
    (tmp_path / "keys.toml").write_text(KEYS)
    shutil.copy(ROOT / "compose.yaml", tmp_path)
    ports = free_ports(3)
    container = Container(podman, f"penstock-compose-{ports[0]}", ports)
    access = ["--host", "0.0.0.0", "--api-keys", "/run/secrets/penstock-keys"]
    command = json.dumps(["serve", "/models", *access, *port_flags(ports)])
    text = OVERRIDE.format(image=image, name=container.name, command=command)
    (tmp_path / "override.yaml").write_text(text)

    def compose(*arguments: str) -> None:
        files = ["-f", "compose.yaml", "-f", "override.yaml"]
        done = subprocess.run(
            [program, *files, *arguments],
            cwd=tmp_path,
            env=podman.environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr

    compose("up", "--detach", "--no-build")
    try:
        container.wait_until_ready()
        body = json.loads((ROOT / "examples" / "digit.json").read_text())
        assert container.infer("digits", body)[0] == 200
        state = container.exec("cat", "/proc/1/status")
        assert "NoNewPrivs:\t1" in state and "CapEff:\t0000000000000000" in state
        with pytest.raises(AssertionError, match="Read-only file system"):
            container.exec("touch", "/opt/penstock/file")
        began = time.monotonic()
    finally:
        compose("down")
    assert time.monotonic() - began < 30
