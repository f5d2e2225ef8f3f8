"""The image that the Containerfile makes, run by podman as the documentation says: read-only, as
another user than root, without capabilities. Run by `make verify-deploy`."""

import concurrent.futures
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
from podman import (
    EXAMPLES,
    HARDENED,
    KEYS,
    ROOT,
    Container,
    Podman,
    build_image,
    print_layers,
    serving,
)
from served import null_model, python_model

import penstock

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]

DIGIT = ROOT / "examples" / "digit.json"
MAX_BYTES = 300 * 10**6
LENGTHS = {"inputs": [{"name": "TEXT", "shape": [1, 1], "datatype": "BYTES", "data": ["calm"]}]}
# Each worker starts a process that outlives it.
FORKS = """
import subprocess
child = subprocess.Popen(["sleep", "1000"])
def infer(inputs):
    return {"y": inputs["x"]}
"""


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return path


def test_layers_are_small(podman: Podman, image: str):
    assert print_layers(podman, image) <= MAX_BYTES


def test_what_the_image_says_of_itself(podman: Podman, image: str):
    found = podman.inspect(image)
    assert found["Config"]["User"] == "10001:10001"
    assert found["Config"]["StopSignal"] == "SIGTERM"
    assert found["Config"]["Entrypoint"] == ["tini", "--", "penstock"]
    assert "/v2/health/live" in " ".join(found["Healthcheck"]["Test"])
    said = podman.run("run", "--rm", *HARDENED, image, "--version")
    assert said.split()[-1] == penstock.__version__


def test_without_keys_it_says_what_to_mount(podman: Podman, image: str):
    """With its own command, as `podman run IMAGE` starts it."""
    volume = f"--volume={EXAMPLES}:/models:ro"
    done = podman.run_unchecked("run", "--rm", *HARDENED, volume, image)
    assert done.returncode == 1
    assert "/run/secrets/penstock-keys: No such file or directory" in done.stderr
    assert "mounted" in done.stderr and "[[key]]" in done.stderr


def test_it_serves_from_a_read_only_root(podman: Podman, image: str, keys: Path):
    """ONNX and Python models, with API keys, and nothing is written to the image."""
    with serving(podman, image, EXAMPLES, keys=keys) as container:
        status, answer = container.infer("digits", json.loads(DIGIT.read_text()))
        assert (status, answer["outputs"][0]["data"][0].split(":")[-1]) == (200, "three")
        status, answer = container.infer("text_length", LENGTHS)
        assert (status, answer["outputs"][0]["data"]) == (200, [4])
        assert container.get("/v2/health/live", container.metrics_port)[0] == 200
        state = container.exec("cat", "/proc/1/status")
        assert re.search(r"^CapEff:\s0+$", state, re.M) and re.search(r"^Seccomp:\s2$", state, re.M)
        assert re.search(r"^Uid:\s10001\s", state, re.M)
        # podman itself makes the mount points.
        changed = podman.run("diff", container.name).splitlines()
        written = [line for line in changed if not re.match(r". /(run|etc|models|tmp|dev)\b", line)]
        assert written == []
        assert container.exec("find", "/tmp", "-mindepth", "1").split() == []


def test_the_health_check_passes_and_fails(podman: Podman, image: str):
    """In a network of its own, so that the default ports are free."""
    name = "penstock-health"
    volume = f"--volume={EXAMPLES}:/models:ro"
    command = ("serve", "/models", "--host", "0.0.0.0", "--insecure")
    podman.run("run", "--detach", "--name", name, "--network=none", volume, image, *command)
    try:
        ends = time.monotonic() + 60
        while podman.run_unchecked("healthcheck", "run", name).returncode:
            assert time.monotonic() < ends, podman.run("logs", name)
        [core] = [
            each.pid
            for each in Container(podman, name, (8000, 8001, 8002)).processes()
            if "penstock serve /models" in each.command and "tini" not in each.command
        ]
        podman.run("exec", name, "sh", "-c", f"kill -STOP {core}")
        assert podman.run_unchecked("healthcheck", "run", name).returncode == 1
    finally:
        podman.run("rm", "--force", "--time=0", name)


