"""`penstock.serve`: a server in a child process that ends with its parent."""

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import penstock
from penstock.errors import CommandLineError, ConfigError

PORTS = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}


def test_a_served_model_answers_until_it_is_stopped(examples: Path) -> None:
    with penstock.serve(examples / "digits", **PORTS) as server:
        assert server.models == ("digits",)
        assert server.url.startswith("http://127.0.0.1:")
        assert server.grpc_url.startswith("grpc://127.0.0.1:")
        assert server.metrics_url.endswith("/metrics")
        assert f"{server.url} running: digits" in repr(server)
        assert server.url in server._repr_html_()
        with server.client() as client:
            assert client.infer(np.zeros((1, 1, 8, 8)))["logits"].shape == (1, 10)
        pid = server.pid
    assert not server.is_running and not psutil.pid_exists(pid)
    assert "stopped" in repr(server)
    server.stop()
    assert not client.ready()


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"host": "0.0.0.0"}, CommandLineError, "--insecure"),
        ({"load_model": ["x"]}, CommandLineError, "--load-model needs --model-control-mode"),
        ({"api_keys": "no/such.toml"}, ConfigError, "no/such.toml"),
    ],
)
def test_what_keeps_it_from_serving_is_raised(examples: Path, options, kind, text: str) -> None:
    with pytest.raises(kind, match=text):
        penstock.serve(examples / "digits", **{**PORTS, **options})


def test_a_missing_model_is_raised(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        penstock.serve(tmp_path / "no.onnx", **PORTS)


def test_a_server_without_grpc_has_no_grpc_client(examples: Path) -> None:
    with (
        penstock.serve(examples / "digits", http_port=0, grpc=False, metrics=False) as server,
        pytest.raises(ConfigError, match="without gRPC"),
    ):
        assert (server.grpc_url, server.metrics_url) == ("", "")
        server.client(grpc=True)


def test_the_server_ends_when_its_parent_is_killed(examples: Path) -> None:
    code = (
        "import penstock, sys, time\n"
        f"server = penstock.serve({str(examples / 'digits')!r}, **{PORTS!r})\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    deadline = time.monotonic() + 60
    while server.is_running() and server.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)  # Nothing tells that someone else's child has ended.
