"""`penstock export ray`: a repository as files for Ray Serve, which needs no Ray to be written."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import penstock
from penstock.api.export import MARK, check_own_files
from penstock.api.ray_options import BY_PENSTOCK, RayOptions
from penstock.benchmark.run_files import write_text
from penstock.errors import ConfigError
from penstock.export import ray_files
from penstock.export.ray_files import RayListeners
from penstock.ray.application import Design


@dataclass(frozen=True, slots=True)
class ExportedRay:
    """The files that were written. `notes` say where figures come from."""

    paths: tuple[str, ...]
    notes: tuple[str, ...]
    next_command: str


def export_ray(repository: str, out: str, options: RayOptions) -> ExportedRay:
    """Write the files into a folder. ConfigError if a model cannot be served, or the folder cannot
    be written."""
    path = os.path.abspath(repository)
    design = Design.read(path, options, {})
    mark = f"{MARK} ray {penstock.__version__}; the next export replaces it."
    by_ray = options.ingress != BY_PENSTOCK
    listeners = None
    if by_ray:
        grpc_port = options.grpc_port if options.grpc else None
        listeners = RayListeners(options.host, options.http_port, grpc_port)
    notes = tuple(_notes(design))
    args: dict[str, Any] = {"repository": path, **_changed(options)}
    if by_ray:
        # A promoted version changes the file, which makes a rolling update of the next deploy.
        args["versions"] = {name: list(plan.versions) for name, plan in design.plans.items()}
    comments = [mark, *notes]
    settings = list(design.settings().values())
    files = {
        ray_files.APP: ray_files.write_app(mark),
        ray_files.CONFIG: ray_files.write_config(args, settings, listeners, comments),
    }
    folder = Path(out)
    check_own_files(folder, files)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    for name, text in files.items():
        write_text(text, folder / name)
    command = f"cd {shlex.quote(out)} && serve run {ray_files.CONFIG}"
    return ExportedRay(tuple(str(folder / name) for name in files), notes, command)


def _changed(options: RayOptions) -> dict[str, Any]:
    """Return the options that are not at their defaults, without those of Ray's proxies."""
    skipped = () if options.ingress == BY_PENSTOCK else ("host", "http_port", "grpc_port", "grpc")
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    if options.api_keys:
        values["api_keys"] = os.path.abspath(options.api_keys)
    return {
        each.name: values[each.name]
        for each in fields(options)
        if values[each.name] != each.default and each.name not in skipped
    }


def _notes(design: Design) -> list[str]:
    return [
        f"{name}: num_cpus {plan.num_cpus}: {plan.reasons['num_cpus']}; "
        f"replicas {plan.min_replicas} to {plan.max_replicas}: {plan.reasons['replicas']}; "
        f"target {plan.target_ongoing_requests:g}: {plan.reasons['target_ongoing_requests']}"
        for name, plan in design.plans.items()
    ]
