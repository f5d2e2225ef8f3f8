"""Access control: one gate in front of every route and RPC, before any other code sees a request.

API keys come from a TOML file and carry scopes; health checks need none. Without a key file,
everything that the server was started with is allowed. `hosts` restricts the Host header of HTTP
requests on a loopback address, so that a web page cannot reach the server through another name
(DNS rebinding).

    [[key]]
    name = "team-a"
    secret = "at least sixteen characters"
    scopes = ["infer"]            # infer, metrics, admin
    requests_per_s = 100          # optional, as the next two; of all models together
    tokens_per_s = 5000           # of language models, prompts and answers together
    queue_share = 0.25            # of the requests that one model may hold
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from penstock.errors import ConfigError, InvalidRequest, NotAllowed
from penstock.protocols.route_table import RPC_ROUTES, Scope
from penstock.serving.quotas import Quota

Metadata = Iterable[tuple[str, str | bytes]]
SCOPES = ("infer", "metrics", "admin")
# Headers that may hold a key.
CREDENTIALS = (b"authorization", b"x-api-key")
EXAMPLE = '  [[key]]\n  secret = "at least 16 characters"\n  scopes = ["infer"]'
MIN_SECRET = 16
# All keys go to a front process in one frame.
MAX_KEYS = 4096
# Quotas and the largest value of each.
QUOTAS = {"requests_per_s": 1e9, "tokens_per_s": 1e9, "queue_share": 1.0}
FIELDS = ("name", "secret", "scopes", *QUOTAS)
LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
# RFC 9110, section 7.2: a name or an address, and an optional port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[^\s:@/\[\]]+))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class Keys:
    """Scopes by the digest of the secret; the secrets themselves are not kept. `names` are for
    logs; front processes have none."""

    scopes: Mapping[bytes, frozenset[str]] = field(default_factory=dict)
    names: Mapping[bytes, str] = field(default_factory=dict)
    # Only keys with a quota are listed. The core enforces them; fronts do not.
    quotas: Mapping[bytes, Quota] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Gate:
    """Checks of keys, scopes and Host headers. `keys` None: no key is needed; they may be replaced
    at any time. `hosts` None: any Host is accepted."""

    keys: Keys | None = None
    hosts: frozenset[str] | None = None

    def caller(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Return the digest of a message's API key, which identifies the caller; empty if it has no
        key, or if the server needs none."""
        secret = None if self.keys is None else secret_of(headers)
        return b"" if secret is None else digest_secret(secret)

    def caller_name(self, headers: Mapping[bytes, bytes]) -> str:
        return self.name_of(self.caller(headers))

    def name_of(self, caller: bytes) -> str:
        """Return the name of a caller, for logs."""
        if self.keys is None or not caller:
            return "anonymous"
        return self.keys.names.get(caller) or f"key {caller.hex()[:8]}"

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise NotAllowed for a Host that this server does not serve. A missing Host passes: only
        HTTP/1.0 allows that, and no browser sends HTTP/1.0."""
        if self.hosts is None:
            return
        given = headers.get(b"host")
        if given is None:
            return
        text = given.decode("latin-1")
        match = _HOST.fullmatch(text)
        name = "" if match is None else match["address"] or match["name"]
        if name.lower() not in self.hosts:
            raise NotAllowed(f"Host '{text}' is not served here; add it with --allow-host")

    def check_keys(self, headers: Mapping[bytes, bytes], what: str = "header") -> None:
        """Raise InvalidRequest for a key that is given twice, which is ambiguous. Repeated keys are
        joined by a line feed, which no value of a header holds."""
        for name in CREDENTIALS:
            if b"\n" in headers.get(name, b""):
                raise InvalidRequest(f"the {what} {name.decode()} is given twice")

    def check_scope(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise NotAllowed, with what is missing, unless the message's key has this scope."""
        if self.keys is None or scope == "open":
            return
        caller = self.caller(headers)
        if not caller:
            raise NotAllowed(
                "this needs an API key: Authorization: Bearer <key>, or X-API-Key", needs_key=True
            )
        self.check_caller(scope, caller)

    def scopes_of(self, headers: Mapping[bytes, bytes]) -> list[str]:
        """Return the scopes of a message's key; all of them if no key is needed."""
        if self.keys is None:
            return list(SCOPES)
        found = self.keys.scopes.get(self.caller(headers), frozenset())
        return [scope for scope in SCOPES if scope in found]

    def check_caller(self, scope: Scope, caller: bytes) -> None:
        """Like `check_scope`, for the digest of a key; NotAllowed once the key is revoked."""
        if self.keys is None:
            return
        scopes = self.keys.scopes.get(caller)
        if not scopes:
            raise NotAllowed("the API key is not known", needs_key=True)
        if scope not in scopes:
            raise NotAllowed(f"This protocol is restricted: the API key has no scope '{scope}'")

    def check_rpc(self, method: str, metadata: Metadata) -> bool:
        """Like `check_scope`, for a gRPC call; InvalidRequest if a key is given twice. Return False
        if there is no such method."""
        route = RPC_ROUTES.get(method)
        if route is None:
            return False
        headers = headers_of(metadata)
        self.check_keys(headers, "metadata")
        self.check_scope(route.scope, headers)
        return True


