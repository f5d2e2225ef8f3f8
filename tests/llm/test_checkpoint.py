"""Files of language models: folders, several files, GGUF, and none."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from gguf_writer import floats, gguf  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from penstock.errors import ConfigError  # noqa: E402
from penstock.llm.checkpoint import made_up, open_checkpoint  # noqa: E402
from penstock.llm.models.families import LLAMA, QWEN2  # noqa: E402
from penstock.llm.models.weights import weight_sizes  # noqa: E402


def assert_same(checkpoint, weights):
    for name in weight_sizes(checkpoint.shape):
        torch.testing.assert_close(checkpoint.weight(name), weights[name])
    checkpoint.close()


def test_a_folder_with_one_file(tmp_path):
    weights = tiny.write_folder(tmp_path)
    assert_same(open_checkpoint(tmp_path), weights)


def test_a_folder_with_several_files(tmp_path):
    weights = tiny.weights_of(tmp_path)
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({n: w for n, w in weights.items() if places[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert_same(open_checkpoint(tmp_path), weights)


def gguf_metadata(name: str) -> dict:
    """Of the tiny model, in this family."""
    values = {
        "block_count": 2,
        "embedding_length": 24,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "feed_forward_length": 40,
        "context_length": 128,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 50,
    }
    return {"general.architecture": name} | {f"{name}.{key}": values[key] for key in values}


def test_a_gguf_file_of_a_family_with_biases(tmp_path):
    weights = tiny.weights_of(tmp_path, **tiny.QWEN2)
    assert torch.any(weights["model.layers.1.self_attn.k_proj.bias"] != 0)
    names = QWEN2.gguf_names(QWEN2.shape_of_config(tiny.QWEN2))
    tensors = {
        other: (tuple(weights[name].shape), 0, floats(weights[name].numpy()))
        for name, other in names.items()
    }
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(gguf_metadata("qwen2"), tensors))
    assert_same(open_checkpoint(path), weights)
    del tensors["blk.1.attn_k.bias"]
    path.write_bytes(gguf(gguf_metadata("qwen2"), tensors))
    with pytest.raises(ConfigError, match=r"no tensor 'blk\.1\.attn_k\.bias'"):
        open_checkpoint(path)


def test_a_gguf_file_is_the_same_model(tmp_path):
    weights = tiny.weights_of(tmp_path)
    shape = LLAMA.shape_of_config(tiny.CONFIG)
    metadata = gguf_metadata("llama")
    tensors = {}
    for name, other in LLAMA.gguf_names(shape).items():
        values = weights[name].numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # As llama.cpp's converter writes them.
            values = values.reshape(-1, 2, 4, 24).swapaxes(1, 2).reshape(values.shape)
        tensors[other] = (values.shape, 0, floats(values))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(metadata, tensors))
    checkpoint = open_checkpoint(path)
    assert checkpoint.shape.is_tied
    assert_same(checkpoint, weights)
    tensors["output.weight"] = ((50, 24), 0, floats(np.ones((50, 24))))
    tensors["rope_freqs.weight"] = ((4,), 0, floats([1, 1, 2, 8]))
    path.write_bytes(gguf(metadata, tensors))
    shape = open_checkpoint(path).shape
    assert not shape.is_tied and shape.rope.divisors == (1, 1, 2, 8)
    tensors["blk.0.attn_q.bias"] = ((48,), 0, floats(np.ones(48)))
    path.write_bytes(gguf(metadata, tensors))
    with pytest.raises(
        ConfigError, match=r"'blk\.0\.attn_q\.bias' is a tensor that this model has"
    ):
        open_checkpoint(path)


def test_made_up_weights_are_the_same_each_time_and_of_the_right_size(tmp_path):
    path = tiny.config_file(tmp_path, tie_word_embeddings=False)
    first, second = made_up(path), made_up(path)
    for name in weight_sizes(first.shape):
        assert torch.equal(first.weight(name), second.weight(name))


@pytest.mark.parametrize(
    ("change", "problems"),
    [
        (lambda weights: weights.pop("model.norm.weight"), ["no weight 'model.norm.weight'"]),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(5)}),
            ["'model.norm.weight' has shape [5]; expected [24]"],
        ),
        (
            lambda weights: [weights.pop(name) for name in list(weights)[:8]],
            None,
        ),
        (
            lambda weights: weights.update({"strange": torch.ones(2)}),
            ["'strange' is a weight that this model has not"],
        ),
    ],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, problems):
    weights = tiny.weights_of(tmp_path)
    change(weights)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as error:
        open_checkpoint(tmp_path)
    if problems is None:
        assert len(error.value.problems) == 6 and error.value.problems[-1] == "and 3 more"
    else:
        assert list(error.value.problems) == problems


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "config.json: cannot be read"),
        ({"config.json": "[]"}, "config.json: expected an object"),
        ({"config.json": "{}"}, "architectures is None; expected a list of one name"),
        (
            {"config.json": '{"architectures": ["GPT2LMHeadModel"]}'},
            "'GPT2LMHeadModel' is not served",
        ),
        ({"config.json": json.dumps(tiny.CONFIG)}, "neither model.safetensors nor"),
        (
            {"config.json": json.dumps(tiny.CONFIG), "model.safetensors": "x"},
            "cannot be read as safetensors",
        ),
        (
            {
                "config.json": json.dumps(tiny.CONFIG),
                "model.safetensors.index.json": '{"weight_map": {"a": "../b"}}',
            },
            "'../b' leaves the folder",
        ),
    ],
)
def test_what_is_wrong_with_a_folder_is_told(tmp_path, files, problem):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError) as error:
        open_checkpoint(tmp_path)
    assert problem in error.value.problems[0]


def test_what_is_neither_folder_nor_gguf_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a folder with config\.json, or a \.gguf file"):
        open_checkpoint(tmp_path / "model.bin")
