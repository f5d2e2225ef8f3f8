"""The management API, whatever the protocol: what it answers, and that protocols ask for it."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import NotAllowed, NotFound, NotReady
from penstock.protocols.route_table import RPC_ROUTES
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi, ManagementCall
from penstock.serving.supervisor import ThreadLife
from penstock.types import TensorSpec

ECHO = ModelConfig(
    name="echo",
    version="1",
    backend="null",
    artifact="",
    inputs=(TensorSpec("x", "FP32", (4,)),),
    outputs=(TensorSpec("y", "FP32", (4,)),),
    max_batch_size=8,
    batching=BatchPolicy(8),
)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **options: object) -> None:
        asyncio.run(test(*args, **options))

    return run


@asynccontextmanager
async def managed(*configs: ModelConfig, **options: object) -> AsyncIterator[ManagementApi]:
    catalog = Catalog(ThreadLife)
    await catalog.load(RepositoryScan(list(configs)))
    try:
        yield ManagementApi(catalog, Control(catalog, ".", is_explicit=False), **options)
    finally:
        await catalog.close()


async def ask(management: ManagementApi, action: str, *model: str) -> object:
    return msgspec.json.decode(await management.answer(ManagementCall(action, *model)))


@in_loop
async def test_rpcs_ask_for_actions_that_exist() -> None:
    async with managed() as management:
        handlers = {route.handler for route in RPC_ROUTES.values()}
        assert handlers - {"infer"} <= set(management.actions)


@in_loop
async def test_a_server_and_its_models_are_described() -> None:
    async with managed(ECHO, server_id="edge 7") as management:
        about = await ask(management, "server_metadata")
        assert isinstance(about, dict) and about["name"] == "edge 7"
        assert await ask(management, "live") == {"live": True}
        assert await ask(management, "ready") == {"ready": True}
        assert await ask(management, "model_ready", "echo") == {"name": "echo", "ready": True}
        metadata = await ask(management, "metadata", "echo", "1")
        assert isinstance(metadata, dict) and metadata["versions"] == ["1"]
        config = await ask(management, "config", "echo")
        assert isinstance(config, dict) and config["max_batch_size"] == 8
        statistics = await ask(management, "statistics")
        assert isinstance(statistics, dict) and len(statistics["model_stats"]) == 1
        assert b'nv_inference_count{model="echo",version="1"} 0' in await management.metrics()
        for action in ("metadata", "model_ready", "config", "statistics", "explain"):
            with pytest.raises(NotFound, match="'none' is not found"):
                await ask(management, action, "none")
        with pytest.raises(NotAllowed, match="--model-control-mode explicit"):
            await ask(management, "unload", "echo")


@in_loop
async def test_who_loads_or_drains_is_not_ready() -> None:
    lifecycle = Lifecycle(is_loading=True)
    async with managed(ECHO, lifecycle=lifecycle) as management:
        with pytest.raises(NotReady, match="models are loading"):
            await ask(management, "ready")
        lifecycle.is_loading = False
        assert await ask(management, "ready") == {"ready": True}
        lifecycle.drain()
        for action in ("ready", "model_ready"):
            with pytest.raises(NotReady, match="the server is shutting down"):
                await ask(management, action, "echo")
        assert await ask(management, "live") == {"live": True}


@pytest.mark.parametrize("tells_reasons", [True, False])
@in_loop
async def test_reasons_are_only_for_those_who_may_know(tells_reasons: bool) -> None:
    async with managed(ECHO, tells_reasons=tells_reasons) as management:
        await management.catalog.load(RepositoryScan([], {"broken": ["no such file"]}))
        with pytest.raises(NotReady) as caught:
            await ask(management, "ready")
        reason = "broken (no such file)" if tells_reasons else "broken"
        assert str(caught.value) == f"not ready: {reason}"
