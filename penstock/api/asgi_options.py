"""Options of `penstock.asgi`: those of `penstock serve` that do not concern ports and processes."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from penstock.api.options import same_flag
from penstock.api.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class AsgiOptions:
    """How a mounted application serves its models."""

    id: str = same_flag(ServeOptions, "id")
    model_control_mode: str = same_flag(ServeOptions, "model_control_mode")
    load_model: tuple[str, ...] = same_flag(ServeOptions, "load_model")
    exit_on_error: bool = same_flag(
        ServeOptions,
        "exit_on_error",
        summary="Fail to start when a model cannot be loaded",
        when="Choose False to serve the other models; the application then does not become ready.",
    )
    gpu_memory_reserve: float = same_flag(ServeOptions, "gpu_memory_reserve")
    on_demand: bool = same_flag(ServeOptions, "on_demand")
    model_memory: str = same_flag(ServeOptions, "model_memory")
    allow_hard_links: bool = same_flag(ServeOptions, "allow_hard_links")
    reload: bool = same_flag(ServeOptions, "reload")
    api_keys: str = same_flag(
        ServeOptions,
        "api_keys",
        when="Give it where the host application does not authenticate its clients. Scopes: infer, "
        "metrics, shared_memory, admin.",
    )
    allow_host: tuple[str, ...] = same_flag(
        ServeOptions,
        "allow_host",
        summary="Host header to accept; without one, all are",
        when="Give it where the host application does not check the header. Repeatable.",
    )
    shared_memory: bool = same_flag(ServeOptions, "shared_memory")
    max_body_bytes: int = same_flag(ServeOptions, "max_body_bytes")
    max_json_bytes: int = same_flag(ServeOptions, "max_json_bytes")
    drain_s: float = same_flag(
        ServeOptions,
        "drain_s",
        summary="Seconds for requests in flight at shutdown",
        when="Raise it for slow models, and keep it below the time after which the host's process "
        "is killed.",
    )
    log_requests: bool = same_flag(ServeOptions, "log_requests")

    @property
    def served(self) -> ServeOptions:
        """The options of a server with one shard that listens nowhere."""
        return ServeOptions(**asdict(self), shards=1, grpc=False, metrics=False)
