"""One notion of a model: whatever a user names is one of these forms, or an answer that helps."""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from suites.classifiers import write_classifier

import penstock
from penstock.errors import ConfigError, NotFound
from penstock.repository.layout import ModelKind, refuse_hard_links
from penstock.repository.model_source import resolve

WriteOnnx = Callable[..., Path]
NULL = """
backend: "null" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def relu(write_onnx: WriteOnnx, path: Path) -> Path:
    node = helper.make_node("Relu", ["x"], ["y"])
    tensors = {"x": ("FP32", ["n", 3])}, {"y": ("FP32", ["n", 3])}
    return write_onnx(path, [node], *tensors)


def hugging_face(folder: Path, architecture: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def model_folder(root: Path, name: str = "null", *versions: str) -> Path:
    for version in versions or ("1",):
        (root / name / version).mkdir(parents=True)
    (root / name / "config.pbtxt").write_text(NULL)
    return root / name


def refusal(model: str | os.PathLike[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(model).read()
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("a.onnx", ModelKind.ONNX_FILE),
        ("a.pt2", ModelKind.PT2_FILE),
        ("a.xml", ModelKind.OPENVINO_FILE),
        ("a.gguf", ModelKind.GGUF_FILE),
        ("a.py", ModelKind.PYTHON_FILE),
        ("A.ONNX", ModelKind.ONNX_FILE),
    ],
)
def test_a_file_is_told_by_its_suffix_and_named_by_its_stem(
    tmp_path: Path, file: str, kind: ModelKind
) -> None:
    (tmp_path / file).write_bytes(b"")
    source = resolve(tmp_path / file)
    assert (source.kind, source.location, source.name) == (kind, tmp_path / file, Path(file).stem)
    assert source.is_file and source.names() == [source.name]
    assert resolve(str(tmp_path / file)) == source


def test_a_folder_is_told_by_what_is_in_it(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "models", "null", "1", "7")
    text = hugging_face(tmp_path / "smol", "LlamaForCausalLM")
    for path, kind, name in (
        (tmp_path / "models", ModelKind.REPOSITORY, ""),
        (model, ModelKind.MODEL_FOLDER, "null"),
        (model / "7", ModelKind.VERSION_FOLDER, "null"),
        (text, ModelKind.HUGGING_FACE, "smol"),
        (text / "config.json", ModelKind.HUGGING_FACE, "smol"),
    ):
        source = resolve(path)
        assert (source.kind, source.name) == (kind, name)
        assert not source.is_file


@pytest.mark.parametrize(
    "url", ["http://h:8000", "https://h/v2/models/m", "grpc://h:8001/m", "openai+http://h/v1"]
)
def test_a_url_is_a_running_server_and_is_measured_instead_of_served(url: str) -> None:
    source = resolve(url)
    assert (source.kind, source.location) == (ModelKind.URL, url)
    assert refusal(url).endswith(f"use penstock bench {url}")


def test_a_factory_is_a_module_and_a_function(tmp_path: Path) -> None:
    source = resolve("package.module:make_net")
    assert (source.kind, source.name) == (ModelKind.FACTORY, "module")
    assert source.location == "package.module:make_net"


def test_a_version_is_served_alone(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "null", "1", "2")
    [config] = resolve(folder / "1").read().configs
    assert (config.name, config.version) == ("null", "1")


def test_a_name_chooses_a_model_of_a_repository(tmp_path: Path) -> None:
    model_folder(tmp_path, "one")
    model_folder(tmp_path, "two")
    assert [each.name for each in resolve(tmp_path, name="two").read().configs] == ["two"]
    assert resolve(tmp_path).names() == ["one", "two"]
    with pytest.raises(ConfigError, match="holds no model 'three'; there: one, two"):
        resolve(tmp_path, name="three").read()
    with pytest.raises(ConfigError, match="holds no model 'three'; there: one"):
        resolve(tmp_path / "one", name="three")
    with pytest.raises(NotFound, match="'three'"):
        resolve(tmp_path).read_one("three")


def test_a_lone_onnx_file_is_version_1_of_a_batched_model(
    tmp_path: Path, write_onnx: WriteOnnx
) -> None:
    path = relu(write_onnx, tmp_path / "relu.onnx")
    source = resolve(path)
    [config] = source.read().configs
    assert (config.name, config.version, config.backend) == ("relu", "1", "onnxruntime")
    assert config.artifact == str(path) and config.max_batch_size > 1
    assert config.batching.is_dynamic
    assert source.read_one("relu").configs == [config]
    with pytest.raises(NotFound, match="there: relu"):
        source.read_one("other")
    with penstock.load(str(path)) as model:
        answer = model.infer(np.float32([[-1, 0, 2]]))
    assert answer["y"].tolist() == [[0, 0, 2]]


def test_a_file_gets_a_name_that_fits_a_url_or_the_one_that_is_given(
    tmp_path: Path, write_onnx: WriteOnnx
) -> None:
    path = relu(write_onnx, tmp_path / "größe (2).onnx")
    assert resolve(path).name == "gr-e-2"
    [config] = resolve(path).read().configs
    assert any("served as 'gr-e-2'" in note and "become -" in note for note in config.notes)
    assert resolve(path, name="sizes").read().configs[0].name == "sizes"


def test_weights_beside_a_lone_onnx_file_are_found(tmp_path: Path) -> None:
    weights = numpy_helper.from_array(np.full((3, 3), 2, np.float32), "w")
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [node],
        "g",
        [value("x", onnx.TensorProto.FLOAT, ["n", 3])],
        [value("y", onnx.TensorProto.FLOAT, ["n", 3])],
        [weights],
    )
    model = helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", 17)])
    path = tmp_path / "far" / "big.onnx"
    path.parent.mkdir()
    onnx.save(model, path, save_as_external_data=True, location="big.data", size_threshold=0)
    with penstock.load(str(path)) as loaded:
        assert loaded.infer(np.float32([[1, 1, 1]]))["y"].tolist() == [[6, 6, 6]]
    # A hard link may be a file from anywhere; other files of the folder do not matter.
    os.link(path, path.with_name("copy"))
    assert refuse_hard_links(resolve(path).read()).problems == {}
    os.link(path.with_name("big.data"), path.with_name("other"))
    assert "big.data" in refuse_hard_links(resolve(path).read()).problems["big"][0]


def test_a_file_that_is_broken_is_a_problem_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"nonsense")
    found = resolve(tmp_path / "a.onnx").read()
    assert found.problems["a"][0].startswith("a.onnx: cannot be read as ONNX")


def test_a_file_of_a_configured_version_says_that_its_configuration_is_not_used(
    tmp_path: Path, write_onnx: WriteOnnx
) -> None:
    path = relu(write_onnx, tmp_path / "m" / "1" / "model.onnx")
    [config] = resolve(path).read().configs
    assert not any("not used" in note for note in config.notes)
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 4")
    [config] = resolve(path).read().configs
    (note,) = (note for note in config.notes if "not used" in note)
    assert note.startswith(str(tmp_path / "m" / "config.pbtxt"))
    assert f"give {path.parent} to" in note


def test_a_torchscript_file_needs_a_configuration(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "net.pt", "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__.py"):
            archive.writestr(f"net/{name}", b"")
    text = refusal(tmp_path / "net.pt")
    assert "put it into a model's folder as 1/model.pt and declare them in config.pbtxt" in text


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("net.pth", ["a state dict has no code", "package.module:factory", "model.pt2"]),
        ("net.pt", ["torch.save is a pickle", "package.module:factory"]),
        ("pytorch_model.bin", ["config.json", "package.module:factory"]),
        ("model.safetensors", ["give the folder", "package.module:factory"]),
        ("net.keras", ["model.export"]),
        ("net.h5", ["model.export"]),
        ("saved_model.pb", ["tf2onnx"]),
        ("clf.pkl", ["skl2onnx"]),
        ("config.pbtxt", ["give the folder"]),
        ("photo.jpg", ["not a model", "model.onnx"]),
    ],
)
def test_files_that_are_not_served_say_what_to_do(
    tmp_path: Path, file: str, words: list[str]
) -> None:
    (tmp_path / file).write_bytes(b"")
    text = refusal(tmp_path / file)
    assert file in text
    assert all(word in text for word in words), text


def test_a_link_that_leads_nowhere_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").symlink_to("gone.onnx")
    (tmp_path / "b.onnx").symlink_to("b.onnx")
    assert "is a link that leads nowhere, to gone.onnx" in refusal(tmp_path / "a.onnx")
    assert "is a link that leads nowhere, to b.onnx" in refusal(tmp_path / "b.onnx")


@pytest.mark.timeout(30)
def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.onnx")
    assert "is no regular file" in refusal(tmp_path / "a.onnx")


def test_a_missing_file_tells_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "resnet50.onnx").write_bytes(b"")
    text = refusal(tmp_path / "resnet5.onnx")
    assert f"did you mean {tmp_path / 'resnet50.onnx'}?" in text
    assert "no such file or folder; expected model.onnx" in refusal(tmp_path / "other")
    assert refusal("").startswith("no model is given; expected model.onnx")
    assert "did you mean http://localhost:8000/v2?" in refusal("localhost:8000/v2")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], ["is an empty folder", "model.onnx"]),
        (["a.onnx", "b.onnx"], ["several models (a.onnx, b.onnx)", "{folder}/a.onnx"]),
        (["notes.txt", "a.pt2"], ["holds one: give {folder}/a.pt2"]),
        (["model.py", "other.py"], ["give {folder}/model.py"]),
        (["train.py", "README.md"], ["holds no model", "<model>/<version>/model.onnx"]),
        (["saved_model.pb", "variables.data"], ["tf2onnx", "--saved-model {folder}"]),
        (["adapter_config.json", "adapter_model.safetensors"], ["merge_and_unload"]),
        (["weights.pth"], ["weights.pth: a state dict has no code", "package.module:factory"]),
    ],
)
def test_a_folder_without_a_model_says_what_to_give(
    tmp_path: Path, files: list[str], words: list[str]
) -> None:
    folder = tmp_path / "given"
    folder.mkdir()
    for file in files:
        (folder / file).write_bytes(b"")
    text = refusal(folder)
    assert text.startswith(f"{folder}: ")
    assert all(word.replace("{folder}", str(folder)) in text for word in words), text


def test_folders_that_lack_something_say_what(tmp_path: Path) -> None:
    folder = tmp_path / "triton"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(NULL)
    (problem,) = resolve(folder).read().problems["triton"]
    assert "no version folder; expected one named by a number, such as 1/" in problem
    folder = hugging_face(tmp_path / "bert", "BertModel")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (problem,) = resolve(folder).read().problems["bert"]
    assert "no weights" in problem and "save_pretrained" in problem


FACTORY = """
import numpy as np
import torch


