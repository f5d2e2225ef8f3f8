"""The loaded models by name and version, as requests find them. The catalog changes the table."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.config import MetricsConfig
from penstock.errors import SHUTTING_DOWN, NotFound, NotReady, QuotaExceeded
from penstock.repository.layout import listed
from penstock.serving.caches import Caches
from penstock.serving.called_models import ModelManager
from penstock.serving.header_forwarding import HeaderForwarding
from penstock.serving.latency_metrics import FIRST_RESPONSE_MS, LatencyMetrics
from penstock.serving.quotas import Quotas
from penstock.serving.rate_limiter import RateLimiter
from penstock.serving.regions import RegionTable
from penstock.serving.request_recorder import Recorders
from penstock.serving.served import Served
from penstock.serving.tracer import Tracer
from penstock.serving.traffic_split import TrafficSplit
from penstock.system.logs import LogSwitches
from penstock.wire.frames import SplitRule


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """A requested model that could not be loaded, and why."""

    name: str
    problems: tuple[str, ...]


class ModelTable:
    """Requests without a version go to the highest loaded one, or as a split says."""

    def __init__(self) -> None:
        # Quotas of API keys, shared by all models.
        self.quotas = Quotas()
        # Memory that clients have registered.
        self.regions = RegionTable()
        self.recorders = Recorders()
        self.tracer = Tracer()
        # Headers that become parameters, by protocol; mostly empty.
        self.forwarding: Mapping[str, HeaderForwarding] = {}
        # Log settings that were changed while the server runs.
        self.log_switches: LogSwitches | None = None
        self.caches = Caches()
        # None: executions are not limited.
        self.rate_limiter: RateLimiter | None = None
        # Answers management calls of models' code; None: they cannot make any.
        self.manage: ModelManager | None = None
        # What is counted and shown of latencies.
        self.metrics_config = MetricsConfig()
        self._models: dict[str, dict[str, Served]] = {}
        self._latest: dict[str, Served] = {}
        # Rollouts by model: how requests are split and, where there are requests, what splits them.
        # Mostly empty, so requests need not ask for theirs.
        self.rules: dict[str, SplitRule] = {}
        self.splits: dict[str, TrafficSplit] = {}
        # Versions of rollouts that are loaded, but not served by themselves.
        self._candidates: dict[str, Served] = {}
        self._failures: dict[str, LoadFailure] = {}
        # Models that are loading: requests for them get NotReady, which clients retry.
        self._awaited: set[str] = set()
        self._is_closed = False

    def __iter__(self) -> Iterator[Served]:
        for name, versions in self._models.items():
            yield from versions.values()
            candidate = self._candidates.get(name)
            if candidate is not None and candidate.config.version not in versions:
                yield candidate

    @property
    def failures(self) -> list[LoadFailure]:
        """Requested models that are not loaded."""
        return [f for name, f in self._failures.items() if name not in self._models]

    @property
    def is_ready(self) -> bool:
        """Whether every requested model can answer; a candidate need not, nor one that is loaded
        on demand: the others are ready without it."""
        versions = (each for found in self._models.values() for each in found.values())
        needed = (each for each in versions if not each.config.scaling.is_on_demand)
        return not self.failures and all(model.is_ready for model in needed)

    def count_latencies(self, model: Served) -> None:
        """Count the latencies that the operator wants, from a model's first request on."""
        wanted = self.metrics_config
        if wanted.has_histograms or wanted.has_summaries:
            config, metrics = model.config, model.metrics
            metrics.latencies = LatencyMetrics(
                config.first_response_ms or FIRST_RESPONSE_MS,
                has_histogram=wanted.has_histograms,
                has_summaries=wanted.has_summaries,
                has_cache=bool(metrics.num_caches),
            )

    def count_request(self, caller: bytes, received: float, name: str, version: str = "") -> None:
        """Count a request of this key on arrival, whatever its outcome. QuotaExceeded if the key
        sends too many; the model, if it exists, counts the refusal."""
        if not self.quotas.is_active:
            return
        try:
            self.quotas.check_rate(caller, received)
        except QuotaExceeded as error:
            self.count_refusal(error, received, name, version)
            raise

    def count_refusal(
        self, error: QuotaExceeded, received: float, name: str, version: str = ""
    ) -> None:
        """Let the model, if it exists, count a request that exceeds the rate of its key."""
        with contextlib.suppress(NotFound, NotReady):
            self.find(name, version).refused(error, received)

    def find(self, name: str, version: str = "") -> Served:
        """Return a loaded version. NotReady if the model is loading or, with the reasons, if that
        failed; NotFound if it was never requested."""
        model = self._latest.get(name) if not version else self._models.get(name, {}).get(version)
        if model is not None:
            return model
        if name not in self._models:
            raise self._absence(name)
        candidate = self._candidates.get(name)
        if candidate is not None and candidate.config.version == version:
            if not self._is_shadow(name):
                return candidate
            raise NotFound(f"'{name}' version {version} is a shadow, which answers no request")
        raise NotFound(
            f"Request for unknown model: '{name}' version {version} is not found; "
            f"loaded: {', '.join(self.versions(name))}"
        )

    def _absence(self, name: str) -> NotReady | NotFound:
        """Return why a model is not loaded."""
        if self._is_closed:
            return NotReady(SHUTTING_DOWN)
        if (failure := self._failures.get(name)) is not None:
            return NotReady(f"model '{name}' could not be loaded: {'; '.join(failure.problems)}")
        if name in self._awaited:
            return NotReady(f"model '{name}' is loading")
        loaded = listed(sorted(self._models))
        return NotFound(f"Request for unknown model: '{name}' is not found; loaded: {loaded}")

    def _is_shadow(self, name: str) -> bool:
        """Whether the candidate of a model answers no requests."""
        rule = self.rules.get(name)
        return rule is None or rule.mode == "shadow"

    def choose(
        self, name: str, version: str, headers: Mapping[bytes, bytes]
    ) -> tuple[Served, TrafficSplit | None]:
        """Return the version that answers a request, and the split that counts it, if there is one:
        requests that name a version are not split."""
        model = self.find(name, version)
        split = None if version else self.splits.get(name)
        return (model, None) if split is None else (split.pick(headers), split)

    def find_all(self, name: str, version: str = "") -> list[Served]:
        """Return the named version, all loaded versions of the model, or those of all models."""
        if not name:
            return list(self)
        if version:
            return [self.find(name, version)]
        self.find(name)
        return list(self._models[name].values())

    def versions(self, name: str) -> list[str]:
        return sorted(self._models.get(name, {}), key=int)

    def failure(self, name: str) -> LoadFailure | None:
        """Return why the last load of this model failed; None if it did not."""
        return self._failures.get(name)
