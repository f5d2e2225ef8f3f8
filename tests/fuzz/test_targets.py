"""The fuzz targets without their fuzzer: seeds, damaged seeds, and noise."""

import targets
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

edits = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 8), st.binary(max_size=6)), max_size=4
)


def pytest_generate_tests(metafunc):
    metafunc.parametrize("name", sorted(targets.TARGETS))


def test_seeds(name):
    seeds = targets.SEEDS[targets.TARGETS[name]]
    assert seeds
    for seed in seeds:
        targets.TARGETS[name](seed)


@settings(max_examples=at_most(200))
@given(which=st.integers(0, 9), changes=edits)
def test_damaged_seeds(name, which, changes):
    seeds = targets.SEEDS[targets.TARGETS[name]]
    data = seeds[which % len(seeds)]
    for start, length, piece in changes:
        position = start % (len(data) + 1)
        data = data[:position] + piece + data[position + length :]
    targets.TARGETS[name](data)


@settings(max_examples=100)
@given(data=st.binary(max_size=200))
def test_noise(name, data):
    targets.TARGETS[name](data)
