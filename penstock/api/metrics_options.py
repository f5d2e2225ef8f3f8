"""Reads `--metrics-config SETTING=VALUE`, in Triton's form. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.config import MetricsConfig

# Settings that are true or false.
SWITCHES = ("counter_latencies", "histogram_latencies", "summary_latencies")
QUANTILES = "summary_quantiles"
VALUES = {"true": True, "1": True, "false": False, "0": False}


def read_metrics_config(
    given: Sequence[str], interval_ms: float = 0.0
) -> tuple[MetricsConfig, list[str]]:
    """Return the configuration and what is wrong with the settings; later ones override."""
    config = MetricsConfig(interval_s=interval_ms / 1e3)
    problems: list[str] = []
    for text in given:
        name, equals, value = text.partition("=")
        flag = f"--metrics-config {text}"
        if not equals or not value:
            problems.append(f"{flag}: expected SETTING=VALUE")
        elif name == QUANTILES:
            quantiles, problem = _quantiles(value)
            config = replace(config, quantiles=quantiles or config.quantiles)
            problems += [f"{flag}: {problem}"] if problem else []
        elif name not in SWITCHES:
            known = ", ".join((*SWITCHES, QUANTILES))
            problems.append(f"{flag}: '{name}' is not one of {known}")
        elif value.lower() not in VALUES:
            problems.append(f"{flag}: expected true or false")
        else:
            config = _switched(config, name, is_on=VALUES[value.lower()])
    return config, problems


def _switched(config: MetricsConfig, name: str, *, is_on: bool) -> MetricsConfig:
    match name:
        case "counter_latencies":
            return replace(config, has_counters=is_on)
        case "histogram_latencies":
            return replace(config, has_histograms=is_on)
    return replace(config, has_summaries=is_on)


def _quantiles(text: str) -> tuple[tuple[str, ...], str]:
    """Return the quantiles of "0.5:0.05,0.99:0.001", or what is wrong. The errors are checked only:
    ours are 1 % of the value."""
    found: list[str] = []
    for part in text.split(","):
        quantile, colon, error = part.partition(":")
        try:
            is_right = bool(colon) and 0 < float(quantile) < 1 and 0 <= float(error) < 1
        except ValueError:
            is_right = False
        if not is_right:
            return (), f"'{part}'; expected QUANTILE:ERROR with numbers below 1, as 0.99:0.001"
        found.append(quantile)
    return tuple(found), ""
