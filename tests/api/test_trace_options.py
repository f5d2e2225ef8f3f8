"""`--trace-config`, written from Triton's documentation of it."""

import pytest

from penstock.api.trace_options import read_trace_config
from penstock.config import TraceConfig


def test_the_example_of_tritons_documentation() -> None:
    config, problems = read_trace_config(
        ["triton,file=/tmp/trace.json", "triton,log-frequency=50", "rate=100", "level=TIMESTAMPS",
         "count=100"]
    )  # fmt: skip
    assert not problems
    assert config == TraceConfig("triton", ("TIMESTAMPS",), 100, 100, "/tmp/trace.json", 50)


def test_levels_add_up() -> None:
    given = ["triton,file=t", "level=TENSORS", "level=TIMESTAMPS", "level=TENSORS"]
    assert read_trace_config(given)[0].levels == ("TENSORS", "TIMESTAMPS")


def test_a_collector_and_what_its_spans_say() -> None:
    config, problems = read_trace_config(
        ["mode=opentelemetry", "opentelemetry,url=http://c:4318/v1/traces", "level=TIMESTAMPS",
         "opentelemetry,resource=service.name=mine", "opentelemetry,resource=a=b=c",
         "opentelemetry,bsp_max_queue_size=100", "opentelemetry,bsp_schedule_delay=250",
         "opentelemetry,bsp_max_export_batch_size=10"]
    )  # fmt: skip
    assert not problems and config.exports
    assert config.resource == {"service.name": "mine", "a": "b=c"}
    sizes = config.max_queue_size, config.schedule_delay_s, config.max_batch_size
    assert sizes == (100, 0.25, 10)


def test_a_file_of_chrome_chooses_its_mode() -> None:
    config, problems = read_trace_config(["chrome,file=t.json", "level=TIMESTAMPS"])
    assert not problems
    assert (config.mode, config.file) == ("chrome", "t.json")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rate", "expected SETTING=VALUE"),
        ("rate=", "expected SETTING=VALUE"),
        ("rate=-1", "out of range"),
        ("rate=many", "Unable to parse 'trace_rate', got: many"),
        ("count=-2", "out of range"),
        ("level=ALL", "OFF, TIMESTAMPS or TENSORS"),
        ("mode=jaeger", "'jaeger' is not one of triton"),
        ("jaeger,url=x", "'jaeger' is not one of triton"),
        ("file=x", "'file' is not one of level, rate, count, mode"),
        ("triton,rate=1", "'rate' is not one of file, log-frequency"),
        ("triton,log-frequency=x", "Unable to parse 'log_frequency'"),
        ("opentelemetry,url=localhost:4318", "expected a URL"),
        ("opentelemetry,url=http://a:b/", "Port could not be cast"),
        ("opentelemetry,resource=x", "expected resource=KEY=VALUE"),
        ("opentelemetry,bsp_max_queue_size=0", "expected a number from 1"),
        ("opentelemetry,bsp_max_queue_size=99999999999", "expected a number from 1"),
        ("opentelemetry,depth=1", "'depth' is not one of url, resource"),
    ],
)
def test_other_settings_are_refused_with_what_is_accepted(text: str, problem: str) -> None:
    [found] = read_trace_config([text])[1]
    assert found.startswith(f"--trace-config {text}: ")
    assert problem in found


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["level=TIMESTAMPS"], "a level needs --trace-config triton,file=FILE"),
        (["mode=chrome", "level=TIMESTAMPS"], "a level needs --trace-config chrome,file=FILE"),
        (["mode=opentelemetry", "level=TENSORS"], "needs the mode triton"),
        (["mode=opentelemetry", "opentelemetry,bsp_max_queue_size=5"], "must not exceed"),
    ],
)
def test_settings_that_contradict_each_other(given: list[str], problem: str) -> None:
    [found] = read_trace_config(given)[1]
    assert problem in found
