"""Price and energy of one machine, divided among its versions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.operate.machine_shares import divide_energy, price_shares

DEVICES = st.dictionaries(
    st.integers(0, 5), st.lists(st.sampled_from(["cpu", "cuda:0", "cuda:1", "cuda:2"]), max_size=4)
)


def test_instances_on_the_cpu_share_the_price():
    assert price_shares({"a": ["cpu"], "b": ["cpu", "cpu", "cpu"]}) == {"a": 0.25, "b": 0.75}


def test_gpus_in_use_share_the_price_and_the_cpu_beside_them_is_free():
    found = price_shares({"a": ["cuda:0", "cuda:1"], "b": ["cuda:1"], "c": ["cpu"]})
    assert found == {"a": 0.75, "b": 0.25}


@given(DEVICES)
def test_together_the_versions_bear_the_whole_price(devices):
    assert sum(price_shares(devices).values()) == pytest.approx(1 if any(devices.values()) else 0)


def test_energy_goes_to_those_that_computed_by_their_time():
    joules = {"cuda:0": 300.0, "cuda:1": 100.0, "cpu": 50.0}
    devices = {"a": ["cuda:0"], "b": ["cuda:0", "cuda:1"], "c": ["cuda:1"], "d": ["cpu"]}
    found = divide_energy(joules, {"a": 4.0, "b": 4.0, "c": 0.0, "d": 0.5}, devices)
    # b computes 2 s on each of its GPUs.
    assert found == pytest.approx({"a": 200.0, "b": 100.0 + 100.0, "c": 0.0, "d": 50.0})


def test_idle_devices_and_devices_without_a_counter_give_nothing():
    devices = {"a": ["cuda:0"], "b": ["cuda:1"]}
    assert divide_energy({"cuda:0": 300.0}, {"a": 0.0, "b": 3.0}, devices) == {}


@given(DEVICES, st.integers(0, 1000))
def test_no_energy_is_given_twice(devices, joules):
    busy_s = dict.fromkeys(devices, 1.5)
    counters = dict.fromkeys(["cpu", "cuda:0", "cuda:1"], float(joules))
    used = {device for each in devices.values() for device in each} & counters.keys()
    found = divide_energy(counters, busy_s, devices)
    assert sum(found.values()) == pytest.approx(joules * len(used))
