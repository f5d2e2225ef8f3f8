"""Metrics that a Python model's code has, in the scrape of a server with one shard and with two."""

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from prometheus_client.parser import text_string_to_metric_families
from served import Served
from waiting import wait_until

CODE = """
import os

import numpy as np
import triton_python_backend_utils as pb_utils

Family = pb_utils.MetricFamily


class TritonPythonModel:
    def initialize(self, args):
        labels = {"model": args["model_name"], "kind": "own"}
        family = Family(name="answered", description="Rows answered", kind=Family.COUNTER)
        self.answered = family.Metric(labels=labels)
        self.unused = family.Metric(labels=labels | {"kind": "never"})
        self.open = Family(name="open_now", description="d", kind=Family.GAUGE).Metric(labels)
        family = Family(name="values", description="d", kind=Family.HISTOGRAM)
        self.values = family.Metric(labels=labels, buckets=[1, 10])

    def execute(self, requests):
        return [self.answer(request.inputs()[0].as_numpy()) for request in requests]

    def answer(self, x):
        self.open.increment(1)
        if x[0, 0] < 0:
            os._exit(1)
        self.answered.increment(len(x))
        self.values.observe(x[0, 0])
        self.open.increment(-1)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])
"""
CONFIG = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
instance_group { count: 2 kind: KIND_CPU }
"""
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")


def samples(served: Served) -> dict[str, float]:
    """Return the samples of the model's own families; the parser adds `_total` to counters."""
    text = served.get("/metrics")[1].decode()
    return {
        f"{each.name} {each.labels.get('le', each.labels['kind'])}": each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
        if each.labels.get("kind") in ("own", "never") and each.labels["model"] == "counting"
    }


@pytest.mark.parametrize("shards", ["1", "2"])
def test_a_scrape_has_the_metrics_of_all_instances_while_the_model_is_loaded(
    tmp_path: Path, shards: str
):
    folder = tmp_path / "counting"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(CODE)
    (folder / "config.pbtxt").write_text(CONFIG)
    with Served(tmp_path, "--shards", shards, *EXPLICIT) as served:
        declared = {
            "answered_total own": 0,
            "answered_total never": 0,
            "open_now own": 0,
            "values_bucket 1": 0,
            "values_bucket 10": 0,
            "values_bucket +Inf": 0,
            "values_sum own": 0,
            "values_count own": 0,
        }
        wait_until(lambda: samples(served) == declared)
        client = httpclient.InferenceServerClient(served.address, concurrency=4)
        given = httpclient.InferInput("x", [1, 1], "FP32")
        asked = []
        for value in range(40):
            given.set_data_from_numpy(np.array([[value]], np.float32))
            asked.append(client.async_infer("counting", [given]))
        assert [int(each.get_result().as_numpy("y")[0, 0]) for each in asked] == [*range(40)]
        counted = declared | {
            "answered_total own": 40,
            "values_bucket 1": 2,
            "values_bucket 10": 11,
            "values_bucket +Inf": 40,
            "values_sum own": sum(range(40)),
            "values_count own": 40,
        }
        assert samples(served) == counted

        # Counts survive a worker; what a dead one was doing does not stay open.
        given.set_data_from_numpy(np.array([[-1]], np.float32))
        with pytest.raises(Exception, match="worker"):
            client.infer("counting", [given])
        wait_until(lambda: len(served.workers()) == 2 and samples(served) == counted)

        client.unload_model("counting")
        wait_until(lambda: samples(served) == {})
