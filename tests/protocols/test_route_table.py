"""One table for gate and router: every route has a reviewed scope, and no spelling of a path
reaches a handler without it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from urllib.parse import unquote

import pytest
from example_counts import at_most
from grpc_health.v1 import health_pb2
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from penstock.config import HttpLimits
from penstock.dashboard.pages import Pages
from penstock.errors import NotAllowed, Unsupported
from penstock.operate.rollouts import Rollouts
from penstock.operate.version_actions import VersionActions
from penstock.protocols.answer_sender import Keep
from penstock.protocols.gate import Gate, Keys, digest_secret
from penstock.protocols.h2_heads import make_head
from penstock.protocols.handler_tasks import MetricsHttp, make_handlers
from penstock.protocols.http import Connection, Exchange, Handler
from penstock.protocols.http_reader import MessageHead, normalize_path
from penstock.protocols.http_server import HttpServer
from penstock.protocols.infer_http import InferCall
from penstock.protocols.route import Match
from penstock.protocols.route_table import INFERENCE, REFLECTION, ROUTES, RPC_ROUTES, find
from penstock.protocols.v2_http import V2Http
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control
from penstock.serving.management import ManagementApi
from penstock.types import Buffer

# What each route needs. A new route must be entered here, with thought.
SCOPES = {
    # Pages are static. What they show comes from the state route, whose handler leaves out what the
    # caller's scopes do not allow (tests/dashboard/test_state.py).
    "/": "open",
    "/docs": "open",
    "/openapi.json": "open",
    "/dashboard": "open",
    "/dashboard/common.js": "open",
    "/dashboard/charts.js": "open",
    "/dashboard/versions.js": "open",
    "/dashboard/live.js": "open",
    "/dashboard/live.css": "open",
    "/dashboard/events": "metrics",
    "/dashboard/what-if": "metrics",
    "/dashboard/app.js": "open",
    "/dashboard/docs.js": "open",
    "/dashboard/style.css": "open",
    "/dashboard/state": "infer",
    "/v2": "infer",
    "/v2/": "infer",
    "/v2/health/live": "open",
    "/v2/health/ready": "open",
    "/v2/models/stats": "infer",
    "/v2/models/{name}": "infer",
    "/v2/models/{name}/infer": "infer",
    "/v2/models/{name}/generate": "infer",
    "/v2/models/{name}/generate_stream": "infer",
    "/v2/models/{name}/ready": "infer",
    "/v2/models/{name}/config": "infer",
    "/v2/models/{name}/stats": "infer",
    "/v2/models/{name}/explain": "metrics",
    "/v2/models/{name}/trace/setting": "admin",
    "/v2/repository/index": "admin",
    "/v2/repository/models/{name}/load": "admin",
    "/v2/repository/models/{name}/unload": "admin",
    "/v2/repository/models/{name}/versions": "admin",
    "/v2/repository/models/{name}/history": "admin",
    "/v2/repository/models/{name}/rollout": "admin",
    "/v2/repository/models/{name}/diff/{a}/{b}": "admin",
    "/v2/repository/models/{name}/promote": "admin",
    "/v2/repository/models/{name}/rollback": "admin",
    "/v2/repository/models/{name}/verify": "admin",
    "/v2/repository/models/{name}/prune": "admin",
    "/metrics": "metrics",
    "/v2/trace/setting": "admin",
    "/v2/logging": "admin",
    "/v2/systemsharedmemory/status": "shared_memory",
    "/v2/systemsharedmemory/unregister": "shared_memory",
    "/v2/systemsharedmemory/region/{region}/status": "shared_memory",
    "/v2/systemsharedmemory/region/{region}/register": "shared_memory",
    "/v2/systemsharedmemory/region/{region}/unregister": "shared_memory",
    "/v2/cudasharedmemory/status": "shared_memory",
    "/v2/cudasharedmemory/unregister": "shared_memory",
    "/v2/cudasharedmemory/region/{region}/status": "shared_memory",
    "/v2/cudasharedmemory/region/{region}/register": "shared_memory",
    "/v2/cudasharedmemory/region/{region}/unregister": "shared_memory",
    "/v1/completions": "infer",
    "/v1/chat/completions": "infer",
    "/v1/embeddings": "infer",
    "/v1/responses": "infer",
    "/v1/models": "infer",
    "/v1/models/{name:path}": "infer",
    "/tokenize": "infer",
    "/detokenize": "infer",
    "/tokenizer_info": "infer",
}
MODEL = "/v2/models/{name}"
SCOPES |= {
    path.replace(MODEL, MODEL + "/versions/{version}"): scope
    for path, scope in SCOPES.items()
    if path.startswith(MODEL)
}
# The route of HTTP that does the same as each RPC. A new RPC must be entered here.
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
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": "/v2",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "/v2",
    "/grpc.health.v1.Health/Check": "/v2/health/ready",
    "/grpc.health.v1.Health/Watch": "/v2/health/ready",
}
SECRETS = {
    scope: f"secret-of-{scope}".encode() for scope in ("infer", "metrics", "shared_memory", "admin")
}
KEYS = Keys({digest_secret(secret): frozenset([scope]) for scope, secret in SECRETS.items()})


def example(path: str) -> str:
    """A path of this row."""
    return re.sub(r"\{\w+(:path)?\}", "m", path)


def test_every_route_has_its_reviewed_scope():
    assert {route.path: route.scope for route in ROUTES} == SCOPES
    assert len(ROUTES) == len(SCOPES)


def test_every_rpc_has_the_scope_of_the_route_that_does_the_same():
    services = [
        *service_pb2.DESCRIPTOR.services_by_name.values(),
        *health_pb2.DESCRIPTOR.services_by_name.values(),
    ]
    there = {f"/{each.full_name}/{m.name}" for each in services for m in each.methods}
    there |= {REFLECTION.format(version) for version in ("v1", "v1alpha")}
    assert RPCS.keys() == there
    scopes = {method: find(path.encode()).route.scope for method, path in RPCS.items()}
    assert scopes == {rpc: route.scope for rpc, route in RPC_ROUTES.items()}


def make_management() -> ManagementApi:
    catalog = Catalog()
    management = ManagementApi(catalog, Control(catalog, ".", is_explicit=True))
    rollouts = Rollouts(management.catalog, management.control)
    management.add(VersionActions(management, Gate().name_of, rollouts).answers)
    return management


async def test_every_handler_of_the_table_exists():
    direct = {"infer", "openai", "generate", "generate_stream"}
    management = make_management()
    pages = Pages(management, Gate()).handlers()
    assert {route.handler for route in ROUTES} == {*direct, *make_handlers(management), *pages}


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
def test_a_path_finds_its_row(route):
    match = find(example(route.path).encode())
    assert match is not None and match.route is route
    assert set(match.names.values()) <= {"m"}


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/v2/models/a%2Fb", {"name": "a/b"}),
        ("/v2/models/stats/infer", {"name": "stats"}),
        ("/v2/models/%C3%BC/versions/AAA", {"name": "ü", "version": "AAA"}),
        ("/v2/models/../ready", {"name": ".."}),
        ("/v1/models/org/name", {"name": "org/name"}),
    ],
)
def test_names_are_decoded_once(path, names):
    assert find(path.encode()).names == names


@pytest.mark.parametrize(
    "path",
    ["//", "", "/v2/unknown", "/V2", "//v2", "/v2//", "/v2/health/live/", "/v2/models//infer"]
    + ["/dashboard/", "/dashboard/index.html", "/dashboard/pages.py", "/docs/"]
    + ["/v1/models/", "/metrics/", "/metrics/x", "/v2/repository", "/v2/repository/models/m/load/"]
    + ["/v2%2Fmodels/m", "/v2/models/m%2Finfer/", "/v2/models/m/infer%0A"],
)
def test_a_path_without_a_row_is_not_found(path):
    assert find(path.encode()) is None


# Spellings of a path: from the path to the target of a request.

Trick = Callable[[str], str]


def escaped(path: str, form: str = "%{:02x}") -> str:
    return "".join(c if c == "/" else form.format(ord(c)) for c in path)


def append(text: str) -> Trick:
    return lambda path: path + text


def before_last_segment(text: str) -> Trick:
    def apply(path: str) -> str:
        start, _, last = path.rpartition("/")
        return f"{start}/{text}{last}"

    return apply


TRICKS: dict[str, Trick] = {
    "plain": str,
    "escaped": escaped,
    "escaped in capitals": lambda path: escaped(path, "%{:02X}"),
    "first letter escaped": lambda path: re.sub(
        r"(?<=^/)[^/]", lambda letter: f"%{ord(letter[0]):02x}", path
    ),
    "last letter escaped": lambda path: path[:-1] + f"%{ord(path[-1]):02x}",
    "escaped twice": lambda path: escaped(path, "%25{:02x}"),
    "slashes escaped": lambda path: "/" + path[1:].replace("/", "%2f"),
    "slashes escaped twice": lambda path: "/" + path[1:].replace("/", "%252F"),
    "backslashes": lambda path: "/" + path[1:].replace("/", "%5c"),
    "overlong slashes": lambda path: "/" + path[1:].replace("/", "%c0%af"),
    "in capitals": str.upper,
    "last segment in capitals": lambda path: path[:-1] + path[-1].upper(),
    "a dot in front": lambda path: "/." + path,
    "out of a folder": lambda path: "/v2/health/live/.." + path,
    "out of an escaped folder": lambda path: "/metrics/%2e%2e" + path,
    "a dot inside": before_last_segment("./"),
    "an escaped dot inside": before_last_segment("%2e/"),
    "a folder and back": before_last_segment("x/../"),
    "an empty segment in front": lambda path: "/" + path,
    "an empty segment inside": before_last_segment("/"),
    "absolute": lambda path: "http://localhost" + path,
    "absolute, https": lambda path: "HTTPS://localhost:8000" + path,
    "absolute, escaped": lambda path: "http://localhost" + escaped(path),
    **{
        f"followed by {end}": append(end)
        for end in ("/", "//", "/.", "/..", "/../ready", ";", ";x=y", ".", "?", "?a=b", "??", "*")
    },
    **{
        f"followed by {end}": append(end)
        for end in ("%00", "%09", "%0a", "%0d", "%0d%0a", "%1b", "%20", "%23", "%2e", "%2f", "%3b")
    },
    **{
        f"followed by {end}": append(end)
        for end in ("%3f", "%7f", "%80", "%c2%85", "%e2%80%a8", "%ff", "%", "%250a", "/health/live")
    },
}


class Recording:
    """A door behind which the name of the handler that would answer is written down."""

    def __init__(self, seen: list[Match]) -> None:
        self.seen = seen

    def count(self, call: InferCall, exchange: Exchange) -> None: ...

    def refuse(self, exchange: Exchange, error: Exception) -> bool:
        raise error

    def infer(self, call: InferCall, exchange: Exchange) -> None:
        match = find(exchange.head.path)
        assert match is not None and match.route.handler == "infer"
        self._answer(match, exchange)

    def other(self, exchange: Exchange, match: Match) -> None:
        self._answer(match, exchange)

    def _answer(self, match: Match, exchange: Exchange) -> None:
        self.seen.append(match)
        exchange.reply(200, b"", ())

    def refused(self, call: object, received: float, error: Exception) -> None: ...

    async def close(self) -> None: ...


class Forwarding(Recording):
    """The door of a shard: everything is forwarded to the core, which checks it again."""

    def __init__(self, core: V2Http) -> None:
        self._core = core

    def _answer(self, match: Match, exchange: Exchange) -> None:
        head = MessageHead(exchange.head.method, exchange.head.path, exchange.head.headers)
        self._core.handle(Exchange(Passed(exchange), head, exchange.body, 0.0))


class Passed:
    """The peer of an exchange in the core whose client is at a shard."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def will_keep_alive(self, head: MessageHead) -> bool:
        return True

    def finish(self, data: bytes, keep_alive: bool) -> None:
        self._exchange.pass_on(data, keep_alive)

    def finish_long(self, parts: Sequence[Buffer], keep_alive: bool, keep: Keep | None) -> None:
        self.finish(b"".join(parts), keep_alive)


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    def close(self) -> None: ...

    def get_extra_info(self, name: str) -> object:
        return self  # As if it used TLS: it has no socket to write to.

    def get_write_buffer_size(self) -> int:
        return 0

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None: ...


