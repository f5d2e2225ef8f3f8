"""Sizes of decoders, and how positions turn their heads."""

import math

import pytest

from penstock.errors import ConfigError
from penstock.llm.models.shape import DecoderShape, Reader, Rope, rope_of_config

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def a_shape(**changes) -> DecoderShape:
    sizes = {
        "num_layers": 2, "width": 8, "num_heads": 6, "num_kv_heads": 2, "head_size": 4,
        "inner": 16, "vocabulary": 10, "max_length": 32, "epsilon": 1e-5, "rope": Rope(),
        "is_tied": True,
    }  # fmt: skip
    return DecoderShape(**{**sizes, **changes})


def test_groups_may_be_of_any_size_that_divides():
    assert a_shape().group == 3
    with pytest.raises(ConfigError, match="6 heads are not a multiple of 4 of keys"):
        a_shape(num_kv_heads=4)


def test_parameters_are_counted():
    # Two layers of 8 x (4 x (12 + 4)) and 3 x 8 x 16, and a table of 10 x 8.
    assert a_shape().num_parameters == 2 * (8 * 64 + 384) + 80
    assert a_shape(is_tied=False).num_parameters == 2 * (8 * 64 + 384) + 160


class TestRope:
    def test_frequencies_fall_from_one(self):
        assert Rope(10_000.0).frequencies(4) == pytest.approx([1.0, 0.01])

    def test_linear_divides_positions(self):
        assert Rope(10_000.0, "linear", 4.0).frequencies(4) == pytest.approx([0.25, 0.0025])

    def test_a_file_may_say_by_itself_what_they_are_divided_by(self):
        assert Rope(10_000.0, divisors=(1.0, 8.0)).frequencies(4) == pytest.approx([1.0, 0.00125])

    def test_llama3_slows_what_turns_slowly(self):
        rope = Rope(500_000.0, "llama3", 8.0, 1.0, 4.0, 8192)
        plain, slowed = Rope(500_000.0).frequencies(128), rope.frequencies(128)
        for before, after in zip(plain, slowed, strict=True):
            length = 2 * math.pi / before
            if length < 8192 / 4:
                assert after == before
            elif length > 8192:
                assert after == pytest.approx(before / 8)
            else:
                assert before / 8 <= after <= before
        assert slowed == sorted(slowed, reverse=True)


LENGTHS = {"original_max_position_embeddings": 4096, "max_position_embeddings": 131072}


class TestConfig:
    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({}, Rope(10_000.0)),
            ({"rope_theta": 1e6}, Rope(1e6)),
            ({"rope_theta": 5e5, "rope_scaling": LLAMA3}, Rope(5e5, "llama3", 8.0)),
            ({"rope_parameters": {**LLAMA3, "rope_theta": 5e5}}, Rope(5e5, "llama3", 8.0)),
            ({"rope_scaling": {"type": "linear", "factor": 2}}, Rope(1e4, "linear", 2.0)),
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, Rope(7.0)),
            ({"partial_rotary_factor": 0.25}, Rope(share=0.25)),
            (
                {**LENGTHS, "rope_scaling": {"type": "su", "short_factor": [2] * 8}},
                Rope(
                    kind="longrope",
                    original_length=4096,
                    divisors=(2.0,) * 8,
                    magnitude=math.sqrt(1 + 5 / 12),
                ),
            ),
        ],
    )
    def test_older_and_newer_forms(self, values, expected):
        assert rope_of_config(values, "config.json", 16) == expected

    @pytest.mark.parametrize(
        ("values", "problem"),
        [
            ({"rope_theta": -1}, "rope_theta is -1; expected a positive number"),
            ({"rope_scaling": {"rope_type": "yarn"}}, "rope of type 'yarn'; expected linear"),
            ({"rope_scaling": {"rope_type": "linear"}}, "rope: factor is missing"),
            ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; expected a share"),
            ({"partial_rotary_factor": 0.3}, "partial_rotary_factor is 0.3; expected a share"),
            (
                {**LENGTHS, "rope_scaling": {"type": "longrope", "short_factor": [2]}},
                "short_factor is [2]; expected 8 positive numbers",
            ),
            ({"rope_scaling": [1]}, "rope_scaling is [1]; expected an object"),
        ],
    )
    def test_what_makes_no_sense_is_told(self, values, problem):
        with pytest.raises(ConfigError) as error:
            rope_of_config(values, "config.json", 16)
        assert any(problem in each for each in error.value.problems)


def test_all_problems_are_told_together():
    reader = Reader({"a": 0, "b": "x", "c": True}, "here")
    reader.whole("a")
    reader.real("b")
    reader.whole("c")
    reader.flag("d", False)
    reader.whole("e")
    with pytest.raises(ConfigError) as error:
        reader.check()
    assert error.value.problems == (
        "here: a is 0; expected a positive number",
        "here: b is 'x'; expected a positive number",
        "here: c is True; expected a positive number",
        "here: e is missing; expected a positive number",
    )
