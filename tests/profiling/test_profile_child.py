"""The way of a request through codec, batcher and worker loop, in this process."""

import numpy as np
import pytest

from penstock.errors import PenstockError
from penstock.profiling.child import buckets_of
from penstock.profiling.profiler import make_batch, read_config


def test_every_part_of_the_way_has_its_time(encoder) -> None:
    config = read_config(encoder)
    tensors, _, _ = make_batch(config, [{"x": np.zeros((5, 64), np.float32)}] * 2)
    buckets = buckets_of(config, encoder, tensors, 4)
    names = ["decode", "queue", "copy in", "compute", "copy out", "encode"]
    assert [each.name for each in buckets] == names
    assert all(each.seconds >= 0 for each in buckets)
    assert {each.name: each.seconds for each in buckets}["compute"] > 0


def test_a_request_that_fails_says_why(encoder) -> None:
    config = read_config(encoder)
    tensors, _, _ = make_batch(config, [{"x": np.zeros((5, 63), np.float32)}])
    with pytest.raises(PenstockError, match="x"):
        buckets_of(config, encoder, tensors, 1)
