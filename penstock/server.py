"""The core process, from start to graceful shutdown: one event loop with the catalog and the
servers of HTTP and gRPC. With several shards, their processes serve both instead of the core."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from penstock.api.cache_options import read_cache_config
from penstock.api.memory_options import read_model_memory
from penstock.api.metrics_options import read_metrics_config
from penstock.api.rate_options import read_resources
from penstock.api.restriction_options import GRPC_FLAG, HTTP_FLAG, read_restrictions
from penstock.api.serve_options import ServeOptions
from penstock.api.trace_options import read_trace_config
from penstock.config import LLM, ModelConfig, TlsConfig
from penstock.dashboard.pages import Pages
from penstock.errors import CommandLineError, ConfigError
from penstock.llm.engine_supervisor import EngineLife
from penstock.llm.language_model import LanguageModel
from penstock.llm.sharded_text import ShardedText
from penstock.operate.monitor import Monitor
from penstock.operate.rollout_records import scrape
from penstock.operate.rollouts import Rollouts
from penstock.operate.version_actions import VersionActions
from penstock.processes.child import limited
from penstock.protocols import access_log
from penstock.protocols.acceptors import Acceptors
from penstock.protocols.gate import LOOPBACK_HOSTS, Gate, Keys
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.grpc_server import GrpcServer
from penstock.protocols.handler_tasks import MetricsHttp
from penstock.protocols.http_server import HttpServer
from penstock.protocols.infer_grpc import InferRpcs
from penstock.protocols.key_file import KeyFile, watch_keys
from penstock.protocols.line import cannot_listen, reserve, why_not_listen
from penstock.protocols.listener import BACKLOG, Listener
from penstock.protocols.openai_http import OpenAiHttp
from penstock.protocols.shard_processes import CoreApi, ShardProcess, shard_spec
from penstock.protocols.tls import H2, TlsFiles, watch
from penstock.protocols.v2_grpc import GrpcService
from penstock.protocols.v2_http import Models, V2Http
from penstock.protocols.watchdog import Watchdog
from penstock.repository.layout import RepositoryScan
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control, Reloader
from penstock.serving.fleet import Fleet
from penstock.serving.header_forwarding import make_forwarding, pattern_problem
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi, for_models
from penstock.serving.polling import Poller
from penstock.serving.quotas import Quotas
from penstock.serving.scrape import ShardUse
from penstock.serving.served import Served
from penstock.serving.shard_count import ShardChoice, choose
from penstock.serving.shards import Shards
from penstock.serving.shared_page import NUM_KEYS
from penstock.system import garbage, service_manager
from penstock.system.cores import usable_cores
from penstock.system.exit_codes import ExitCode
from penstock.system.host_policy import read_host_policies
from penstock.system.service_manager import ServiceManager
from penstock.wire.frames import VERSION, OpenShard

log = logging.getLogger("penstock.server")
SWITCH_S = 0.0005

PROGRESS_S = 1.0
# Requests on the metrics port need no body.
METRICS_BODY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading is."""

    num_loaded: int
    num_models: int
    waiting_for: Sequence[str]
    elapsed_s: float


SHARDS_WITH_QUOTAS = (
    "--api-keys {path}: {number} keys have a queue_share below 1; "
    "with --shards, {limit} are possible"
)


def make_text_model(config: ModelConfig, quotas: Quotas, shards: Shards | None = None) -> Served:
    """Create a language model, in the shards if there are several."""
    start_life = limited(EngineLife, config.memory_bytes)
    if shards is not None:
        return ShardedText(config, shards, start_life)
    return LanguageModel(config, start_life, quotas=quotas)


