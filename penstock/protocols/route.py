"""A row of the route table, and how a path finds its row. Pure; `route_table` has the rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import unquote

import msgspec

Scope = Literal["open", "infer", "metrics", "shared_memory", "admin"]
Methods = tuple[str, ...]
Body = type[msgspec.Struct] | None
_PARAMETER = re.compile(r"\{(\w+)(:path)?\}")


@dataclass(frozen=True, slots=True)
class Route:
    """One row. `{name}` in a path is one non-empty segment, `{name:path}` at its end one or more.
    `rpcs` are the equivalent gRPC methods, which need the same scope."""

    methods: Methods
    path: str
    scope: Scope
    handler: str
    # Purpose in a few words.
    summary: str = ""
    # The JSON of requests and of answers; None: no body, or not JSON.
    body: Body = None
    answer: object = None
    # The content type of an answer that is not JSON.
    media: str = ""
    rpcs: tuple[str, ...] = ()
    is_on_metrics_port: bool = False
    _segments: tuple[bytes | None, ...] = field(init=False, repr=False)
    _names: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        parts = self.path.split("/")[1:]
        matches = [_PARAMETER.fullmatch(part) for part in parts]
        segments = tuple(
            None if match else part.encode() for part, match in zip(parts, matches, strict=True)
        )
        object.__setattr__(self, "_segments", segments)
        object.__setattr__(self, "_names", tuple(match[1] for match in matches if match))

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def is_audited(self) -> bool:
        """Whether calls are written to the audit log."""
        return self.scope == "admin" or (self.scope == "shared_memory" and "POST" in self.methods)

    @property
    def takes_rest(self) -> bool:
        return self.path.endswith(":path}")

    def match(self, given: list[bytes]) -> Match | None:
        """Match segments of a path, still percent-encoded; there must be as many as in this row."""
        values = []
        for expected, segment in zip(self._segments, given, strict=True):
            if expected is None and segment:
                values.append(unquote(segment.decode("latin-1")))
            elif expected != segment:
                return None
        return Match(self, dict(zip(self._names, values, strict=True)))


@dataclass(frozen=True, slots=True)
class Match:
    """A row, and the decoded values of its path parameters."""

    route: Route
    names: Mapping[str, str]

    @property
    def model_name(self) -> str:
        return self.names.get("name", "")

    @property
    def model_version(self) -> str:
        return self.names.get("version", "")

    @property
    def region(self) -> str:
        return self.names.get("region", "")


class RouteTable:
    """Rows by their paths. The first matching row wins: literal segments go before parameters."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._by_num_segments: dict[int, list[Route]] = {}
        for route in routes:
            if not route.takes_rest:
                self._by_num_segments.setdefault(route.num_segments, []).append(route)
        self._taking_rest = tuple(route for route in routes if route.takes_rest)

    def find(self, path: bytes) -> Match | None:
        """Return the row for a path in the form of `http_reader.MessageHead.path`, or None."""
        given = path.split(b"/")[1:]
        for route in self._by_num_segments.get(len(given), ()):
            if (match := route.match(given)) is not None:
                return match
        for route in self._taking_rest:
            start = route.num_segments - 1
            if len(given) > start:
                rest = b"/".join(given[start:])
                if (match := route.match([*given[:start], rest])) is not None:
                    return match
        return None
