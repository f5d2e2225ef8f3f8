"""The ensembles of the examples, served: with small weights of the same signature, and with the
published ones, which are fetched."""

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.http as httpclient
from e2e.served import Served
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

Image = pytest.importorskip("PIL.Image")
tokenizers = pytest.importorskip("tokenizers")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = EXAMPLES / "ensembles" / "models"
WORDS = ("[PAD]", "[UNK]", "a", "cat", "dog", "sleeps")
MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


def write_onnx(path: Path, nodes: list, inputs: list, output: tuple, **weights: np.ndarray) -> None:
    graph = helper.make_graph(
        nodes,
        "stand_in",
        [helper.make_tensor_value_info(*each) for each in inputs],
        [helper.make_tensor_value_info(*output)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    opset = [helper.make_opsetid("", 17)]
    path.parent.mkdir(exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)


def add_mobilenet(path: Path) -> None:
    """The scores are the means of the three channels, then zeros."""
    weight = np.eye(3, 1000, dtype=np.float32)
    nodes = [
        helper.make_node("ReduceMean", ["image"], ["mean"], axes=[2, 3], keepdims=0),
        helper.make_node("MatMul", ["mean", "weight"], ["logits"]),
    ]
    image = ("image", TensorProto.FLOAT, ["n", 3, 224, 224])
    write_onnx(path, nodes, [image], ("logits", TensorProto.FLOAT, ["n", 1000]), weight=weight)


def add_encoder(path: Path) -> None:
    """The hidden state of a token is its row of `table`."""
    table = np.eye(len(WORDS), 384, dtype=np.float32)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["weights"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["weights", "last"], ["columns"]),
        helper.make_node("Mul", ["rows", "columns"], ["hidden"]),
    ]
    inputs = [(name, TensorProto.INT64, ["n", "s"]) for name in ("input_ids", "attention_mask")]
    hidden = ("hidden", TensorProto.FLOAT, ["n", "s", 384])
    last = np.array([2], np.int64)
    write_onnx(path, nodes, inputs, hidden, table=table, last=last)


def add_tokenizer(path: Path) -> None:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("ensembles") / "models"
    shutil.copytree(MODELS, root, ignore=shutil.ignore_patterns("__pycache__"))
    labels = "".join(f"class {number}, of 1000\n" for number in range(1000))
    for name in ("classify", "mobilenet"):
        (root / name / "labels.txt").write_text(labels)
    for name in ("classify", "embed"):
        (root / name / "1").mkdir()
    add_mobilenet(root / "mobilenet" / "1" / "model.onnx")
    add_encoder(root / "encode" / "1" / "model.onnx")
    add_tokenizer(root / "tokenize" / "1" / "tokenizer.json")
    with Served(root) as served:
        yield served


def ask(server: Served, model: str, name: str, rows: list[bytes], output: str, **wanted: int):
    with httpclient.InferenceServerClient(server.address) as client:
        tensor = httpclient.InferInput(name, [len(rows), 1], "BYTES")
        tensor.set_data_from_numpy(np.array(rows, np.object_)[:, None])
        outputs = [httpclient.InferRequestedOutput(output, **wanted)]
        return client.infer(model, [tensor], outputs=outputs).as_numpy(output)


def photo(colour: tuple[int, int, int], size: tuple[int, int], form: str) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, form, quality=95)
    return out.getvalue()


@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_configurations_are_tritons(name: str) -> None:
    text = (MODELS / name / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.name == name
    assert config.platform == ("ensemble" if config.HasField("ensemble_scheduling") else "")


def test_files_become_classes_with_labels(server: Served) -> None:
    colours, sizes = [(255, 0, 0), (20, 60, 250)], [(640, 300), (225, 500)]
    files = [photo(c, s, f) for c, s, f in zip(colours, sizes, ("JPEG", "PNG"), strict=True)]
    scores = ask(server, "classify", "FILE", files, "SCORES")
    expected = (np.array(colours) / 255 - MEAN) / DEVIATION
    np.testing.assert_allclose(scores[:, :3], expected, atol=0.05)
    classes = ask(server, "classify", "FILE", files, "SCORES", class_count=1)
    found = [row[0].decode().split(":", 2)[1:] for row in classes]
    assert found == [["0", "class 0, of 1000"], ["2", "class 2, of 1000"]]


def test_a_file_that_is_no_image_is_refused(server: Served) -> None:
    with pytest.raises(InferenceServerException, match="model 'decode'.*cannot identify image"):
        ask(server, "classify", "FILE", [b"text"], "SCORES")


def test_texts_become_vectors_whatever_their_neighbours(server: Served) -> None:
    texts = [b"a cat sleeps", b"dog"]
    together = ask(server, "embed", "TEXT", texts, "VECTOR")
    expected = np.zeros((2, 384), np.float32)
    expected[0, [2, 3, 5]], expected[1, 4] = 3**-0.5, 1
    np.testing.assert_allclose(together, expected, atol=1e-6)
    alone = [ask(server, "embed", "TEXT", [text], "VECTOR")[0] for text in texts]
    np.testing.assert_allclose(alone, expected, atol=1e-6)


def test_a_text_that_is_not_utf8_is_refused(server: Served) -> None:
    with pytest.raises(InferenceServerException, match="model 'tokenize'.*utf-8"):
        ask(server, "embed", "TEXT", [b"\xff"], "VECTOR")


@pytest.mark.slow
def test_the_published_weights_answer_the_client(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import fetch
        from ensembles import prepare

        try:
            root = prepare.prepare(tmp_path / "models")
            wheel = fetch.fetch(fetch.FOOLBOX)
        except fetch.FetchFailed as error:
            pytest.skip(str(error))
        finally:
            for name in ("fetch", "ensembles.prepare"):
                sys.modules.pop(name, None)
    shutil.unpack_archive(wheel, tmp_path / "foolbox", "zip")
    photos = sorted((tmp_path / "foolbox" / "foolbox" / "data").glob("imagenet_*.jpg"))
    labels = (root / "classify" / "labels.txt").read_text().splitlines()
    texts = ["A cat sleeps.", "The kitten is napping.", "Shares fell on Monday."]
    with Served(root) as served:
        classified = run_client(served, *map(str, photos))
        compared = run_client(served, *texts)
    right = [labels[int(path.stem.split("_")[2])] for path in photos]
    found = [line.partition(": ")[2].split("; ")[0] for line in classified]
    # The accuracy of this network on these photographs.
    assert len(photos) == 20 and sum(map(str.__eq__, found, right)) >= 17
    same, near, far = (float(line.split()[0]) for line in compared)
    assert same == 1.0 and near > 0.5 > far + 0.3


def run_client(served: Served, *given: str) -> list[str]:
    command = [sys.executable, EXAMPLES / "ensembles" / "ask.py", "--url", served.address, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout.splitlines()
