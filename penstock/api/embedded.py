"""The server's core inside another program: models with worker processes of their own, behind the
server's handlers, without listeners, signals or shards.

`penstock.asgi` and `penstock.ray` embed it. It lives on the event loop of that program and leaves
its logging and its garbage collector alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from penstock.api import serving
from penstock.api.serve_options import ServeOptions
from penstock.config import LLM
from penstock.errors import ConfigError
from penstock.operate.monitor import Monitor
from penstock.operate.rollout_records import scrape
from penstock.operate.rollouts import Rollouts
from penstock.operate.version_actions import VersionActions
from penstock.protocols import access_log
from penstock.protocols.gate import Gate, Keys
from penstock.protocols.generate_http import GenerateHttp
from penstock.protocols.infer_grpc import InferRpcs
from penstock.protocols.key_file import KeyFile, watch_keys
from penstock.protocols.openai_http import OpenAiHttp
from penstock.protocols.v2_http import Models, V2Http
from penstock.repository import layout
from penstock.repository.layout import RepositoryScan
from penstock.server import check_quotas, make_text_model
from penstock.serving.catalog import Catalog
from penstock.serving.control import Control, Reloader
from penstock.serving.fleet import Fleet
from penstock.serving.header_forwarding import make_forwarding
from penstock.serving.lifecycle import Lifecycle
from penstock.serving.management import ManagementApi
from penstock.serving.polling import Poller

log = logging.getLogger("penstock.embedded")
POLL_S = 0.005


class EmbeddedServer:
    """A server that is called, not connected to. Made on the event loop that it lives on. `start`
    loads the models, `stop` drains and ends their processes."""

    def __init__(self, model: str, options: ServeOptions, *, owns_repository: bool = True) -> None:
        """ConfigError if the API keys cannot be read. A server that does not own its repository
        leaves the histories there to others."""
        self._owns_repository = owns_repository
        self._model = model
        self._options = options
        self._key_file = KeyFile(Path(options.api_keys)) if options.api_keys else None
        keys = None if self._key_file is None else self._key_file.read()
        hosts = frozenset(host.lower() for host in options.allow_host)
        self.gate = gate = Gate(keys, hosts or None, options.restrictions)
        fleet = Fleet(options.gpu_memory_reserve, policies=options.host_policies)
        self.catalog = Catalog(fleet=fleet, makers={LLM: make_text_model})
        self.catalog.regions.is_allowed = options.shared_memory
        self.catalog.memory.limit = options.memory_limit
        self.catalog.memory.loads_all = options.on_demand
        self.catalog.forwarding = make_forwarding(options.header_patterns)
        if keys is not None:
            self.catalog.quotas.replace(keys.quotas)
        self.lifecycle = Lifecycle(is_loading=True)
        control = Control(
            self.catalog,
            model,
            options.is_explicit,
            options.allow_hard_links,
            options.load_permissions,
            options.model_repository,
            options.model_config_name,
            options.is_polling,
        )
        self._poller = None
        if options.is_polling:
            self._poller = Poller(control, options.repository_poll_secs)
        self.management = ManagementApi(
            self.catalog,
            control,
            self.lifecycle,
            options.id,
            tells_reasons=keys is None,
        )
        self._rollouts = rollouts = Rollouts(self.catalog, self.management.control)
        self.management.families.append(lambda: scrape(rollouts.states().values()))
        self.management.add(VersionActions(self.management, gate.name_of, rollouts).answers)
        self._monitor = Monitor(self.catalog, self.management.usage.gpus, options.price)
        self.management.families.append(self._monitor.families)
        is_logged = options.log_requests
        if is_logged:
            access_log.log.setLevel(logging.INFO)  # Requested, whatever the general log level.
        openai = OpenAiHttp(self.catalog, lambda: self.lifecycle.is_draining, is_logged)
        generate = GenerateHttp(self.catalog, lambda: self.lifecycle.is_draining, is_logged)
        models = Models(self.management, is_logged, openai.handle, generate.handle, gate)
        self.v2 = V2Http(models, options.limits, gate, is_logged)
        self.infer = InferRpcs(self.catalog, self.lifecycle, gate, is_logged)
        self._watching: list[asyncio.Task[None]] = []
        # Returns how many messages have no complete answer.
        self.count_running: Callable[[], int] = lambda: 0

    async def start(self, found: RepositoryScan | None = None) -> None:
        """Load the models: those of `found`, or those that the options name. ConfigError if one
        cannot be loaded, unless `exit_on_error` is off."""
        options = self._options
        if found is None:
            found = await asyncio.to_thread(serving.find, self._model, options)
        if not options.allow_hard_links:
            found = layout.refuse_hard_links(found)
        if found.problems and options.exit_on_error:
            raise ConfigError(layout.flat(found.problems))
        if self._key_file is not None:
            check = partial(check_quotas, options=options)
            watching = watch_keys(self._key_file, check, self._use_keys)
            self._watching.append(asyncio.create_task(watching))
        self._watching.append(asyncio.create_task(self._monitor.run()))
        self._watching.append(asyncio.create_task(self._rollouts.run()))
        self._watching.append(asyncio.create_task(self.catalog.memory.keep_limit()))
        self.management.traces.begin(options.tracing)
        await asyncio.to_thread(self.management.usage.begin)
        if self._owns_repository:
            await self._rollouts.recover()
        await self.catalog.load(found)
        failures = {each.name: list(each.problems) for each in self.catalog.failures}
        if failures and options.exit_on_error:
            raise ConfigError(layout.flat(failures))
        self.lifecycle.is_loading = False
        if options.reload:
            reloader = Reloader(self.catalog, self.management.control)
            self._watching.append(asyncio.create_task(reloader.run()))
        if self._poller is not None:
            self._watching.append(asyncio.create_task(self._poller.run()))

    async def stop(self) -> None:
        """Refuse new inferences, finish accepted ones up to the drain limit, then end the models'
        processes. Safe to call after a failed start."""
        self.lifecycle.drain()
        drain_s = self._options.drain_s
        try:
            async with asyncio.timeout(drain_s):
                await self.catalog.drain()
                while self.count_running():
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            log.warning("requests are cut off after %.0f s of draining", drain_s)
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self._rollouts.close()
        await self.catalog.close()
        self.management.control.close()
        await self.v2.close()
        self.management.regions.close()
        await asyncio.to_thread(self.management.traces.close)

    def _use_keys(self, keys: Keys) -> None:
        self.gate.keys = keys
        self.catalog.quotas.replace(keys.quotas)
