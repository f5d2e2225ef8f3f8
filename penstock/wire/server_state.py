"""The JSON of the state route, which the server's own pages read. Pure.

Fields are only ever added. The first `{url}` in a call stands for the address under which the
client reaches the server: the server itself does not know it behind a proxy.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.wire.documented import TensorDescription

# Kinds of forms.
Form = Literal["text", "image", "tensors", "chat", "completion"]


class ExampleCall(msgspec.Struct, frozen=True):
    """A valid request to a model: `body` is its JSON, followed by `num_zeros` bytes that are 0."""

    form: Form
    # Relative to the server's address, percent-encoded.
    path: str
    body: str
    num_zeros: int
    curl: str
    python: str
    # The input that the form's text or image goes to.
    input: str = ""


class ModelLoad(msgspec.Struct, frozen=True):
    """Figures that need the scope `metrics`."""

    num_waiting: int
    num_answered: int
    num_failed: int


class ModelState(msgspec.Struct, frozen=True):
    """One version of a model. A model that could not be loaded has no version."""

    name: str
    version: str
    state: str
    reason: str
    backend: str = ""
    batching: str = ""
    # Empty without an SLO.
    slo: str = ""
    devices: list[str] = []
    num_instances: int = 0
    num_ready: int = 0
    inputs: list[TensorDescription] = []
    outputs: list[TensorDescription] = []
    # Names of the elements, by output.
    labels: dict[str, list[str]] = {}
    call: ExampleCall | None = None
    load: ModelLoad | None = None


class ServerState(msgspec.Struct, frozen=True):
    """The part of the server that the caller may see; `scopes` are those of its API key."""

    name: str
    version: str
    state: Literal["loading", "ready", "not ready", "shutting down"]
    needs_key: bool
    scopes: list[str]
    models: list[ModelState]


class Links(msgspec.Struct, frozen=True):
    """The answer of `/` to clients that are not browsers; paths are relative to it."""

    name: str
    version: str
    docs: str = "docs"
    openapi: str = "openapi.json"
    state: str = "dashboard/state"
    metrics: str = "metrics"
    live: str = "v2/health/live"
    ready: str = "v2/health/ready"