class Server:
    """The running server. Ports open first, so that it is live before it is ready; then models
    load. Shutdown is in reverse order."""

    def __init__(
        self, options: ServeOptions, path: str, watchdog: Watchdog, choice: ShardChoice
    ) -> None:
        """`choice` is about `options.shards`, which is given."""
        self._options = options
        self.shard_choice = choice
        self._watchdog = watchdog
        self._stop = asyncio.Event()
        shards = self._shards = Shards(choice.number) if choice.number > 1 else None
        self._acceptors: Acceptors | None = None
        self.catalog = Catalog(
            fleet=Fleet(options.gpu_memory_reserve, policies=options.host_policies),
            makers={LLM: partial(make_text_model, shards=shards)},
            shards=shards,
        )
        self._key_file = KeyFile(Path(options.api_keys)) if options.api_keys else None
        self._gate = gate = make_gate(options, self._key_file)
        if gate.keys is not None:
            check_quotas(gate.keys, options)
            self.catalog.quotas.replace(gate.keys.quotas)
        self._tls = None if options.tls is None else TlsFiles(options.tls)
        self._context = None if self._tls is None else self._tls.load()
        self._grpc_tls = None
        if options.tls is not None and options.grpc and shards is None:
            self._grpc_tls = TlsFiles(options.tls, warns=False, protocol=H2)
        self._watching: list[asyncio.Task[None]] = []
        self.lifecycle = Lifecycle(is_loading=True)
        self._processes: list[ShardProcess] = []
        self.management = self._make_management(path)
        self.monitor = Monitor(self.catalog, self.management.usage.gpus, options.price)
        self.management.families.append(self.monitor.families)
        self.catalog.regions.is_allowed = options.shared_memory
        if is_logged := options.log_requests:
            access_log.log.setLevel(logging.INFO)  # Requested, whatever the general log level.
        openai = OpenAiHttp(self.catalog, lambda: self.lifecycle.is_draining, is_logged)
        generate = GenerateHttp(self.catalog, lambda: self.lifecycle.is_draining, is_logged)
        self._pages = Pages(self.management, gate, self.monitor)
        self._pages.sampler.rollouts = self.rollouts.states
        pages = self._pages.handlers()
        models = Models(self.management, is_logged, openai.handle, generate.handle, gate, pages)
        self.v2 = V2Http(models, options.limits, gate, options.log_requests)
        v2, limits = self.v2, options.limits
        self.http = HttpServer(
            v2.handle, limits, v2.screen, self.lifecycle, v2.prepare, v2.rejected
        )
        self.http_port = options.http_port
        self._metrics = MetricsHttp(gate, self.management)
        self.metrics_port = options.open_metrics_port
        self._metrics_http = self._make_metrics_http()
        self._core = CoreApi(self.management, self.v2.handle, gate, shards)
        # Listeners of the shards.
        self._reserved: list[socket.socket] = []
        infer = InferRpcs(self.catalog, self.lifecycle, gate, options.log_requests)
        self.grpc_service = GrpcService(infer, self._core.manage, gate)
        self.catalog.manage = for_models(self._core.manage)
        self.grpc: GrpcServer | None = None
        self.grpc_port = options.grpc_port if options.grpc else None
        if options.grpc_config is not None and shards is None:
            methods = self.grpc_service.methods()
            self.grpc = GrpcServer(methods, options.grpc_config, gate, options.limits)

    def _make_management(self, path: str) -> ManagementApi:
        options, gate = self._options, self._gate
        self.catalog.metrics_config = options.shown_metrics
        self.catalog.memory.limit = options.memory_limit
        self.catalog.memory.loads_all = options.on_demand
        self.catalog.forwarding = make_forwarding(options.header_patterns)
        self.catalog.rate_limiter = options.rate_limiter
        self.catalog.caches.divide(options.cache, self.shard_choice.number)
        control = Control(
            self.catalog,
            path,
            options.is_explicit,
            options.allow_hard_links,
            options.load_permissions,
            options.model_repository,
            options.model_config_name,
            options.is_polling,
        )
        made = ManagementApi(
            self.catalog,
            control,
            self.lifecycle,
            options.id,
            tells_reasons=gate.keys is None,
            shards=self._shard_uses,
        )
        made.describe_shards = self._describe_shards
        self._poller = None
        if options.is_polling:
            self._poller = Poller(control, options.repository_poll_secs)
        self.rollouts = rollouts = Rollouts(self.catalog, made.control)
        made.families.append(lambda: scrape(rollouts.states().values()))
        made.add(VersionActions(made, gate.name_of, rollouts).answers)
        return made

    def _make_metrics_http(self) -> HttpServer | None:
        if self.metrics_port is None:
            return None
        limits = replace(self._options.limits, max_body_bytes=METRICS_BODY_BYTES)
        return HttpServer(self._metrics.handle, limits)

    async def start(
        self, found: RepositoryScan, on_progress: Callable[[LoadProgress], None]
    ) -> None:
        """Listen, then load the models; `stop` cancels loading. Call `on_progress` every
        PROGRESS_S meanwhile."""
        self.management.traces.begin(self._options.tracing)
        if self._options.record:
            self.catalog.recorders.claim(Path(self._options.record).resolve())
        self.catalog.announce(found)
        await self._open_http()
        if self.grpc is not None and self.grpc_port is not None:
            tls = None if self._grpc_tls is None else self._grpc_tls.load()
            self.grpc_port = await self._listen(self.grpc, self.grpc_port, "gRPC", tls)
        if self._metrics_http is not None and self.metrics_port is not None:
            self.metrics_port = await self._listen(self._metrics_http, self.metrics_port, "metrics")
            metrics = self._metrics_http
            self._watchdog.cover(metrics.listeners, lambda: metrics.tls)
        if self._key_file is not None:
            check = partial(check_quotas, options=self._options)
            watching = watch_keys(self._key_file, check, self._use_keys)
            self._watching.append(asyncio.create_task(watching))
        if self._tls is not None:
            servers: list[Listener] = [self.http] if self._answers_http else []
            if self._metrics_http is not None:
                servers.append(self._metrics_http)
            self._watching.append(asyncio.create_task(watch(self._tls, servers)))
        if self._grpc_tls is not None and self.grpc is not None:
            self._watching.append(asyncio.create_task(watch(self._grpc_tls, [self.grpc])))
        self._watching.append(asyncio.create_task(self.rollouts.run()))
        self._watching.append(asyncio.create_task(self.catalog.memory.keep_limit()))
        log.info("%s", self.shard_choice, extra={"shards": self.shard_choice.number})
        await asyncio.to_thread(self.management.usage.begin)
        await self.rollouts.recover()
        loading = asyncio.ensure_future(self._load(found))
        stopping = asyncio.ensure_future(self._stop.wait())
        telling = asyncio.ensure_future(self._tell(found, on_progress))
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        telling.cancel()
        if not loading.done():
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            return
        loading.result()
        garbage.freeze(garbage.SERVING)
        self.lifecycle.is_loading = False
        self._follow_files()

    def _follow_files(self) -> None:
        """Begin to load what changes in the repository, if that is wanted."""
        if self._options.reload:
            reloader = Reloader(self.catalog, self.management.control)
            self._watching.append(asyncio.create_task(reloader.run()))
        if self._poller is not None:
            self._watching.append(asyncio.create_task(self._poller.run()))

    async def _open_http(self) -> None:
        self._watching.append(asyncio.create_task(self.monitor.run()))
        if self._shards is not None:
            self._add_shards()
            self._watching.append(asyncio.create_task(self._steer(self._shards).run()))
        else:
            self.http_port = await self._listen(self.http, self._options.http_port, "HTTP")

    def _steer(self, shards: Shards) -> Acceptors:
        """Begin to choose which shards accept connections."""
        groups = list(zip(*(each.listeners for each in self._processes), strict=True))
        accepts_all = self._options.shard_accept == "all"
        made = Acceptors(groups, shards.blocks.page, shards.move_clients, accepts_all)
        shards.on_lost = lambda: made.tick(time.monotonic())
        self._acceptors = made
        return made

    def _shard_uses(self) -> list[ShardUse]:
        uses = [each.use() for each in self._processes]
        if self._acceptors is None:
            return uses
        accepting = self._acceptors.accepting
        return [replace(each, accepts=shard in accepting) for shard, each in enumerate(uses)]

    def _describe_shards(self) -> str:
        if self._acceptors is None:
            return str(self.shard_choice)
        return f"{self.shard_choice}; {len(self._acceptors.accepting)} accept new connections"

    @property
    def _answers_http(self) -> bool:
        """Whether the core itself has the HTTP port."""
        return self._shards is None

    @property
    def needs_key(self) -> bool:
        return self._gate.keys is not None

    @property
    def tls(self) -> TlsConfig | None:
        return self._options.tls

    @property
    def scheme(self) -> str:
        return "http" if self._tls is None else "https"

    async def run_until_stopped(self) -> None:
        await self._stop.wait()

    def stop(self) -> None:
        """Start draining: not ready, refuse new inferences, finish accepted ones."""
        if not self.lifecycle.is_draining and not self.lifecycle.is_loading:
            text = "shutting down: requests in flight have %.0f s to finish"
            log.info(text, self._options.drain_s)
        self.lifecycle.drain()
        for process in self._processes:
            process.drain()
        if self.grpc is not None:
            self.grpc.go_away()
            self.grpc_service.drain()
        self._stop.set()

    async def close(self) -> None:
        """Finish accepted requests, up to the drain limit, then stop workers and connections."""
        self.stop()
        try:
            async with asyncio.timeout(self._options.drain_s):
                await self.catalog.drain()
                while any(each.num_running for each in self._answering()):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            log.warning("requests are cut off after %.0f s of draining", self._options.drain_s)
            # Before the connections close, so that clients get an error instead of a reset.
            await self.catalog.close()
        for task in self._watching:
            task.cancel()
        await self.rollouts.close()
        if self._shards is not None:
            # Shards that end now are not lost, and their listeners are closed.
            self._shards.on_lost = lambda: None
        # Before shards settle: connections to these listeners would not be accepted any more.
        for sock in self._reserved:
            sock.close()
        await asyncio.gather(*(each.close() for each in self._processes))
        servers = [self.http] if self.grpc is None else [self.http, self.grpc]
        await asyncio.gather(*(server.settle() for server in servers))
        await self.v2.close()
        await self._close_grpc()
        await self.http.close()
        await self.catalog.close()
        self.management.control.close()
        self.management.regions.close()
        await asyncio.to_thread(self.management.traces.close)
        if self._shards is not None:
            self._shards.close()
        await self._metrics.close()
        self._watchdog.release()
        if self._metrics_http is not None:
            await self._metrics_http.close()
        if not self.lifecycle.is_loading:
            log.info("stopped")

    def _answering(self) -> list[Listener | ShardProcess]:
        """Return all that may owe an answer."""
        return [self.http, *self._processes, *([] if self.grpc is None else [self.grpc])]

    async def _close_grpc(self) -> None:
        """End streams and watches, which have no end of their own, then the connections."""
        await self.grpc_service.stop()
        if self.grpc is not None:
            await self.grpc.close()
        await self.grpc_service.close()

    def _use_keys(self, keys: Keys) -> None:
        self._gate.keys = keys
        self.catalog.quotas.replace(keys.quotas)
        self.http.forget_heads()
        for process in self._processes:
            process.set_keys(self._gate)

    async def _tell(
        self, found: RepositoryScan, on_progress: Callable[[LoadProgress], None]
    ) -> None:
        names = list(dict.fromkeys(config.name for config in found.configs))
        began = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            ended = {model.config.name for model in self.catalog}
            ended |= {failure.name for failure in self.catalog.failures}
            waiting = [name for name in names if name not in ended]
            elapsed_s = time.monotonic() - began
            if waiting:
                num_loaded = len(names) - len(waiting)
                on_progress(LoadProgress(num_loaded, len(names), waiting, elapsed_s))

    async def _load(self, found: RepositoryScan) -> None:
        """Load the models while the shards start; cancel loading if one cannot."""
        loading = asyncio.ensure_future(self.catalog.load(found))
        try:
            for process in self._processes:
                process.start()
            for process in self._processes:
                await process.listening()
            await loading
        except BaseException:
            loading.cancel()
            await asyncio.wait([loading])
            raise

    def _add_shards(self) -> None:
        """Make listeners for each shard on the same ports."""
        options = self._options
        ports = [self._share_port(options.http_port, "HTTP")]
        self.http_port = ports[0][0].getsockname()[1]
        if options.grpc_config is not None:
            ports.append(self._share_port(options.grpc_port, "gRPC"))
            self.grpc_port = ports[1][0].getsockname()[1]
        for number, listeners in enumerate(zip(*ports, strict=True)):
            opening = OpenShard(
                VERSION,
                number,
                limits=options.limits,
                logs_requests=options.log_requests,
                tls=options.tls,
                grpc=options.grpc_config,
                allows_regions=options.shared_memory,
                record_folder=str(self.catalog.recorders.folder or ""),
                num_shards=self.shard_choice.number,
                metrics=options.shown_metrics,
                header_patterns=options.header_patterns,
                cache=options.cache,
            )
            spec = shard_spec(opening, listeners, self._gate)
            self._processes.append(ShardProcess(self._core, spec))

    def _share_port(self, port: int, what: str) -> list[socket.socket]:
        """Return a listener on this port for each shard. They stay open here, so connections that a
        shard had not accepted when it ended are not lost."""
        host, listeners = self._options.host, list[socket.socket]()
        try:
            for _ in range(self.shard_choice.number):
                listeners.append(reserve(host, port))
                self._reserved.append(listeners[-1])
                port = listeners[-1].getsockname()[1]
                listeners[-1].listen(BACKLOG)
                listeners[-1].setblocking(False)
        except OSError as error:
            raise cannot_listen(host, port, what, error) from None
        return listeners

    async def _listen(
        self, server: Listener, port: int, what: str, tls: ssl.SSLContext | None = None
    ) -> int:
        host = self._options.host
        try:
            return await server.start(host, port, tls=tls or self._context)
        except OSError as error:
            raise cannot_listen(host, port, what, error) from None