class KeyFile:
    """The key file of a running server, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None

    def read(self) -> Keys:
        self._stamp = file_stamp(self._path)
        return read_keys(self._path)

    def read_if_changed(self) -> Keys | None:
        """Return the new keys; None if the file has not changed. ConfigError once for each unusable
        change."""
        return None if file_stamp(self._path) == self._stamp else self.read()


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Return a stamp that changes with the file's content; None if the file is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def headers_of(metadata: Metadata) -> dict[bytes, bytes]:
    """Return the metadata of a gRPC call as headers, with repeated keys joined."""
    headers: dict[bytes, bytes] = {}
    for name, given in metadata:
        header, value = name.encode(), given if isinstance(given, bytes) else given.encode()
        is_repeated = header in headers and header in CREDENTIALS
        headers[header] = headers[header] + b"\n" + value if is_repeated else value
    return headers


def read_keys(path: Path) -> Keys:
    """Read a key file. ConfigError lists every problem."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: {error}"]) from None
    except RecursionError:
        raise ConfigError([f"{path}: nested too deeply"]) from None
    entries = content.get("key")
    is_list = isinstance(entries, list) and all(isinstance(each, dict) for each in entries)
    if not is_list or not entries:
        raise ConfigError([f"{path}: holds no [[key]]; expected for each key\n{EXAMPLE}"])
    if len(entries) > MAX_KEYS:
        raise ConfigError([f"{path}: {len(entries)} keys; at most {MAX_KEYS} can be held"])
    strange = [name for name in content if name != "key"]
    problems = [f"{path}: {name}: no such field; expected [[key]]" for name in strange]
    first: dict[bytes, int] = {}
    scopes: dict[bytes, frozenset[str]] = {}
    names: dict[bytes, str] = {}
    quotas: dict[bytes, Quota] = {}
    for index, entry in enumerate(entries):
        found = _key_problems(entry)
        if not found:
            digest = digest_secret(entry["secret"].encode())
            scopes[digest] = frozenset(entry["scopes"])
            names[digest] = entry.get("name", "")
            quotas[digest] = Quota(**{name: entry.get(name) for name in QUOTAS})
            if first.setdefault(digest, index) != index:
                found.append(f".secret: the same as that of key[{first[digest]}]")
        problems += [f"{path}: key[{index}]{problem}" for problem in found]
    if problems:
        raise ConfigError(problems)
    return Keys(scopes, names, {key: each for key, each in quotas.items() if each != Quota()})


def _key_problems(entry: Mapping[str, object]) -> list[str]:
    """Return the problems of one key; they never quote its secret."""
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
    problems += [
        f".{name}: expected a number above 0, up to {most:g}"
        for name, most in QUOTAS.items()
        if not _is_number(entry.get(name, most), most)
    ]
    return problems


def _is_number(value: object, limit: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < cast(float, value) <= limit


def secret_of(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the API key of a message; None if it has no key, or several in one header."""
    if any(b"\n" in headers.get(name, b"") for name in CREDENTIALS):
        return None
    given = headers.get(b"authorization")
    if given is not None and given[:7].lower() == b"bearer ":
        return given[7:].strip()
    return headers.get(b"x-api-key")


def digest_secret(secret: bytes) -> bytes:
    """Return the SHA-256 of a secret. Keys are looked up by it, so that lookup times do not reveal
    how much of a guessed secret is right."""
    return hashlib.sha256(secret).digest()
