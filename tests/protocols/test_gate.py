"""Who may do what, and that no route is forgotten."""

from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from starlette.routing import Route
from tritonclient.grpc import service_pb2

from penstock.errors import ConfigError, NotAllowed
from penstock.protocols.gate import MAX_KEYS, RPC_SCOPES, Gate, read_keys, scope_of
from penstock.protocols.v2_routes import V2Routes
from penstock.serving.catalog import Catalog
from penstock.serving.supervisor import socket_pair
from penstock.wire import frames

SECRET = "0123456789abcdef"
FILE = f"""
[[key]]
name = "team-a"
secret = "{SECRET}"
scopes = ["infer"]
[[key]]
name = "operator"
secret = "{SECRET[::-1]}"
scopes = ["metrics", "admin"]
"""
# What each route needs. A new route must be entered here, with thought.
ROUTES = {
    "/v2": "infer",
    "/v2/health/live": "open",
    "/v2/health/ready": "open",
    "/v2/models/stats": "infer",
    "/v2/models/{name}": "infer",
    "/v2/models/{name}/ready": "infer",
    "/v2/models/{name}/config": "infer",
    "/v2/models/{name}/stats": "infer",
    "/v2/models/{name}/explain": "metrics",
    "/v2/models/{name}/versions/{version}/explain": "metrics",
    "/v2/models/{name}/versions/{version}": "infer",
    "/v2/models/{name}/versions/{version}/ready": "infer",
    "/v2/models/{name}/versions/{version}/config": "infer",
    "/v2/models/{name}/versions/{version}/stats": "infer",
    "/v2/repository/index": "admin",
    "/v2/repository/models/{name}/load": "admin",
    "/v2/repository/models/{name}/unload": "admin",
    "/metrics": "metrics",
    "/v2/models/{name}/trace/setting": "admin",
    "/v2/models/{name}/versions/{version}/trace/setting": "admin",
    "/v2/trace/setting": "admin",
    "/v2/logging": "admin",
    "/v2/systemsharedmemory/{rest:path}": "admin",
    "/v2/cudasharedmemory/{rest:path}": "admin",
}
# What is not Starlette's.
SHORT = [
    "/v2/models/{name}/infer",
    "/v2/models/{name}/generate",
    "/v2/models/{name}/generate_stream",
]
SHORT += ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models", "/tokenize"]
# What each RPC needs, and the route of HTTP that does the same. A new RPC must be entered here.
INFERENCE = "/inference.GRPCInferenceService/"
RPCS = {
    f"{INFERENCE}ServerLive": "/v2/health/live",
    f"{INFERENCE}ServerReady": "/v2/health/ready",
    f"{INFERENCE}ServerMetadata": "/v2",
    f"{INFERENCE}ModelReady": "/v2/models/m/ready",
    f"{INFERENCE}ModelMetadata": "/v2/models/m",
    f"{INFERENCE}ModelConfig": "/v2/models/m/config",
    f"{INFERENCE}ModelStatistics": "/v2/models/m/stats",
    f"{INFERENCE}ModelInfer": "/v2/models/m/infer",
    f"{INFERENCE}ModelStreamInfer": "/v2/models/m/infer",
    f"{INFERENCE}RepositoryIndex": "/v2/repository/index",
    f"{INFERENCE}RepositoryModelLoad": "/v2/repository/models/m/load",
    f"{INFERENCE}RepositoryModelUnload": "/v2/repository/models/m/unload",
    f"{INFERENCE}SystemSharedMemoryStatus": "/v2/systemsharedmemory/status",
    f"{INFERENCE}SystemSharedMemoryRegister": "/v2/systemsharedmemory/region/r/register",
    f"{INFERENCE}SystemSharedMemoryUnregister": "/v2/systemsharedmemory/unregister",
    f"{INFERENCE}CudaSharedMemoryStatus": "/v2/cudasharedmemory/status",
    f"{INFERENCE}CudaSharedMemoryRegister": "/v2/cudasharedmemory/region/r/register",
    f"{INFERENCE}CudaSharedMemoryUnregister": "/v2/cudasharedmemory/unregister",
    f"{INFERENCE}TraceSetting": "/v2/trace/setting",
    f"{INFERENCE}LogSettings": "/v2/logging",
    "/grpc.health.v1.Health/Check": "/v2/health/ready",
    "/grpc.health.v1.Health/Watch": "/v2/health/ready",
}


