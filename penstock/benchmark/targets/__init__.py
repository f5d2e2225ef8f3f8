"""Whom the load is for. A target lives in one process; `open_target` makes it from a spec.

A target knows a protocol. It knows nothing of pacing, of statistics or of other processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.benchmark.exchange import Exchange
from penstock.benchmark.inputs import RequestForm, Sample
from penstock.benchmark.targets.http_messages import hide_password
from penstock.errors import CommandLineError, ConfigError

ADDRESSES = (
    "http://host:port/v2/models/NAME, grpc://host:port/NAME, openai+http://host:port/v1, "
    "another http:// URL, or the folder of a model or repository, or a GGUF file"
)
# Module and what makes one of a spec, by kind.
CLASSES: Mapping[str, tuple[str, str]] = {
    "v2 HTTP": ("penstock.benchmark.targets.v2_target", "V2Http"),
    "v2 gRPC": ("penstock.benchmark.targets.grpc_target", "GrpcTarget"),
    "in process": ("penstock.benchmark.targets.path_target", "open_path"),
    "OpenAI": ("penstock.benchmark.targets.openai", "OpenAI"),
    "HTTP": ("penstock.benchmark.targets.plain", "PlainHttp"),
}


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

    # Of this process now, and how often all of them were busy so far; none where nothing connects.
    @property
    def num_connections(self) -> int: ...
    @property
    def num_waited(self) -> int: ...

    # How long loading took, where the model is in this process.
    @property
    def load_s(self) -> float | None: ...

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
    """ConfigError for an address of no known kind. Only the module of its kind is loaded."""
    module, name = CLASSES[kind_of(spec)]
    target: Target = getattr(importlib.import_module(module), name)(spec)
    return target


def kind_of(spec: TargetSpec) -> str:
    """One of CLASSES."""
    scheme, is_url, rest = spec.address.partition("://")
    if not is_url:
        if not spec.address or not Path(spec.address).exists():
            where = hide_password(spec.address)
            raise ConfigError([f"{where}: there is no such folder; expected {ADDRESSES}"])
        return "in process"
    if scheme in ("grpc", "grpcs"):
        return "v2 gRPC"
    if scheme in ("openai+http", "openai+https"):
        return "OpenAI"
    if scheme in ("http", "https"):
        return _kind_of_path(spec, "/" + rest.partition("/")[2].partition("?")[0])
    where = hide_password(spec.address)
    raise CommandLineError([f"{where}: unknown protocol '{scheme}'; expected {ADDRESSES}"])


def _kind_of_path(spec: TargetSpec, path: str) -> str:
    """A body of one's own makes any URL a plain one."""
    if spec.body:
        return "HTTP"
    if path.endswith(("/v1/chat/completions", "/v1/completions")):
        return "OpenAI"
    if spec.model or "/v2/models/" in path or path.rstrip("/").endswith("/v2"):
        return "v2 HTTP"
    return "HTTP"
