"""Access control: one gate in front of every route and RPC, before any other code sees a request.

API keys (`key_file`) carry scopes; health checks need none. Without a key file,
everything that the server was started with is allowed. `hosts` restricts the Host header of HTTP
requests on a loopback address, so that a web page cannot reach the server through another name
(DNS rebinding). Without keys, changes that pages of other origins ask for are refused (CSRF).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.config import Restrictions
from penstock.errors import InvalidRequest, NotAllowed, Unsupported
from penstock.protocols import audit_log
from penstock.protocols.audit_log import AdminCall
from penstock.protocols.http_errors import WrongHead
from penstock.protocols.http_reader import CREDENTIALS, MessageHead
from penstock.protocols.restrictions import check_restriction
from penstock.protocols.route import Match, Route, Scope
from penstock.protocols.route_table import RPC_ROUTES, find
from penstock.serving.quotas import Quota

SCOPES = ("infer", "metrics", "shared_memory", "admin")
REFUSALS = (NotAllowed, InvalidRequest, WrongHead)
# Characters of a path in errors and logs.
MAX_PATH = 200
LOOPBACK_HOSTS = frozenset(("localhost", "127.0.0.1", "::1"))
# RFC 9110, section 7.2: a name or an address, and an optional port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[^\s:@/\[\]]+))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class Keys:
    """Scopes by the digest of the secret; the secrets themselves are not kept. `names` are for
    logs."""

    scopes: Mapping[bytes, frozenset[str]] = field(default_factory=dict)
    names: Mapping[bytes, str] = field(default_factory=dict)
    # Only keys with a quota are listed. The core keeps them, also for shards.
    quotas: Mapping[bytes, Quota] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Gate:
    """Checks of keys, scopes and Host headers. `keys` None: no key is needed; they may be replaced
    at any time. `hosts` None: any Host is accepted."""

    keys: Keys | None = None
    hosts: frozenset[str] | None = None
    restrictions: Restrictions = field(default_factory=Restrictions)

    def admit(self, head: MessageHead, is_metrics_port: bool = False) -> Match:
        """Return the route of a message that may pass. Raises NotAllowed or InvalidRequest for its
        Host or key, WrongHead if there is no such path or method."""
        match = find(head.path)
        if match is not None and is_metrics_port and not match.route.is_on_metrics_port:
            match = None
        try:
            return self._check(head, match)
        except REFUSALS as error:
            if match is not None:
                audit_log.record_refusal(match, self.caller_name(head.headers), error)
            raise

    def admit_rpc(self, head: MessageHead) -> Route:
        """Return the route of a gRPC call that may pass. Raises Unsupported if there is no such
        method, NotAllowed or InvalidRequest for its key."""
        path, headers = head.path.decode("latin-1"), head.headers
        route = RPC_ROUTES.get(path)
        if route is None:
            raise Unsupported("Method not found!")
        try:
            self.check_keys(headers, "metadata")
            self.check_scope(route.scope, headers)
            check_restriction(self.restrictions.grpc, route, headers, "protocol")
        except REFUSALS as error:
            if route.is_audited:
                method = path.rpartition("/")[2]
                audit_log.record(AdminCall("grpc", self.caller_name(headers), method), error)
            raise
        return route

    def screen(self, head: MessageHead) -> bool:
        """Tell whether `admit` would accept the message, before its body is read."""
        try:
            self._check(head, find(head.path))
        except REFUSALS:
            return False
        return True

    def _check(self, head: MessageHead, match: Match | None) -> Match:
        self.check_host(head.headers)
        self.check_keys(head.headers)
        if match is None:
            raise no_route(head)
        self.check_scope(match.route.scope, head.headers)
        check_restriction(self.restrictions.http, match.route, head.headers, "API")
        methods, method = match.route.methods, head.method.decode("latin-1")
        if method not in methods:
            text = f"{short_path(head)} takes {' or '.join(methods)}, not {method}"
            raise WrongHead(405, text, f"Allow: {', '.join(methods)}\r\n".encode())
        if match.route.is_audited and method == "POST":
            self.check_origin(head.headers)
        return match

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

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise NotAllowed for a change that a web page of another origin asks for. Browsers name
        the page's origin in such requests; they cannot add a key, so with keys nothing is checked.
        A proxy that changes Host must pass it on as X-Forwarded-Host, which pages cannot set."""
        origin = headers.get(b"origin")
        if self.keys is not None or origin is None:
            return
        own = {headers.get(name, b"").lower() for name in (b"host", b"x-forwarded-host")} - {b""}
        if origin.lower().partition(b"://")[2] not in own:
            text = origin[:MAX_PATH].decode("latin-1")
            raise NotAllowed(f"Origin '{text}': changes are allowed from this server's pages only")

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
            text = "this needs an API key: Authorization: Bearer <key>, or X-API-Key"
            raise NotAllowed(text, needs_key=True)
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


def no_route(head: MessageHead) -> WrongHead:
    return WrongHead(404, f"Not Found: there is no {short_path(head)} here")


def short_path(head: MessageHead) -> str:
    return head.path[:MAX_PATH].decode("latin-1")


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
