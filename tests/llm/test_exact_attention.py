"""Attention and whole engines whose answers do not depend on the batch, bit for bit."""

import random

import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from batch_invariance import differences  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.llm.cache import attend_sdpa  # noqa: E402
from penstock.llm.engine_loading import load  # noqa: E402
from penstock.llm.exact_attention import attend, attend_prompt, pad_length  # noqa: E402
from penstock.llm.models.int4 import FixedRowsLinear  # noqa: E402
from penstock.llm.models.shape import AttentionForm  # noqa: E402

# Sizes that int4 takes.
SIZES = {
    "num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 160, "vocab_size": 320, "max_position_embeddings": 256,
}  # fmt: skip
OPTIONS = {"max_sequences": 9, "max_tokens": 24, "max_length": 256, "max_waiting": 100}


def of_prompt(num, length, heads=6, kv_heads=2, size=32):
    torch.manual_seed(num * 1000 + length)
    queries = torch.randn(num, heads, size)
    keys, values = (torch.randn(length, kv_heads, size) for _ in range(2))
    return queries, keys, values


@pytest.mark.parametrize(("num", "length"), [(1, 1), (1, 200), (70, 70), (40, 300)])
def test_it_is_attention(num, length):
    queries, keys, values = of_prompt(num, length)
    places = torch.arange(length - num, length)
    mask = torch.arange(length)[None, :] <= places[:, None]
    wanted = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], *(each.transpose(0, 1)[None] for each in (keys, values)),
        attn_mask=mask, enable_gqa=True,
    )  # fmt: skip
    found = attend_prompt(queries, keys, values)
    assert torch.allclose(found, wanted[0].transpose(0, 1), atol=1e-5)


@pytest.mark.parametrize(("window", "cap"), [(7, 0.0), (64, 2.0), (0, 1.5)])
def test_windows_and_caps_are_those_of_plain_attention(window, cap):
    parts, form = of_prompt(40, 300), AttentionForm(window, cap)
    torch.testing.assert_close(attend_prompt(*parts, form), attend_sdpa(*parts, form))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_a_token_alone_is_bit_for_bit_what_it_is_in_a_prompt_and_in_a_batch(seed, num_threads):
    chance = random.Random(seed)
    heads, kv_heads = chance.choice([(6, 2), (4, 4), (8, 1)])
    size, length = chance.choice([16, 32, 64]), chance.choice([5, 64, 130, 517])
    num = min(length, chance.choice([1, 9, 100]))
    torch.set_num_threads(num_threads)
    try:
        queries, keys, values = of_prompt(num, length, heads, kv_heads, size)
        whole = attend_prompt(queries, keys, values)
        for place in {0, num - 1, chance.randrange(num)}:
            end = length - num + place + 1
            alone = attend_prompt(queries[place : place + 1], keys[:end], values[:end])
            assert torch.equal(alone[0], whole[place])
            # As a row among others, in more room than it needs.
            room, num_rows, row = pad_length(end) + 128, 7, chance.randrange(7)
            rows = torch.randn(num_rows, kv_heads, heads // kv_heads, size)
            some_keys = torch.randn(num_rows, kv_heads, room, size)
            some_values = torch.randn(num_rows, kv_heads, room, size)
            rows[row] = queries[place].reshape(kv_heads, -1, size)
            for many, own in ((some_keys, keys), (some_values, values)):
                many[row] = 0
                many[row, :, :end] = own[:end].transpose(0, 1)
            ends = torch.randint(1, room, (num_rows, kv_heads, heads // kv_heads))
            ends[row] = end
            flat = (each.flatten(0, 1) for each in (rows, some_keys, some_values, ends))
            found = attend(*flat).reshape(num_rows, heads, size)
            assert torch.equal(found[row], whole[place])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_product_of_odd_sizes_rounds_a_row_as_it_does_alone(num_threads):
    torch.set_num_threads(num_threads)
    try:
        linear = FixedRowsLinear(torch.randn(50, 24), torch.randn(50))
        rows = torch.randn(41, 24)
        whole = linear(rows)
        assert torch.allclose(whole, F.linear(rows, linear.weight, linear.bias), atol=1e-5)
        for size in (1, 2, 3, 5, 8, 13, 40):
            parts = [linear(rows[n : n + size]) for n in range(0, 41, size)]
            assert torch.equal(torch.cat(parts), whole)
    finally:
        torch.set_num_threads(1)


# Two threads that wait for each other take minutes where others need the cores.
@pytest.mark.parametrize("num_threads", [1, pytest.param(2, marks=pytest.mark.verify)])
@pytest.mark.parametrize(
    "dtype",
    [
        "float32",
        "int8",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("bfloat16", "float16", "int4")),
    ],
)
def test_answers_do_not_depend_on_others_in_the_batch(tmp_path, dtype, num_threads):
    tiny.write_folder(tmp_path, **SIZES)
    settings = tiny.settings_of(tmp_path, dtype=dtype, num_threads=num_threads, **OPTIONS)
    try:
        engine, _ = load(settings)
        found = differences(engine, SIZES["vocab_size"])
    finally:
        torch.set_num_threads(1)
    if dtype == "float32":
        # Rounded to seven digits, which moves logprobs, and tokens only where two are that alike.
        found = [each for each in found if each[2][0] != each[3][0]]
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("name", ["gemma2", "gpt2", "experts"])
def test_other_layers_keep_the_law(tmp_path, name, dtype):
    sizes = {**SIZES, "num_experts": 8, "moe_intermediate_size": 64}
    if name == "gpt2":
        sizes = {"n_embd": 96, "n_positions": 256, "vocab_size": SIZES["vocab_size"]}
    tiny.write_folder(tmp_path, **{**tiny.OTHERS[name], **sizes})
    engine, _ = load(tiny.settings_of(tmp_path, dtype=dtype, **OPTIONS))
    assert differences(engine, SIZES["vocab_size"]) == []


def test_int4_keeps_the_law_with_layers_of_odd_sizes(tmp_path):
    odd = SIZES | {"intermediate_size": 150, "head_dim": 16, "num_attention_heads": 5,
                   "num_key_value_heads": 1}  # fmt: skip
    tiny.write_folder(tmp_path, **odd)
    engine, built = load(tiny.settings_of(tmp_path, dtype="int4", **OPTIONS))
    assert "in float32" in built["int4"]
    assert differences(engine, SIZES["vocab_size"]) == []