class Server:
    """The core's router, or a shard's before it, behind the gate; handlers only record."""

    def __init__(self, has_shard: bool = False, handler: Handler | None = None) -> None:
        self.seen: list[Match] = []
        gate = Gate(KEYS, frozenset(("localhost",)))
        v2 = V2Http(Recording(self.seen), HttpLimits(), gate)
        if has_shard:
            v2 = V2Http(Forwarding(v2), HttpLimits(), gate)
        self._http = HttpServer(handler or v2.handle, HttpLimits())

    def ask(self, method: str, target: str, secret: bytes = b"", version: str = "1.1") -> int:
        lines = [f"{method} {target} HTTP/{version}", "Content-Length: 0"]
        if version == "1.1":
            lines.append("Host: localhost")
        if secret:
            lines.append(f"X-API-Key: {secret.decode()}")
        wire = Wire()
        connection = Connection(self._http)
        connection.connection_made(wire)  # type: ignore[arg-type]
        connection.data_received("\r\n".join([*lines, "", ""]).encode())
        return int(wire.sent.split()[1])

    def check(self, method: str, target: str, version: str = "1.1") -> None:
        """With each key alone the request is answered if and only if the key has the scope of the
        route that answers."""
        answered: set[str] = set()
        needed: set[str] = set()
        for scope, secret in {"": b"", **SECRETS}.items():
            before = len(self.seen)
            status = self.ask(method, target, secret, version)
            for match in self.seen[before:]:
                assert status == 200
                answered.add(scope)
                needed.add(SCOPES[match.route.path])
            if len(self.seen) == before:
                assert status in (400, 401, 403, 404, 405)
        if needed:
            (scope,) = needed
            expected = {"", *SECRETS} if scope == "open" else {scope}
            assert answered == expected, f"{target} needs {scope}"


