"""Gauges of shards add up."""

from penstock.serving.model_gauges import NO_GAUGES, ModelGauges


def test_gauges_add_up_one_by_one():
    total = ModelGauges(1, 2, 3, 4).plus(ModelGauges(10, 20, 30, 40)).plus(NO_GAUGES)
    assert total == ModelGauges(11, 22, 33, 44)
