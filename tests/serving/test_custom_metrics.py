"""Metrics of models' own code, added up over workers and models, and how a scrape shows them."""

import math

import pytest

from penstock.serving.custom_metrics import CustomMetrics
from penstock.serving.metrics import ModelMetrics
from penstock.serving.scrape import Pending, expose
from penstock.wire.frames import MetricChange


def change(kind: str, value: float = 0.0, **more: object) -> MetricChange:
    label = more.pop("label", "x")
    fields = {"family": kind, "text": "what it is", "kind": kind, "labels": (("a", label),)}
    return MetricChange(**{**fields, "value": value, **more})


def shown(*models: CustomMetrics) -> dict[str, str]:
    """Return the samples of the models' families in a scrape."""
    pending = []
    for number, each in enumerate(models):
        metrics = ModelMetrics(f"m{number}", "1")
        metrics.custom = each
        pending.append(Pending(metrics, 0, 0))
    lines = expose(pending).decode().splitlines()
    own = [line for line in lines if 'a="' in line]
    return dict(line.rsplit(" ", 1) for line in own)


def added(*changes: tuple[int, MetricChange]) -> CustomMetrics:
    metrics = CustomMetrics()
    for worker, each in changes:
        metrics.add(worker, [each])
    return metrics


def test_counters_of_workers_and_models_add_up():
    one = added((0, change("counter", 1)), (1, change("counter", 2.5)))
    other = added((0, change("counter", 4)), (0, change("counter", 8, label="y")))
    assert shown(one, other) == {'counter{a="x"}': "7.5", 'counter{a="y"}': "8"}


def test_a_gauge_is_what_was_set_last_and_added_since():
    one = added((0, change("gauge", 5, is_set=True)), (1, change("gauge", -2)))
    assert shown(one) == {'gauge{a="x"}': "3"}
    other = added((0, change("gauge", 7, is_set=True)))
    assert shown(one, other) == shown(other, one) == {'gauge{a="x"}': "7"}
    one.add(1, [change("gauge", 1)])
    assert shown(one, other) == shown(other, one) == {'gauge{a="x"}': "8"}
    # A worker that declares it changes nothing.
    third = added((0, change("gauge", is_new=True)))
    assert shown(one, other, third) == {'gauge{a="x"}': "8"}
    third.add(0, [change("gauge", 4)])
    assert shown(one, other, third) == {'gauge{a="x"}': "12"}
    third.add(0, [change("gauge", is_new=True)])
    assert shown(third, one, other) == {'gauge{a="x"}': "8"}


def test_what_a_dead_worker_added_to_a_gauge_goes():
    new = change("gauge", is_new=True)
    metrics = added((0, new), (1, new), (0, change("gauge", 3)), (1, change("gauge", 1)))
    assert shown(metrics) == {'gauge{a="x"}': "4"}
    metrics.add(0, [new])
    assert shown(metrics) == {'gauge{a="x"}': "1"}
    # What was set holds, whoever set it.
    metrics.add(1, [change("gauge", 9, is_set=True)])
    metrics.add(1, [new])
    assert shown(metrics) == {'gauge{a="x"}': "9"}


def test_histograms_add_up_by_bucket():
    seen = change("histogram", 7.6, bounds=(0.1, 1.0), counts=[1, 1, 1])
    assert shown(added((0, seen)), added((0, seen), (1, seen))) == {
        'histogram_bucket{a="x",le="0.1"}': "3",
        'histogram_bucket{a="x",le="1"}': "6",
        'histogram_bucket{a="x",le="+Inf"}': "9",
        'histogram_sum{a="x"}': repr(7.6 * 2 + 7.6),
        'histogram_count{a="x"}': "9",
    }


@pytest.mark.parametrize(
    "other",
    [
        change("gauge", 1, family="f"),
        change("histogram", 1, family="f", bounds=(2.0,), counts=[1, 0]),
    ],
    ids=["kind", "buckets"],
)
def test_another_kind_or_other_buckets_do_not_count(
    other: MetricChange, caplog: pytest.LogCaptureFixture
):
    first = change("histogram", 1, family="f", bounds=(1.0,), counts=[1, 0])
    alone = shown(added((0, first)))
    assert shown(added((0, first)), added((0, other))) == alone
    other.is_new = True
    assert shown(added((0, first), (1, other))) == alone
    assert "declare the metric f {'a': 'x'} in different ways" in caplog.text


def test_an_empty_histogram_is_written_as_tritons():
    new = change("histogram", bounds=(2.5, 5.0), counts=[0, 0, 0], is_new=True)
    assert shown(added((0, new))) == {
        'histogram_bucket{a="x",le="2.5"}': "0",
        'histogram_bucket{a="x",le="5"}': "0",
        'histogram_bucket{a="x",le="+Inf"}': "0",
        'histogram_sum{a="x"}': "0",
        'histogram_count{a="x"}': "0",
    }


def test_a_stage_shows_its_metrics_with_its_model():
    stage, model = added((0, change("counter", 2))), CustomMetrics()
    model.include(stage)
    assert shown(model) == {'counter{a="x"}': "2"}


@pytest.mark.parametrize(
    "value, text",
    [(3.0, "3"), (0.1, "0.1"), (math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN")],
)
def test_numbers_are_written_as_prometheus_reads_them(value: float, text: str):
    metrics = added((0, change("gauge", value, is_set=True)))
    assert shown(metrics) == {'gauge{a="x"}': text}


def test_a_metric_may_have_no_labels():
    metrics = ModelMetrics("m", "1")
    metrics.custom = added((0, change("counter", 2, family="mine", labels=())))
    assert "\nmine 2\n" in expose([Pending(metrics, 0, 0)]).decode()


def test_a_family_of_the_servers_own_is_shown_once():
    metrics = ModelMetrics("m", "1")
    metrics.custom = added((0, change("counter", 7, family="nv_inference_count", text="a\nb")))
    metrics.custom.add(0, [change("counter", 1, family="mine", text="a\nb \\")])
    text = expose([Pending(metrics, 0, 0)]).decode()
    assert text.count("# TYPE nv_inference_count ") == 1 and 'nv_inference_count{a="' not in text
    assert "# HELP mine a\\nb \\\\\n" in text