def test_memory_of_tensors_is_not_limited_by_dev_shm(podman: Podman, image: str, tmp_path: Path):
    """Slabs and the spill are memfds: 64 kB of /dev/shm do for tensors of megabytes."""
    code = 'def infer(inputs):\n    return {"y": inputs["x"]}\n'
    root = python_model(tmp_path, "echo", code, max_batch=4)
    config = (root / "echo" / "config.pbtxt").read_text().replace("dims: 1", "dims: -1")
    (root / "echo" / "config.pbtxt").write_text(config)
    sent = np.arange(4 << 20, dtype=np.int32)[None]
    with serving(podman, image, root, options=["--shm-size=64k"]) as container:
        assert "64K" in container.exec("df", "-h", "/dev/shm")
        url = f"http://127.0.0.1:{container.http_port}/v2/models/echo"
        with penstock.Client(url) as client:
            answers = [client.infer({"x": sent})["y"] for _ in range(4)]
    assert all(np.array_equal(each, sent) for each in answers)


def test_connections_are_steered_without_capabilities(podman: Podman, image: str, tmp_path: Path):
    """The BPF program on the listeners passes the default seccomp profile."""
    root = null_model(tmp_path, "model", a_ms=1)
    with serving(podman, image, root, "--shards", "2") as container:
        accepts = r'^penstock_shard_accepts{shard="\d"} (\d)$'
        ends = time.monotonic() + 30
        while sum(map(int, re.findall(accepts, container.get("/metrics")[1], re.M))) != 1:
            assert time.monotonic() < ends, container.get("/metrics")[1]
            time.sleep(0.1)
        assert "steering them fails" not in container.logs()


def test_sigterm_finishes_what_is_accepted(podman: Podman, image: str, tmp_path: Path):
    """Eight requests of 1.5 s each are in flight when the container is stopped."""
    root = null_model(tmp_path, "model", max_batch=8, a_ms=1500)
    body = {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [1000]}]}
    with (
        serving(podman, image, root) as container,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        asked = [pool.submit(container.infer, "model", body) for _ in range(8)]
        time.sleep(0.5)
        began = time.monotonic()
        code = container.stop()
        took_s = time.monotonic() - began
        assert [each.result()[0] for each in asked] == [200] * 8
        assert code == 0, container.logs()
        print(f"\ncontainer stopped in {took_s:.1f} s, 8 of 8 requests answered, exit code {code}")
        assert "in flight have 30 s to finish" in container.logs()


def test_processes_that_models_leave_behind_are_reaped(podman: Podman, image: str, tmp_path: Path):
    root = python_model(tmp_path, "forks", FORKS)
    with serving(podman, image, root) as container:
        for _ in range(3):
            found = container.processes()
            [worker] = [each.pid for each in found if "penstock.serving.worker" in each.command]
            container.exec("sh", "-c", f"kill -9 {worker}")
            time.sleep(1)
            container.wait_until_ready()
        states = [each.state for each in container.processes()]
    assert "Z" not in states, states


def test_an_unknown_variant_is_refused(podman: Podman):
    with pytest.raises(AssertionError, match="VARIANT is 'rocm'; expected cpu or cuda"):
        build_image(podman, "wrong", VARIANT="rocm")


def test_extras_are_installed(podman: Podman):
    """openvino stands for all extras: PyTorch's CPU build is on an index of its own, which is not
    reached from every machine."""
    image = build_image(podman, "openvino", EXTRAS="openvino", TORCH_CPU_INDEX="")
    print_layers(podman, image)
    code = "import openvino; print(openvino.__version__)"
    assert podman.run("run", "--rm", *HARDENED, "--entrypoint=python3", image, "-c", code)
    podman.remove("openvino")


@pytest.mark.timeout(3600)
def test_the_cuda_variant_is_built(podman: Podman):
    """Built, and started without a GPU: it has never run on one."""
    image = build_image(podman, "cuda", VARIANT="cuda")
    try:
        print_layers(podman, image)
        code = "import torch, triton; print(torch.__version__, torch.version.cuda)"
        libraries = podman.run("run", "--rm", *HARDENED, "--entrypoint=python3", image, "-c", code)
        print(f"  torch {libraries.strip()}")
        assert "gcc" in podman.run("run", "--rm", "--entrypoint=gcc", image, "--version")
        with serving(podman, image, EXAMPLES) as container:
            assert container.infer("digits", json.loads(DIGIT.read_text()))[0] == 200
    finally:
        podman.remove("cuda")  # Several gigabytes.