def make():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def example_inputs():
    return {"input": np.zeros((4, 3), np.float32)}
"""


def test_a_factory_is_served_with_the_tensors_of_its_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net_of_mine.py").write_text(FACTORY)
    source = resolve("net_of_mine:make")
    assert (source.kind, source.names()) == (ModelKind.FACTORY, ["net_of_mine"])
    with penstock.load("net_of_mine:make") as model:
        assert (model.config.name, model.config.backend) == ("net_of_mine", "pytorch")
        assert model.config.max_batch_size > 1
        answer = model.infer(np.ones((2, 3), np.float32))
    torch.manual_seed(0)
    expected = torch.nn.Linear(3, 2)(torch.ones(2, 3)).detach().numpy()
    np.testing.assert_allclose(answer["OUTPUT__0"], expected, rtol=1e-5)
    with pytest.raises(NotFound, match="there: net_of_mine"):
        source.read_one("other")
    (tmp_path / "net_of_mine.py").write_text("def make():\n    return 3\n")
    with pytest.raises(ConfigError, match=r"gave a int, expected a torch\.nn\.Module"):
        source.read_one("net_of_mine")


@pytest.mark.parametrize(
    "classes",
    [{"classlabels_strings": ["cat", "dog", "owl"]}, {"classlabels_int64s": [3, 5, 8]}],
    ids=["texts", "numbers"],
)
def test_maps_of_probabilities_are_served_as_a_tensor(
    tmp_path: Path, classes: dict[str, list[str] | list[int]]
) -> None:
    path = write_classifier(tmp_path / "c.onnx", **classes)
    before = path.read_bytes()
    with penstock.load(str(path)) as model:
        assert any("ZipMap" in note for note in model.config.notes)
        (named,) = classes.values()
        assert any(", ".join(map(str, named)) in note for note in model.config.notes)
        assert model.config.outputs[1].shape == (3,) and model.config.max_batch_size > 1
        answer = model.infer(np.float32([[0, 0, 0], [0, 9, 0]]))
    assert answer["label"].tolist() == [0, 1]
    np.testing.assert_allclose(answer["probability"][0], [1 / 3] * 3, rtol=1e-6)
    assert answer["probability"][1].argmax() == 1
    assert path.read_bytes() == before


def test_a_classifier_of_scikit_learn_is_served_as_skl2onnx_writes_it(tmp_path: Path) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")
    skl2onnx = pytest.importorskip("skl2onnx")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4)).astype(np.float32)
    trained = linear_model.LogisticRegression().fit(
        x, np.array(["a", "b", "c"])[x[:, :3].argmax(1)]
    )
    path = tmp_path / "trained.onnx"
    path.write_bytes(skl2onnx.to_onnx(trained, x[:1]).SerializeToString())
    with penstock.load(str(path)) as model:
        answer = model.infer(x)
    assert [each.decode() for each in answer["output_label"]] == list(trained.predict(x))
    np.testing.assert_allclose(
        answer["output_probability"], trained.predict_proba(x), rtol=1e-4, atol=1e-5
    )


def test_other_outputs_that_are_no_tensors_are_refused(
    tmp_path: Path, write_onnx: WriteOnnx
) -> None:
    node = helper.make_node("SequenceConstruct", ["x"], ["s"])
    path = write_onnx(tmp_path / "s.onnx", [node], {"x": ("FP32", [1])}, {"s": ("FP32", [1])})
    model = onnx.load(path)
    tensor = helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, [1])
    model.graph.output[0].type.CopyFrom(helper.make_sequence_type_proto(tensor))
    onnx.save(model, path)
    (problem,) = resolve(path).read().problems["s"]
    assert "'s': not a tensor" in problem


def test_notes_say_how_a_file_is_batched_and_why(tmp_path: Path, write_onnx: WriteOnnx) -> None:
    [config] = resolve(relu(write_onnx, tmp_path / "a.onnx")).read().configs
    assert config.notes == (
        "batches of up to 64 rows, as the first dimension of every input and output is variable",
    )
    node = helper.make_node("Relu", ["x"], ["y"])
    fixed = write_onnx(tmp_path / "b.onnx", [node], {"x": ("FP32", [2])}, {"y": ("FP32", [2])})
    [config] = resolve(fixed).read().configs
    assert config.notes == ("no batching, as the first dimension of 'x' [2] is not variable",)
    # Nothing was worked out where a configuration says it.
    [config] = resolve(model_folder(tmp_path)).read().configs
    assert config.notes == ()
