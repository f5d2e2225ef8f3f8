"""The audit log has a line for every administrative call, with caller and result."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from penstock.config import GrpcConfig, HttpLimits
from penstock.errors import InvalidRequest, NotAllowed
from penstock.protocols import audit_log
from penstock.protocols.audit_log import AdminCall, record
from penstock.protocols.gate import Gate, Keys, digest_secret
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.infer_grpc import InferRpcs
from penstock.protocols.route_table import find
from penstock.protocols.shard_processes import CoreApi
from penstock.protocols.v2_grpc import GrpcService
from penstock.protocols.v2_http import Models, V2Http
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.management import ManagementApi

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "repository"
SECRETS = {"operator": b"secret-of-operator", "team-a": b"secret-of-team-a"}
SCOPES = {"operator": frozenset(["admin", "infer"]), "team-a": frozenset(["infer"])}
DIGESTS = {name: digest_secret(secret) for name, secret in SECRETS.items()}
GATE = Gate(
    Keys(
        {DIGESTS[name]: scopes for name, scopes in SCOPES.items()},
        {digest: name for name, digest in DIGESTS.items()},
    )
)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    caplog.set_level("INFO", logger=audit_log.log.name)
    yield lambda: [r.getMessage() for r in caplog.records if r.name == audit_log.log.name]


def test_a_line_says_who_what_and_the_result(lines: Any) -> None:
    record(AdminCall("http", "operator", "load", "m"))
    record(AdminCall("grpc", "a b\n=", "index"), NotAllowed('no "scope"'))
    record(AdminCall("http", "x", "load", "m"), InvalidRequest("r" * 2000))
    record(AdminCall("http", "operator", "promote", "m", "2"))
    first, second, third, fourth = lines()
    assert first == "http caller=operator action=load model=m result=200"
    assert second == (
        r'grpc caller="a b\n=" action=index result=PERMISSION_DENIED reason="no \"scope\""'
    )
    assert len(third) < 600
    assert fourth == "http caller=operator action=promote model=m version=2 result=200"


@pytest.mark.parametrize(
    "body, version",
    [(b'{"version": "2"}', "2"), (b'{"version": 3}', "3"), (b"{", ""), (b"", ""), (b"[]", "")],
)
def test_a_promotion_says_which_version_it_is_about(body: bytes, version: str) -> None:
    match = find(b"/v2/repository/models/m/promote")
    assert match is not None
    call = audit_log.http_call(match, "operator", body)
    assert call == AdminCall("http", "operator", "promote", "m", version)


def make_management() -> ManagementApi:
    catalog = Catalog()
    return ManagementApi(catalog, Control(catalog, str(EXAMPLES), is_explicit=True))


def test_a_quiet_log_level_does_not_silence_it() -> None:
    assert audit_log.log.isEnabledFor(20)


async def test_administrative_calls_over_http_are_recorded(serve: Any, lines: Any) -> None:
    v2 = V2Http(Models(make_management(), gate=GATE), HttpLimits(), GATE)

    async def ask(path: str, name: str, method: str = "POST") -> int:
        key = f"X-API-Key: {SECRETS[name].decode()}\r\n" if name else ""
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n{key}\r\n"
        return (await served.ask(head.encode())).status

    async with serve(v2.handle) as served:
        change = "/v2/repository/models/m%20n"
        assert await ask(f"{change}/unload", "operator") == 200
        assert await ask(f"{change}/load", "operator") == 404
        assert await ask(f"{change}/load", "team-a") == 403
        assert await ask("/v2/repository/index", "") == 401
        assert await ask("/v2/logging", "operator", "GET") == 200
        assert await ask("/v2", "team-a", "GET") == 200
        assert await ask("/v2/models/m", "team-a", "GET") == 404
    await v2.close()
    found = lines()
    assert found[0] == 'http caller=operator action=unload model="m n" result=200'
    assert found[1].startswith('http caller=operator action=load model="m n" result=404 reason=')
    assert found[2].startswith('http caller=team-a action=load model="m n" result=403 reason=')
    assert found[3].startswith("http caller=anonymous action=index result=401 reason=")
    assert found[4] == "http caller=operator action=logging result=200"
    assert len(found) == 5


async def test_calls_refused_before_they_are_looked_at_are_recorded(serve: Any, lines: Any) -> None:
    gate = Gate(GATE.keys, frozenset(["localhost"]))
    models = Models(make_management(), gate=gate)
    v2 = V2Http(models, HttpLimits(max_json_bytes=10), gate)
    key = f"X-API-Key: {SECRETS['operator'].decode()}"
    bearer = f"Authorization: Bearer {SECRETS['operator'].decode()}"

    async def ask(*headers: str, method: str = "POST", body: str = "") -> int:
        head = [f"{method} /v2/repository/index HTTP/1.1", f"Content-Length: {len(body)}", *headers]
        return (await served.ask("\r\n".join([*head, "", body]).encode())).status

    async with serve(v2.handle) as served:
        assert await ask("Host: evil.example", key) == 403
        assert await ask("Host: localhost", key, key) == 400
        assert await ask("Host: localhost", bearer, bearer, key) == 400
        assert await ask("Host: localhost", key, body=" " * 11) == 413
        assert await ask("Host: localhost", key, method="PUT") == 405
        assert await ask("Host: localhost", key, bearer) == 200
    await v2.close()
    found = [line.partition(" reason=") for line in lines()]
    assert [f"{start} {reason[:40]}".strip() for start, _, reason in found] == [
        """http caller=operator action=index result=403 "Host 'evil.example' is not served here;""",
        'http caller=anonymous action=index result=400 "the header x-api-key is given twice"',
        'http caller=anonymous action=index result=400 "the header authorization is given twice',
        'http caller=operator action=index result=413 "the JSON of a request may have 10 bytes',
        'http caller=operator action=index result=405 "/v2/repository/index takes POST, not PU',
        "http caller=operator action=index result=200",
    ]


