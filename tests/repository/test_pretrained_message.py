"""Hugging Face folders as served: configuration, and answers as transformers gives them."""

import io
import json
import threading

import numpy as np
import pytest
import tiny_pretrained as tiny
from doubles import FakeGpus
from onnx import TensorProto, helper
from PIL import Image

import penstock
from penstock.errors import ConfigError, InvalidRequest
from penstock.repository import layout, pbtxt
from penstock.system import devices

transformers = pytest.importorskip("transformers")
TEXTS = [*tiny.SENTENCES, "cat", "unknown wörds 日本", "the " * 100]


def resolve(folder):
    found = layout.read(folder)
    assert not found.problems
    (config,) = found.configs
    return config


def rows(texts):
    return {"TEXT": np.array([[text] for text in texts], dtype=object)}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return tiny.write_classifier(tmp_path_factory.mktemp("folders") / "sentiment")


@pytest.fixture(scope="module")
def served(classifier):
    with penstock.load(str(classifier)) as model:
        yield model


def test_a_classifier_has_text_in_and_labels_out(classifier):
    config = resolve(classifier)
    assert [(spec.name, spec.datatype, spec.shape) for spec in config.inputs] == [
        ("TEXT", "BYTES", (1,))
    ]
    assert [(spec.name, spec.datatype, spec.shape) for spec in config.outputs] == [
        ("LABEL", "BYTES", (1,)),
        ("SCORE", "FP32", (1,)),
        ("SCORES", "FP32", (3,)),
    ]
    assert config.outputs[2].labels == tuple(tiny.LABELS.values())
    assert (config.backend, config.version, config.is_staged) == ("pytorch", "1", True)
    assert config.batching.is_dynamic


def test_the_printed_configuration_reads_back(classifier):
    config = resolve(classifier)
    message = pbtxt.parse(pbtxt.describe(config))
    again = pbtxt.resolve(message, config.name, classifier, classifier / "config.json")
    assert again.inputs == config.inputs and again.outputs == config.outputs
    assert (again.preprocess, again.postprocess) == (config.preprocess, config.postprocess)


def test_a_configuration_in_the_folder_overrides_defaults(tmp_path):
    folder = tiny.write_classifier(tmp_path / "m")
    (folder / "config.pbtxt").write_text(
        "max_batch_size: 4 instance_group { count: 2 kind: KIND_CPU }"
        'parameters { key: "penstock.pad_buckets" value { string_value: "32" } }'
    )
    config = resolve(folder)
    assert (config.max_batch_size, config.num_instances) == (4, 2)
    assert config.preprocess.padding.buckets == (32,)


def test_tensors_in_that_configuration_are_refused(tmp_path):
    folder = tiny.write_classifier(tmp_path / "m")
    text = 'input { name: "x" data_type: TYPE_FP32 dims: 1 }'
    (folder / "config.pbtxt").write_text(text)
    assert "leave them out" in layout.read(folder).problems["m"][0]


def test_a_text_model_needs_a_tokenizer(tmp_path):
    folder = tiny.write_classifier(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    (problem,) = layout.read(folder).problems["m"]
    assert problem.startswith("a text classifier without a tokenizer; AutoTokenizer")


def test_what_the_folder_does_not_say_is_noted(tmp_path):
    folder = tiny.write_bert(tmp_path / "m", "BertModel")
    (note,) = resolve(folder).notes
    assert note == "no modules.json: embeddings are the mean over the tokens, not normalised"
    tiny.write_modules(folder)
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (note,) = resolve(folder).notes
    assert "default prompt 'query' is not added" in note


@pytest.mark.parametrize(("num_gpus", "backend"), [(0, "onnxruntime"), (1, "pytorch")])
def test_weights_are_preferred_where_there_is_a_gpu(tmp_path, monkeypatch, num_gpus, backend):
    folder = tiny.write_classifier(tmp_path / "m")
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["n", "s"])
        for name in ("input_ids", "attention_mask")
    ]
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["n", 3])
    model = helper.make_model(helper.make_graph([], "g", inputs, [logits]))
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    monkeypatch.setattr(devices, "read_gpus", FakeGpus(*[1 << 34] * num_gpus))
    assert resolve(folder).backend == backend


def test_such_a_folder_may_stand_in_a_repository(tmp_path):
    tiny.write_classifier(tmp_path / "one")
    tiny.write_bert(tmp_path / "two", "BertModel")
    found = layout.read(tmp_path)
    assert [config.name for config in found.configs] == ["one", "two"]


def test_answers_are_those_of_transformers(classifier, served):
    ask = transformers.pipeline("text-classification", model=str(classifier), top_k=None)
    answer = served.infer(rows(TEXTS))
    for number, text in enumerate(TEXTS):
        expected = {each["label"]: each["score"] for each in ask([text], truncation=True)[0]}
        scores = dict(zip(tiny.LABELS.values(), answer["SCORES"][number], strict=True))
        assert scores == pytest.approx(expected, abs=1e-5)
        best = max(expected, key=expected.get)
        assert answer["LABEL"][number, 0].decode() == best
        assert answer["SCORE"][number, 0] == pytest.approx(expected[best], abs=1e-5)


