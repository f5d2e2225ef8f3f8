"""Which target an address stands for: a URL's protocol, or a model in this process."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from penstock.benchmark.targets import Target, TargetSpec
from penstock.benchmark.targets.http_messages import hide_password
from penstock.config import LLM
from penstock.errors import CommandLineError, ConfigError, PenstockError
from penstock.repository.layout import ModelKind
from penstock.repository.model_source import ModelSource, resolve

ADDRESSES = (
    "http://host:port/v2/models/NAME, grpc://host:port/NAME, openai+http://host:port/v1, "
    "another http:// URL, or the file or folder of a model"
)
# Module and constructor by kind of target.
CLASSES: Mapping[str, tuple[str, str]] = {
    "v2 HTTP": ("penstock.benchmark.targets.v2_target", "V2HttpTarget"),
    "v2 gRPC": ("penstock.benchmark.targets.grpc_target", "GrpcTarget"),
    "in process": ("penstock.benchmark.targets.in_process", "InProcess"),
    "text in process": ("penstock.benchmark.targets.in_process_text", "InProcessText"),
    "OpenAI": ("penstock.benchmark.targets.openai", "OpenAI"),
    "HTTP": ("penstock.benchmark.targets.plain", "PlainHttp"),
}


def open_target(spec: TargetSpec) -> Target:
    """Make a target, importing only its own module; ConfigError for an unknown kind of address."""
    module, name = CLASSES[kind_of(spec)]
    target: Target = getattr(importlib.import_module(module), name)(spec)
    return target


def kind_of(spec: TargetSpec) -> str:
    """Return one of CLASSES."""
    if _resolve(spec.address).kind is not ModelKind.URL:
        return "text in process" if is_text(spec) else "in process"
    scheme, _, rest = spec.address.partition("://")
    if scheme in ("grpc", "grpcs"):
        return "v2 gRPC"
    if scheme in ("openai+http", "openai+https"):
        return "OpenAI"
    if scheme in ("http", "https"):
        return _kind_of_path(spec, "/" + rest.partition("/")[2].partition("?")[0])
    where = hide_password(spec.address)
    raise CommandLineError([f"{where}: unknown protocol '{scheme}'; expected {ADDRESSES}"])


def _resolve(address: str) -> ModelSource:
    try:
        return resolve(address)
    except ConfigError as error:
        hidden = hide_password(address)
        raise ConfigError([each.replace(address, hidden) for each in error.problems]) from None


def is_text(spec: TargetSpec) -> bool:
    """Whether it is a language model; problems with it are reported by `describe`."""
    try:
        found = resolve(spec.address, name=spec.model).read()
    except PenstockError:
        return False
    configs = [config for config in found.configs if spec.version in ("", config.version)]
    return bool(configs) and all(config.backend == LLM for config in configs)


def _kind_of_path(spec: TargetSpec, path: str) -> str:
    """Return the kind of a URL. A `--body` makes any URL a plain one."""
    if spec.body:
        return "HTTP"
    if path.endswith(("/v1/chat/completions", "/v1/completions")):
        return "OpenAI"
    if spec.model or "/v2/models/" in path or path.rstrip("/").endswith("/v2"):
        return "v2 HTTP"
    return "HTTP"
