"""Makes deployments of Ray Serve: one for each model of a repository, and the ingress before them.
`export.ray_plan` decides what each needs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.api.ray_options import BY_PENSTOCK, RayOptions
from penstock.config import ModelConfig
from penstock.errors import CommandLineError, ConfigError
from penstock.export.ray_plan import INGRESS, SERVER, ReplicaPlan, plan_model
from penstock.export.workload import read_needs
from penstock.protocols.key_file import KeyFile
from penstock.ray.evidence_check import read_manifest
from penstock.ray.ingress import Ingress, IngressSpec, check_no_quotas
from penstock.ray.replica import ModelReplica, ReplicaSpec, read_versions
from penstock.repository import layout
from penstock.repository import manifest as manifests
from penstock.repository.model_source import resolve
from penstock.server import is_loopback

MISSING = (
    "penstock.ray needs Ray Serve, which is not installed; install it with "
    "pip install 'penstock[ray]'"
)
ROUTER = "penstock.ray.prefix_router.PrefixRouter"
# Time for a replica to end after its requests had theirs.
GRACE_S = 10.0
HEALTH_PERIOD_S = 5.0
# Replicas that are started before old ones stop, in percent; one at least.
SURGE_PERCENT = 25
INGRESS_CPUS = 0.5
# Ray would log a line for each request; `log_requests` is ours.
QUIET = {"enable_access_log": False}
INGRESS_REQUESTS = 8192
# Reasons to change the number of replicas have to last this long. Ray measures every 10 s, and has
# to look back further than that.
UPSCALE_S, DOWNSCALE_S, LOOK_BACK_S = 5.0, 60.0, 15.0


def require_serve() -> Any:
    """Return `ray.serve`; ConfigError names the extra that installs it."""
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"{MISSING} ({error})") from None
    return serve


def make_application(
    repository: str,
    options: RayOptions,
    versions: Mapping[str, Sequence[str]],
    deployments: Mapping[str, Mapping[str, Any]],
) -> Any:
    """Return the application. ConfigError if a model cannot be served, or an option is wrong."""
    serve = require_serve()
    path = os.path.abspath(repository) if os.path.exists(repository) else repository
    design = Design.read(path, options, versions)
    return (
        design.node_servers(serve, deployments)
        if options.ingress == BY_PENSTOCK
        else (design.deployments(serve, deployments))
    )


@dataclass(frozen=True, slots=True)
class Design:
    """The models of a repository and what each needs; makes Ray's deployments of them."""

    repository: str
    options: RayOptions
    models: Mapping[str, Sequence[ModelConfig]]
    plans: Mapping[str, ReplicaPlan]

    @staticmethod
    def read(repository: str, options: RayOptions, versions: Mapping[str, Sequence[str]]) -> Design:
        check_options(options, versions)
        models = read_models(repository, versions)
        if options.ingress != BY_PENSTOCK:
            refuse_ensembles(models)
        return Design(repository, options, models, plan_models(models, options))

    def settings(self) -> dict[str, dict[str, Any]]:
        """Return the options of all deployments, in the names of Ray Serve, by their names."""
        if self.options.ingress == BY_PENSTOCK:
            return {SERVER: server_settings(list(self.plans.values()), self.options)}
        found = {name: replica_settings(plan, self.options) for name, plan in self.plans.items()}
        return {INGRESS: ingress_settings(self.options), **found}

    def deployments(self, serve: Any, given: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return an ingress before a deployment of each model."""
        settings = merge_settings(self.settings(), given)
        handles = {
            name: serve.deployment(ModelReplica)
            .options(**settings[name])
            .bind(replica_spec(self.repository, configs, self.options))
            for name, configs in self.models.items()
        }
        texts = tuple(name for name, plan in self.plans.items() if plan.is_text)
        ingress = serve.deployment(serve.ingress()(Ingress)).options(**settings[INGRESS])
        return ingress.bind(ingress_spec(texts, self.options), handles)

    def node_servers(self, serve: Any, given: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return servers, at most one on a node."""
        from penstock.ray.node_server import NodeServer, NodeSpec, server_options

        settings = merge_settings(self.settings(), given)[SERVER]
        digest = "".join(map(digest_versions, self.models.values()))
        spec = NodeSpec(self.repository, digest, server_options(self.options))
        return serve.deployment(NodeServer).options(**settings).bind(spec)


def merge_settings(
    settings: Mapping[str, Mapping[str, Any]], given: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the options of deployments, with those that the caller has given instead of ours."""
    unknown = [name for name in given if name not in settings]
    if unknown:
        there = ", ".join(settings)
        raise ConfigError(f"deployments: no {', '.join(unknown)}; there: {there}")
    merged = {name: {**each, **given.get(name, {})} for name, each in settings.items()}
    for name, each in given.items():
        # Ray takes one of them.
        other = {"num_replicas": "autoscaling_config", "autoscaling_config": "num_replicas"}
        for key in each:
            if key in other and other[key] not in each:
                merged[name].pop(other[key], None)
    return merged


def read_models(
    repository: str, versions: Mapping[str, Sequence[str]]
) -> dict[str, list[ModelConfig]]:
    """Return the versions of each model that are to be served, read on this machine."""
    source = resolve(repository)
    names = source.names()
    unknown = [name for name in versions if name not in names]
    if unknown:
        there = layout.listed(sorted(names))
        raise ConfigError(
            f"versions: no model {', '.join(unknown)} in {repository}; there: {there}"
        )
    return {name: read_versions(repository, name, versions.get(name, ())).configs for name in names}


def refuse_ensembles(found: Mapping[str, Sequence[ModelConfig]]) -> None:
    """Raise ConfigError for ensembles: the models that they run would be other deployments."""
    if names := [
        name for name, configs in found.items() if any(each.is_ensemble for each in configs)
    ]:
        advice = (
            "give --ingress penstock (ingress='penstock'), whose servers have all models, or serve "
            "the others from a repository of their own"
        )
        raise ConfigError(
            f"{', '.join(names)}: an ensemble cannot be a deployment, as its steps run models that "
            f"are other deployments; {advice}"
        )


def plan_models(
    found: Mapping[str, Sequence[ModelConfig]], options: RayOptions
) -> dict[str, ReplicaPlan]:
    return {
        name: plan_model(
            configs, read_needs(configs[-1]), read_evidence(configs[-1]), options.max_replicas or 0
        )
        for name, configs in found.items()
        # It needs nothing beside its members.
        if not configs[-1].is_ensemble
    }


def read_evidence(config: ModelConfig) -> Mapping[str, object]:
    manifest = read_manifest(config)
    return {} if manifest is None else manifest.evidence


def replica_spec(
    repository: str, configs: Sequence[ModelConfig], options: RayOptions
) -> ReplicaSpec:
    return ReplicaSpec(
        repository=repository,
        model=configs[-1].name,
        versions=tuple(config.version for config in configs),
        digest=digest_versions(configs),
        evidence=options.evidence,
        drain_s=options.drain_s,
        max_body_bytes=options.max_body_bytes,
        max_json_bytes=options.max_json_bytes,
        log_requests=options.log_requests,
    )


def digest_versions(configs: Sequence[ModelConfig]) -> str:
    """Return a digest that changes with the configuration and the files of the versions."""
    state = hashlib.sha256()
    for config in configs:
        state.update(f"{config.name}/{config.version}\n{config.written}\n".encode())
        if config.manifest:
            state.update(Path(config.manifest).read_bytes())
        else:
            for path in _files(Path(config.artifact)):
                found = path.stat()
                state.update(f"{path.name} {found.st_size} {found.st_mtime_ns}\n".encode())
    return state.hexdigest()[:16]


def _files(artifact: Path) -> list[Path]:
    """Return the files of an uncommitted version: weights and modules lie beside the file that it
    is loaded by."""
    if artifact.is_dir():
        found = [artifact / name for name in manifests.names_below(artifact)]
    else:
        found = sorted(artifact.parent.glob("*"))
    return [path for path in found if path.is_file()]


def ingress_spec(texts: tuple[str, ...], options: RayOptions) -> IngressSpec:
    return IngressSpec(
        texts=texts,
        retries=options.retries,
        id=options.id,
        api_keys=os.path.abspath(options.api_keys) if options.api_keys else "",
        max_body_bytes=options.max_body_bytes,
        max_json_bytes=options.max_json_bytes,
        log_requests=options.log_requests,
    )


def replica_settings(plan: ReplicaPlan, options: RayOptions) -> dict[str, Any]:
    """Return the options of a model's deployment, in the names of Ray Serve."""
    settings: dict[str, Any] = {
        "name": plan.model,
        "ray_actor_options": {"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
        "max_ongoing_requests": plan.max_ongoing_requests,
        "max_queued_requests": plan.max_queued_requests,
        "graceful_shutdown_timeout_s": options.drain_s + GRACE_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_PERIOD_S,
        "max_surge_percent": SURGE_PERCENT,
        "logging_config": QUIET,
    }
    if plan.scales:
        settings["autoscaling_config"] = {
            "min_replicas": plan.min_replicas,
            "max_replicas": plan.max_replicas,
            "target_ongoing_requests": plan.target_ongoing_requests,
            "upscale_delay_s": UPSCALE_S,
            "downscale_delay_s": DOWNSCALE_S,
            "look_back_period_s": LOOK_BACK_S,
        }
    else:
        settings["num_replicas"] = plan.min_replicas
    if plan.is_text:
        settings["request_router_config"] = {"request_router_class": ROUTER}
    return settings


def server_settings(plans: Sequence[ReplicaPlan], options: RayOptions) -> dict[str, Any]:
    """Return the options of servers: each has the models' CPUs and GPUs, on a node of its own."""
    return {
        "name": SERVER,
        "num_replicas": options.ingress_replicas,
        "max_replicas_per_node": 1,
        "ray_actor_options": {
            "num_cpus": sum(plan.num_cpus for plan in plans),
            "num_gpus": sum(plan.num_gpus for plan in plans),
        },
        "graceful_shutdown_timeout_s": options.drain_s + 2 * GRACE_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": HEALTH_PERIOD_S,
        # The ports of a node are taken until its server has stopped.
        "max_surge_percent": 0,
        "logging_config": QUIET,
    }


def ingress_settings(options: RayOptions) -> dict[str, Any]:
    return {
        "name": INGRESS,
        "num_replicas": options.ingress_replicas,
        "ray_actor_options": {"num_cpus": INGRESS_CPUS},
        "max_ongoing_requests": INGRESS_REQUESTS,
        "graceful_shutdown_timeout_s": options.drain_s + GRACE_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "max_surge_percent": SURGE_PERCENT,
        "logging_config": QUIET,
    }


def check_options(options: RayOptions, versions: Mapping[str, Sequence[str]]) -> None:
    """Raise CommandLineError for flags that contradict each other; ConfigError for API keys that
    cannot be read, and for what one server does but a cluster does not."""
    problems: list[str] = []
    usage: list[str] = []
    if options.api_keys:
        try:
            check_no_quotas(options.api_keys, KeyFile(Path(options.api_keys)).read())
        except ConfigError as error:
            problems += error.problems
    is_guarded = options.api_keys or options.insecure
    if not is_guarded and not is_loopback(options.host):
        usage.append(
            f"--host {options.host}: everybody who reaches this address could use the models; "
            "give --api-keys, or --insecure if that is what you want"
        )
    if not is_guarded and options.grpc and options.ingress != BY_PENSTOCK:
        usage.append(
            "--grpc: Ray's gRPC proxies listen on all interfaces; give --api-keys, or --insecure "
            "where the network keeps strangers out"
        )
    if options.ingress == BY_PENSTOCK and versions:
        problems.append(
            "versions: a server serves those that are promoted; use penstock repo promote"
        )
    if usage:
        raise CommandLineError([*usage, *problems])
    if problems:
        raise ConfigError(problems)
