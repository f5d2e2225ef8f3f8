"""The response cache of a process: which models have one, and where its answers are."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import BatchPolicy, CacheConfig, ModelConfig, RedisConfig
from penstock.serving.caches import Caches
from penstock.serving.metrics import ModelMetrics
from penstock.types import TensorSpec

CONFIG = ModelConfig(
    "echo",
    "3",
    "null",
    "",
    (TensorSpec("x", "INT64", (4,)),),
    (TensorSpec("y", "INT64", (4,)),),
    8,
    BatchPolicy(8),
    is_cached=True,
)


def test_shards_divide_the_bytes():
    caches = Caches()
    caches.divide(CacheConfig(1 << 20), 4)
    assert caches.store.max_bytes == 1 << 18
    metrics = ModelMetrics.from_config(CONFIG)
    assert caches.open(CONFIG, metrics).store is caches.store
    assert metrics.num_caches == 1


def test_only_models_that_want_it_have_a_cache(caplog: pytest.LogCaptureFixture):
    caches = Caches()
    metrics = ModelMetrics.from_config(CONFIG)
    caches.divide(CacheConfig(), 1)
    assert caches.open(CONFIG, metrics) is None
    assert asyncio.run(caches.read(CONFIG)) is None
    assert "echo/3: response_cache: every request is computed" in caplog.text
    caches.divide(CacheConfig(1 << 20), 1)
    assert caches.open(replace(CONFIG, is_cached=False), metrics) is None
    assert metrics.num_caches == 0


def test_servers_share_answers_of_the_same_files(tmp_path: Path):
    (tmp_path / "echo" / "3").mkdir(parents=True)
    (tmp_path / "echo" / "3" / "model.py").write_text("")
    config = replace(CONFIG, artifact=str(tmp_path / "echo" / "3" / "model.py"))
    caches = Caches()
    caches.divide(CacheConfig(redis=RedisConfig("localhost")), 2)
    taken = asyncio.run(caches.read(config))
    assert taken.text
    assert asyncio.run(caches.read(replace(config, is_cached=False))) is None
    # A part that knows no fingerprint computes everything.
    assert caches.open(config, ModelMetrics.from_config(config)) is None


def test_the_password_is_not_shown():
    assert "secret" not in repr(CacheConfig(redis=RedisConfig("localhost", password="secret")))
