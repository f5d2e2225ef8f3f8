"""Which datatype a file of four bits gets on a CPU, and why."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from gguf_writer import floats, gguf  # noqa: E402

from penstock.llm import dtype_choice  # noqa: E402
from penstock.llm.dtype_choice import choose, divergence, is_four_bits  # noqa: E402
from penstock.llm.engine_loading import load  # noqa: E402
from penstock.llm.loading import open_decoder  # noqa: E402
from penstock.llm.models.families import LLAMA  # noqa: E402

CONFIG = {
    **tiny.CONFIG, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 64,
}  # fmt: skip
METADATA = {
    "general.architecture": "llama", "llama.block_count": 2, "llama.embedding_length": 64,
    "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 16, "llama.feed_forward_length": 96,
    "llama.context_length": 128, "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 64,
}  # fmt: skip
F32, Q4_0 = 0, 2


def q4_0(shape, chance) -> bytes:
    blocks = np.prod(shape) // 32
    scales = chance.uniform(0.01, 0.05, blocks).astype(np.float16)
    numbers = chance.integers(0, 256, (blocks, 16), dtype=np.uint8)
    return np.concatenate([scales.view(np.uint8).reshape(blocks, 2), numbers], 1).tobytes()


def write_gguf(folder, kind):
    """Layers in four bits or in FP32; tables in FP32 are few beside them."""
    chance = np.random.default_rng(3)
    weights = tiny.weights_of(folder, **CONFIG)
    tensors = {}
    for name, place in LLAMA.gguf_places(LLAMA.shape_of_config(CONFIG)).items():
        shape = tuple(weights[name].shape)
        is_small = kind == Q4_0 and len(shape) == 2 and "layers" in name
        content = q4_0(shape, chance) if is_small else floats(weights[name].numpy() / 12)
        tensors[place.name] = (shape, Q4_0 if is_small else F32, content)
    path = folder / "tiny.gguf"
    path.write_bytes(gguf(METADATA, tensors))
    return path


def settings_of(path, **changes):
    return tiny.settings_of(path, is_dtype_free=True, **changes)


def test_four_bits_are_recognised(tmp_path):
    assert is_four_bits(write_gguf(tmp_path, Q4_0))
    assert not is_four_bits(write_gguf(tmp_path, F32))
    assert not is_four_bits(tmp_path)


def test_int4_is_chosen_where_it_moves_little_and_the_reason_is_told(tmp_path, caplog):
    path = write_gguf(tmp_path, Q4_0)
    with caplog.at_level("INFO", "penstock.engine"):
        engine, built = load(settings_of(path))
    assert built["dtype"] == "int4" and engine.is_idle
    assert "dtype: int4 (next-token KL" in caplog.text and "penstock.dtype float32" in caplog.text


def test_float32_is_kept_where_int4_moves_too_much(tmp_path, monkeypatch):
    path = write_gguf(tmp_path, Q4_0)
    monkeypatch.setattr(dtype_choice, "MAX_KL", -1.0)
    found = choose(settings_of(path), open_decoder)
    assert found.settings.dtype == "float32" and not found.decoder.rounds
    assert found.reason.startswith("float32 (next-token KL") and "int4" in found.reason


def test_without_room_for_float32_nothing_is_compared(tmp_path, monkeypatch):
    path = write_gguf(tmp_path, Q4_0)
    monkeypatch.setattr(dtype_choice, "SPARE", 1e12)
    found = choose(settings_of(path), open_decoder)
    assert found.settings.dtype == "int4" and "not compared" in found.reason


@pytest.mark.parametrize("kind", [Q4_0, F32])
def test_a_named_datatype_and_other_files_are_left_alone(tmp_path, kind):
    path = write_gguf(tmp_path, kind)
    settings = settings_of(path) if kind == F32 else tiny.settings_of(path)
    found = choose(settings, open_decoder)
    assert found.settings == settings and found.reason == ""


def test_divergence():
    one = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log()
    assert divergence(one, one) == pytest.approx(0.0, abs=1e-7)
    other = torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    expected = (0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)) / 2
    assert divergence(one, other) == pytest.approx(expected, rel=1e-5)
