"""Serve models in this process until a signal arrives: resolve, check, load, listen. `penstock
serve` runs it in the foreground, `penstock.serve` in a child process."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock import server
from penstock.api.serve_options import ServeOptions
from penstock.errors import CommandLineError, ConfigError
from penstock.repository import layout
from penstock.repository.ensemble_files import add_members
from penstock.repository.repositories import Repositories, check_config_name
from penstock.system import logs
from penstock.system.file_limit import raise_file_limit

if TYPE_CHECKING:
    from penstock.config import ModelConfig
    from penstock.repository.layout import RepositoryScan
    from penstock.server import LoadProgress, Server
    from penstock.serving.placement import GpuPlan

log = logging.getLogger("penstock")


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks for events of the start. Names are those of the repository's models."""

    started: Callable[[Server, Sequence[str]], None]
    progress: Callable[[LoadProgress], None] = lambda progress: None
    memory_plan: Callable[[Sequence[GpuPlan]], None] = lambda plan: None


def run(model: str, options: ServeOptions, listeners: Listeners) -> signal.Signals:
    """Serve until a signal arrives, and return it. ConfigError, or CommandLineError for options
    that contradict each other, before anything is served."""
    import uvloop

    settings = logs.from_environment()
    level, form = options.log_level or settings.level, options.log_format or settings.format
    settings = replace(settings, level=level, format=form)
    logs.configure(settings)
    logs.hand_down(settings)
    raise_file_limit()
    server.check(options)
    found = find(model, options)
    if not options.allow_hard_links:
        found = layout.refuse_hard_links(found)
    if found.problems and options.exit_on_error:
        raise ConfigError(layout.flat(found.problems))
    configs = _check_gpus(found, options, listeners)
    choice = server.choose_shards(configs, options)
    options = replace(options, shards=choice.number)
    server.check_ports(options)

    def started(running: Server) -> None:
        failures = layout.flat({f.name: list(f.problems) for f in running.catalog.failures})
        if failures and options.exit_on_error:
            raise ConfigError(failures)
        is_made_up = options.random_weights
        names = list(found.folders) if is_made_up else sources_of(model, options).names()
        listeners.started(running, names)

    return uvloop.run(server.serve(model, found, options, choice, started, listeners.progress))


def _check_gpus(
    found: RepositoryScan, options: ServeOptions, listeners: Listeners
) -> Sequence[ModelConfig]:
    """Report the memory plan of the GPUs, and fail if the models do not fit. Return the models that
    do, with their devices."""
    from penstock.serving.fleet import Fleet

    arranged = Fleet(options.gpu_memory_reserve, policies=options.host_policies).arrange(
        found.configs
    )
    if arranged.plan:
        listeners.memory_plan(arranged.plan)
    if arranged.problems and options.exit_on_error:
        raise ConfigError(layout.flat(arranged.problems))
    return arranged.configs


def find(path: str, options: ServeOptions) -> RepositoryScan:
    """Return what to load at start."""
    if options.random_weights:
        return layout.read_made_up(path)
    if options.load_model and not options.is_explicit:
        raise CommandLineError(["--load-model needs --model-control-mode explicit"])
    if options.reload and options.is_polling:
        raise CommandLineError(["--reload: poll mode already follows the files; leave it out"])
    sources = sources_of(path, options)
    if options.is_polling:
        # Models may come later.
        return sources.read_named(sources.names())
    if not options.is_explicit or "*" in options.load_model:
        return sources.read()
    found = sources.read_named(options.load_model)
    add_members(found, sources.read_one)
    return found


def sources_of(path: str, options: ServeOptions) -> Repositories:
    """Return where the models are."""
    check_config_name(options.model_config_name)
    return Repositories((path, *map(str, options.model_repository)), options.model_config_name)
