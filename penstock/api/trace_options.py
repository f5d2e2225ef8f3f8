"""Reads `--trace-config [MODE,]SETTING=VALUE`, in Triton's form. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from penstock.config import TraceConfig
from penstock.errors import PenstockError
from penstock.serving.trace_settings import parse_levels, parse_number
from penstock.wire.trace_records import TENSORS

MODES = ("triton", "opentelemetry", "chrome")
# Global settings that are numbers.
NUMBERS = {"rate": "trace_rate", "count": "trace_count"}
FILES = ("triton", "chrome")
BATCHES = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")
MAX_BATCHES = 1 << 20


def read_trace_config(given: Sequence[str]) -> tuple[TraceConfig, list[str]]:
    """Return the configuration and what is wrong with the settings; later ones override. Levels
    add up, as in Triton."""
    config, problems = TraceConfig(), list[str]()
    for text in given:
        mode, comma, rest = text.partition(",")
        if not comma or "=" in mode:
            mode, rest = "", text
        name, equals, value = rest.partition("=")
        try:
            if not equals or not value:
                raise ValueError("expected SETTING=VALUE or MODE,SETTING=VALUE")
            config = _read_own(config, mode, name, value) if mode else _read(config, name, value)
        except (ValueError, PenstockError) as error:
            problems.append(f"--trace-config {text}: {error}")
    if not problems:
        problems += _contradictions(config)
    return config, problems


def _read(config: TraceConfig, name: str, value: str) -> TraceConfig:
    """Read a global setting."""
    if name == "level":
        added = parse_levels([value])
        return replace(config, levels=tuple(dict.fromkeys((*config.levels, *added))))
    if name == "mode":
        if value not in MODES:
            raise ValueError(f"'{value}' is not one of {', '.join(MODES)}")
        return replace(config, mode=value)
    if name not in NUMBERS:
        raise ValueError(f"'{name}' is not one of level, rate, count, mode")
    changed: dict[str, Any] = {name: parse_number(NUMBERS[name], value)}
    return replace(config, **changed)


def _read_own(config: TraceConfig, mode: str, name: str, value: str) -> TraceConfig:
    """Read a setting of one mode. Naming a file of mode chrome also chooses the mode."""
    if mode not in MODES:
        raise ValueError(f"'{mode}' is not one of {', '.join(MODES)}")
    if mode in FILES:
        if name == "file":
            chosen = mode if mode == "chrome" else config.mode
            return replace(config, file=value, mode=chosen)
        if name == "log-frequency":
            return replace(config, log_frequency=parse_number("log_frequency", value))
        raise ValueError(f"'{name}' is not one of file, log-frequency")
    return _read_otel(config, name, value)


def _read_otel(config: TraceConfig, name: str, value: str) -> TraceConfig:
    if name == "url":
        url = urlsplit(value)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError("expected a URL as http://localhost:4318/v1/traces")
        _ = url.port  # ValueError if it is no number.
        return replace(config, url=value)
    if name == "resource":
        key, equals, text = value.partition("=")
        if not key or not equals:
            raise ValueError("expected resource=KEY=VALUE")
        return replace(config, resource={**config.resource, key: text})
    if name not in BATCHES:
        raise ValueError(f"'{name}' is not one of {', '.join(('url', 'resource', *BATCHES))}")
    if not (value.isascii() and value.isdigit() and 0 < int(value) <= MAX_BATCHES):
        raise ValueError(f"expected a number from 1 to {MAX_BATCHES}")
    match name:
        case "bsp_max_queue_size":
            return replace(config, max_queue_size=int(value))
        case "bsp_schedule_delay":
            return replace(config, schedule_delay_s=int(value) / 1e3)
    return replace(config, max_batch_size=int(value))


def _contradictions(config: TraceConfig) -> list[str]:
    problems = []
    if config.levels and not config.exports and not config.file:
        flag = "chrome" if config.mode == "chrome" else "triton"
        problems.append(f"--trace-config: a level needs --trace-config {flag},file=FILE")
    if config.exports and TENSORS in config.levels:
        problems.append("--trace-config: the level TENSORS needs the mode triton")
    if config.exports and config.max_batch_size > config.max_queue_size:
        problems.append(
            "--trace-config: bsp_max_export_batch_size must not exceed bsp_max_queue_size"
        )
    return problems