def check(options: ServeOptions) -> None:
    """Raise CommandLineError for flags that contradict each other."""
    problems = [*_host_problems(options), *_port_problems(options), *_tls_problems(options)]
    problems += read_metrics_config(options.metrics_config)[1]
    problems += read_host_policies(options.host_policy)[1]
    problems += read_model_memory(options.model_memory)[1]
    problems += read_trace_config(options.trace_config)[1]
    problems += restriction_problems(options)
    problems += read_cache_config(options.cache_config)[1]
    problems += read_resources(options.rate_limit, options.rate_limit_resource)[1]
    if problems:
        raise CommandLineError(problems)


def restriction_problems(options: ServeOptions) -> list[str]:
    """Return what is wrong with restricted protocols and patterns of headers."""
    problems = read_restrictions(options.http_restricted_api, HTTP_FLAG)[1]
    problems += read_restrictions(options.grpc_restricted_protocol, GRPC_FLAG)[1]
    patterns = {
        "--http-header-forward-pattern": options.http_header_forward_pattern,
        "--grpc-header-forward-pattern": options.grpc_header_forward_pattern,
    }
    for flag, pattern in patterns.items():
        if problem := pattern_problem(pattern):
            problems.append(f"{flag} '{pattern[:100]}': {problem}")
    return problems