@pytest.mark.parametrize("has_shard", [False, True], ids=["core", "shard"])
@pytest.mark.parametrize("version", ["1.1", pytest.param("1.0", marks=pytest.mark.slow)])
@pytest.mark.parametrize("trick", TRICKS.values(), ids=TRICKS.keys())
async def test_no_spelling_of_a_path_reaches_a_handler_without_its_scope(
    trick: Trick, version: str, has_shard: bool
) -> None:
    server = Server(has_shard)
    for route in ROUTES:
        for method in {*route.methods, "GET", "POST"}:
            server.check(method, trick(example(route.path)), version)
    if trick is str:
        assert {match.route.path for match in server.seen} == SCOPES.keys()


@settings(max_examples=at_most(300), deadline=None)
@given(
    st.sampled_from(ROUTES),
    st.lists(st.sampled_from(sorted(TRICKS)), min_size=2, max_size=4),
)
def test_a_row_is_found_by_its_decoded_segments_and_nothing_else(route, names):
    path = example(route.path)
    for name in names:
        path = TRICKS[name](path)
    path = re.sub(r"^\w+://[^/]*", "", path).partition("?")[0]
    segments = [unquote(segment) for segment in path.split("/")[1:]]
    expected = next((each for each in ROUTES if matches(each.path, segments)), None)
    match = find(normalize_path(path.encode()))
    assert (None if match is None else match.route) == expected


