"""A real server with TLS: HTTP from the core and from shards, gRPC and metrics, and a new
certificate while it runs."""

import json
import os
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from certificates import make_certificates
from served import Served, null_model


def flags(folder: Path, processes: tuple[str, ...], client_ca: str = "") -> list[str]:
    found = ["--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")]
    found += ["--tls-client-ca", str(folder / f"{client_ca}.pem")] if client_ca else []
    return [*found, *processes]


def context_of(folder: Path, name: str = "") -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if name:
        context.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return context


def get(url: str, context: ssl.SSLContext) -> bytes:
    with urllib.request.urlopen(url, context=context, timeout=60) as answer:
        return answer.read()


def credentials(folder: Path, name: str = "") -> grpc.ChannelCredentials:
    pair = [
        (folder / f"{name}.{suffix}").read_bytes() if name else None for suffix in ("key", "pem")
    ]
    return grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), *pair)


def is_live(address: str, made: grpc.ChannelCredentials) -> bool:
    with grpcclient.InferenceServerClient(address, ssl=True, creds=made) as client:
        try:
            return bool(client.is_server_live(client_timeout=5))
        except grpcclient.InferenceServerException:
            return False


def names(port: int, folder: Path, name: str = "") -> str:
    """Common name in the certificate of the server on this port."""
    plain = socket.create_connection(("127.0.0.1", port), timeout=60)
    context = context_of(folder, name)
    # gRPC speaks nothing else.
    context.set_alpn_protocols(["h2", "http/1.1"])
    with plain, context.wrap_socket(plain, server_hostname="localhost") as sock:
        subject = sock.getpeercert()["subject"]
    return str(dict(pair[0] for pair in subject)["commonName"])


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.parametrize(
    "processes",
    [(), ("--shards", "2")],
    ids=["core", "shards"],
)
def test_every_port_speaks_tls_and_takes_a_new_certificate(tmp_path, processes):
    folder = make_certificates(tmp_path / "tls")
    served = Served(null_model(tmp_path / "models", "m"), *flags(folder, processes), grpc=True)
    assert served.metrics_url.startswith("https://")
    metrics_port = int(served.metrics_url.rpartition(":")[2].partition("/")[0])
    grpc_port = int(served.grpc_address.rpartition(":")[2])
    ports = (served.port, metrics_port, grpc_port)
    context = context_of(folder)
    assert json.loads(get(f"https://{served.address}/v2", context))["name"] == "penstock"
    assert b"nv_inference_count" in get(served.metrics_url, context)
    with pytest.raises((urllib.error.URLError, ConnectionError)):
        urllib.request.urlopen(f"http://{served.address}/v2", timeout=60)
    secure = {"ssl": True, "ssl_context_factory": lambda: context_of(folder)}
    tensor = httpclient.InferInput("x", [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[7]], np.int32))
    with httpclient.InferenceServerClient(served.address, **secure) as client:
        assert client.infer("m", [tensor]).as_numpy("y").tolist() == [[7]]
        assert is_live(served.grpc_address, credentials(folder))
        assert {names(port, folder) for port in ports} == {"server"}
        for suffix in ("key", "pem"):
            os.replace(folder / f"renewed.{suffix}", folder / f"server.{suffix}")
        for port in ports:
            # Each process of a port reads the files itself.
            wait_until(lambda port=port: {names(port, folder) for _ in range(16)} == {"renewed"})
        assert client.infer("m", [tensor]).as_numpy("y").tolist() == [[7]]
    assert is_live(served.grpc_address, credentials(folder))
    assert served.terminate() == 0


@pytest.mark.parametrize(
    "processes",
    [
        (),
        pytest.param(("--shards", "2"), marks=pytest.mark.slow),
    ],
    ids=["core", "shards"],
)
def test_clients_need_a_certificate_of_the_right_issuer(tmp_path, processes):
    folder = make_certificates(tmp_path / "tls")
    given = flags(folder, processes, "ca")
    served = Served(null_model(tmp_path / "models", "m"), *given, grpc=True)
    for url in (f"https://{served.address}/v2", served.metrics_url):
        assert get(url, context_of(folder, "client"))
        for name in ("", "stranger"):
            with pytest.raises((OSError, urllib.error.URLError)):
                get(url, context_of(folder, name))
    assert is_live(served.grpc_address, credentials(folder, "client"))
    for name in ("", "stranger"):
        assert not is_live(served.grpc_address, credentials(folder, name))
    # Lines of gRPC's own would not be in the format of the log.
    assert "ssl_transport_security" not in served.logged()
    assert served.terminate() == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--tls-cert", "server.pem"], "--tls-key is required"),
        (["--tls-client-ca", "ca.pem"], "--tls-cert and --tls-key are required"),
        (["--tls-key", "server.key"], "--tls-cert is required"),
        (["--tls-cert", "none.pem", "--tls-key", "server.key"], "No such file"),
        (["--tls-cert", "client.pem", "--tls-key", "server.key"], "is not the key of"),
    ],
)
def test_wrong_files_and_flags_end_the_start(tmp_path, given, words):
    folder = make_certificates(tmp_path / "tls")
    paths = [each if each.startswith("-") else str(folder / each) for each in given]
    command = [sys.executable, "-m", "penstock", "serve", str(null_model(tmp_path / "models", "m"))]
    ended = subprocess.run([*command, *paths], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr
