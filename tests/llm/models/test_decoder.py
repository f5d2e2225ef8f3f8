"""Hidden states and logits, beside the same by hand."""

import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from penstock.llm.checkpoint import open_checkpoint  # noqa: E402
from penstock.llm.models.decoder import Decoder  # noqa: E402
from penstock.llm.models.weights import weight_sizes  # noqa: E402


def attend(layer, queries, keys, values):
    """All at once, without a cache."""
    parts = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    mixed = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
    return mixed[0].transpose(0, 1)


def decoder_of(folder, dtype=torch.float32) -> Decoder:
    checkpoint = open_checkpoint(folder)
    decoder = Decoder(checkpoint.shape, checkpoint.weight, "cpu", dtype)
    checkpoint.close()
    return decoder


@pytest.mark.parametrize("config", [tiny.CONFIG, tiny.QWEN3], ids=["llama", "qwen3"])
def test_logits_are_those_by_hand(tmp_path, config):
    weights = tiny.write_folder(tmp_path, **config)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    decoder = decoder_of(tmp_path)
    hidden = decoder.hidden(torch.tensor(tokens), torch.arange(8), attend)
    wanted = tiny.by_hand(weights, config, tokens)
    torch.testing.assert_close(decoder.logits(hidden).double(), wanted, rtol=1e-4, atol=1e-4)


def test_products_may_have_a_bias(tmp_path):
    weights = tiny.write_folder(tmp_path, attention_bias=True)
    tokens = torch.tensor([3, 1, 4])
    found = decoder_of(tmp_path).hidden(tokens, torch.arange(3), attend)
    assert any(name.endswith("q_proj.bias") for name in weights)
    # A bias on values alone moves what attention gives by itself, whoever is seen.
    moved = dict(weights)
    name = "model.layers.1.self_attn.v_proj.bias"
    moved[name] = weights[name] + 1
    decoder = Decoder(open_checkpoint(tmp_path).shape, moved.__getitem__, "cpu", torch.float32)
    assert not torch.allclose(decoder.hidden(tokens, torch.arange(3), attend), found)


def test_every_weight_has_a_size(tmp_path):
    tiny.write_folder(tmp_path, **tiny.QWEN3)
    shape = open_checkpoint(tmp_path).shape
    sizes = weight_sizes(shape)
    of_a_layer = [name for name in sizes if name.startswith("model.layers.0.")]
    assert len(sizes) == 3 + 2 * len(of_a_layer)
