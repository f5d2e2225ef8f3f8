"""What a server prints at start works when it is pasted into a shell."""

import os
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from certificates import make_certificates
from served import EXAMPLES, Served
from text_server import NAME, write_model

SECRET = "a-secret-to-be-pasted"


def printed(server: Served) -> list[str]:
    """The lines after the addresses, up to the command."""
    assert server.process.stdout is not None
    lines: list[str] = []
    for line in server.process.stdout:
        lines.append(line.rstrip("\n"))
        if "curl " in line:
            return lines
    raise AssertionError(lines)


def paste(line: str, folder: Path, **environment: str) -> tuple[int, str]:
    """The status and the answer."""
    told = f"{line.strip()} -s -w '\\n%{{http_code}}'"
    done = subprocess.run(
        ["bash", "-c", told],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    answer, _, status = done.stdout.rpartition("\n")
    return int(status), answer


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_tensor_model_in_shards(tmp_path: Path) -> None:
    with Served(EXAMPLES / "digits", "--shards", "2") as server:
        lines = printed(server)
        assert lines[0].split() == ["Page", f"http://{server.address}/"]
        status, answer = paste(lines[-1], tmp_path)
        assert status == 200
        assert '"logits"' in answer
        for path in ("/", "/docs", "/openapi.json", "/dashboard/app.js", "/dashboard/state"):
            assert server.status(path) == 200
            metrics = server.metrics_url.removesuffix("/metrics")
            assert status_of(metrics + path) == 404
        request = urllib.request.Request(
            f"http://{server.address}/", headers={"Accept": "text/html"}
        )
        with urllib.request.urlopen(request) as page:
            assert "script-src 'self'" in page.headers["Content-Security-Policy"]
            assert page.read().startswith(b"<!doctype html>")


def test_a_model_for_text_with_tls_and_keys(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "tls")
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nsecret = "{SECRET}"\nscopes = ["infer"]\n')
    flags = ["--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")]
    with Served(EXAMPLES / "text_length", *flags, "--api-keys", str(keys)) as server:
        lines = printed(server)
        assert lines[0].split() == ["Page", f"https://{server.address}/"]
        assert "-k instead of --cacert" in "".join(lines)
        assert SECRET not in "".join(lines)
        status, answer = paste(lines[-1], tmp_path, PENSTOCK_API_KEY=SECRET)
        assert status == 200
        assert '"LENGTH"' in answer
        assert paste(lines[-1], tmp_path, PENSTOCK_API_KEY="another one that is wrong")[0] == 401


def test_a_language_model(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with Served(write_model(tmp_path)) as server:
        status, answer = paste(printed(server)[-1], tmp_path)
        assert status == 200
        assert f'"model":"{NAME}"' in answer
        assert '"role":"assistant"' in answer