def check_ports(options: ServeOptions) -> None:
    """Raise ConfigError for ports of shards that are taken: they would notice only while models
    load, and would silently share their ports with those of another server."""
    if problems := _shared_port_problems(options):
        raise ConfigError(problems)


def choose_shards(configs: Sequence[ModelConfig], options: ServeOptions) -> ShardChoice:
    """Return the number of shards that was given, or choose it for models whose devices are
    known. ConfigError if the API keys cannot be read."""
    if options.shards:
        return ShardChoice(options.shards, f"--shards {options.shards}")
    return choose(usable_cores(), configs, shard_refusals(configs, options))


def shard_refusals(configs: Sequence[ModelConfig], options: ServeOptions) -> list[str]:
    """Return why these models and options need a server with one shard; empty if they do not."""
    refusals: list[str] = []
    if options.is_polling or (options.is_explicit and "*" not in options.load_model):
        refusals.append("models that are loaded later are not known yet")
    number = num_queue_shares(KeyFile(Path(options.api_keys)).read()) if options.api_keys else 0
    if number > NUM_KEYS:
        refusals.append(f"{options.api_keys} has {number} queue_shares")
    return refusals


def num_queue_shares(keys: Keys) -> int:
    """Return how many numbers shards need for the shares of queues."""
    return len(Quotas(keys.quotas).numbers)


