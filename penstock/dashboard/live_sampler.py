"""Samples what the dashboard draws, once a second, for all listeners alike.

The monitor calls it after each reading of the counters; it keeps the last minutes of each version.
Belongs to the core's event loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import psutil

import penstock
from penstock.config import SLO_OFF
from penstock.dashboard.live_figures import LiveFigures, VersionCounters, growth_quantile
from penstock.dashboard.state import num_ready, num_wanted, state_of
from penstock.llm.text_metrics import TextMetrics
from penstock.operate.monitor import TICK_S, Monitor
from penstock.serving.management import ManagementApi
from penstock.serving.served import Served
from penstock.system.devices import GpuUse
from penstock.wire.live import (
    DRAWN,
    LiveEvent,
    LiveGpu,
    LiveMachine,
    LiveModel,
    LiveRefusals,
    LiveSeries,
    LiveShard,
    LiveStart,
    LiveText,
)

# Readings that latencies and batches are computed over, and points that are kept for charts.
NUM_READINGS, NUM_POINTS = 10, 180
NUM_REFUSALS = 100
Rollouts = Callable[[], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class TextCounters:
    """Counters of a language model at one time."""

    at: float
    num_prompt: int
    num_generated: int
    first_token: Sequence[int]
    mean_token: Sequence[int]

    @classmethod
    def read(cls, text: TextMetrics, now: float) -> TextCounters:
        counts = list(text.first_token_s.counts), list(text.mean_token_s.counts)
        return cls(now, text.num_prompt_tokens, text.num_generated_tokens, *counts)


@dataclass(slots=True)
class VersionSamples:
    """The last readings of a version, oldest first, and its points."""

    readings: deque[VersionCounters] = field(default_factory=lambda: deque(maxlen=NUM_READINGS + 1))
    texts: deque[TextCounters] = field(default_factory=lambda: deque(maxlen=NUM_READINGS + 1))
    points: deque[list[float | None]] = field(default_factory=lambda: deque(maxlen=NUM_POINTS))

    def add(self, counters: VersionCounters) -> tuple[LiveFigures, LiveFigures]:
        """Return the figures since the last reading, and of the last readings together."""
        if self.readings and counters.has_restarted(self.readings[-1]):
            self.readings.clear()
            self.texts.clear()
        if not self.readings:
            self.readings.append(VersionCounters.nothing(counters.at - TICK_S))
        self.readings.append(counters)
        last, oldest = self.readings[-2], self.readings[0]
        return LiveFigures.between(last, counters), LiveFigures.between(oldest, counters)

    def add_text(self, text: TextMetrics, now: float) -> LiveText:
        counters = TextCounters.read(text, now)
        self.texts.append(counters)
        last = self.texts[-2] if len(self.texts) > 1 else counters
        span_s = max(counters.at - last.at, 1e-9)
        oldest = self.texts[0]
        ttft, tpot = text.first_token_s, text.mean_token_s
        return LiveText(
            text.num_running,
            text.num_waiting,
            round(text.cache_use, 4),
            _rounded((counters.num_prompt - last.num_prompt) / span_s) or 0.0,
            _rounded((counters.num_generated - last.num_generated) / span_s) or 0.0,
            _rounded(growth_quantile(ttft, oldest.first_token, 0.5)),
            _rounded(growth_quantile(ttft, oldest.first_token, 0.99)),
            _rounded(growth_quantile(tpot, oldest.mean_token, 0.5)),
            _rounded(growth_quantile(tpot, oldest.mean_token, 0.99)),
        )


class LiveSampler:
    """`rollouts` returns the state of each rollout, by model."""

    def __init__(
        self,
        management: ManagementApi,
        monitor: Monitor,
        rollouts: Rollouts = dict,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._management = management
        self._monitor = monitor
        self.rollouts = rollouts
        self._unix_time = unix_time
        self._samples: dict[tuple[str, str], VersionSamples] = {}
        self._times: deque[float] = deque(maxlen=NUM_POINTS)
        self._refusals: deque[LiveRefusals] = deque(maxlen=NUM_REFUSALS)
        self._busy: Mapping[tuple[str, str], float | None] = {}
        self._cpu = psutil.cpu_times()
        # As they were read last; reading them takes too long for the event loop.
        self.gpus: Sequence[GpuUse] = ()

    def sample(self, now: float) -> LiveEvent:
        """Sample all versions; `now` is the monitor's time."""
        at = round(self._unix_time(), 3)
        self._times.append(at)
        known = {(m.config.name, m.config.version): m for m in self._management.catalog}
        self._samples = {key: s for key, s in self._samples.items() if key in known}
        new: list[LiveRefusals] = []
        self._busy = self._monitor.busy_ratios()
        models = [self._sample(model, now, at, new) for model in known.values()]
        self._refusals.extend(new)
        models += [
            _failed(failure.name, "; ".join(failure.problems))
            for failure in self._management.catalog.failures
        ]
        models.sort(key=lambda model: (model.name, -int(model.version or 0)))
        rollouts = {n: msgspec.Raw(msgspec.json.encode(s)) for n, s in self.rollouts().items()}
        state, machine = state_of(self._management), self._machine()
        return LiveEvent(at, state, machine, models, self._burn_rates(), new, rollouts)

    def start(self, needs_key: bool, scopes: Sequence[str], has_versions: bool) -> LiveStart:
        """Return the first event for a caller with these scopes."""
        series = [
            LiveSeries(name, version, list(samples.points))
            for (name, version), samples in self._samples.items()
        ]
        return LiveStart(
            self._management.server_id,
            penstock.__version__,
            needs_key,
            list(scopes),
            self._management.control.is_explicit,
            has_versions,
            list(DRAWN),
            list(self._times),
            series,
            list(self._refusals),
        )

    def current_rate(self, name: str, version: str) -> float:
        """Return the answers per second of a version, in the last readings together."""
        samples = self._samples.get((name, version))
        if samples is None or len(samples.readings) < 2:
            return 0.0
        return LiveFigures.between(samples.readings[0], samples.readings[-1]).answered

    def _sample(
        self, model: Served, now: float, at: float, refusals: list[LiveRefusals]
    ) -> LiveModel:
        config, metrics = model.config, model.metrics
        key = config.name, config.version
        samples = self._samples.setdefault(key, VersionSamples())
        last, recent = samples.add(VersionCounters.read(metrics, now))
        refusals += [LiveRefusals(at, *key, reason, n) for reason, n in last.refused.items()]
        text = metrics.of_kind
        spending = self._monitor.spendings().get(key)
        covered_s = self._monitor.covered_s
        found = LiveModel(
            *key,
            model.shown_state,
            model.reason,
            "" if config.slo == SLO_OFF else config.slo,
            list(config.devices),
            num_wanted(model),
            num_ready(model),
            model.num_waiting,
            _rounded(last.answered) or 0.0,
            _rounded(last.num_refused / last.span_s) or 0.0,
            _rounded(last.failed) or 0.0,
            _rounded(recent.p50_s),
            _rounded(recent.p95_s),
            _rounded(recent.p99_s),
            _rounded(recent.queue_s),
            _rounded(recent.batch_rows),
            dict(recent.batch_sizes),
            _rounded(self._busy_ratio(model)),
            {each.metric: each.limit_s for each in metrics.objectives if each.limit_s < 1e9},
            _rounded(spending.cost_per_million(now, covered_s)) if spending else None,
            _rounded(spending.joules_per_request(now)) if spending else None,
            [each.text for each in model.drift if each.is_alarm],
            samples.add_text(text, now) if isinstance(text, TextMetrics) else None,
        )
        samples.points.append([getattr(found, name) for name in DRAWN])
        return found

    def _busy_ratio(self, model: Served) -> float | None:
        """Return how busy its instances are; with several stages, those of the busiest."""
        config = model.config
        if not config.is_staged:
            return self._busy.get((config.name, config.version))
        stages = [
            ratio
            for (name, version), ratio in self._busy.items()
            if name.startswith(f"{config.name}:") and version == config.version
        ]
        return max((ratio for ratio in stages if ratio is not None), default=None)

    def _burn_rates(self) -> dict[str, dict[str, dict[str, float]]]:
        found: dict[str, dict[str, dict[str, float]]] = {}
        for (name, metric), rates in self._monitor.burn_rates().items():
            found.setdefault(name, {})[metric] = {w: round(rate, 3) for w, rate in rates.items()}
        return found

    def _machine(self) -> LiveMachine:
        before, self._cpu = self._cpu, psutil.cpu_times()
        total = sum(self._cpu) - sum(before)
        idle = self._cpu.idle - before.idle
        memory = psutil.virtual_memory()
        return LiveMachine(
            round(min(1.0, max(0.0, 1 - idle / total)), 4) if total > 0 else 0.0,
            memory.total - memory.available,
            memory.total,
            [
                LiveGpu(
                    f"cuda:{index}",
                    use.utilization,
                    use.memory_used_bytes,
                    use.memory_total_bytes,
                    use.power_watts,
                    use.power_limit_watts,
                )
                for index, use in enumerate(self.gpus)
            ],
            [
                LiveShard(each.shard, each.num_connections, each.accepts, each.num_restarts)
                for each in self._management.shards()
            ],
        )


def _failed(name: str, reason: str) -> LiveModel:
    """Return a model that cannot be loaded."""
    return LiveModel(name, "", "UNAVAILABLE", reason)


def _rounded(value: float | None) -> float | None:
    """Keep four significant digits: that is more than a chart shows."""
    return None if value is None else float(f"{value:.4g}")
