"""`--metrics-config`, written from Triton's documentation of it."""

import pytest

from penstock.api.metrics_options import read_metrics_config


def test_settings_are_tritons_and_later_ones_override():
    config, problems = read_metrics_config(
        ["summary_latencies=true", "histogram_latencies=true", "summary_latencies=FALSE"], 2000
    )
    assert not problems
    assert (config.has_counters, config.has_histograms, config.has_summaries) == (True, True, False)
    assert config.interval_s == 2.0
    assert config.quantiles == ("0.5", "0.9", "0.95", "0.99", "0.999")
    assert not read_metrics_config(["counter_latencies=false"])[0].has_counters


def test_quantiles_are_kept_as_they_are_written():
    config, problems = read_metrics_config(["summary_quantiles=0.5:0.05,0.9:0.01"])
    assert (config.quantiles, problems) == (("0.5", "0.9"), [])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("summary_latencies", "expected SETTING=VALUE"),
        ("summary_latencies=maybe", "expected true or false"),
        ("latencies=true", "'latencies' is not one of counter_latencies"),
        ("summary_quantiles=0.5", "expected QUANTILE:ERROR"),
        ("summary_quantiles=1.5:0.1", "expected QUANTILE:ERROR"),
        ("summary_quantiles=x:0.1", "expected QUANTILE:ERROR"),
    ],
)
def test_other_settings_are_refused_with_what_is_accepted(text: str, problem: str):
    [found] = read_metrics_config([text])[1]
    assert found.startswith(f"--metrics-config {text}: ")
    assert problem in found
