"""The metrics port: scrapes and health, nothing else, and the same gate."""

from pathlib import Path

import pytest

from penstock.protocols.gate import Gate
from penstock.protocols.handler_tasks import MetricsHttp
from penstock.protocols.key_file import read_keys
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.management import ManagementApi

SECRET = "0123456789abcdef"


def make(gate: Gate | None = None) -> MetricsHttp:
    catalog = Catalog()
    management = ManagementApi(catalog, Control(catalog, ".", is_explicit=True))
    return MetricsHttp(gate or Gate(), management)


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize("path", ["/metrics", "/v2/health/live", "/v2/health/ready"])
async def test_scrapes_and_health_are_answered(serve, path):
    watch = make()
    async with serve(watch.handle) as served:
        assert (await served.ask(get(path))).status == 200
    await watch.close()


async def test_a_scrape_is_prometheus_text_with_every_process(serve):
    watch = make()
    async with serve(watch.handle) as served:
        answer = await served.ask(get("/metrics"))
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.body.decode()
    assert 'penstock_process_resident_bytes{process="core"}' in text
    assert "penstock_shard_restarts" not in text, "there is no shard"
    await watch.close()


@pytest.mark.parametrize(
    "path",
    ["/v2", "/v2/models/stats", "/v2/models/m/infer", "/v2/repository/index", "/", "/metrics/x"],
)
async def test_nothing_else_is_there(serve, path):
    watch = make()
    async with serve(watch.handle) as served:
        assert (await served.ask(get(path))).status == 404
        assert (await served.ask(get(path, "Content-Length: 0", method="POST"))).status == 404
    await watch.close()


async def test_the_gate_is_the_same(serve, tmp_path: Path):
    (tmp_path / "keys.toml").write_text(
        f'[[key]]\nsecret = "{SECRET}"\nscopes = ["metrics"]\n'
        f'[[key]]\nsecret = "{SECRET[::-1]}"\nscopes = ["infer"]\n'
    )
    watch = make(Gate(read_keys(tmp_path / "keys.toml"), frozenset({"localhost"})))
    async with serve(watch.handle) as served:
        statuses = [
            (await served.ask(get("/metrics", *headers))).status
            for headers in ([], [f"X-API-Key: {SECRET}"], [f"X-API-Key: {SECRET[::-1]}"])
        ]
        assert statuses == [401, 200, 403]
        assert (await served.ask(get("/v2/health/live"))).status == 200
        evil = get("/v2/health/live").replace(b"localhost", b"evil.example")
        assert (await served.ask(evil)).status == 403
    await watch.close()
