"""The live dashboard as JSON: events that `/dashboard/events` streams each second, and predictions
of `/dashboard/what-if`. Pure."""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.config import ModelConfig

# Figures of a version that the page draws over time, in this order in `LiveHistory.points`.
DRAWN = (
    "answered", "refused", "failed", "p50_s", "p95_s", "p99_s", "num_waiting", "batch_rows", "busy",
)  # fmt: skip


class LiveText(msgspec.Struct, frozen=True):
    """A language model: sequences, share of KV blocks in use, tokens per second, and latencies of
    the last seconds."""

    num_running: int
    num_waiting: int
    cache_use: float
    prompt_tokens: float
    generated_tokens: float
    ttft_p50_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p50_s: float | None = None
    tpot_p99_s: float | None = None


class LiveModel(msgspec.Struct, frozen=True):
    """A version. Rates are those of the last second; latencies and batches of the last ten seconds,
    null without requests. Percentiles are estimated from the histogram's buckets."""

    name: str
    version: str
    state: str
    # Why it is not ready.
    reason: str = ""
    slo: str = ""
    devices: list[str] = []
    num_instances: int = 0
    num_ready: int = 0
    num_waiting: int = 0
    # Requests per second.
    answered: float = 0.0
    refused: float = 0.0
    failed: float = 0.0
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    # Mean time in the queue.
    queue_s: float | None = None
    # Mean rows of a batch, and the number of batches by rows.
    batch_rows: float | None = None
    batch_sizes: dict[int, int] = {}
    # Share of the last minute in which instances computed.
    busy: float | None = None
    # Limits of the SLO by metric, in seconds.
    limits_s: dict[str, float] = {}
    cost_per_million: float | None = None
    joules_per_request: float | None = None
    # How inputs differ from the data of the evidence, one sentence for each alarm.
    drift: list[str] = []
    text: LiveText | None = None


class LiveRefusals(msgspec.Struct, frozen=True):
    """Requests of a version that were refused in one second, for one reason. `time` is in seconds
    since 1970."""

    time: float
    model: str
    version: str
    reason: str
    count: int


class LiveGpu(msgspec.Struct, frozen=True):
    """Use of a GPU; null: not reported."""

    name: str
    utilization: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    power_limit_watts: float | None


class LiveShard(msgspec.Struct, frozen=True):
    shard: str
    num_connections: int
    accepts: bool
    num_restarts: int


class LiveMachine(msgspec.Struct, frozen=True):
    """Shares are from 0 to 1; the CPU's is that of the last second."""

    cpu: float
    memory_used_bytes: int
    memory_total_bytes: int
    gpus: list[LiveGpu]
    shards: list[LiveShard]


class LiveEvent(msgspec.Struct, frozen=True):
    """The server at one time, in seconds since 1970."""

    time: float
    state: str
    machine: LiveMachine
    models: list[LiveModel]
    # By model, metric and window.
    burn_rates: dict[str, dict[str, dict[str, float]]]
    # New ones only.
    refusals: list[LiveRefusals]
    # By model, as GET /v2/repository/models/{name}/rollout answers.
    rollouts: dict[str, msgspec.Raw]


class LiveSeries(msgspec.Struct, frozen=True):
    """Figures of a version over time: a row of DRAWN for each of the last times."""

    name: str
    version: str
    points: list[list[float | None]]


class LiveStart(msgspec.Struct, frozen=True):
    """The first event: who the server is, what the caller may do, and the last minutes."""

    name: str
    version: str
    needs_key: bool
    scopes: list[str]
    # Whether models may be loaded, unloaded and promoted.
    is_explicit: bool
    # Whether it serves a repository, whose models have versions and a history.
    has_versions: bool
    drawn: list[str]
    times: list[float]
    series: list[LiveSeries]
    refusals: list[LiveRefusals]


class WhatIfBody(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of a prediction: a version at another rate, or with another number of instances; 0
    means as many as there are."""

    model: str
    rate: Annotated[float, msgspec.Meta(gt=0, le=1e6)]
    version: str | int = ""
    instances: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0


class Prediction(msgspec.Struct, frozen=True):
    """Simulated load at one rate of Poisson arrivals. Latencies are those of answered requests;
    null if there are none."""

    rate: float
    num_instances: int
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    # Shares from 0 to 1: of refused requests, and of the instances' time.
    refused: float
    busy: float
    batch_rows: float | None
    # Null without an SLO on latency.
    keeps_slo: bool | None


class WhatIfAnswer(msgspec.Struct, frozen=True):
    """Predictions from batch times that the server measured, at the asked rate and, as a check, at
    the rate of the last seconds."""

    model: str
    version: str
    asked: Prediction
    current: Prediction | None
    # Requests per second that the instances can do at most.
    capacity: float
    # Seconds by rows of a batch, and where they come from.
    times_s: dict[int, float]
    basis: str
    notes: list[str]


class WhatIfJob(msgspec.Struct):
    """A simulation, as the server hands it to a process."""

    config: ModelConfig
    times_s: dict[int, float]
    # Whether these times include the dispatch of a batch to its worker.
    has_dispatch: bool
    num_instances: int
    num_cores: int
    rates: list[float]
    # Empty: the model has none.
    slo: str = ""


class WhatIfResult(msgspec.Struct):
    """A prediction for each rate of the job."""

    capacity: float
    predictions: list[Prediction]
