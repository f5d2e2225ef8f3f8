"""Options of `penstock.serve` and `penstock serve`: the configuration of the server."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.cache_options import read_cache_config
from penstock.api.memory_options import DEFAULT as MODEL_MEMORY
from penstock.api.memory_options import read_model_memory
from penstock.api.metrics_options import read_metrics_config
from penstock.api.options import flags_of, number, text
from penstock.api.rate_options import EXECUTION_COUNT, MODES, read_resources
from penstock.api.restriction_options import (
    GRPC_FLAG,
    GRPC_PREFIX,
    HTTP_FLAG,
    read_restrictions,
)
from penstock.api.trace_options import read_trace_config
from penstock.config import (
    GPU_MEMORY_RESERVE,
    CacheConfig,
    GrpcConfig,
    HeaderPatterns,
    HttpLimits,
    LoadPermissions,
    MetricsConfig,
    ModelMemoryLimit,
    Restrictions,
    TlsConfig,
    TraceConfig,
)
from penstock.serving.rate_limiter import RateLimiter
from penstock.system import logs
from penstock.system.host_policy import HostPolicy, read_host_policies

listen_flag, model_flag = flags_of("Where to listen"), flags_of("Which models")
security_flag, limit_flag, log_flag = map(flags_of, ("Who may ask", "Limits", "Logs"))
metrics_flag, trace_flag = flags_of("Metrics"), flags_of("Tracing")
record_flag = flags_of("Recording")
cache_flag = flags_of("Response cache")
rate_flag = flags_of("Rate limiter")
PORT_TAKEN = "Change it when the port is taken; 0 picks a free one and prints it."
BYTES = (1 << 10, 1 << 30)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """How a model or repository is served."""

    host: str = listen_flag(
        "Address to listen on",
        "Change it so that other machines can connect; this needs --api-keys or --insecure.",
        **text("ADDRESS", value="127.0.0.1"),
    )
    http_port: int = listen_flag("Port for HTTP", PORT_TAKEN, **number(8000, "PORT", 0, 65535))
    grpc_port: int = listen_flag("Port for gRPC", PORT_TAKEN, **number(8001, "PORT", 0, 65535))
    grpc: bool = listen_flag(
        "Serve gRPC",
        "Switch it off where no client uses gRPC.",
        value=True,
    )
    metrics_port: int = listen_flag(
        "Port for /metrics and health checks only", PORT_TAKEN, **number(8002, "PORT", 0, 65535)
    )
    metrics: bool = listen_flag(
        "Open the metrics port",
        "Switch it off where /metrics on the HTTP port is enough.",
        value=True,
    )
    shards: int = listen_flag(
        "Processes that take requests on the same port",
        "0 chooses from cores and models; with 1, the core process takes them. Raise it when "
        "penstock explain says that event loops are the bottleneck and CPU cores are idle.",
        **number(0, "N", 0, 64),
    )
    shard_accept: str = listen_flag(
        "Which shards accept new connections",
        "load lets one shard accept at low rates and more when it is busy; some clients are then "
        "asked to connect again. Choose all where clients cannot do that.",
        value="load",
        choices=("load", "all"),
    )
    id: str = listen_flag(
        "Name of this server in its metadata",
        "Change it when clients tell several servers apart by name.",
        **text("NAME", value="penstock"),
    )
    model_control_mode: str = model_flag(
        "Whether clients may load and unload models",
        "none loads every model at start. Choose explicit to load only those that --load-model "
        "names, and others over the API; poll to follow what changes in the repository.",
        value="none",
        choices=("none", "poll", "explicit"),
    )
    repository_poll_secs: float = model_flag(
        "Seconds between looks at the repository, in poll mode",
        "A change is served once two looks in a row find it the same. Raise it where files take "
        "long to copy.",
        **number(15.0, "SECONDS", 0.01),
    )
    model_repository: tuple[str, ...] = model_flag(
        "Further repository to serve",
        "Give it where models lie in several folders; no two may have one of the same name. "
        "Repeatable.",
        value=(),
        metavar="DIR",
    )
    model_config_name: str = model_flag(
        "Configuration of each model to use, by name",
        "Give it where machines differ: with h100, configs/h100.pbtxt of a model is used instead "
        "of config.pbtxt, if it is there.",
        **text("NAME", "config.pbtxt"),
    )
    load_model: tuple[str, ...] = model_flag(
        "Model to load at start, in explicit mode",
        "'*' and '?' in it stand for any characters, so '*' loads all. Leave it out to start "
        "without models. Repeatable.",
        value=(),
        metavar="NAME",
    )
    exit_on_error: bool = model_flag(
        "Stop when a model cannot be loaded",
        "Choose --no-exit-on-error to serve the other models; the server then does not become "
        "ready.",
        value=True,
    )
    gpu_memory_reserve: float = model_flag(
        "Share of each GPU's memory to keep free",
        "Raise it when models run out of memory under load; lower it when the memory plan refuses "
        "models that are known to fit.",
        **number(GPU_MEMORY_RESERVE, "SHARE", 0.0, 0.999),
    )
    on_demand: bool = model_flag(
        "Load each model with its first request",
        "Use it for many models on a machine that cannot hold them all. Models that cannot be "
        "loaded on demand, and those with penstock.on_demand false, are loaded at the start.",
        value=False,
    )
    model_memory: str = model_flag(
        "Memory of the models that are loaded on demand",
        "A size, as 8GiB, or a share, as 60%, of the machine's memory and of each GPU's. Idle "
        "models are evicted when others need more. Lower it when other programs need memory.",
        **text("SIZE", value=MODEL_MEMORY),
    )
    host_policy: tuple[str, ...] = model_flag(
        "Cores or NUMA node of an instance group's workers",
        "NAME,cpu-cores=0-3 or NAME,numa-node=1, for instance groups with host_policy NAME; the "
        "names cpu and gpu_0 mean all others on that device. Repeatable. Give it on machines with "
        "several NUMA nodes.",
        value=(),
        metavar="NAME,SETTING=VALUE",
    )
    allow_hard_links: bool = model_flag(
        "Accept model files that have other hard links",
        "Use it where storage is deduplicated by hard links and only trusted users write to the "
        "repository.",
        value=False,
    )
    reload: bool = model_flag(
        "Reload Python models when their files change",
        "Use it during development. A change that cannot be loaded leaves the old code in place.",
        value=False,
    )
    random_weights: bool = model_flag(
        "Serve a language model with random weights",
        "MODEL is then its config.json. Use it to measure the speed of a model that you have not "
        "downloaded; its answers are noise.",
        value=False,
    )
    api_keys: str = security_flag(
        "TOML file of API keys and their scopes",
        "Give it when other machines can reach the server. Scopes: infer, metrics, shared_memory, "
        "admin.",
        **text("FILE", "no keys"),
    )
    insecure: bool = security_flag(
        "Allow a public --host without API keys",
        "Use it only where a proxy or the network keeps strangers out.",
        value=False,
    )
    tls_cert: str = security_flag(
        "PEM certificate chain; all ports then use TLS",
        "Give it when clients connect over a network that others can read. Needs --tls-key. "
        "Changed files are reloaded.",
        **text("FILE", "no TLS"),
    )
    tls_key: str = security_flag(
        "PEM private key of --tls-cert, not encrypted",
        "Needed whenever --tls-cert is given.",
        metavar="FILE",
    )
    tls_client_ca: str = security_flag(
        "PEM issuers of client certificates",
        "Clients then need a certificate. Give it to identify clients without API keys, or in "
        "addition to them, where you issue certificates.",
        metavar="FILE",
    )
    allow_host: tuple[str, ...] = security_flag(
        "Further Host header to accept on the loopback address",
        "Needed behind a proxy that passes the client's Host header on. Repeatable.",
        value=(),
        metavar="NAME",
    )
    http_restricted_api: tuple[str, ...] = security_flag(
        "Categories of HTTP routes that need a secret header",
        "As in Triton: health, metadata, inference, shared-memory, model-config, model-repository, "
        "statistics, trace, logging. Give it where clients of Triton send such headers; --api-keys "
        "keeps secrets off the command line. Repeatable.",
        value=(),
        metavar="CATEGORY,...:KEY=VALUE",
    )
    grpc_restricted_protocol: tuple[str, ...] = security_flag(
        "Categories of gRPC methods that need a secret",
        "As --http-restricted-api; the metadata is triton-grpc-protocol-KEY. Give both where both "
        "protocols are to be restricted. Repeatable.",
        value=(),
        metavar="CATEGORY,...:KEY=VALUE",
    )
    http_header_forward_pattern: str = security_flag(
        "Regular expression of HTTP headers for models",
        "Headers whose name it finds become parameters of the request, which Python models see. "
        "Give it where models need to know the tenant or the user.",
        **text("REGEX", "no headers"),
    )
    grpc_header_forward_pattern: str = security_flag(
        "Regular expression of gRPC metadata for models",
        "As --http-header-forward-pattern. Give both where clients use both protocols.",
        **text("REGEX", "no metadata"),
    )
    shared_memory: bool = security_flag(
        "Let clients on this machine share memory with it",
        "Switch it on when clients send large tensors from the same machine: they register memory "
        "of the server's user, and tensors in it are not sent. Needs the scope shared_memory.",
        value=False,
    )
    allow_load_files: bool = security_flag(
        "Let administrators load models from files that they send",
        "Needs explicit mode and the scope admin. Switch it on where a pipeline deploys models "
        "over the API; the files last until the model is loaded again.",
        value=False,
    )
    allow_load_code: bool = security_flag(
        "Let administrators send code with a load",
        "Switch it on only where every holder of an admin key may run any code as the server's "
        "user: model.py, .pt2 and all else that a backend executes.",
        value=False,
    )
    record: str = record_flag(
        "Folder for recordings of requests and answers",
        "Records 1 % of the requests of every model, in at most 64 MB per model; penstock.record "
        "in config.pbtxt changes that or says off. The files hold what clients send. Give it to "
        "replay real traffic, or to recalibrate from it.",
        **text("DIR", "nothing is recorded"),
    )
    cache_config: tuple[str, ...] = cache_flag(
        "Response cache, as local,size=BYTES or redis,host=HOST",
        "Give it where the same inputs come again: models with response_cache { enable: true } "
        "then answer them from memory, which shards divide, or from a Redis that servers share. "
        "Repeatable, for redis with port, username, password_file and timeout_ms.",
        value=(),
        metavar="CACHE,SETTING=VALUE",
    )
    rate_limit: str = rate_flag(
        "Whether executions wait for the resources that they need",
        "Choose execution_count where models must not compute at the same time: instances then "
        "execute only while they hold the resources of their rate_limiter, as in Triton.",
        value="off",
        choices=MODES,
    )
    rate_limit_resource: tuple[str, ...] = rate_flag(
        "Count of a resource, of each device or of one",
        "Give it to let more instances execute at a time than the one that needs most. Repeatable.",
        value=(),
        metavar="NAME:COUNT[:DEVICE]",
    )
    max_body_bytes: int = limit_flag(
        "Largest HTTP request body, after decompression",
        "Raise it when tensors are larger; each connection may use this much memory.",
        **number(64 << 20, "BYTES", *BYTES),
    )
    max_json_bytes: int = limit_flag(
        "Largest JSON part of an HTTP inference",
        "Raise it only where clients cannot send binary tensors: decoding JSON delays all other "
        "requests.",
        **number(8 << 20, "BYTES", *BYTES),
    )
    grpc_max_message_bytes: int = limit_flag(
        "Largest gRPC request",
        "Raise it when tensors are larger.",
        **number(64 << 20, "BYTES", *BYTES),
    )
    grpc_compression: str = limit_flag(
        "Compression of gRPC responses",
        "Choose one for slow networks only: it costs CPU time on both sides. Requests may be "
        "compressed either way.",
        value="none",
        choices=("none", "deflate", "gzip"),
    )
    drain_s: float = limit_flag(
        "Seconds for requests in flight after SIGTERM",
        "Raise it for slow models, and keep it below the time after which your orchestrator kills "
        "the process.",
        **number(30.0, "SECONDS", 0),
    )
    log_level: str | None = log_flag(
        "Least important log lines to write",
        "Choose WARNING where logs are paid by the line, DEBUG to look for a fault.",
        value=None,
        default="PENSTOCK_LOG, or INFO",
        choices=logs.LEVELS,
    )
    log_format: str | None = log_flag(
        "Format of log lines",
        "Choose json, one object per line, when logs are collected.",
        value=None,
        default="PENSTOCK_LOG_FORMAT, or text",
        choices=logs.FORMATS,
    )
    log_requests: bool = log_flag(
        "Log every inference with status and timings",
        "Switch it on to look into single requests; it costs some throughput.",
        value=False,
    )
    metrics_config: tuple[str, ...] = metrics_flag(
        "Latencies that are counted and shown in /metrics",
        "Give it where dashboards query more. As in Triton, histogram_latencies=true and "
        "summary_latencies=true add families, counter_latencies=false leaves some out, and "
        "summary_quantiles=0.5:0.05,0.99:0.001 chooses quantiles. Repeatable.",
        value=(),
        metavar="SETTING=VALUE",
    )
    metrics_interval_ms: float = metrics_flag(
        "Time between readings of the machine's use",
        "0 reads CPUs, GPUs and processes at every scrape. Raise it when several systems scrape "
        "the server.",
        **number(0.0, "MILLISECONDS", 0.0),
    )
    price: float | None = metrics_flag(
        "Price of the machine per hour, in any currency",
        "Give it to see the cost of a million answers in /metrics and on the dashboard.",
        **number(None, "NUMBER", 1e-9, default="that of each version's evidence"),
    )

    trace_config: tuple[str, ...] = trace_flag(
        "Which requests are traced, and where traces go",
        "As in Triton: triton,file=FILE, level=TIMESTAMPS and rate=100 trace every 100th request; "
        "mode=opentelemetry and opentelemetry,url=URL send spans to a collector; chrome,file=FILE "
        "is for Perfetto. Give a file at start to switch tracing on later. Repeatable.",
        value=(),
        metavar="SETTING=VALUE",
    )

    @property
    def grpc_config(self) -> GrpcConfig | None:
        """The settings of the gRPC server, if there is one."""
        if not self.grpc:
            return None
        size, compression = self.grpc_max_message_bytes, self.grpc_compression
        return GrpcConfig(self.grpc_port, size, compression=compression)

    @property
    def open_metrics_port(self) -> int | None:
        """The separate port for scrapes and health; None if it is not opened."""
        return self.metrics_port if self.metrics else None

    @property
    def tls(self) -> TlsConfig | None:
        """The files for TLS on all ports; None for plain text."""
        files = (self.tls_cert, self.tls_key, self.tls_client_ca)
        return TlsConfig(*files) if any(files) else None

    @property
    def host_policies(self) -> dict[str, HostPolicy]:
        return read_host_policies(self.host_policy)[0]

    @property
    def memory_limit(self) -> ModelMemoryLimit:
        return read_model_memory(self.model_memory)[0]

    @property
    def shown_metrics(self) -> MetricsConfig:
        return read_metrics_config(self.metrics_config, self.metrics_interval_ms)[0]

    @property
    def restrictions(self) -> Restrictions:
        http = read_restrictions(self.http_restricted_api, HTTP_FLAG)[0]
        grpc = read_restrictions(self.grpc_restricted_protocol, GRPC_FLAG, GRPC_PREFIX)[0]
        return Restrictions(http, grpc)

    @property
    def header_patterns(self) -> HeaderPatterns:
        return HeaderPatterns(self.http_header_forward_pattern, self.grpc_header_forward_pattern)

    @property
    def rate_limiter(self) -> RateLimiter | None:
        if self.rate_limit != EXECUTION_COUNT:
            return None
        return RateLimiter(read_resources(self.rate_limit, self.rate_limit_resource)[0])

    @property
    def tracing(self) -> TraceConfig:
        return read_trace_config(self.trace_config)[0]

    @property
    def cache(self) -> CacheConfig:
        return read_cache_config(self.cache_config)[0]

    @property
    def limits(self) -> HttpLimits:
        return HttpLimits(self.max_body_bytes, self.max_json_bytes)

    @property
    def load_permissions(self) -> LoadPermissions:
        return LoadPermissions(self.allow_load_files, self.allow_load_code)

    @property
    def is_polling(self) -> bool:
        """Whether models follow what changes in the repository."""
        return self.model_control_mode == "poll"

    @property
    def is_explicit(self) -> bool:
        """Whether models are loaded and unloaded over the API, and only some of them at start."""
        return self.model_control_mode == "explicit"