def test_concurrent_texts_of_all_lengths_share_batches_and_keep_their_answers(served):
    alone = [served.infer(rows([text]))["SCORES"][0] for text in TEXTS]
    futures = [(n, served.submit(rows([TEXTS[n]]))) for n in list(range(len(TEXTS))) * 4]
    for number, future in futures:
        np.testing.assert_allclose(future.result()["SCORES"][0], alone[number], atol=1e-5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"\xff\xfe", "input 'TEXT': not UTF-8 at byte 0"),
        (b" \n", "input 'TEXT': empty"),
        (b"x" * ((1 << 20) + 1), "input 'TEXT': 1048577 bytes; at most 1048576 a text"),
    ],
)
def test_bad_texts_fail_only_their_own_request(served, text, problem):
    good = served.submit(rows(["fine"]))
    bad = served.submit(rows([text]))
    with pytest.raises(InvalidRequest, match=problem):
        bad.result()
    assert good.result()["LABEL"].shape == (1, 1)


def test_preprocessing_has_a_worker_of_its_own(classifier):
    before = threading.active_count()
    with penstock.load(str(classifier)):
        # The loop, the tokenizer's worker and the network's.
        assert threading.active_count() >= before + 3


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
    ],
)
def test_the_problem_type_decides_how_scores_are_made(tmp_path, settings, activation):
    folder = tiny.write_classifier(tmp_path / "m", **settings)
    ask = transformers.pipeline("text-classification", model=str(folder), top_k=None)
    with penstock.load(str(folder)) as model:
        scores = model.infer(rows(TEXTS[:1]))["SCORES"][0]
    expected = {each["label"]: each["score"] for each in ask([TEXTS[0]])[0]}
    assert dict(zip(tiny.LABELS.values(), scores, strict=True)) == pytest.approx(expected, abs=1e-4)


def test_weights_that_are_missing_are_not_made_up(tmp_path):
    folder = tiny.write_bert(tmp_path / "m", "BertModel")
    path = folder / "config.json"
    path.write_text(path.read_text().replace("BertModel", "BertForSequenceClassification"))
    with pytest.raises(ConfigError, match="no weights for classifier"):
        penstock.load(str(folder))


def test_entities_are_those_of_transformers(tmp_path):
    folder = tiny.write_tagger(tmp_path / "m")
    ask = transformers.pipeline(
        "token-classification", model=str(folder), aggregation_strategy="simple"
    )
    with penstock.load(str(folder)) as model:
        futures = [model.submit(rows([text])) for text in TEXTS[:6]]
        answers = [future.result() for future in futures]
        together = model.infer(rows(TEXTS[:2]))
    num_entities = 0
    for text, answer in zip(TEXTS, answers, strict=False):
        found = json.loads(answer["ENTITIES"][0, 0])
        expected = ask(text)
        num_entities += len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.pop("score") == pytest.approx(other.pop("score"), abs=1e-5)
            assert one == {key: other[key] for key in one}
        num_tokens = len(ask.tokenizer(text)["input_ids"])
        assert answer["SCORES"].shape == (1, num_tokens, 4)
        assert answer["OFFSETS"].shape == (1, num_tokens, 2)
    assert num_entities > 5
    # Rows of one request are as long as its longest text; scores behind a text are zero.
    assert together["ENTITIES"][0, 0] == answers[0]["ENTITIES"][0, 0]
    num_tokens = answers[1]["SCORES"].shape[1]
    assert not together["SCORES"][1, num_tokens:].any()


def test_images_get_the_labels_of_transformers(tmp_path):
    folder = tiny.write_image_classifier(tmp_path / "m")
    config = resolve(folder)
    assert [(spec.name, spec.datatype, spec.shape) for spec in config.inputs] == [
        ("IMAGE", "BYTES", (1,))
    ]
    files = [tiny.draw_image(50 + n, 40, seed=n) for n in range(6)]
    ask = transformers.pipeline("image-classification", model=str(folder))
    with penstock.load(str(folder)) as model:
        given = {"IMAGE": np.array([[file] for file in files], dtype=object)}
        answer = model.infer(given)
        with pytest.raises(InvalidRequest, match="input 'IMAGE': 3 bytes that are no image"):
            model.infer({"IMAGE": np.array([[b"GIF"]], dtype=object)})
    for number, file in enumerate(files):
        expected = max(ask(Image.open(io.BytesIO(file))), key=lambda each: each["score"])
        assert answer["LABEL"][number, 0].decode() == expected["label"]
        assert answer["SCORE"][number, 0] == pytest.approx(expected["score"], abs=1e-5)
    assert len(set(answer["LABEL"][:, 0])) > 1
