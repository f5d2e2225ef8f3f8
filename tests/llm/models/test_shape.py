"""Sizes of decoders, and what is particular to their layers."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")

from penstock.errors import ConfigError
from penstock.llm.models.gpt2 import GPT
from penstock.llm.models.rope import Rope
from penstock.llm.models.shape import AttentionForm, DecoderShape, Experts
from penstock.llm.models.swiglu import SWIGLU


def a_shape(**changes) -> DecoderShape:
    sizes = {
        "num_layers": 2, "width": 8, "num_heads": 6, "num_kv_heads": 2, "head_size": 4,
        "inner": 16, "vocabulary": 10, "max_length": 32, "epsilon": 1e-5, "rope": Rope(),
        "is_tied": True, "layer": SWIGLU,
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
    assert a_shape(layer=GPT).num_parameters == 2 * (8 * 64 + 256) + 80
    experts = Experts(4, 2, 5)
    assert a_shape(experts=experts).num_parameters == 2 * (8 * 64 + 4 * (8 + 3 * 8 * 5)) + 80


def test_layers_may_differ_in_their_windows_and_ropes():
    shape = a_shape(windows=(5, 0), score_cap=2.0, local_rope=Rope(7.0))
    assert shape.attention_form(0) == AttentionForm(5, 2.0)
    assert shape.attention_form(1) == AttentionForm(0, 2.0)
    assert [shape.rope_of_layer(number) for number in (0, 1)] == [Rope(7.0), Rope()]
    shape = replace(shape, windows=(), local_rope=None)
    assert shape.attention_form(0).window == 0 and shape.rope_of_layer(0) == Rope()
