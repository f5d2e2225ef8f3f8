"""Hugging Face folders behind a real server: texts in, labels and embeddings out."""

import json
import urllib.error
import urllib.request

import numpy as np
import onnx
import pytest
import tiny_pretrained as tiny
from onnx import TensorProto, helper, numpy_helper
from served import Served
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

transformers = pytest.importorskip("transformers")


def write_exported(folder):
    """A classifier whose network is an ONNX file: the sum of a vector for each token."""
    folder.mkdir()
    size = tiny.write_tokenizer(folder)
    labels = {str(number): label for number, label in tiny.LABELS.items()}
    config = {"architectures": ["BertForSequenceClassification"], "id2label": labels}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32}))
    table = np.random.default_rng(3).standard_normal((size, 3)).astype(np.float32)
    names = ("input_ids", "attention_mask")
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "input_ids"], ["vectors"]),
            helper.make_node("Cast", ["attention_mask"], ["kept"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["kept", "last"], ["column"]),
            helper.make_node("Mul", ["vectors", "column"], ["masked"]),
            helper.make_node("ReduceSum", ["masked", "first"], ["logits"], keepdims=0),
        ],
        "g",
        [helper.make_tensor_value_info(each, TensorProto.INT64, ["n", "s"]) for each in names],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])],
        [
            numpy_helper.from_array(table, "table"),
            numpy_helper.from_array(np.array([2]), "last"),
            numpy_helper.from_array(np.array([1]), "first"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (folder / "onnx").mkdir()
    onnx.save(model, folder / "onnx" / "model.onnx")
    return table


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repository")
    tiny.write_modules(tiny.write_bert(folder / "sentences", "BertModel"))
    return folder


@pytest.fixture(scope="module")
def table(folder):
    return write_exported(folder / "exported")


@pytest.fixture(scope="module")
def server(folder, table):
    server = Served(folder, grpc=True)
    yield server
    server.terminate()


def post(server, path, body):
    request = urllib.request.Request(
        f"http://{server.address}{path}", json.dumps(body).encode(), method="POST"
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def infer(server, name, texts):
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}
    outputs = post(server, f"/v2/models/{name}/infer", {"inputs": [tensor]})["outputs"]
    return {each["name"]: np.array(each["data"]).reshape(each["shape"]) for each in outputs}


def get(server, path):
    with urllib.request.urlopen(f"http://{server.address}{path}") as answer:
        return answer.read().decode()


def test_an_exported_network_is_run_by_onnxruntime(server, folder, table):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    answer = infer(server, "exported", tiny.SENTENCES)
    assert json.loads(get(server, "/v2/models/exported/config"))["backend"] == "onnxruntime"
    for number, text in enumerate(tiny.SENTENCES):
        logits = table[tokenizer(text)["input_ids"]].sum(axis=0)
        powers = np.exp(logits - logits.max())
        np.testing.assert_allclose(answer["SCORES"][number], powers / powers.sum(), atol=1e-5)


def expected_vectors(folder, texts):
    """As sentence-transformers computes them: the mean of the tokens, normalised."""
    import torch

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        means = [
            model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0)
            for text in texts
        ]
    return [(each / each.norm()).numpy() for each in means], tokenizer


def test_embeddings_are_pooled_and_counted(server, folder):
    vectors, tokenizer = expected_vectors(folder / "sentences", tiny.SENTENCES)
    answer = infer(server, "sentences", tiny.SENTENCES)
    np.testing.assert_allclose(answer["EMBEDDING"], vectors, atol=1e-5)
    body = {"model": "sentences", "input": tiny.SENTENCES}
    told = post(server, "/v1/embeddings", body)
    np.testing.assert_allclose([each["embedding"] for each in told["data"]], vectors, atol=1e-5)
    num_tokens = sum(len(tokenizer(text)["input_ids"]) for text in tiny.SENTENCES)
    assert told["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def test_a_bad_text_is_answered_with_400_that_names_the_input(server):
    with pytest.raises(urllib.error.HTTPError) as caught:
        infer(server, "exported", [""])
    assert caught.value.code == 400
    assert "input 'TEXT': empty" in json.loads(caught.value.read())["error"]


def test_statistics_count_requests_once_and_stages_apart(server):
    before = json.loads(get(server, "/v2/models/exported/stats"))["model_stats"][0]
    for _ in range(3):
        infer(server, "exported", ["cat", "dog"])
    after = json.loads(get(server, "/v2/models/exported/stats"))["model_stats"][0]
    counts = [each["inference_stats"]["success"]["count"] for each in (before, after)]
    assert counts[1] - counts[0] == 3
    assert after["inference_count"] - before["inference_count"] == 6
    metrics = get(server, "/metrics")
    for name in ("exported", "exported:tokenizer", "exported:model"):
        assert f'nv_inference_request_success{{model="{name}",version="1"}}' in metrics


def test_the_explanation_has_the_stages(server):
    told = json.loads(get(server, "/v2/models/exported/explain"))
    notes = " ".join(told["notes"])
    assert "stage tokenizer" in notes and "stage model" in notes


def test_grpc_has_the_same_answers_and_errors(server):
    client = InferenceServerClient(server.grpc_address)
    tensor = InferInput("TEXT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"the cat"]], dtype=object))
    answer = client.infer("exported", [tensor])
    assert (
        answer.as_numpy("LABEL")[0, 0].decode() == infer(server, "exported", ["the cat"])["LABEL"]
    )
    tensor.set_data_from_numpy(np.array([[b"\xff"]], dtype=object))
    with pytest.raises(InferenceServerException, match="input 'TEXT': not UTF-8") as caught:
        client.infer("exported", [tensor])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    client.close()


def test_classification_names_the_classes(server):
    tensor = {"name": "TEXT", "datatype": "BYTES", "shape": [1, 1], "data": ["the cat"]}
    asked = {"name": "SCORES", "parameters": {"classification": 1}}
    body = {"inputs": [tensor], "outputs": [asked]}
    (output,) = post(server, "/v2/models/exported/infer", body)["outputs"]
    best = infer(server, "exported", ["the cat"])["LABEL"][0, 0]
    assert output["data"][0].endswith(f":{best}")


def test_the_page_shows_such_models(server):
    told = get(server, "/dashboard/state")
    assert '"exported"' in told and '"TEXT"' in told


def test_a_classifier_has_no_embeddings(server):
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(server, "/v1/embeddings", {"model": "exported", "input": "the cat"})
    assert caught.value.code == 400
    assert "is a classifier" in json.loads(caught.value.read())["error"]["message"]
