"""How positions turn heads, and what files say about it."""

import math

import pytest

torch = pytest.importorskip("torch")

from penstock.errors import ConfigError  # noqa: E402
from penstock.llm.models.reader import Reader  # noqa: E402
from penstock.llm.models.rope import (  # noqa: E402
    Rope,
    rope_of_config,
    rope_of_gguf,
    rotate,
    widen,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config_rope(values, **options) -> Rope:
    reader = Reader({"max_position_embeddings": 4096, **values}, "config.json")
    found = rope_of_config(reader, 16, **options)
    reader.check()
    return found


def test_positions_turn_pairs_by_their_angle_and_keep_lengths():
    turns = torch.tensor([[[0.0], [1.0]], [[1.0], [0.0]]])
    heads = torch.tensor([[[3.0, 4.0]], [[3.0, 4.0]]])
    assert rotate(heads, widen(turns)).tolist() == [[[-4.0, 3.0]], [[3.0, 4.0]]]


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
        assert config_rope(values) == expected

    @pytest.mark.parametrize(
        ("values", "problem"),
        [
            ({"rope_theta": -1}, "rope_theta is -1; expected a positive number"),
            ({"rope_scaling": {"rope_type": "dynamic"}}, "rope of type 'dynamic'; expected linear"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 0}}, "rope: factor is 0; expected"),
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
            config_rope(values)
        assert any(problem in each for each in error.value.problems)

    def test_kinds_of_layers_may_have_their_own(self):
        kinds = {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        }
        values = {"rope_parameters": kinds}
        assert config_rope(values) == Rope(1e6, "linear", 8.0)
        assert config_rope(values, layers="sliding_attention") == Rope(5e3)


class TestGguf:
    def test_yarn_is_that_of_a_configuration(self):
        values = {
            "qwen2.rope.freq_base": 1e6,
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 1024,
        }
        told = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
        reader = Reader(values, "GGUF")
        found = rope_of_gguf(reader, "qwen2", 16, 4096)
        reader.check()
        assert found == config_rope({"rope_theta": 1e6, "rope_scaling": told})
        # High frequencies stay, low ones are divided by the factor.
        assert found.divisors[0] == 1 and found.divisors[-1] == pytest.approx(4)
        assert found.magnitude == pytest.approx(0.1 * math.log(4) + 1)
