"""Who may do what: one gate in front of every route and RPC, before anything else looks at a
request.

Keys come from a TOML file and carry scopes; health is open to all. Without keys everything is
allowed that the server was started for. An HTTP request through the loopback address must also name
it as its Host, so that a page in a browser cannot reach the server by another name.

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
from penstock.protocols.route_table import RPC_SCOPES, Scope
from penstock.serving.quotas import Quota

SCOPES = ("infer", "metrics", "admin")
# Headers that may hold a key.
CREDENTIALS = (b"authorization", b"x-api-key")
EXAMPLE = '  [[key]]\n  secret = "at least 16 characters"\n  scopes = ["infer"]'
MIN_SECRET = 16
# They travel to a front in one frame.
MAX_KEYS = 4096
# Quotas and the largest number that each may be.
QUOTAS = {"requests_per_s": 1e9, "tokens_per_s": 1e9, "queue_share": 1.0}
FIELDS = ("name", "secret", "scopes", *QUOTAS)
LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
# RFC 9110, section 7.2: a name or an address, and perhaps a port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[^\s:@/\[\]]+))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class Keys:
    """Scopes by the digest of the secret; the secrets themselves are not kept. `names` are for
    logs; front processes have none."""

    scopes: Mapping[bytes, frozenset[str]] = field(default_factory=dict)
    names: Mapping[bytes, str] = field(default_factory=dict)
    # Only keys with a quota are listed. The core enforces them; fronts do not.
    quotas: Mapping[bytes, Quota] = field(default_factory=dict)

    def of(self, secret: bytes) -> frozenset[str]:
        return self.scopes.get(digest_secret(secret), frozenset())


class Gate:
    """`keys` None: no key is needed; they may be replaced at any time. `hosts` None: any Host is
    accepted."""

    def __init__(self, keys: Keys | None = None, hosts: frozenset[str] | None = None) -> None:
        self.keys = keys
        self.hosts = hosts

    def caller(self, headers: Mapping[bytes, bytes]) -> bytes:
        """Digest of the API key of a message, to tell callers apart; empty if none is needed."""
        return b"" if self.keys is None else caller_of(headers)

    def caller_name(self, headers: Mapping[bytes, bytes]) -> str:
        """The name of a message's caller, for logs."""
        return self.name_of(self.caller(headers))

    def name_of(self, caller: bytes) -> str:
        """Name a caller for logs."""
        if self.keys is None or not caller:
            return "anonymous"
        return self.keys.names.get(caller) or f"key {caller.hex()[:8]}"

    def check_host(self, headers: Mapping[bytes, bytes]) -> None:
        """NotAllowed for a Host that this server does not have. Only HTTP/1.0 may send none, which
        no browser speaks."""
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

    def check_keys(self, headers: Mapping[bytes, bytes]) -> None:
        """InvalidRequest for a key that is given twice; `http` joins such headers by a line feed.
        Which of them counts would be a guess."""
        for name in CREDENTIALS:
            if b"\n" in headers.get(name, b""):
                raise InvalidRequest(f"the header {name.decode()} is given twice")

    def check_scope(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """NotAllowed, saying what was missing."""
        if self.keys is None or scope == "open":
            return
        caller = caller_of(headers)
        if not caller:
            raise NotAllowed(
                "this needs an API key: Authorization: Bearer <key>, or X-API-Key", needs_key=True
            )
        self.check_caller(scope, caller)

    def check_caller(self, scope: Scope, caller: bytes) -> None:
        """The same for a key that was admitted before: NotAllowed once it is revoked."""
        if self.keys is None:
            return
        scopes = self.keys.scopes.get(caller)
        if not scopes:
            raise NotAllowed("the API key is not known", needs_key=True)
        if scope not in scopes:
            raise NotAllowed(f"This protocol is restricted: the API key has no scope '{scope}'")

    def check_rpc(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """The same for a gRPC call; InvalidRequest if it has several keys. False: there is no such
        method, for anybody."""
        scope = RPC_SCOPES.get(method)
        if scope is None:
            return False
        self.check_scope(scope, headers_of(metadata))
        return True

    def rpc_caller_name(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The name of a gRPC call's caller, for logs."""
        try:
            return self.caller_name(headers_of(metadata))
        except InvalidRequest:
            return self.name_of(b"")


class KeyFile:
    """The key file of a running server, read again when it has changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, ...] | None = None

    def read(self) -> Keys:
        """ConfigError with every problem."""
        self._stamp = file_stamp(self._path)
        return read_keys(self._path)

    def read_if_changed(self) -> Keys | None:
        """None: it has not changed. ConfigError once for each change that cannot be used."""
        return None if file_stamp(self._path) == self._stamp else self.read()


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Identity of a file's content: differs after every change. None if the file is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def headers_of(metadata: Iterable[tuple[str, str | bytes]]) -> dict[bytes, bytes]:
    """The metadata of a gRPC call as headers. InvalidRequest for a key that is given twice, which
    HTTP refuses too: which of them counts would be a guess."""
    headers: dict[bytes, bytes] = {}
    for name, value in metadata:
        header = name.encode()
        if header in headers and header in CREDENTIALS:
            raise InvalidRequest(f"the metadata {name} is given twice")
        headers[header] = value if isinstance(value, bytes) else value.encode()
    return headers


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
    """The key that came with a message; None also if there are several."""
    if any(b"\n" in headers.get(name, b"") for name in CREDENTIALS):
        return None
    given = headers.get(b"authorization")
    if given is not None and given[:7].lower() == b"bearer ":
        return given[7:].strip()
    return headers.get(b"x-api-key")


def caller_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Digest of the key that came with a message; empty if none did."""
    secret = secret_of(headers)
    return b"" if secret is None else digest_secret(secret)


def digest_secret(secret: bytes) -> bytes:
    """Looking a digest up takes the same time however much of the secret was right."""
    return hashlib.sha256(secret).digest()