def check_quotas(keys: Keys, options: ServeOptions) -> None:
    """Raise ConfigError if more keys have shares of queues than shards can show each other."""
    number = num_queue_shares(keys)
    if (options.shards or 1) > 1 and number > NUM_KEYS:
        figures = {"path": options.api_keys, "number": number, "limit": NUM_KEYS}
        raise ConfigError([SHARDS_WITH_QUOTAS.format(**figures)])


def _shared_port_problems(options: ServeOptions) -> list[str]:
    if options.shards <= 1:
        return []
    shared = [(options.http_port, "HTTP")]
    if options.grpc:
        shared.append((options.grpc_port, "gRPC"))
    host = options.host
    reasons = [(port, what, why_not_listen(host, port)) for port, what in shared]
    return [str(cannot_listen(host, *each)) for each in reasons if each[2]]


def _host_problems(options: ServeOptions) -> list[str]:
    """Allow only loopback addresses, unless there are keys, a client CA, or --insecure."""
    is_guarded = options.insecure or options.api_keys or options.tls_client_ca
    if is_guarded or is_loopback(options.host):
        return []
    return [
        f"--host {options.host}: everybody who reaches this address could use the models; "
        "give --api-keys, --tls-client-ca, or --insecure if that is what you want"
    ]


def _port_problems(options: ServeOptions) -> list[str]:
    flags = {options.http_port: ["--http-port"]}
    if options.grpc:
        flags.setdefault(options.grpc_port, []).append("--grpc-port")
    if options.metrics:
        flags.setdefault(options.metrics_port, []).append("--metrics-port")
    return [
        f"{' and '.join(names)} are all {port}; each needs a port of its own"
        for port, names in flags.items()
        if port and len(names) > 1
    ]