def matches(pattern: str, segments: list[str]) -> bool:
    """Reference implementation of the docstring of Route."""
    parts = pattern.split("/")[1:]
    if parts[-1].endswith(":path}"):
        start = len(parts) - 1
        return segments[:start] == parts[:start] and bool("/".join(segments[start:]))
    return len(parts) == len(segments) and all(
        bool(segment) if part.startswith("{") else part == segment
        for part, segment in zip(parts, segments, strict=True)
    )


async def test_the_metrics_port_has_nothing_but_scrapes_and_health() -> None:
    handler = MetricsHttp(Gate(), make_management())
    server = Server(handler=handler.handle)
    tricks = [trick for name, trick in TRICKS.items() if not name.endswith("/health/live")]
    for route in ROUTES:
        if not route.is_on_metrics_port:
            for trick in tricks:
                assert server.ask("GET", trick(example(route.path))) in (400, 404)
                assert server.ask("POST", trick(example(route.path))) in (400, 404)
    await handler.close()


RPC_TRICKS: dict[str, Trick] = {
    "plain": str,
    "a line feed behind": append("\n"),
    "an escaped line feed behind": append("%0a"),
    "a slash behind": append("/"),
    "a slash in front": lambda method: "/" + method,
    "no slash in front": lambda method: method[1:],
    "in capitals": str.upper,
    "escaped": escaped,
    "a query": append("?a=b"),
    "a space behind": append(" "),
    "NUL behind": append("\0"),
}


@pytest.mark.parametrize("trick", RPC_TRICKS.values(), ids=RPC_TRICKS.keys())
def test_no_spelling_of_a_method_reaches_an_rpc_without_its_scope(trick: Trick) -> None:
    gate = Gate(KEYS)
    for method, path in RPCS.items():
        scope = find(path.encode()).route.scope
        for own, secret in {"": b"", **SECRETS}.items():
            fields = [(b":method", b"POST"), (b":scheme", b"http")]
            fields.append((b":path", trick(method).encode("latin-1")))
            head = make_head([*fields, *([(b"x-api-key", secret)] if secret else [])])
            if trick(method) != method:
                with pytest.raises(Unsupported):
                    gate.admit_rpc(head)
            elif scope in ("open", own):
                assert gate.admit_rpc(head) is RPC_ROUTES[method]
            else:
                with pytest.raises(NotAllowed):
                    gate.admit_rpc(head)
    assert INFERENCE + "ModelInfer" in RPCS
