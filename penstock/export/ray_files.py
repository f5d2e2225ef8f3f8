"""The files of an application for Ray Serve: `app.py`, which makes it, and `serve_config.yaml` in
Ray's schema, with every figure written out. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.export.yaml_text import Yaml, dump

APP, CONFIG = "app.py", "serve_config.yaml"
NAME = "penstock"
# Functions that register our gRPC methods with Ray's proxies.
_RPCS = "penstock.ray.inference_rpcs"
SERVICER_FUNCTIONS = (f"{_RPCS}.add_inference_service", f"{_RPCS}.add_health_service")
SOURCE = '''"""{mark}

serve run serve_config.yaml       # on this machine
serve deploy serve_config.yaml    # on a running cluster

To add deployments of your own, copy this file: `app` returns an application of Ray Serve.
"""

from penstock.ray import build


def app(args: dict):
    return build(args)
'''


@dataclass(frozen=True, slots=True)
class RayListeners:
    """Where Ray's proxies listen; no gRPC without a port."""

    host: str
    http_port: int
    grpc_port: int | None


def write_app(mark: str) -> str:
    return SOURCE.format(mark=mark)


def write_config(
    args: Mapping[str, Yaml],
    deployments: Sequence[Mapping[str, Yaml]],
    listeners: RayListeners | None,
    comments: Sequence[str],
) -> str:
    """Return the config file. `args` are those of `penstock.ray.build`. Without `listeners` Ray
    accepts no traffic: the servers of the nodes do."""
    application: dict[str, Yaml] = {
        "name": NAME,
        "route_prefix": None if listeners is None else "/",
        "import_path": "app:app",
        "args": args,
        "deployments": list(deployments),
    }
    config: dict[str, Yaml] = {
        "proxy_location": "Disabled" if listeners is None else "EveryNode",
    }
    if listeners is not None:
        config["http_options"] = {"host": listeners.host, "port": listeners.http_port}
        if listeners.grpc_port is not None:
            config["grpc_options"] = {
                "port": listeners.grpc_port,
                "grpc_servicer_functions": list(SERVICER_FUNCTIONS),
            }
    config["applications"] = [application]
    return dump(config, comments)
