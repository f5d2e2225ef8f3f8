"""Servers and their queues as arithmetic: known laws to test statistics and searches against."""

import itertools

import numpy as np

from penstock.benchmark.exchange import ExchangeColumns
from penstock.benchmark.pacer import due_times
from penstock.benchmark.recorder import Recorder


def columns(due, done, sent=None, failed=None, failures=(), **streams):
    """Arrays as a generator would send them."""
    failed = np.zeros(len(due), np.uint8) if failed is None else np.asarray(failed, np.uint8)
    as_bytes = {
        name: np.asarray(column, np.int64 if name.startswith("num") else np.float64).tobytes()
        for name, column in streams.items()
    }
    return ExchangeColumns(
        np.asarray(due, np.float64).tobytes(),
        np.asarray(due if sent is None else sent, np.float64).tobytes(),
        np.asarray(done, np.float64).tobytes(),
        failed.tobytes(),
        list(failures),
        **as_bytes,
    )


def windows_of(due, latencies, end, slo=None, failed=None):
    """What is recorded of requests between 0 and `end`."""
    recorder = Recorder(0.0, slo)
    recorder.stop(end)
    due = np.asarray(due, np.float64)
    recorder.add(columns(due, due + latencies, failed=failed, failures=["refused"]))
    return recorder.windows(end)


def queued(due, service_s):
    """Latencies behind one server that takes requests in their order (Lindley's recursion)."""
    steps = np.concatenate([[0.0], service_s[:-1] - np.diff(due)])
    sums = np.cumsum(steps)
    return sums - np.minimum.accumulate(sums) + service_s


def due_until(load, end, seed):
    """Due times of a load before `end`."""
    chunks = list(itertools.takewhile(lambda chunk: chunk[0] < end, due_times(load, seed)))
    due = np.concatenate([*chunks, np.array([])])
    return due[due < end]


def poisson(rate, end, random):
    gaps = random.exponential(1 / rate, int(rate * end * 1.1) + 100)
    due = np.cumsum(gaps)
    assert due[-1] > end
    return due[due < end]
