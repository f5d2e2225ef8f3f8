"""Who may do what: one gate in front of every route and RPC, before anything else looks at a
request.

Keys come from a TOML file and carry scopes; health is open to all. Without keys everything is
allowed that the server was started for. An HTTP request through the loopback address must also name
it as its Host, so that a page in a browser cannot reach the server by another name.

    [[key]]
    name = "team-a"
    secret = "at least sixteen characters"
    scopes = ["infer"]            # infer, metrics, admin
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from penstock.errors import ConfigError, NotAllowed

Scope = Literal["open", "infer", "metrics", "admin"]
SCOPES = ("infer", "metrics", "admin")
FIELDS = ("name", "secret", "scopes")
EXAMPLE = '  [[key]]\n  secret = "at least 16 characters"\n  scopes = ["infer"]'
MIN_SECRET = 16
# They travel to a front in one frame.
MAX_KEYS = 4096
LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
_HEALTH = re.compile(r"/v2/health/(live|ready)")
_EXPLAIN = re.compile(r"/v2/models/[^/]+(/versions/[^/]+)?/explain")
_ADMIN = re.compile(
    r"/v2/((repository|trace|logging|(system|cuda)sharedmemory)(/.*)?"
    r"|models/[^/]+(/versions/[^/]+)?/trace/setting)"
)
# What each RPC needs: the same as the route of HTTP that does its work.
_RPCS: Mapping[str, Mapping[Scope, tuple[str, ...]]] = {
    "inference.GRPCInferenceService": {
        "open": ("ServerLive", "ServerReady"),
        "infer": (
            "ServerMetadata",
            "ModelReady",
            "ModelMetadata",
            "ModelConfig",
            "ModelStatistics",
            "ModelInfer",
            "ModelStreamInfer",
        ),
        "admin": (
            "RepositoryIndex",
            "RepositoryModelLoad",
            "RepositoryModelUnload",
            "SystemSharedMemoryStatus",
            "SystemSharedMemoryRegister",
            "SystemSharedMemoryUnregister",
            "CudaSharedMemoryStatus",
            "CudaSharedMemoryRegister",
            "CudaSharedMemoryUnregister",
            "TraceSetting",
            "LogSettings",
        ),
    },
    # Asked about a model it needs what ModelReady does (`v2_grpc`).
    "grpc.health.v1.Health": {"open": ("Check", "Watch")},
}
RPC_SCOPES: Mapping[str, Scope] = {
    f"/{service}/{name}": scope
    for service, scopes in _RPCS.items()
    for scope, names in scopes.items()
    for name in names
}


@dataclass(frozen=True, slots=True)
class Keys:
    """Scopes by the digest of the secret; the secrets themselves are not kept."""

    scopes: Mapping[bytes, frozenset[str]] = field(default_factory=dict)

    def of(self, secret: bytes) -> frozenset[str]:
        return self.scopes.get(_digest(secret), frozenset())


class Gate:
    """`keys` None: nobody needs one. `hosts` None: any Host will do."""

    def __init__(self, keys: Keys | None = None, hosts: frozenset[str] | None = None) -> None:
        self.keys = keys
        self.hosts = hosts

    def check(self, path: str, headers: Mapping[bytes, bytes]) -> None:
        """NotAllowed, saying what was missing."""
        self._check_host(headers)
        self._check_key(scope_of(path), headers)

    def check_rpc(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """The same for a gRPC call; what is not known is inference here too."""
        if self.keys is None:
            return
        self._check_key(RPC_SCOPES.get(method, "infer"), _headers(metadata))

    def caller_digest(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Digest of the API key of a message, to tell callers apart; empty where none is needed."""
        secret = None if self.keys is None else secret_of(headers)
        return b"" if secret is None else _digest(secret)

    def rpc_caller_digest(self, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
        """The same for a gRPC call."""
        return b"" if self.keys is None else self.caller_digest(_headers(metadata))

    def _check_key(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        if self.keys is None or scope == "open":
            return
        secret = secret_of(headers)
        if secret is None:
            raise NotAllowed(
                "this needs an API key: Authorization: Bearer <key>, or X-API-Key", needs_key=True
            )
        scopes = self.keys.of(secret)
        if not scopes:
            raise NotAllowed("the API key is not known", needs_key=True)
        if scope not in scopes:
            raise NotAllowed(f"This protocol is restricted: the API key has no scope '{scope}'")

    def _check_host(self, headers: Mapping[bytes, bytes]) -> None:
        if self.hosts is None:
            return
        given = headers.get(b"host", b"").decode("latin-1")
        name = given.rpartition("]")[0].lstrip("[") if given.startswith("[") else given
        if not given.startswith("["):
            name = given.rpartition(":")[0] if ":" in given else given
        if given and name.lower() not in self.hosts:
            raise NotAllowed(f"Host '{given}' is not served here; --allow-host adds one")


def scope_of(path: str) -> Scope:
    """What a path needs. Whatever is not known to be open, metrics or admin is inference."""
    if _HEALTH.fullmatch(path):
        return "open"
    if path == "/metrics" or path.startswith("/metrics/") or _EXPLAIN.fullmatch(path):
        return "metrics"
    if _ADMIN.fullmatch(path):
        return "admin"
    return "infer"


def read_keys(path: Path) -> Keys:
    """The key file, with every problem reported."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: nested too deeply"]) from None
    entries = content.get("key")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise ConfigError([f"{path}: holds no [[key]]; expected for each key\n{EXAMPLE}"])
    if len(entries) > MAX_KEYS:
        raise ConfigError([f"{path}: {len(entries)} keys; at most {MAX_KEYS} can be held"])
    strange = [name for name in content if name != "key"]
    problems = [f"{path}: {name}: no such field; expected [[key]]" for name in strange]
    first: dict[bytes, int] = {}
    scopes: dict[bytes, frozenset[str]] = {}
    for index, entry in enumerate(entries):
        found = _key_problems(entry)
        if not found:
            digest = _digest(entry["secret"].encode())
            scopes[digest] = frozenset(entry["scopes"])
            if first.setdefault(digest, index) != index:
                found.append(f".secret: the same as that of key[{first[digest]}]")
        problems += [f"{path}: key[{index}]{problem}" for problem in found]
    if problems:
        raise ConfigError(problems)
    return Keys(scopes)


def _key_problems(entry: Mapping[str, object]) -> list[str]:
    """What is wrong with one key, without its secret."""
    expected = ", ".join(FIELDS)
    problems = [
        f".{name}: no such field; expected {expected}" for name in entry if name not in FIELDS
    ]
    if not isinstance(entry.get("name", ""), str):
        problems.append(".name: expected a string")
    secret, wanted = entry.get("secret"), entry.get("scopes")
    if not isinstance(secret, str) or len(secret) < MIN_SECRET or not secret.isascii():
        problems.append(f".secret: at least {MIN_SECRET} ASCII characters are needed")
    wrong = [w for w in wanted if w not in SCOPES] if isinstance(wanted, list) else []
    if not isinstance(wanted, list) or not wanted or wrong:
        told = "".join(f"; {each!r:.40} is none" for each in wrong)
        problems.append(f".scopes: expected a list of some of {', '.join(SCOPES)}{told}")
    return problems


def secret_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The key that came with a message."""
    given = headers.get(b"authorization")
    if given is not None and given[:7].lower() == b"bearer ":
        return given[7:].strip()
    return headers.get(b"x-api-key")


def _headers(metadata: Iterable[tuple[str, str | bytes]]) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in metadata
    }


def _digest(secret: bytes) -> bytes:
    """Looking a digest up takes the same time however much of the secret was right."""
    return hashlib.sha256(secret).digest()
