"""`--cache-config`, written from Triton's documentation of it."""

from pathlib import Path

import pytest

from penstock.api.cache_options import read_cache_config
from penstock.config import CacheConfig, RedisConfig
from penstock.serving import redis_client


def test_the_size_is_in_bytes_and_the_last_one_counts():
    config, problems = read_cache_config(["local,size=1048576", "local,size=2097152"])
    assert (config.max_bytes, problems) == (2 << 20, [])
    assert read_cache_config([])[0].max_bytes == 0


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_client, "is_installed", lambda: True)


@pytest.mark.usefixtures("installed")
def test_redis_has_tritons_settings(tmp_path: Path):
    (tmp_path / "secret").write_text("word\n")
    given = ["host=cache", "port=7000", "username=me", "timeout_ms=5"]
    given.append(f"password_file={tmp_path / 'secret'}")
    config, problems = read_cache_config([f"redis,{each}" for each in given])
    assert (config.redis, problems) == (RedisConfig("cache", 7000, "me", "word", 0.005), [])
    assert read_cache_config(["redis,host=cache"])[0].redis == RedisConfig("cache")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["local,size=4096", "redis,host=a"], "a server has one cache, not local and redis"),
        (["redis,port=1"], "host is missing; for example redis,host=127.0.0.1"),
        (["redis,host="], "expected a text"),
        (["redis,host=a", "redis,port=0"], "'0'; expected a port"),
        (["redis,host=a", "redis,timeout_ms=9999"], "expected milliseconds from 1 to 1000"),
        (["redis,host=a", "redis,password_file=/nowhere"], "cannot be read"),
        (["redis,host=a", "redis,password_file=/dev/null"], "is empty"),
        (["redis,host=a", "redis,password=b", "redis,password_file=/etc/hostname"], "not both"),
    ],
)
def test_settings_of_redis_that_do_not_fit_are_refused(given: list[str], problem: str):
    config, [found] = read_cache_config(given)
    assert problem in found and config == CacheConfig()


def test_redis_needs_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(redis_client, "is_installed", lambda: False)
    [found] = read_cache_config(["redis,host=a"])[1]
    assert "pip install 'penstock[redis]'" in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is not one of local, redis"),
        ("lokal,size=1048576", "'lokal' is not one of local, redis"),
        ("local", "'' is no setting of local; for example local,size="),
        ("local,bytes=1048576", "'bytes' is no setting of local"),
        ("local,size", "expected bytes"),
        ("local,size=1MB", "'1MB'; expected bytes, at least 1024"),
        ("local,size=-1", "expected bytes"),
        ("local,size=1000", "expected bytes"),
        ("local,size=\u0661\u0662\u0663\u0664\u0665", "expected bytes"),
        ("local,size=99999999999999999999", "expected bytes"),
    ],
)
def test_other_settings_are_refused_with_what_is_accepted(text: str, problem: str):
    [found] = read_cache_config([text])[1]
    assert found.startswith(f"--cache-config {text}: ")
    assert problem in found
