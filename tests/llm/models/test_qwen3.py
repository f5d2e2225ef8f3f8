"""What Qwen3 has beyond Llama."""

import numpy as np
import pytest

pytest.importorskip("torch")

import tiny_llm as tiny

from penstock.llm.models import qwen3


def test_heads_are_of_128_unless_told_and_normalised():
    values = {key: value for key, value in tiny.QWEN3.items() if key != "head_dim"}
    shape = qwen3.shape_of_config(values)
    assert shape.head_size == 128 and shape.has_qk_norm and not shape.is_tied


def test_norms_have_names_in_gguf_and_weights_lie_as_they_are():
    shape = qwen3.shape_of_config(tiny.QWEN3)
    names = qwen3.gguf_names(shape)
    assert names["model.layers.0.self_attn.k_norm.weight"] == "blk.0.attn_k_norm.weight"
    assert names["lm_head.weight"] == "output.weight"
    values = np.arange(6).reshape(3, 2)
    found = qwen3.from_gguf("model.layers.0.self_attn.q_proj.weight", values, shape)
    np.testing.assert_array_equal(found, values)
