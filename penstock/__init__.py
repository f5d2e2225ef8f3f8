"""Optimise and serve models under a latency target: give a model, sample data and an SLO.

Importing is light: each function imports what it needs when it is called.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from penstock.repository.python_model import TensorType as Tensor
from penstock.repository.python_model import model

if TYPE_CHECKING:
    from typing import Unpack

    from penstock.api import keywords
    from penstock.api import repo as repo
    from penstock.api.asgi import AsgiApp
    from penstock.api.bench import BenchResult
    from penstock.api.capacity import CapacityResult
    from penstock.api.client import Client as Client
    from penstock.api.explain import ExplainResult
    from penstock.api.inspect import InspectResult
    from penstock.api.loaded import LoadedModel
    from penstock.api.optimize import OptimizeResult
    from penstock.api.profile import ProfileResult
    from penstock.api.server_handle import ServerHandle

__version__ = "0.1.0"
__all__ = [
    "Client",
    "Tensor",
    "__version__",
    "asgi",
    "bench",
    "capacity",
    "explain",
    "inspect",
    "load",
    "model",
    "optimize",
    "profile",
    "repo",
    "serve",
]

# A model file or folder, a repository, package.module:factory, or the URL of a running server.
Model = str | os.PathLike[str]


def load(model: Model, *, version: str = "") -> LoadedModel:
    """Load a model in this process: `penstock.load("model.onnx").infer(image)`."""
    from penstock.api.loaded import LoadedModel
    from penstock.repository.model_source import resolve

    return LoadedModel(resolve(model).read(), os.fspath(model), version)


def serve(model: Model, /, **options: Unpack[keywords.ServeKeywords]) -> ServerHandle:
    """Serve a model or repository from a child process, and return when it is ready.

    `with penstock.serve("model.onnx", http_port=0) as server: server.client().infer(image)`.
    Options are those of `penstock serve`. The server ends with this process."""
    from penstock.api.options import from_keywords
    from penstock.api.serve_options import ServeOptions
    from penstock.api.server_handle import ServerHandle

    return ServerHandle(os.fspath(model), from_keywords(ServeOptions, options))


def asgi(model: Model, /, **options: Unpack[keywords.AsgiKeywords]) -> AsgiApp:
    """Return an ASGI 3 application that serves a model or repository inside another application.

    `host = FastAPI(lifespan=models.lifespan)`, then `host.mount("/models", models)`. Options are
    those of `penstock serve` that do not concern ports. Models have worker processes."""
    from penstock.api.asgi import AsgiApp
    from penstock.api.asgi_options import AsgiOptions
    from penstock.api.options import from_keywords

    return AsgiApp(os.fspath(model), from_keywords(AsgiOptions, options))


def bench(
    model: Model, /, *, progress: bool = False, **options: Unpack[keywords.BenchKeywords]
) -> BenchResult:
    """Measure a model or a running server under load.

    `penstock.bench("model.onnx", rate="100:800", duration=5, slo="p99 < 20 ms")`. Options are
    those of `penstock bench`. `progress` shows levels on stderr as they are measured."""
    from penstock.api.bench import bench as run
    from penstock.api.bench_options import BenchOptions
    from penstock.api.options import from_keywords

    return run(os.fspath(model), from_keywords(BenchOptions, options), progress=progress)


def optimize(
    model: Model, /, *, progress: bool = False, **options: Unpack[keywords.OptimizeKeywords]
) -> OptimizeResult:
    """Find the cheapest configuration of a model that meets an SLO, and add it to a repository.

    `penstock.optimize("model.onnx", data="data.npz", slo="p99 < 20 ms at 200/s", out="models")`.
    Options are those of `penstock optimize`. Interrupted runs resume."""
    from penstock.api.optimize import optimize as run
    from penstock.api.optimize_options import OptimizeOptions
    from penstock.api.options import from_keywords

    return run(os.fspath(model), from_keywords(OptimizeOptions, options), progress=progress)


def profile(model: Model, /, **options: Unpack[keywords.ProfileKeywords]) -> ProfileResult:
    """Show where the time of one batch goes, and what to do next.

    `penstock.profile("model.onnx", batch_size=8)`. Options are those of `penstock profile`."""
    from penstock.api.options import from_keywords
    from penstock.api.profile import profile as run
    from penstock.api.profile_options import ProfileOptions

    return run(os.fspath(model), from_keywords(ProfileOptions, options))


def inspect(model: Model) -> InspectResult:
    """Return how a model or repository would be served, without loading it."""
    from penstock.api.inspect import inspect as run

    return run(os.fspath(model))


def capacity(model: Model, /, **options: Unpack[keywords.CapacityKeywords]) -> CapacityResult:
    """Return how many replicas of a model a load needs, from the evidence of its version.

    `penstock.capacity("models/bert", rate="50000/s", failure_domain=8, price=2.5)`. Options are
    those of `penstock capacity`."""
    from penstock.api.capacity import capacity as run
    from penstock.api.capacity_options import CapacityOptions
    from penstock.api.options import from_keywords

    return run(os.fspath(model), from_keywords(CapacityOptions, options))


def explain(model: str, *, url: str = "", version: str = "", api_key: str = "") -> ExplainResult:
    """Ask a running server why a model's batches are as they are.

    `model` is a name on the server at `url`, or http://host:port/v2/models/NAME."""
    from penstock.api.explain import locate

    return locate(model, url, version, api_key).ask()


def __getattr__(name: str) -> Any:
    if name == "Client":
        from penstock.api.client import Client

        return Client
    if name == "repo":
        return importlib.import_module("penstock.api.repo")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
