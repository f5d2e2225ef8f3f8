"""Models on a Ray cluster: `penstock.ray.app(repository)` is an application for Ray Serve.

Each model is a deployment whose replicas hold the server's core with real worker processes; an
ingress speaks v2 over HTTP and gRPC, and OpenAI's API. Importing this needs no Ray.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Unpack

    from penstock.api.keywords import RayKeywords

__all__ = ["app", "build", "grpc_options"]


def app(
    repository: str | os.PathLike[str],
    /,
    *,
    versions: Mapping[str, Sequence[str]] | None = None,
    deployments: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Unpack[RayKeywords],
) -> Any:
    """Return a Ray Serve application of all models of a repository, or of one model.

    `serve.run(penstock.ray.app("models"))`; again after `penstock repo promote`, it is a rolling
    update. `versions` are those to serve, by model, instead of the promoted ones. `deployments` are
    options of Ray's deployments by the name of their model, or `penstock_ingress`. The repository
    must have the same path on all nodes. Other options are those of `penstock export ray`."""
    from penstock.api.options import from_keywords
    from penstock.api.ray_options import RayOptions
    from penstock.ray.application import make_application

    made = from_keywords(RayOptions, options)
    return make_application(os.fspath(repository), made, versions or {}, deployments or {})


def build(args: dict[str, Any]) -> Any:
    """Return the application that the `args` of a Serve config file describe: `repository`, and the
    keywords of `app`."""
    given = dict(args)
    return app(given.pop("repository"), **given)


def grpc_options(port: int = 8001) -> dict[str, Any]:
    """Return options for `serve.start(grpc_options=...)`, with which Ray's proxies speak v2. They
    listen on all interfaces."""
    from penstock.export.ray_files import SERVICER_FUNCTIONS

    return {"port": port, "grpc_servicer_functions": list(SERVICER_FUNCTIONS)}
