"""`model_metrics` of config.pbtxt: buckets of the time to the first answer."""

import pytest

from penstock.repository import pbtxt, pbtxt_metrics

CONTROL = """model_metrics {{ metric_control {{ metric_identifier {{ family: "{family}" }}
  histogram_options {{ buckets: {buckets} }} }} }}"""


def read(family: str, buckets: str) -> tuple[tuple[float, ...], list[str]]:
    problems: list[str] = []
    message = pbtxt.parse(CONTROL.format(family=family, buckets=buckets)).model_metrics
    found = pbtxt_metrics.read(message, lambda path, text: problems.append(f"{path}: {text}"))
    return found, problems


def test_buckets_replace_the_default_ones():
    assert read(pbtxt_metrics.FIRST_RESPONSE, "[ 1, 2, 4, 8 ]") == ((1.0, 2.0, 4.0, 8.0), [])


@pytest.mark.parametrize("buckets", ["[ 2, 1 ]", "[ 1, 1 ]", "[ ]", "[ 1, inf ]"])
def test_buckets_must_be_rising_numbers(buckets: str):
    found, [problem] = read(pbtxt_metrics.FIRST_RESPONSE, buckets)
    assert found == ()
    assert "expected rising numbers, in milliseconds" in problem


def test_other_families_have_fixed_buckets():
    found, [problem] = read("nv_inference_request_summary_us", "[ 1 ]")
    assert found == ()
    assert problem.startswith("model_metrics.metric_control[0].metric_identifier.family: 'nv_inf")
    assert "only the buckets of nv_inference_first_response_histogram_ms" in problem
