"""Metrics of a model's code: Triton's names and rules, and what has changed since the last look."""

import threading
from collections.abc import Callable, Iterator

import pytest

from penstock.backends import metric_book
from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.backends.metric_book import BOOK, MetricBook
from penstock.wire.frames import MetricChange

COUNTER, GAUGE, HISTOGRAM = (
    pb_utils.MetricFamily.COUNTER,
    pb_utils.MetricFamily.GAUGE,
    pb_utils.MetricFamily.HISTOGRAM,
)


@pytest.fixture
def wakes() -> list[str]:
    return []


@pytest.fixture
def book(wakes: list[str]) -> Iterator[MetricBook]:
    made = MetricBook(lambda: wakes.append("changed"), lambda: wakes.append("declared"))
    BOOK.set(made)
    yield made
    BOOK.set(None)


def family(kind: int, name: str = "n") -> pb_utils.MetricFamily:
    return pb_utils.MetricFamily(name=name, description="what it is", kind=kind)


def test_a_counter_counts(book: MetricBook, wakes: list[str]):
    metric = family(COUNTER).Metric(labels={"b": "2", "a": "1"})
    declared = MetricChange("n", "what it is", "counter", (("a", "1"), ("b", "2")), is_new=True)
    assert book.take() == [declared] and book.take() == []
    metric.increment(2)
    metric.increment(0.5)
    (change,) = book.take()
    assert (change.value, change.is_set, change.is_new) == (2.5, False, False)
    assert metric.value() == 2.5 and wakes == ["declared", "changed"]


def test_a_gauge_is_set_and_changed(book: MetricBook):
    metric = family(GAUGE).Metric()
    metric.increment(3)
    metric.increment(-1)
    (change,) = book.take()
    assert (change.value, change.is_set, metric.value()) == (2.0, False, 2.0)
    metric.set(10)
    metric.increment(-4)
    (change,) = book.take()
    assert (change.value, change.is_set, metric.value()) == (6.0, True, 6.0)


def test_a_histogram_counts_by_bucket(book: MetricBook):
    metric = family(HISTOGRAM).Metric(buckets=[0.1, 1])
    for value in (0.1, 0.5, 7):
        metric.observe(value)
    (change,) = book.take()
    assert change.bounds == (0.1, 1.0) and change.counts == [1, 1, 1]
    assert change.value == pytest.approx(7.6)


def test_a_histogram_may_have_one_bucket_for_all(book: MetricBook):
    family(HISTOGRAM).Metric(buckets=[]).observe(3)
    (change,) = book.take()
    assert change.bounds == () and change.counts == [1]


def test_the_same_labels_are_the_same_metric(book: MetricBook):
    one, other = family(COUNTER), family(COUNTER)
    one.Metric({"a": "1"}).increment(1)
    other.Metric({"a": "1"}).increment(2)
    other.Metric({"a": "2"}).increment(4)
    assert [change.value for change in book.take()] == [3.0, 4.0]


def test_the_first_description_of_a_family_stays(book: MetricBook):
    pb_utils.MetricFamily("n", "first", pb_utils.COUNTER)
    pb_utils.MetricFamily("n", "second", pb_utils.COUNTER).Metric()
    assert [change.text for change in book.take()] == ["first"]


def test_threads_lose_nothing(book: MetricBook):
    metric = family(COUNTER).Metric()
    threads = [
        threading.Thread(target=lambda: [metric.increment(1) for _ in range(2000)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    total = 0.0
    while any(thread.is_alive() for thread in threads):
        total += sum(change.value for change in book.take())
    total += sum(change.value for change in book.take())
    assert total == metric.value() == 8000


@pytest.mark.parametrize(
    "kind, use, what",
    [
        (COUNTER, lambda metric: metric.set(1), "COUNTER does not support Set"),
        (COUNTER, lambda metric: metric.observe(1), "COUNTER does not support Observe"),
        (COUNTER, lambda metric: metric.increment(-1), "by non-negative values"),
        (GAUGE, lambda metric: metric.observe(1), "GAUGE does not support Observe"),
        (HISTOGRAM, lambda metric: metric.set(1), "HISTOGRAM does not support Set"),
        (HISTOGRAM, lambda metric: metric.increment(1), "HISTOGRAM does not support Increment"),
        (HISTOGRAM, lambda metric: metric.value(), "HISTOGRAM does not support Value"),
    ],
)
def test_what_a_kind_cannot_do_is_refused(
    book: MetricBook, kind: int, use: Callable[[object], object], what: str
):
    metric = family(kind).Metric(buckets=[1.0] if kind == HISTOGRAM else None)
    with pytest.raises(pb_utils.TritonModelException, match=what):
        use(metric)


@pytest.mark.parametrize(
    "use, what",
    [
        (lambda: family(COUNTER, "two words"), "not a name of Prometheus"),
        (lambda: family(COUNTER, "__reserved"), "not a name of Prometheus"),
        (lambda: family(COUNTER, "penstock_mine"), "are the server's own"),
        (lambda: family(COUNTER, "penstock:mine"), "are the server's own"),
        (lambda: family(COUNTER, "nv_inference_count"), "are the server's own"),
        (lambda: family(COUNTER).Metric({"a": "b\ud800"}), "no Unicode text"),
        (lambda: pb_utils.MetricFamily("n", "\ud800", COUNTER), "no Unicode text"),
        (lambda: family(3), "expected COUNTER, GAUGE or HISTOGRAM, got 3"),
        (lambda: (family(COUNTER), family(GAUGE)), "'n' is a COUNTER already"),
        (lambda: family(COUNTER).Metric({"a": 1}), "expected strings"),
        (lambda: family(COUNTER).Metric({"a b": ""}), "'a b' cannot be a label's name"),
        (lambda: family(COUNTER).Metric({"a": "b" * 1001}), "labels over 1000 characters"),
        (lambda: family(COUNTER).Metric(buckets=[1.0]), "only histograms have buckets"),
        (lambda: family(HISTOGRAM).Metric(), "a histogram needs buckets"),
        (lambda: family(HISTOGRAM).Metric({"le": "1"}, [1.0]), "'le' cannot be a label's name"),
        (lambda: family(HISTOGRAM).Metric(buckets=[1.0, 1.0]), "do not ascend"),
        (lambda: family(HISTOGRAM).Metric(buckets=[1.0, float("inf")]), "do not ascend"),
        (
            lambda: [family(HISTOGRAM).Metric(buckets=[each]) for each in (1.0, 2.0)],
            r"has buckets \[1.0\]",
        ),
    ],
)
def test_a_metric_that_cannot_be_shown_is_refused(
    book: MetricBook, use: Callable[[], object], what: str
):
    with pytest.raises(pb_utils.TritonModelException, match=what):
        use()


def test_a_model_has_a_limited_number_of_metrics(book: MetricBook, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metric_book, "MAX_METRICS", 2)
    made = family(COUNTER)
    for label in "ab":
        made.Metric({"a": label})
    with pytest.raises(pb_utils.TritonModelException, match="at most 2 metrics"):
        made.Metric({"a": "c"})
    made.Metric({"a": "b"}).increment(1)


def test_outside_of_a_worker_metrics_count_for_the_model_alone():
    BOOK.set(None)
    metric = family(COUNTER).Metric()
    metric.increment(2)
    assert metric.value() == 2
