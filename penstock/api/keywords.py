"""Keywords of the public functions, for type checkers and editors: the fields of their options.
Texts that are paths, numbers or durations may be given as such; durations in seconds."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict

PathText = str | os.PathLike[str]
Number = str | float


class ServeKeywords(TypedDict, total=False):
    host: str
    http_port: int
    grpc_port: int
    grpc: bool
    metrics_port: int
    metrics: bool
    shards: int
    shard_accept: str
    id: str
    model_control_mode: str
    repository_poll_secs: float
    model_repository: Sequence[PathText]
    model_config_name: str
    load_model: Sequence[str]
    exit_on_error: bool
    gpu_memory_reserve: float
    on_demand: bool
    model_memory: str
    host_policy: Sequence[str]
    allow_hard_links: bool
    reload: bool
    random_weights: bool
    api_keys: PathText
    insecure: bool
    tls_cert: PathText
    tls_key: PathText
    tls_client_ca: PathText
    allow_host: Sequence[str]
    http_restricted_api: Sequence[str]
    grpc_restricted_protocol: Sequence[str]
    http_header_forward_pattern: str
    grpc_header_forward_pattern: str
    shared_memory: bool
    allow_load_files: bool
    allow_load_code: bool
    record: PathText
    cache_config: Sequence[str]
    rate_limit: str
    rate_limit_resource: Sequence[str]
    max_body_bytes: int
    max_json_bytes: int
    grpc_max_message_bytes: int
    grpc_compression: str
    drain_s: float
    log_level: str | None
    log_format: str | None
    log_requests: bool
    metrics_config: Sequence[str]
    metrics_interval_ms: float
    price: float | None
    trace_config: Sequence[str]


class AsgiKeywords(TypedDict, total=False):
    id: str
    model_control_mode: str
    load_model: Sequence[str]
    exit_on_error: bool
    gpu_memory_reserve: float
    on_demand: bool
    model_memory: str
    allow_hard_links: bool
    reload: bool
    api_keys: PathText
    allow_host: Sequence[str]
    shared_memory: bool
    max_body_bytes: int
    max_json_bytes: int
    drain_s: float
    log_requests: bool


class BenchKeywords(TypedDict, total=False):
    concurrency: Number
    rate: Number
    max_rate: bool
    find_knee: bool
    arrivals: str
    cv: float | None
    ramp: str
    steps: str
    trace: PathText
    rate_scale: float | None
    replay: PathText
    speed: float | None
    slo: str
    gate: bool
    baseline: PathText
    tolerance: float | None
    price: float | None
    duration: Number
    precision: float
    warm_up: Number
    timeout: Number
    data: PathText
    data_name: str
    batch_size: Number
    lengths: str
    output_lengths: str
    seed: int | None
    model: str
    version: str
    api_key: str
    tensors: str
    shared_memory: bool
    api: str
    extra: str
    body: str
    method: str
    header: Sequence[str]
    max_connections: int | None
    processes: int


class OptimizeKeywords(TypedDict, total=False):
    slo: str
    accuracy: str
    out: PathText
    name: str
    member: str
    device: str
    price: float | None
    data: PathText
    from_live: PathText
    data_name: str
    labels: str
    eval: str
    calibration: PathText
    outputs: str
    preprocess: str
    postprocess: str
    budget: Number
    duration: Number
    exhaustive: bool | None
    fresh: bool | None
    seed: int | None
    plan: PathText


class ProfileKeywords(TypedDict, total=False):
    model: str
    batch_size: int
    data: PathText
    data_name: str
    lengths: str
    seed: int
    threads: int | None
    runs: int
    chrome_trace: PathText


class RayKeywords(TypedDict, total=False):
    ingress: str
    max_replicas: int | None
    ingress_replicas: int
    retries: int
    evidence: str
    http_port: int
    grpc: bool
    grpc_port: int
    host: str
    id: str
    api_keys: PathText
    insecure: bool
    max_body_bytes: int
    max_json_bytes: int
    drain_s: float
    log_requests: bool


class PromoteKeywords(TypedDict, total=False):
    force: str
    reason: str
    canary: str
    steps: str
    header: str
    hash_header: str
    shadow: bool
    agreement: str
    step_s: float | None
    mirrored_per_s: float | None
    api_key: str


class CapacityKeywords(TypedDict, total=False):
    rate: Number
    replica_rate: Number
    slo: str
    headroom: float
    failure_domain: int
    price: float | None
    model: str
    version: str
