"""Whom the load is for. A target lives in one process; `open_target` makes it from a spec.

A target knows a protocol. It knows nothing of pacing, of statistics or of other processes.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from penstock.benchmark.exchange import Exchange
from penstock.benchmark.inputs import RequestForm, Sample


class TargetSpec(msgspec.Struct, frozen=True):
    """Everything the command line says about a target; travels to the generator processes."""

    # http://host:port/v2/models/NAME[/versions/N], grpc://host:port/NAME[/N], openai+http://…/v1,
    # any other http:// URL, or the path of a model or repository.
    address: str
    # For addresses that do not name the model themselves.
    model: str = ""
    version: str = ""
    # v2 over HTTP: binary tensors, or JSON numbers.
    is_binary: bool = True
    # Rows in each request, for models with a batch dimension.
    batch_size: int = 1
    # OpenAI: chat or completions.
    api: str = "chat"
    # A plain URL: method, headers and a body in which {name} stands for a field of the input.
    method: str = "POST"
    headers: dict[str, str] = {}
    body: str = ""
    api_key: str = ""
    timeout_s: float = 60.0
    # Most connections at once; an open loop opens them as it needs them.
    max_connections: int = 1024
    # Every n-th request asks a Penstock server where its time went. 0: none does.
    timing_every: int = 64
    # OpenAI: further fields of the request, as JSON.
    extra: str = ""


class Description(msgspec.Struct):
    """What is measured, as far as the target itself says it."""

    protocol: str  # "v2 HTTP, binary", "v2 gRPC", "in process", "OpenAI chat", "HTTP"
    address: str
    model: str = ""
    version: str = ""
    # "penstock 0.1.0", "triton 2.51.0", "" where nobody says.
    server: str = ""
    backend: str = ""
    # None: unknown.
    num_instances: int | None = None
    max_batch_size: int | None = None
    # sha256 of the served configuration, and of the model's files where they can be seen.
    config_digest: str = ""
    model_digest: str = ""


class Counters(msgspec.Struct, frozen=True):
    """A server's own account since it started, from v2 `/stats`. Times in nanoseconds, summed
    over requests."""

    num_success: int
    num_fail: int
    num_inferences: int
    num_executions: int
    success_ns: int
    queue_ns: int
    compute_input_ns: int
    compute_infer_ns: int
    compute_output_ns: int
    # The two waits of a Penstock queue; None elsewhere.
    batch_wait_ns: int | None = None
    instance_wait_ns: int | None = None
    # Sum over executions of the time each took; how busy the instances were. None: not known.
    busy_ns: int | None = None


class Target(Protocol):
    """Used from one event loop only."""

    async def describe(self) -> tuple[Description, RequestForm]:
        """Ask the server; ConfigError in words when there is none, or no such model."""
        ...

    async def counters(self) -> Counters | None:
        """None where the server keeps none."""
        ...

    async def open(self, num_connections: int) -> None:
        """Make ready for so many exchanges at once; ConfigError in words when that fails."""
        ...

    def encode(self, sample: Sample) -> Any:
        """An item for `Exchange.item`; ConfigError when the input does not fit."""
        ...

    def send(self, exchange: Exchange) -> None:
        """Never raises and never blocks. When all connections are busy it waits its turn, and
        `sent` is when it left. After a lost connection the next exchange makes a new one."""
        ...

    async def close(self) -> None:
        """What is still under way fails with "cancelled"."""
        ...


def open_target(spec: TargetSpec) -> Target:
    """ConfigError for an address of no known kind."""
    raise NotImplementedError
