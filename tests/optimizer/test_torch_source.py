"""Factories and Hugging Face folders: signatures found by running, weights all there."""

import json
from pathlib import Path

import numpy as np
import pytest

import penstock
from penstock.errors import ConfigError
from penstock.optimizer import folders
from penstock.optimizer.torch_source import take_factory, take_hugging_face

torch = pytest.importorskip("torch")

MODULE = '''
import torch


class Embed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(20, 4)

    def forward(self, ids, mask=None):
        found = self.table(ids)
        return found, found.mean(1)


class Whole(torch.nn.Module):
    """No batch: it takes one matrix and gives one number."""

    def forward(self, x):
        return x.sum(dtype=torch.float32).reshape(1)


class Complex(torch.nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)


def failing():
    raise RuntimeError("no weights today")


embed, whole, complex_numbers = Embed, Whole, Complex
'''


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "torch_source_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "torch_source_code"


def version(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "1"
    path.mkdir(parents=True)
    return path


def test_free_sizes_of_outputs_follow_those_of_inputs(code: str, tmp_path: Path) -> None:
    rows = [{"ids": np.ones(length, np.int64)} for length in (2, 5)]
    config, _ = take_factory(f"{code}:embed", rows, version(tmp_path))
    found = [(spec.name, spec.datatype, spec.shape) for spec in (*config.inputs, *config.outputs)]
    assert found == [
        ("ids", "INT64", (-1,)),
        ("OUTPUT__0", "FP32", (-1, 4)),
        ("OUTPUT__1", "FP32", (4,)),
    ]
    folders.write_config(tmp_path / "model", config)
    with penstock.load(str(tmp_path / "model")) as model:
        answer = model.infer({"ids": np.ones((1, 3), np.int64)})
    assert answer["OUTPUT__0"].shape == (1, 3, 4)


def test_module_without_rows_is_not_batched(code: str, tmp_path: Path) -> None:
    rows = [{"x": np.ones((2, 2), np.float32)}]
    config, _ = take_factory(f"{code}:whole", rows, version(tmp_path))
    assert (config.max_batch_size, config.batching.is_dynamic) == (0, False)
    assert [spec.shape for spec in config.outputs] == [(1,)]


@pytest.mark.parametrize(
    ("factory", "rows", "problem"),
    [
        ("failing", [], ":failing() failed: RuntimeError: no weights today"),
        ("embed", [], "does not say what it takes; expected data whose arrays have the names"),
        ("embed", [{"x": np.ones(2, np.int64)}], "forward(ids, mask=None): missing a required"),
        ("embed", [{"ids": np.ones(2, np.float32)}], "fails on inputs like those given"),
        ("complex_numbers", [{"x": np.ones(4, np.float32)}], "output 'OUTPUT__0' is torch.complex"),
    ],
)
def test_what_cannot_be_run_is_told(
    code: str, tmp_path: Path, factory: str, rows: list[dict[str, np.ndarray]], problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        take_factory(f"{code}:{factory}", rows, version(tmp_path))
    assert problem in str(error.value)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with random weights, as `save_pretrained` writes it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
        num_labels=3,
    )
    folder = tmp_path_factory.mktemp("bert")
    transformers.BertForSequenceClassification(config).eval().save_pretrained(folder)
    return folder


def test_hugging_face_folder_answers_as_transformers_does(classifier: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config, name = take_hugging_face(classifier, [], version(tmp_path))
    assert name == "BertForSequenceClassification"
    assert [(spec.name, spec.shape) for spec in config.inputs] == [
        ("input_ids", (-1,)),
        ("attention_mask", (-1,)),
        ("token_type_ids", (-1,)),
    ]
    assert [(spec.name, spec.shape) for spec in config.outputs] == [("logits", (3,))]
    folders.write_config(tmp_path / "model", config)
    inputs = {
        "input_ids": np.array([[1, 2, 3, 0]]),
        "attention_mask": np.array([[1, 1, 1, 0]]),
        "token_type_ids": np.zeros((1, 4), np.int64),
    }
    with penstock.load(str(tmp_path / "model")) as model:
        answer = model.infer(inputs)["logits"]
    plain = transformers.BertForSequenceClassification.from_pretrained(classifier).eval()
    with torch.inference_mode():
        expected = plain(**{name: torch.from_numpy(a) for name, a in inputs.items()}).logits
    assert np.allclose(answer, expected.numpy(), atol=1e-6)


def test_inputs_are_those_that_the_data_has(classifier: Path, tmp_path: Path) -> None:
    rows = [{name: np.ones(3, np.int64) for name in ("input_ids", "attention_mask")}]
    config, _ = take_hugging_face(classifier, rows, version(tmp_path))
    assert [spec.name for spec in config.inputs] == ["input_ids", "attention_mask"]


TINY = {
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}


def masked(folder: Path, family: str, saved: str, **options: bool) -> Path:
    """Weights of one class of a family under a configuration that names its ...ForMaskedLM."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**TINY)
    getattr(transformers, saved)(config, **options).eval().save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["architectures"] = [f"{family}ForMaskedLM"]
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def without_head(folder: Path) -> None:
    """The encoder's weights alone, by the names that they have in the model with a head."""
    library = pytest.importorskip("safetensors.torch")
    path = folder / "model.safetensors"
    kept = {
        name: tensor
        for name, tensor in library.load_file(path).items()
        if not name.startswith(("cls.", "lm_head."))
    }
    library.save_file(kept, path, {"format": "pt"})


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
@pytest.mark.parametrize("form", ["plain", "pooled", "prefixed"])
def test_encoder_without_the_head_that_is_named_is_the_base_model(
    tmp_path: Path, family: str, form: str
) -> None:
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "source"
    if form == "prefixed":
        without_head(masked(source, family, f"{family}ForMaskedLM"))
    else:
        masked(source, family, f"{family}Model", add_pooling_layer=form == "pooled")
    config, note = take_hugging_face(source, [], version(tmp_path))
    assert note == (
        f"{family}Model: the weights have no head of {family}ForMaskedLM, so the base model is "
        "served"
    )
    assert [(spec.name, spec.shape) for spec in config.outputs] == [("last_hidden_state", (-1, 8))]
    folders.write_config(tmp_path / "model", config)
    inputs = {spec.name: np.ones((1, 4), np.int64) for spec in config.inputs}
    with penstock.load(str(tmp_path / "model")) as model:
        answer = model.infer(inputs)["last_hidden_state"]
    plain = transformers.AutoModel.from_pretrained(source).eval()
    with torch.inference_mode():
        expected = plain(**{name: torch.from_numpy(array) for name, array in inputs.items()})
    assert np.allclose(answer, expected.last_hidden_state.numpy(), atol=1e-6)


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_a_head_that_is_there_is_kept(tmp_path: Path, family: str) -> None:
    """Its decoder shares the weights of the embeddings, and is in no file."""
    source = masked(tmp_path / "source", family, f"{family}ForMaskedLM")
    config, note = take_hugging_face(source, [], version(tmp_path))
    assert note == f"{family}ForMaskedLM"
    assert [spec.name for spec in config.outputs] == ["logits"]


def test_half_a_head_is_none(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    source = masked(tmp_path / "source", "Bert", "BertForMaskedLM")
    path = source / "model.safetensors"
    tensors = library.load_file(path)
    del tensors["cls.predictions.transform.dense.weight"]
    library.save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"not there: cls\.predictions\.transform\.dense\.weight"):
        take_hugging_face(source, [], version(tmp_path))


def changed(classifier: Path, folder: Path, **fields: object) -> Path:
    """The folder with another config.json."""
    folder.mkdir()
    described = json.loads((classifier / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, **fields}))
    (folder / "model.safetensors").write_bytes((classifier / "model.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"architectures": ["BertLMHeadModel"]}, "generates text; expected an encoder"),
        ({"architectures": []}, "names no architecture"),
        ({"architectures": ["NoSuchModel"]}, "transformers has no 'NoSuchModel'"),
        ({"architectures": ["BertForMaskedLM"]}, "has weights that are not there: cls."),
        ({"num_hidden_layers": 2}, "has weights that are not there: bert.encoder.layer.1."),
    ],
)
def test_folder_that_is_not_whole_is_refused(
    classifier: Path, tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    folder = changed(classifier, tmp_path / "source", **fields)
    with pytest.raises(ConfigError) as error:
        take_hugging_face(folder, [], version(tmp_path))
    assert problem in str(error.value)