def _tls_problems(options: ServeOptions) -> list[str]:
    given = {"--tls-cert": options.tls_cert, "--tls-key": options.tls_key}
    missing = [flag for flag, path in given.items() if not path]
    if options.tls is None or not missing:
        return []
    return [f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} required for TLS"]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def make_gate(options: ServeOptions, key_file: KeyFile | None) -> Gate:
    keys = None if key_file is None else key_file.read()
    hosts = LOOPBACK_HOSTS | {host.lower() for host in (options.host, *options.allow_host)}
    known_hosts = frozenset(hosts) if is_loopback(options.host) else None
    return Gate(keys, known_hosts, options.restrictions)


async def serve(
    path: str,
    found: RepositoryScan,
    options: ServeOptions,
    choice: ShardChoice,
    on_start: Callable[[Server], None],
    on_progress: Callable[[LoadProgress], None],
) -> signal.Signals:
    """Run until SIGTERM, SIGQUIT or SIGINT, or SIGHUP from a terminal, and return the signal; a
    second signal exits at once."""
    # GIL switch interval: threads that read repositories or inflate bodies must yield quickly.
    sys.setswitchinterval(SWITCH_S)
    received: list[signal.Signals] = []

    def asked_to_stop(number: signal.Signals) -> None:
        if number == signal.SIGHUP and not sys.stdin.isatty():
            log.info("SIGHUP: API keys and certificates are reloaded whenever their files change")
            return
        if server.lifecycle.is_draining:
            is_interrupt = number == signal.SIGINT
            os._exit(ExitCode.INTERRUPTED if is_interrupt else ExitCode.FAILED)
        received.append(number)
        server.stop()

    manager = ServiceManager()
    alive = partial(manager.tell, service_manager.ALIVE)
    watchdog = Watchdog(options.drain_s, asked_to_stop, on_alive=alive)
    server = Server(options, path, watchdog, choice)
    watchdog.start()
    try:
        await server.start(found, on_progress)
        if not server.lifecycle.is_draining:
            on_start(server)
            manager.tell(service_manager.READY)
        await server.run_until_stopped()
    finally:
        manager.tell(service_manager.STOPPING)
        await server.close()
        watchdog.stop()
        manager.close()
    return received[0]