@pytest.fixture
def keys(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(FILE)
    return read_keys(tmp_path / "keys.toml")


async def all_routes() -> list[str]:
    routes = V2Routes(Catalog(), ".", is_explicit=True).application().routes
    return [route.path for route in routes if isinstance(route, Route)]


def test_every_route_has_a_scope_that_somebody_thought_of():
    import asyncio

    assert {path: scope_of(path) for path in asyncio.run(all_routes())} == ROUTES


def test_what_computes_needs_a_key_that_may_infer():
    assert {scope_of(path) for path in SHORT} == {"infer"}


def test_every_rpc_has_the_scope_of_the_route_that_does_the_same():
    services = [
        *service_pb2.DESCRIPTOR.services_by_name.values(),
        *health_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    there = {f"/{each.full_name}/{m.name}" for each in services for m in each.methods}
    assert RPCS.keys() == there
    assert {method: scope_of(path) for method, path in RPCS.items()} == RPC_SCOPES


@pytest.mark.parametrize(
    "path",
    [
        "/v2/models/m/infer",
        "/v2/unknown",
        "/",
        "/V2/health/live",
        "/v2/health/live/",
        "//v2/health/live",
    ],
)
def test_what_is_not_known_needs_the_key_for_inference(path):
    assert scope_of(path) == "infer"


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository",
        "/v2/repository/",
        "/v2/repository/models/x/load/",
        "/v2/logging",
        "/v2/trace/setting",
    ],
)
def test_what_looks_like_administration_needs_its_key(path):
    assert scope_of(path) == "admin"


def test_without_keys_everything_is_allowed():
    Gate().check("/v2/models/m/infer", {})