async def test_a_call_that_its_client_leaves_is_recorded(
    serve: Any, lines: Any, until: Any
) -> None:
    management = make_management()
    started = asyncio.Event()

    async def wait(name: str, with_dependents: object) -> None:
        started.set()
        await asyncio.Event().wait()

    management.control.unload = wait  # type: ignore[method-assign]
    v2 = V2Http(Models(management, gate=GATE), HttpLimits(), GATE)
    async with serve(v2.handle) as served:
        async with served.connect() as client:
            key = SECRETS["operator"].decode()
            await client.send(
                b"POST /v2/repository/models/m/unload HTTP/1.1\r\nHost: x\r\n"
                + f"Content-Length: 0\r\nX-API-Key: {key}\r\n\r\n".encode()
            )
            await started.wait()
        await until(lambda: lines() == ["http caller=operator action=unload model=m result=499"])
    await v2.close()


async def test_administrative_calls_over_grpc_are_recorded(lines: Any) -> None:
    management = make_management()
    infer = InferRpcs(management.catalog, management.lifecycle, GATE)
    service = GrpcService(infer, CoreApi(management, gate=GATE).manage, GATE)
    server = GrpcServer(service.methods(), GrpcConfig(), GATE, HttpLimits())
    port = await server.start("127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        operator, other = ([("x-api-key", SECRETS[name].decode())] for name in SECRETS)
        request = service_pb2.RepositoryModelUnloadRequest(model_name="m")
        await stub.RepositoryModelUnload(request, metadata=operator)
        for metadata in (other, other, None):
            with pytest.raises(grpc.RpcError):
                await stub.RepositoryModelUnload(request, metadata=metadata)
        load = service_pb2.RepositoryModelLoadRequest(model_name="m")
        with pytest.raises(grpc.RpcError):
            await stub.RepositoryModelLoad(load, metadata=operator)
        await stub.ServerMetadata(service_pb2.ServerMetadataRequest(), metadata=operator)
    await server.close()
    first, *refused, anonymous, last = lines()
    assert first == "grpc caller=operator action=unload model=m result=OK"
    for line in refused:
        assert line.startswith("grpc caller=team-a action=RepositoryModelUnload ")
        assert "result=PERMISSION_DENIED" in line
    assert len(refused) == 2, "also a head that was seen before"
    assert "caller=anonymous" in anonymous and "result=UNAUTHENTICATED" in anonymous
    assert last.startswith("grpc caller=operator action=load model=m result=NOT_FOUND reason=")
