"""Options of `penstock.ray.app` and `penstock export ray`: how models are deployed on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api.options import flags_of, number, same_flag
from penstock.api.serve_options import ServeOptions

cluster_flag = flags_of("On the cluster")
# Who accepts traffic.
BY_RAY, BY_PENSTOCK = "ray", "penstock"
EVIDENCE = ("warn", "require", "off")


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How a repository is deployed with Ray Serve."""

    ingress: str = cluster_flag(
        "Who accepts traffic: Ray's proxies or our servers",
        "ray sends requests through Ray's proxies to replicas of each model. Choose penstock where "
        "the proxies are the bottleneck: Ray then places one server on each node, which listens "
        "on its own ports.",
        value=BY_RAY,
        choices=(BY_RAY, BY_PENSTOCK),
    )
    max_replicas: int | None = cluster_flag(
        "Most replicas of each model",
        "Give it to scale by queue depth; Ray then starts as many as requests need.",
        **number(None, "N", 1, 10_000, default="penstock.max_instances, or 1"),
    )
    ingress_replicas: int = cluster_flag(
        "Replicas of the ingress, or servers with --ingress penstock",
        "Raise it to the number of nodes, so that each proxy has an ingress on its own node and "
        "requests survive the death of another.",
        **number(1, "N", 1, 10_000),
    )
    retries: int = cluster_flag(
        "Calls that are repeated when their replica dies",
        "Lower it to 0 where a model has side effects; raise it where nodes die often.",
        **number(2, "N", 0, 10),
    )
    evidence: str = cluster_flag(
        "What happens if evidence does not hold on a node",
        "warn logs it. Choose require to start only versions that were measured on hardware like "
        "that of their node, off for models without evidence.",
        value="warn",
        choices=EVIDENCE,
    )
    http_port: int = same_flag(
        ServeOptions,
        "http_port",
        when="The same on all nodes. Change it when the port is taken.",
    )
    grpc: bool = cluster_flag(
        "Serve gRPC as well",
        "Ray's gRPC proxies listen on all interfaces, so this needs --api-keys or --insecure.",
        value=False,
    )
    grpc_port: int = same_flag(
        ServeOptions,
        "grpc_port",
        when="The same on all nodes. Change it when the port is taken.",
    )
    host: str = same_flag(
        ServeOptions,
        "host",
        when="Change it so that other machines can connect, with api_keys, or where the network "
        "keeps strangers out.",
    )
    id: str = same_flag(ServeOptions, "id")
    api_keys: str = same_flag(
        ServeOptions,
        "api_keys",
        when="Give it when other machines can reach the cluster. The file has to be at the same "
        "path on all nodes, without quotas: those need one server.",
    )
    insecure: bool = same_flag(ServeOptions, "insecure")
    max_body_bytes: int = same_flag(ServeOptions, "max_body_bytes")
    max_json_bytes: int = same_flag(ServeOptions, "max_json_bytes")
    drain_s: float = same_flag(
        ServeOptions,
        "drain_s",
        summary="Seconds for requests in flight when a replica stops",
        when="Raise it for slow models.",
    )
    log_requests: bool = same_flag(ServeOptions, "log_requests")
