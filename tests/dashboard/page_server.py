"""A server with pages in this process: null models, whose outputs OUT_<name> repeat their inputs,
and Python threads instead of workers."""

import asyncio
import contextlib
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import uvloop

from penstock.config import BatchPolicy, HttpLimits, ModelConfig
from penstock.dashboard.pages import Pages
from penstock.operate.monitor import Monitor
from penstock.operate.rollouts import Rollouts
from penstock.operate.version_actions import VersionActions
from penstock.protocols.gate import Gate, Keys, digest_secret
from penstock.protocols.http_server import HttpServer
from penstock.protocols.v2_http import Models, V2Http
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.local import ThreadLife
from penstock.serving.management import ManagementApi
from penstock.types import TensorSpec

SECRETS = {scope: f"a-secret-of-{scope}" for scope in ("infer", "metrics", "admin")}
SECRETS["both"] = "a-secret-of-infer-and-metrics"
SCOPES = {**{name: [name] for name in ("infer", "metrics", "admin")}, "both": ["infer", "metrics"]}
KEYS = Keys(
    {digest_secret(secret.encode()): frozenset(SCOPES[name]) for name, secret in SECRETS.items()}
)


def null_config(
    name: str,
    inputs: Mapping[str, tuple[str, tuple[int, ...]]],
    max_batch_size: int = 4,
    version: str = "1",
    slo: str = "",
) -> ModelConfig:
    return ModelConfig(
        name=name,
        version=version,
        backend="null",
        artifact="",
        inputs=tuple(TensorSpec(key, *value) for key, value in inputs.items()),
        outputs=tuple(TensorSpec(f"OUT_{key}", *value) for key, value in inputs.items()),
        max_batch_size=max_batch_size,
        batching=BatchPolicy(max(1, max_batch_size), is_dynamic=max_batch_size > 0),
        slo=slo,
    )


@dataclass(frozen=True)
class PageServer:
    catalog: Catalog
    management: ManagementApi
    pages: Pages
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, headers: Mapping[str, str] | None = None, body: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        request = urllib.request.Request(self.url + path, body, dict(headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()


@contextlib.contextmanager
def page_server(
    configs: Sequence[ModelConfig], gate: Gate | None = None, problems: dict | None = None
) -> Iterator[PageServer]:
    started, stop = threading.Event(), threading.Event()
    box: list[PageServer] = []

    async def serve() -> None:
        catalog = Catalog(start_life=ThreadLife)
        await catalog.load(RepositoryScan(list(configs), dict(problems or {})))
        management = ManagementApi(catalog, Control(catalog, "", is_explicit=False))
        checked = gate or Gate()
        rollouts = Rollouts(catalog, management.control)
        management.add(VersionActions(management, checked.name_of, rollouts).answers)
        monitor = Monitor(catalog)
        pages = Pages(management, checked, monitor)
        v2 = V2Http(Models(management, gate=checked, pages=pages.handlers()), HttpLimits(), checked)
        http = HttpServer(v2.handle, HttpLimits())
        watching = asyncio.create_task(monitor.run())
        box.append(PageServer(catalog, management, pages, await http.start("127.0.0.1", 0)))
        started.set()
        await asyncio.to_thread(stop.wait)
        watching.cancel()
        await v2.close()
        await http.close()
        await catalog.close()

    thread = threading.Thread(target=lambda: uvloop.run(serve()))
    thread.start()
    try:
        assert started.wait(90)
        yield box[0]
    finally:
        stop.set()
        thread.join(60)
