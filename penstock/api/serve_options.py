"""Options of `penstock.serve` and `penstock serve`, and the server's configuration made of them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import Flag, option
from penstock.config import GPU_MEMORY_RESERVE, GrpcConfig, HttpLimits, ServerConfig, TlsConfig
from penstock.system import logs

LISTEN, MODELS, SECURITY = "Where to listen", "Which models", "Who may ask"
LIMITS, LOGS = "Limits", "Logs"
PORTS = (0, 65535)
BYTES = (1 << 10, 1 << 30)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a model or repository is served."""

    host: str = option(
        "127.0.0.1",
        Flag(
            LISTEN,
            "Address to listen on",
            "Change it so that other machines can connect; this needs --api-keys or --insecure.",
            metavar="ADDRESS",
        ),
    )
    http_port: int = option(
        8000,
        Flag(
            LISTEN,
            "Port for HTTP",
            "Change it when the port is taken; 0 picks a free one and prints it.",
            metavar="PORT",
            low=PORTS[0],
            high=PORTS[1],
        ),
    )
    grpc_port: int = option(
        8001,
        Flag(
            LISTEN,
            "Port for gRPC",
            "Change it when the port is taken; 0 picks a free one and prints it.",
            metavar="PORT",
            low=PORTS[0],
            high=PORTS[1],
        ),
    )
    grpc: bool = option(
        True,
        Flag(
            LISTEN,
            "Serve gRPC, from a process of its own",
            "Switch it off where no client uses gRPC.",
        ),
    )
    metrics_port: int = option(
        8002,
        Flag(
            LISTEN,
            "Port for /metrics and health checks only",
            "Change it when the port is taken; 0 picks a free one and prints it.",
            metavar="PORT",
            low=PORTS[0],
            high=PORTS[1],
        ),
    )
    metrics: bool = option(
        True,
        Flag(
            LISTEN,
            "Open the metrics port",
            "Switch it off where /metrics on the HTTP port is enough.",
        ),
    )
    fronts: int = option(
        0,
        Flag(
            LISTEN,
            "Processes that serve HTTP on the same port",
            "With 0, the core process serves HTTP. Raise it when penstock explain says that the "
            "core's event loop is the bottleneck and CPU cores are idle; otherwise it only adds "
            "latency. Does not work with language models.",
            metavar="N",
            low=0,
            high=64,
        ),
    )
    id: str = option(
        "penstock",
        Flag(
            LISTEN,
            "Name of this server in its metadata",
            "Change it when clients tell several servers apart by name.",
            metavar="NAME",
        ),
    )
    model_control_mode: str = option(
        "none",
        Flag(
            MODELS,
            "Whether clients may load and unload models",
            "none loads every model at start. Choose explicit to load only those that --load-model "
            "names, and others over the API.",
            choices=("none", "explicit"),
        ),
    )
    load_model: tuple[str, ...] = option(
        (),
        Flag(
            MODELS,
            "Model to load at start, in explicit mode",
            "'*' loads all. Leave it out to start without models. Repeatable.",
            metavar="NAME",
            default="none",
        ),
    )
    exit_on_error: bool = option(
        True,
        Flag(
            MODELS,
            "Stop when a model cannot be loaded",
            "Choose --no-exit-on-error to serve the other models; the server then does not become "
            "ready.",
        ),
    )
    gpu_memory_reserve: float = option(
        GPU_MEMORY_RESERVE,
        Flag(
            MODELS,
            "Share of each GPU's memory to keep free",
            "Raise it when models run out of memory under load; lower it when the memory plan "
            "refuses models that are known to fit.",
            metavar="SHARE",
            low=0.0,
            high=0.999,
        ),
    )
    allow_hard_links: bool = option(
        False,
        Flag(
            MODELS,
            "Accept model files that have other hard links",
            "Use it where storage is deduplicated by hard links and only trusted users write to "
            "the repository.",
        ),
    )
    reload: bool = option(
        False,
        Flag(
            MODELS,
            "Reload Python models when their files change",
            "Use it during development. A change that cannot be loaded leaves the old code in "
            "place.",
        ),
    )
    random_weights: bool = option(
        False,
        Flag(
            MODELS,
            "Serve a language model with random weights",
            "MODEL is then its config.json. Use it to measure the speed of a model that you have "
            "not downloaded; its answers are noise.",
        ),
    )
    api_keys: str = option(
        "",
        Flag(
            SECURITY,
            "TOML file of API keys and their scopes",
            "Give it when other machines can reach the server. Scopes: infer, metrics, admin.",
            metavar="FILE",
            default="no keys",
        ),
    )
    insecure: bool = option(
        False,
        Flag(
            SECURITY,
            "Allow a public --host without API keys",
            "Use it only where a proxy or the network keeps strangers out.",
        ),
    )
    tls_cert: str = option(
        "",
        Flag(
            SECURITY,
            "PEM certificate chain; all ports then use TLS",
            "Give it when clients connect over a network that others can read. Needs --tls-key. "
            "Changed files are reloaded.",
            metavar="FILE",
            default="no TLS",
        ),
    )
    tls_key: str = option(
        "",
        Flag(
            SECURITY,
            "PEM private key of --tls-cert, not encrypted",
            "Needed whenever --tls-cert is given.",
            metavar="FILE",
            default="none",
        ),
    )
    tls_client_ca: str = option(
        "",
        Flag(
            SECURITY,
            "PEM issuers of client certificates",
            "Clients then need a certificate. Give it to identify clients without API keys, or in "
            "addition to them, where you issue certificates.",
            metavar="FILE",
            default="none",
        ),
    )
    allow_host: tuple[str, ...] = option(
        (),
        Flag(
            SECURITY,
            "Further Host header to accept on the loopback address",
            "Needed behind a proxy that passes the client's Host header on. Repeatable.",
            metavar="NAME",
            default="none",
        ),
    )
    max_body_bytes: int = option(
        64 << 20,
        Flag(
            LIMITS,
            "Largest HTTP request body, after decompression",
            "Raise it when tensors are larger; each connection may use this much memory.",
            metavar="BYTES",
            low=BYTES[0],
            high=BYTES[1],
        ),
    )
    max_json_bytes: int = option(
        8 << 20,
        Flag(
            LIMITS,
            "Largest JSON part of an HTTP inference",
            "Raise it only where clients cannot send binary tensors: decoding JSON delays all "
            "other requests.",
            metavar="BYTES",
            low=BYTES[0],
            high=BYTES[1],
        ),
    )
    grpc_max_message_bytes: int = option(
        64 << 20,
        Flag(
            LIMITS,
            "Largest gRPC request",
            "Raise it when tensors are larger; address space is reserved for it.",
            metavar="BYTES",
            low=BYTES[0],
            high=BYTES[1],
        ),
    )
    grpc_compression: str = option(
        "none",
        Flag(
            LIMITS,
            "Compression of gRPC responses",
            "Choose one for slow networks only: it costs CPU time on both sides. Requests may be "
            "compressed either way.",
            choices=("none", "deflate", "gzip"),
        ),
    )
    drain_s: float = option(
        30.0,
        Flag(
            LIMITS,
            "Seconds for requests in flight after SIGTERM",
            "Raise it for slow models, and keep it below the time after which your orchestrator "
            "kills the process.",
            metavar="SECONDS",
            low=0,
        ),
    )
    log_level: str | None = option(
        None,
        Flag(
            LOGS,
            "Least important log lines to write",
            "Choose WARNING where logs are paid by the line, DEBUG to look for a fault.",
            choices=logs.LEVELS,
            default="PENSTOCK_LOG, or INFO",
        ),
    )
    log_format: str | None = option(
        None,
        Flag(
            LOGS,
            "Format of log lines",
            "Choose json, one object per line, when logs are collected.",
            choices=logs.FORMATS,
            default="PENSTOCK_LOG_FORMAT, or text",
        ),
    )
    log_requests: bool = option(
        False,
        Flag(
            LOGS,
            "Log every inference with status and timings",
            "Switch it on to look into single requests; it costs some throughput.",
        ),
    )

    def config(self) -> ServerConfig:
        """Return the server's configuration."""
        has_tls = self.tls_cert or self.tls_key or self.tls_client_ca
        return ServerConfig(
            id=self.id,
            host=self.host,
            http_port=self.http_port,
            num_fronts=self.fronts,
            grpc=GrpcConfig(
                self.grpc_port, self.grpc_max_message_bytes, compression=self.grpc_compression
            )
            if self.grpc
            else None,
            metrics_port=self.metrics_port if self.metrics else None,
            drain_s=self.drain_s,
            is_explicit=self.model_control_mode == "explicit",
            load=self.load_model,
            gpu_memory_reserve=self.gpu_memory_reserve,
            api_keys=self.api_keys,
            tls=TlsConfig(self.tls_cert, self.tls_key, self.tls_client_ca) if has_tls else None,
            allow_hosts=self.allow_host,
            allows_hard_links=self.allow_hard_links,
            logs_requests=self.log_requests,
            limits=HttpLimits(self.max_body_bytes, self.max_json_bytes),
            has_random_weights=self.random_weights,
            reloads=self.reload,
        )
