"""Reads `--cache-config CACHE,SETTING=VALUE`, in Triton's form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from penstock.config import CacheConfig, RedisConfig
from penstock.serving import redis_client

LOCAL, REDIS = "local", "redis"
# Smaller caches hold no answer.
MIN_BYTES = 1024
MAX_TIMEOUT_MS = 1000
EXAMPLES = {
    LOCAL: "for example local,size=104857600",
    REDIS: "for example redis,host=127.0.0.1",
}


def _number(low: int, high: int, what: str) -> Callable[[str], str]:
    """Return a check of a setting, which returns what is wrong with a text."""

    def check(text: str) -> str:
        is_right = text.isdecimal() and text.isascii() and low <= int(text) <= high
        return "" if is_right else f"'{text}'; expected {what}"

    return check


def _text(text: str) -> str:
    return "" if text else "expected a text"


def _file(text: str) -> str:
    try:
        return "" if Path(text).read_text().strip() else f"'{text}' is empty"
    except (OSError, ValueError) as error:
        return f"'{text}' cannot be read: {error}"


# The settings of each cache.
SETTINGS: Mapping[str, Mapping[str, Callable[[str], str]]] = {
    LOCAL: {"size": _number(MIN_BYTES, (1 << 63) - 1, f"bytes, at least {MIN_BYTES}")},
    REDIS: {
        "host": _text,
        "port": _number(1, 65535, "a port"),
        "username": _text,
        "password": _text,
        "password_file": _file,
        "timeout_ms": _number(1, MAX_TIMEOUT_MS, f"milliseconds from 1 to {MAX_TIMEOUT_MS}"),
    },
}


def read_cache_config(given: Sequence[str]) -> tuple[CacheConfig, list[str]]:
    """Return the configuration and what is wrong with the settings; later ones override."""
    found: dict[str, dict[str, str]] = {}
    problems: list[str] = []
    for text in given:
        kind, _, setting = text.partition(",")
        name, _, value = setting.partition("=")
        shown = f"{kind},{name}=..." if name == "password" else text
        if problem := _problem(kind, name, value):
            problems.append(f"--cache-config {shown}: {problem}")
        else:
            found.setdefault(kind, {})[name] = value
    if problems:
        return CacheConfig(), problems
    if len(found) > 1:
        return CacheConfig(), [f"--cache-config: a server has one cache, not {' and '.join(found)}"]
    if LOCAL in found:
        return CacheConfig(int(found[LOCAL]["size"])), []
    return _redis(found[REDIS]) if found else (CacheConfig(), [])


def _problem(kind: str, name: str, value: str) -> str:
    if kind not in SETTINGS:
        return f"'{kind}' is not one of {', '.join(SETTINGS)}; {EXAMPLES[LOCAL]}"
    check = SETTINGS[kind].get(name)
    if check is None:
        return f"'{name}' is no setting of {kind}; {EXAMPLES[kind]}"
    return check(value)


def _redis(given: Mapping[str, str]) -> tuple[CacheConfig, list[str]]:
    problems: list[str] = []
    if "host" not in given:
        problems.append(f"--cache-config redis: host is missing; {EXAMPLES[REDIS]}")
    if "password" in given and "password_file" in given:
        problems.append("--cache-config redis: give password or password_file, not both")
    if not redis_client.is_installed():
        problems.append(f"--cache-config redis: {redis_client.MISSING}")
    if problems:
        return CacheConfig(), problems
    password = given.get("password", "")
    if "password_file" in given:
        password = Path(given["password_file"]).read_text().strip()
    config = RedisConfig(
        given["host"],
        int(given.get("port", 6379)),
        given.get("username", ""),
        password,
        int(given.get("timeout_ms", 20)) / 1e3,
    )
    return CacheConfig(redis=config), []