def test_health_is_open(keys):
    Gate(keys).check("/v2/health/ready", {})


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"authorization": b"Basic abc"},
        {b"authorization": b"Bearer "},
        {b"x-api-key": b"nobody"},
    ],
)
def test_no_key_or_an_unknown_one_is_refused(keys, headers):
    with pytest.raises(NotAllowed) as caught:
        Gate(keys).check("/v2/models/m/infer", headers)
    assert caught.value.needs_key


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_a_key_opens_its_scopes_and_no_others(keys, header):
    value = f"Bearer {SECRET}" if header == "authorization" else SECRET
    headers = {header.encode(): value.encode()}
    gate = Gate(keys)
    gate.check("/v2/models/m/infer", headers)
    for path in ("/metrics", "/v2/repository/models/m/load"):
        with pytest.raises(NotAllowed, match="This protocol is restricted") as caught:
            gate.check(path, headers)
        assert not caught.value.needs_key


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
def test_an_rpc_is_opened_by_the_same_keys(keys, name):
    gate = Gate(keys)
    value = f"Bearer {SECRET}" if name == "authorization" else SECRET
    metadata = [("user-agent", "test"), (name, value), ("trace-bin", b"\xff")]
    gate.check_rpc(f"{INFERENCE}ModelInfer", metadata)
    with pytest.raises(NotAllowed, match="has no scope 'admin'") as caught:
        gate.check_rpc(f"{INFERENCE}RepositoryModelLoad", metadata)
    assert not caught.value.needs_key
    for wrong in ([], [(name, "nobody")], [(name, value + "x")], [(name, "é")]):
        gate.check_rpc("/grpc.health.v1.Health/Check", wrong)
        for method in (f"{INFERENCE}ModelInfer", "/unknown.Service/Method", ""):
            with pytest.raises(NotAllowed) as caught:
                gate.check_rpc(method, wrong)
            assert caught.value.needs_key
    Gate().check_rpc(f"{INFERENCE}RepositoryModelLoad", [])


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        (b"localhost:8000", True),
        (b"LOCALHOST", True),
        (b"127.0.0.1", True),
        (b"[::1]:8000", True),
        (b"evil.example:8000", False),
        (b"localhost.evil.example", False),
        (b"127.0.0.1.evil.example:80", False),
        (b"[::2]", False),
        (b":8000", False),
    ],
)
def test_a_page_cannot_reach_the_server_under_another_name(host, is_allowed):
    gate = Gate(hosts=frozenset(("localhost", "127.0.0.1", "::1")))
    if is_allowed:
        gate.check("/v2", {b"host": host})
    else:
        with pytest.raises(NotAllowed, match="--allow-host"):
            gate.check("/v2", {b"host": host})


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("", ["holds no"]),
        ("key = 3", ["holds no"]),
        ("key = [1]", ["holds no"]),
        ("x = " + "[" * 5000, ["nested too deeply"]),
        (f'[[key]]\nsecret = "{SECRET}"\nscopes = [["infer"]]\n', ["key[0].scopes"]),
        (f'[[key]]\nsecret = "{SECRET}"\nscopes = [{{a = 1}}]\n', ["key[0].scopes"]),
        ("[[key", ["keys.toml: Expected"]),
        (
            '[[key]]\nsecret = "short"\nscopes = ["infer"]\n'
            f'[[key]]\nsecret = "{SECRET}"\nscopes = ["root"]\n',
            [
                "key[0].secret",
                "key[1].scopes: expected a list of some of infer, metrics, admin; 'root'",
            ],
        ),
        (
            "",
            ['expected for each key\n  [[key]]\n  secret = "at least 16 characters"\n  scopes = '],
        ),
        ('[[key]]\nsecret = "short"\nscopes = "infer"\n', ["key[0].secret", "key[0].scopes"]),
        (
            f'[[key]]\nsecret = "{SECRET}"\nscope = ["infer"]\n',
            ["key[0].scope: no such field; expected name, secret, scopes", "key[0].scopes"],
        ),
        (f"keys = 1\n{FILE}", ["keys.toml: keys: no such field"]),
        (f'{FILE}[[key]]\nname = 3\nsecret = "{SECRET}"\nscopes = ["admin"]\n', ["key[2].name"]),
        (
            f'{FILE}[[key]]\nsecret = "{SECRET}"\nscopes = ["admin"]\n',
            ["key[2].secret: the same as that of key[0]"],
        ),
    ],
)
def test_a_wrong_key_file_is_explained(tmp_path, text, complaints):
    (tmp_path / "keys.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_keys(tmp_path / "keys.toml")
    assert len(caught.value.problems) == len(complaints)
    for problem, complaint in zip(caught.value.problems, complaints, strict=True):
        assert complaint in problem
        assert SECRET not in problem


def test_so_many_keys_fit_the_frame_that_opens_a_front(tmp_path):
    entries = [
        f'[[key]]\nsecret = "{SECRET}{number}"\nscopes = ["infer", "metrics", "admin"]\n'
        for number in range(MAX_KEYS + 1)
    ]
    path = tmp_path / "keys.toml"
    path.write_text("".join(entries[:-1]))
    keys = {digest: tuple(scopes) for digest, scopes in read_keys(path).scopes.items()}
    frame = frames.Open(frames.VERSION, "localhost", 0, 0, 0, keys=keys)
    ours, theirs = socket_pair()
    with ours, theirs:
        ours.send(frames.encode(frame))
        data = theirs.recv(frames.MAX_FRAME_BYTES)
    assert frames.decode_to_front(data) == frame
    path.write_text("".join(entries))
    with pytest.raises(ConfigError, match="4097 keys; at most 4096"):
        read_keys(path)


def test_a_missing_key_file_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_keys(tmp_path / "none.toml")


def test_callers_are_told_apart_by_their_key_and_only_where_keys_are_needed(tmp_path: Path):
    (tmp_path / "keys.toml").write_text(FILE)
    gate = Gate(read_keys(tmp_path / "keys.toml"))
    bearer = {b"authorization": b"Bearer " + SECRET.encode()}
    plain = {b"x-api-key": SECRET.encode()}
    other = {b"x-api-key": SECRET[::-1].encode()}
    assert gate.caller_digest(bearer) == gate.caller_digest(plain) != gate.caller_digest(other)
    assert SECRET.encode() not in gate.caller_digest(plain)
    assert gate.rpc_caller_digest([("authorization", f"Bearer {SECRET}")]) == gate.caller_digest(
        plain
    )
    assert gate.caller_digest({}) == gate.rpc_caller_digest([]) == b""
    assert Gate().caller_digest(bearer) == Gate().rpc_caller_digest([("x-api-key", SECRET)]) == b""
