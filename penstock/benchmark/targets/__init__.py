"""Targets of the load. A target lives in one process; `kinds.open_target` makes it from a spec.

A target knows its protocol, but nothing of pacing, statistics or other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from penstock.benchmark.exchange import TimedExchange
from penstock.data import RequestForm, Sample


class TargetSpec(msgspec.Struct, frozen=True):
    """Everything the command line says about a target; sent to the generator processes."""

    # http://host:port/v2/models/NAME[/versions/N], grpc://host:port/NAME[/N], openai+http://…/v1,
    # any other http:// URL, or the path of a model or repository.
    address: str
    # For addresses that do not name the model.
    model: str = ""
    version: str = ""
    # v2 over HTTP: send binary tensors rather than JSON numbers.
    is_binary: bool = True
    # v2 over HTTP: inputs are in memory that each generator process shares with the server.
    shared_memory: bool = False
    # OpenAI: chat or completions.
    api: str = "chat"
    # A plain URL: method, headers and a body; {name} in the body is a field of the input.
    method: str = "POST"
    headers: dict[str, str] = {}
    body: str = ""
    api_key: str = ""
    timeout_s: float = 60.0
    # Most connections at once; an open loop opens them on demand.
    max_connections: int = 1024
    # Every n-th request asks a Penstock server for its timings; 0: none does.
    timing_every: int = 64
    # OpenAI: extra fields of the request, as JSON.
    extra: str = ""
    # Whether answers are read, to compare them with recorded ones.
    reads_answers: bool = False


class Description(msgspec.Struct):
    """The measured target, as it describes itself."""

    # "v2 HTTP, binary", "v2 HTTP, inputs in shared memory", "v2 gRPC", "in process", "HTTP", …
    protocol: str
    address: str
    model: str = ""
    version: str = ""
    # "penstock 0.1.0", "triton 2.51.0", or "" where the server does not say.
    server: str = ""
    backend: str = ""
    # None: unknown.
    num_instances: int | None = None
    max_batch_size: int | None = None
    # sha256 of the served configuration, and of the model's files where they are readable.
    config_digest: str = ""
    model_digest: str = ""
    # Whether requests named inputs in shared memory instead of carrying them.
    shared_memory: bool = False


class Counters(msgspec.Struct, frozen=True):
    """A server's own counters since it started, from v2 `/stats`. Times are nanosecond totals."""

    num_success: int
    num_fail: int
    num_inferences: int
    num_executions: int
    success_ns: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    # The two waits of a Penstock queue; None for other servers.
    batch_wait_ns: int | None = None
    instance_wait_ns: int | None = None
    # Execution time summed over executions: how busy the instances were. None: unknown.
    busy_ns: int | None = None
    # Of the models that an ensemble runs, by name, in the order of its steps. They count all their
    # requests, also those of other clients.
    members: dict[str, Counters] = {}

    @property
    def numbers(self) -> tuple[int | None, ...]:
        """All fields but the members."""
        values: tuple[int | None, ...] = msgspec.structs.astuple(self)[:-1]
        return values


def combine(counts: Sequence[Counters], fold: Callable[[Sequence[int]], int]) -> Counters:
    """Fold counters field by field; a field, or a member, that one of them lacks is unknown."""
    columns = zip(*(each.numbers for each in counts), strict=True)
    folded: list[Any] = [None if None in column else fold(column) for column in columns]
    names = [name for name in counts[0].members if all(name in each.members for each in counts)]
    members = {name: combine([each.members[name] for each in counts], fold) for name in names}
    return msgspec.structs.replace(Counters(*folded), members=members)


class Target(Protocol):
    """Used from one event loop only."""

    # Open connections of this process, and how often an exchange found all of them busy.
    @property
    def num_connections(self) -> int: ...
    @property
    def num_waited(self) -> int: ...

    # Load time of an in-process model.
    @property
    def load_s(self) -> float | None: ...

    async def describe(self) -> tuple[Description, RequestForm]:
        """Ask the server; ConfigError if there is no server or no such model."""

    async def counters(self) -> Counters | None:
        """Return the server's counters; None where it has none."""

    async def open(self, num_connections: int) -> None:
        """After `describe`, prepare for so many concurrent exchanges; ConfigError if it fails."""

    def encode(self, sample: Sample) -> Any:
        """Return an item for `TimedExchange.item`; ConfigError when the input does not fit. With
        `TargetSpec.shared_memory`, call it before the first `open`, which registers the memory."""

    def send(self, exchange: TimedExchange) -> None:
        """Send without raising or blocking. If all connections are busy, the exchange is queued,
        and `sent` is when it left. After a lost connection the next exchange makes a new one."""

    async def cancel(self) -> None:
        """Fail exchanges in flight with "cancelled"; `open` makes the target usable again."""

    async def close(self) -> None:
        """Cancel, and leave nothing of this process on the server."""
