"""A worker tells the core what its model's code has counted, and the rest when it ends."""

import threading
import time

from penstock.backends import triton_python_backend_utils as pb_utils
from penstock.serving import worker_metrics
from penstock.serving.worker_metrics import WorkerMetrics
from penstock.wire.frames import Measured, decode_from_worker


def total(sent: list[bytes]) -> float:
    frames = [frame for frame in map(decode_from_worker, sent) if isinstance(frame, Measured)]
    return sum(each.value for frame in frames for each in frame.changes)


def test_changes_are_sent_together_and_the_last_ones_before_it_ends():
    sent: list[bytes] = []
    metrics = WorkerMetrics(sent.append)
    counter = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER).Metric()
    ends_at, count = time.monotonic() + 3 * worker_metrics.SEND_EVERY_S, 0
    while time.monotonic() < ends_at:
        counter.increment(1)
        count += 1
    metrics.close()
    assert total(sent) == count and 2 <= len(sent) <= 6


def test_a_new_metric_is_sent_at_once():
    sent: list[bytes] = []
    metrics = WorkerMetrics(sent.append)
    family = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER)
    family.Metric().increment(1)
    for number in range(3):
        family.Metric({"number": str(number)})
        # With what has changed before it.
        assert len(sent) >= number + 2
    metrics.close()
    assert total(sent) == 1


def test_many_changes_fit_their_frames(monkeypatch):
    sent: list[bytes] = []
    metrics = WorkerMetrics(sent.append)
    monkeypatch.setattr(worker_metrics, "MAX_CHANGES", 3)
    family = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER)
    declared = [family.Metric({"number": str(number)}) for number in range(20)]
    for metric in declared:
        metric.increment(1)
    metrics.close()
    assert total(sent) == 20
    assert max(len(decode_from_worker(each).changes) for each in sent) == 3


def test_a_model_without_metrics_has_no_thread():
    before = threading.active_count()
    metrics = WorkerMetrics(lambda data: None)
    assert threading.active_count() == before
    metrics.close()
