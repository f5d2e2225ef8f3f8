"""Random tensors: of the right form, another one each time, and harmless to the usual models."""

from itertools import count, repeat

import numpy as np
import pytest

from penstock.data import InputSpec, RequestForm, open_source
from penstock.data.lengths import Lengths, Sizes
from penstock.data.random_tensors import (
    NUM_STRING_WINDOWS,
    NUM_WINDOWS,
    RandomTensors,
)
from penstock.errors import ConfigError
from penstock.types import DATATYPES, Array, TensorSpec


def form(*inputs: TensorSpec, has_batch: bool = True) -> RequestForm:
    return RequestForm("tensors", inputs, has_batch)


def drawn(name: str, datatype: str, *shape: int, lengths: int = 1) -> Array:
    sizes = Sizes(repeat(lengths))
    source = RandomTensors(form(TensorSpec(name, datatype, shape)), 1, (0,), sizes)
    return source.next()[1].tensors[name]


@pytest.mark.parametrize("datatype", DATATYPES)
def test_every_datatype(datatype: str) -> None:
    array = drawn("x", datatype, 3, 4)
    assert array.shape == (1, 3, 4)
    assert array.dtype == DATATYPES[datatype].numpy
    assert array.flags.c_contiguous
    assert len(set(array.ravel().tolist())) > 1


def test_windows_come_round_only_after_all_were_used() -> None:
    """The step and the number of windows share no factor: both numbers of windows are prime."""
    for number in (NUM_WINDOWS, NUM_STRING_WINDOWS):
        assert all(number % factor for factor in range(2, int(number**0.5) + 1))


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])
def test_every_request_differs(datatype: str) -> None:
    """Strings go round once on the way, and are drawn anew."""
    source = RandomTensors(form(TensorSpec("x", datatype, (8,))), 1, (0,), Sizes())
    samples = [source.next() for _ in range(2 * NUM_STRING_WINDOWS)]
    seen = {tuple(sample.tensors["x"].ravel().tolist()) for _, sample in samples}
    assert len(seen) == len(samples)
    assert {index for index, _ in samples} == {None}


def test_processes_and_seeds_differ_and_a_seed_repeats() -> None:
    def first(seed: int, index: int) -> list[float]:
        source = open_source(InputSpec(seed=seed), form(TensorSpec("x", "FP32", (4,))), index, 2)
        values: list[float] = source.next()[1].tensors["x"].ravel().tolist()
        return values

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(*which)) for which in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4


def test_inputs_of_one_request_differ() -> None:
    specs = [TensorSpec(name, "FP32", (4,)) for name in "ab"]
    tensors = RandomTensors(form(*specs), 1, (0,), Sizes()).next()[1].tensors
    assert tensors["a"].tolist() != tensors["b"].tolist()


def test_floats_are_uniform_from_zero_to_one() -> None:
    for datatype in ("FP16", "FP32", "FP64"):
        values = drawn("x", datatype, 10_000)
        assert 0 <= values.min() < 0.01
        assert 0.99 < values.max() <= 1
        assert values.mean(dtype=np.float64) == pytest.approx(0.5, abs=0.02)


def test_bf16_are_bits_of_such_floats() -> None:
    bits = drawn("x", "BF16", 10_000).astype(np.uint32) << 16
    assert bits.view(np.float32).mean() == pytest.approx(0.5, abs=0.02)


def test_integers_stay_small_and_bytes_use_their_range() -> None:
    assert set(drawn("x", "INT64", 10_000).ravel().tolist()) == set(range(100))
    assert set(drawn("x", "UINT8", 10_000).ravel().tolist()) == set(range(256))
    assert set(drawn("x", "INT8", 10_000).ravel().tolist()) == set(range(-128, 128))
    assert set(drawn("x", "BOOL", 100).ravel().tolist()) == {True, False}


def test_strings_are_words() -> None:
    words = drawn("x", "BYTES", 1000).ravel().tolist()
    assert all(isinstance(w, bytes) and w.isalpha() and w.islower() for w in words)
    assert {len(word) for word in words} == set(range(3, 9))


@pytest.mark.parametrize("name", ["input_ids", "decoder_input_ids", "token", "item_ids"])
def test_token_ids_are_in_every_vocabulary(name: str) -> None:
    values = drawn(name, "INT64", 10_000)
    assert values.min() == 0
    assert values.max() == 999


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("attention_mask", [1, 1, 1, 1]),
        ("token_type_ids", [0, 0, 0, 0]),
        ("segment_ids", [0, 0, 0, 0]),
        ("position_ids", [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("datatype", ["INT64", "INT32"])
def test_what_an_encoder_takes_beside_ids(name: str, datatype: str, expected: list[int]) -> None:
    array = drawn(name, datatype, -1, lengths=4)
    assert array.dtype == DATATYPES[datatype].numpy
    assert array.tolist() == [expected]


def test_variable_dimensions_of_a_request_have_one_length() -> None:
    specs = [TensorSpec("input_ids", "INT64", (-1,)), TensorSpec("attention_mask", "INT64", (-1,))]
    source = RandomTensors(form(*specs), 3, (0,), Sizes(count(1)))
    for length in range(1, 100):
        shapes = [array.shape for array in source.next()[1].tensors.values()]
        assert shapes == [(3, length), (3, length)]


def test_a_length_beyond_what_was_drawn_is_drawn() -> None:
    lengths = iter([1, 2_000_000, 1, 3_000_000])
    source = RandomTensors(form(TensorSpec("x", "UINT8", (-1,))), 1, (0,), Sizes(lengths))
    sizes = [source.next()[1].tensors["x"].size for _ in range(4)]
    assert sizes == [1, 2_000_000, 1, 3_000_000]


def test_batch_and_optional_inputs() -> None:
    specs = [TensorSpec("a", "FP32", (2,)), TensorSpec("b", "FP32", (2,), is_optional=True)]
    batched = RandomTensors(form(*specs), 4, (0,), Sizes()).next()[1].tensors
    assert {name: array.shape for name, array in batched.items()} == {"a": (4, 2)}
    single = RandomTensors(form(*specs, has_batch=False), 1, (0,), Sizes()).next()[1].tensors
    assert single["a"].shape == (2,)


def test_the_report_is_told() -> None:
    fixed, variable = TensorSpec("a", "FP32", (2,)), TensorSpec("b", "FP32", (-1,))
    origin = open_source(InputSpec(), form(fixed), 0, 1).origin
    assert origin.is_random
    assert origin.num_examples is None
    assert origin.text == (
        "random values from the model's signature: real data may behave differently"
    )
    assert "are 1 long" in open_source(InputSpec(), form(fixed, variable), 0, 1).origin.text
    spec = InputSpec(lengths=Lengths("uniform", (1, 9)))
    assert "uniform from 1 to 9" in open_source(spec, form(variable), 0, 1).origin.text


def test_lengths_of_a_model_without_variable_dimensions_are_refused() -> None:
    spec = InputSpec(lengths=Lengths("fixed", (5,)))
    with pytest.raises(ConfigError, match=r"no input has a variable dimension: 'a' \[2\]"):
        open_source(spec, form(TensorSpec("a", "FP32", (2,))), 0, 1)
