"""Files of language models: folders, several files, GGUF, and none."""

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import tiny_llm as tiny  # noqa: E402
from gguf_writer import floats, gguf  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from penstock.errors import ConfigError  # noqa: E402
from penstock.llm.checkpoint import made_up, open_checkpoint  # noqa: E402
from penstock.llm.models.families import LLAMA, QWEN2, family_of  # noqa: E402
from penstock.llm.models.weights import weight_sizes  # noqa: E402


def assert_same(checkpoint, weights):
    for name in weight_sizes(checkpoint.shape):
        torch.testing.assert_close(checkpoint.weight(name), weights[name])
    checkpoint.close()


def test_a_folder_with_one_file(tmp_path):
    weights = tiny.write_folder(tmp_path)
    assert_same(open_checkpoint(tmp_path), weights)


@pytest.mark.parametrize("config", tiny.OTHERS.values(), ids=tiny.OTHERS)
def test_weights_that_files_have_in_other_places_and_forms(tmp_path, config):
    weights = tiny.write_folder(tmp_path, **config)
    assert_same(open_checkpoint(tmp_path), weights)


def test_a_folder_with_several_files(tmp_path):
    weights = tiny.weights_of(tmp_path)
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(weights)}
    for file in set(places.values()):
        save_file({n: w for n, w in weights.items() if places[n] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert_same(open_checkpoint(tmp_path), weights)


def gguf_metadata(name: str, **changes) -> dict:
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
        **changes,
    }
    return {"general.architecture": name} | {f"{name}.{key}": values[key] for key in values}


def tensors_of(family, shape, weights) -> dict:
    """The weights as tensors of a GGUF file, in FP32."""
    parts: dict[str, list] = {}
    for name, place in family.gguf_places(shape).items():
        values = weights[name].numpy()
        if family.has_adjacent_pairs and name.endswith(("q_proj.weight", "k_proj.weight")):
            # As llama.cpp's converter writes them.
            pairs = values.reshape(-1, 2, shape.head_size // 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        if family.has_low_norms and name.endswith("norm.weight"):
            values = values + 1
        parts.setdefault(place.name, []).append((place, values))
    found = {}
    for name, own in parts.items():
        is_stack = own[0][0].matrix is not None
        values = [each for _, each in sorted(own, key=lambda x: (x[0].matrix or 0, x[0].start))]
        whole = np.stack(values) if is_stack else np.concatenate(values)
        found[name] = whole.shape, 0, floats(whole)
    return found


GEMMA = {"attention.sliding_window": 16}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "n_layer": 2, "n_embd": 24, "n_head": 6,
    "n_positions": 128, "n_inner": 40, "vocab_size": 50, "layer_norm_epsilon": 1e-5,
}  # fmt: skip
GPT2_GGUF = {
    "attention.head_count_kv": 6, "attention.key_length": 4, "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
EXPERTS = {"expert_count": 4, "expert_used_count": 2}
QWEN3_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
GEMMA_CONFIG = {
    "hidden_act": "gelu_pytorch_tanh", "sliding_window": 16, "query_pre_attn_scalar": 8,
}  # fmt: skip
# By case: name in GGUF files, changes of the configuration, and of the file's metadata.
GGUF_CASES = {
    "llama": ("llama", {}, {}),
    "llama with a head": ("llama", {"tie_word_embeddings": False}, {}),
    "qwen2": ("qwen2", tiny.QWEN2, {}),
    "qwen3": ("qwen3", tiny.QWEN3, {}),
    "gemma2": (
        "gemma2",
        {"architectures": ["Gemma2ForCausalLM"], **GEMMA_CONFIG, **CAPS},
        {**GEMMA, **CAPS},
    ),
    "gemma3": (
        "gemma3",
        {
            "architectures": ["Gemma3ForCausalLM"],
            **GEMMA_CONFIG,
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        {
            **GEMMA, "rope.freq_base": 1e6, "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "gpt2": ("gpt2", GPT2, GPT2_GGUF),
    "qwen3 moe": (
        "qwen3moe",
        {"architectures": ["Qwen3MoeForCausalLM"], **QWEN3_EXPERTS},
        {**EXPERTS, "expert_feed_forward_length": 16},
    ),
    "mixtral": (
        "llama",
        {
            "architectures": ["MixtralForCausalLM"], "num_local_experts": 4,
            "num_experts_per_tok": 2, "rope_theta": 1e4,
        },
        EXPERTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "config", "metadata"), GGUF_CASES.values(), ids=GGUF_CASES)
def test_a_gguf_file_is_the_same_model(tmp_path, name, config, metadata):
    """Weights of a folder, written as a GGUF file: the same shape, and the same weights."""
    made = made_up(tiny.config_file(tmp_path, **config))
    torch.manual_seed(3)
    weights = {name: torch.randn(size) for name, size in weight_sizes(made.shape).items()}
    family = family_of(name)
    path = tmp_path / "tiny.gguf"
    tensors = tensors_of(family, made.shape, weights)
    path.write_bytes(gguf(gguf_metadata(name, **metadata), tensors))
    if family.has_low_norms:
        weights = {n: w + 1 if n.endswith("norm.weight") else w for n, w in weights.items()}
    checkpoint = open_checkpoint(path)
    assert replace(checkpoint.shape, layer=made.shape.layer) == made.shape
    assert_same(checkpoint, weights)


def test_tensors_that_are_missing_or_too_many_are_named(tmp_path):
    made = made_up(tiny.config_file(tmp_path, **tiny.QWEN2))
    weights = {name: made.weight(name) for name in weight_sizes(made.shape)}
    tensors = tensors_of(QWEN2, made.shape, weights)
    path = tmp_path / "tiny.gguf"
    bias = tensors.pop("blk.1.attn_k.bias")
    path.write_bytes(gguf(gguf_metadata("qwen2"), tensors))
    with pytest.raises(ConfigError, match=r"no tensor 'blk\.1\.attn_k\.bias'"):
        open_checkpoint(path)
    path.write_bytes(gguf(gguf_metadata("qwen2"), {**tensors, "strange": bias}))
    with pytest.raises(ConfigError, match="'strange' is a tensor that this model has"):
        open_checkpoint(path)


def test_a_gguf_file_may_have_divisors_of_frequencies(tmp_path):
    made = made_up(tiny.config_file(tmp_path))
    weights = {name: made.weight(name) for name in weight_sizes(made.shape)}
    tensors = tensors_of(LLAMA, made.shape, weights)
    tensors["rope_freqs.weight"] = ((4,), 0, floats([1, 1, 2, 8]))
    path = tmp_path / "tiny.gguf"
    path.write_bytes(gguf(gguf_metadata("llama"), tensors))
    assert open_checkpoint(path).shape.rope.divisors == (1, 1, 2, 8)


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
            {"config.json": '{"architectures": ["BloomForCausalLM"]}'},
            "'BloomForCausalLM' is not served",
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
