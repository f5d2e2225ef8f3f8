"""The state that the pages show: models, what they promise, and how to call them.

Reads the catalog. Figures of load are given only to callers with the scope `metrics`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import penstock
from penstock.config import LLM, SLO_OFF, ModelConfig
from penstock.dashboard.example_calls import example_call
from penstock.serving.version_loader import network_of
from penstock.wire.documented import (
    ExampleCall,
    ModelLoad,
    ModelState,
    ServerState,
    describe_tensors,
)

if TYPE_CHECKING:
    from penstock.llm.language_model import LanguageModel
    from penstock.llm.sharded_text import ShardedText
    from penstock.serving.catalog import Catalog
    from penstock.serving.management import ManagementApi
    from penstock.serving.served import Served

FIGURES = "metrics"
# The page shows no names of outputs with more elements.
MAX_LABELS = 1000


class CallKey(NamedTuple):
    """A version, and what else its example call depends on."""

    name: str
    version: str
    has_chat: bool
    is_latest: bool


class StateReader:
    """Reads the state of one server. Example calls are kept while their model stays the same: the
    event loop makes them, which also serves inference."""

    def __init__(self, management: ManagementApi, needs_key: bool) -> None:
        self._catalog = management.catalog
        self._management = management
        self._needs_key = needs_key
        self._calls: dict[CallKey, tuple[ModelConfig, ExampleCall]] = {}

    def read(self, scopes: Sequence[str]) -> ServerState:
        catalog = self._catalog
        known, self._calls = self._calls, {}
        models = []
        for model in catalog:
            key = _key(catalog, model)
            kept = known.get(key)
            if kept is None or kept[0] is not model.config:
                kept = (model.config, call_of(catalog, model, self._needs_key))
            self._calls[key] = kept
            models.append(model_state(model, kept[1], FIGURES in scopes))
        for failure in catalog.failures:
            models.append(ModelState(failure.name, "", "UNAVAILABLE", "; ".join(failure.problems)))
        models.sort(key=lambda model: (model.name, -int(model.version or 0)))
        told = self._management.server_id, penstock.__version__, state_of(self._management)
        return ServerState(*told, self._needs_key, list(scopes), models)


def model_state(model: Served, call: ExampleCall, has_figures: bool) -> ModelState:
    config = model.config
    has_batch = config.max_batch_size > 0
    metrics = model.metrics
    num_failed = sum(metrics.num_failures.values())
    return ModelState(
        config.name,
        config.version,
        model.shown_state,
        model.reason,
        config.backend,
        batching(model),
        "" if config.slo == SLO_OFF else config.slo,
        list(config.devices),
        num_wanted(model),
        num_ready(model),
        describe_tensors(config.inputs, has_batch),
        describe_tensors(config.outputs, has_batch),
        {
            spec.name: list(spec.labels)
            for spec in config.outputs
            if 0 < len(spec.labels) <= MAX_LABELS
        },
        call,
        ModelLoad(model.num_waiting, metrics.num_success, num_failed) if has_figures else None,
    )


def call_of(catalog: Catalog, model: Served, needs_key: bool = False) -> ExampleCall:
    key = _key(catalog, model)
    return example_call(model.config, key.has_chat, needs_key, key.is_latest)


def num_ready(model: Served) -> int:
    """Return the number of instances that can answer, without those of earlier stages."""
    if model.config.is_scaled and (host := network_of(model)) is not None:
        return sum(each.state == "ready" for each in host.processes)
    return sum(each.is_ready for each in model.processes[: model.config.num_instances])


def num_wanted(model: Served) -> int:
    """Return the number of instances that there should be, likewise. If it follows the load, that
    of now."""
    if model.config.is_scaled and (host := network_of(model)) is not None:
        return sum(each.is_wanted for each in host.instances)
    return model.config.num_instances


def batching(model: Served) -> str:
    config, mode = model.config, model.mode
    if mode in ("continuous", "ensemble"):
        return mode
    return "none" if mode == "unbatched" else f"up to {config.max_batch_size}"


def _key(catalog: Catalog, model: Served) -> CallKey:
    config = model.config
    is_latest = catalog.versions(config.name)[-1:] == [config.version]
    is_loaded = config.backend == LLM and model.is_ready
    has_chat = is_loaded and bool(cast("LanguageModel | ShardedText", model).vocabulary.template)
    return CallKey(config.name, config.version, has_chat, is_latest)


def state_of(
    management: ManagementApi,
) -> Literal["loading", "ready", "not ready", "shutting down"]:
    if management.lifecycle.is_draining:
        return "shutting down"
    if management.lifecycle.is_loading:
        return "loading"
    return "ready" if management.catalog.is_ready else "not ready"
