"""Hugging Face folders are optimised from text or image to label."""

import csv
import json

import numpy as np
import pytest
import tiny_pretrained as tiny

import penstock
from penstock.backends.processing import apply
from penstock.errors import ConfigError
from penstock.optimizer import trials
from penstock.optimizer.examples import open_examples
from penstock.optimizer.plan import Plan
from penstock.optimizer.subject import open_subject

pytest.importorskip("transformers")
TEXTS = [*tiny.SENTENCES, "cat", "a sad dog works in Paris"] * 2


def make_plan(tmp_path, model, data="", **options):
    return Plan(str(model), "m", str(tmp_path / "out"), data=str(data), **options)


def write_csv(path, **columns):
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return tiny.write_classifier(tmp_path_factory.mktemp("folders") / "sentiment")


def expected(folder, texts):
    with penstock.load(str(folder)) as model:
        return model.infer({"TEXT": np.array([[text] for text in texts], dtype=object)})


@pytest.mark.slow
def test_the_original_takes_texts_and_answers_as_the_folder_does(tmp_path, classifier):
    labels = [tiny.LABELS[n % 3] for n in range(len(TEXTS))]
    data = write_csv(tmp_path / "d.csv", sentence=TEXTS, label=labels)
    plan = make_plan(tmp_path, classifier, data)
    subject = open_subject(plan, tmp_path / "m" / "sentiment")
    config = subject.build.config
    assert (config.preprocess.function, config.postprocess.function) == ("tokenizer", "classifier")
    assert [spec.name for spec in config.inputs] == ["TEXT"]
    assert config.classes == tuple(tiny.LABELS.values())
    examples = open_examples(plan, config.inputs, True, config.classes)
    assert examples.labels.tolist() == [n % 3 for n in range(len(TEXTS))]
    answers = trials.answers(subject.build, examples.rows)
    for answer, right in zip(answers, expected(classifier, TEXTS)["SCORES"], strict=True):
        np.testing.assert_allclose(answer["SCORES"], right, atol=1e-5)


def test_the_written_model_is_served_through_the_same_stages(tmp_path, classifier):
    plan = make_plan(tmp_path, classifier, write_csv(tmp_path / "d.csv", text=TEXTS))
    folder = open_subject(plan, tmp_path / "m" / "sentiment").build.folder
    with penstock.load(str(folder)) as model:
        assert model.config.is_staged
        given = {"TEXT": np.array([[text] for text in TEXTS], dtype=object)}
        answer = model.infer(given)
    right = expected(classifier, TEXTS)
    assert answer["LABEL"].tolist() == right["LABEL"].tolist()
    np.testing.assert_allclose(answer["SCORES"], right["SCORES"], atol=1e-5)


@pytest.mark.slow
def test_embeddings_keep_their_pooling(tmp_path):
    source = tiny.write_modules(tiny.write_bert(tmp_path / "s", "BertModel"), "cls")
    lines = tmp_path / "d.txt"
    lines.write_text("\n".join(TEXTS))
    subject = open_subject(make_plan(tmp_path, source, lines), tmp_path / "m" / "s")
    rows = [{"TEXT": np.array([text.encode()], dtype=object)} for text in TEXTS]
    answers = trials.answers(subject.build, rows)
    for answer, right in zip(answers, expected(source, TEXTS)["EMBEDDING"], strict=True):
        np.testing.assert_allclose(answer["EMBEDDING"], right, atol=1e-5)


def test_images_are_read_from_a_folder(tmp_path):
    source = tiny.write_image_classifier(tmp_path / "i")
    (tmp_path / "images").mkdir()
    for number in range(3):
        (tmp_path / "images" / f"{number}.png").write_bytes(tiny.draw_image(40, 40, number))
    plan = make_plan(tmp_path, source, tmp_path / "images")
    config = open_subject(plan, tmp_path / "m" / "i").build.config
    assert [(spec.name, spec.datatype) for spec in config.inputs] == [("IMAGE", "BYTES")]
    rows = open_examples(plan, config.inputs, True).rows
    (made, *_) = apply(config, rows)
    assert made["pixel_values"].shape == (3, 32, 32)


def test_tokens_in_the_data_optimise_the_network_alone(tmp_path, classifier):
    data = tmp_path / "d.jsonl"
    row = {"input_ids": [2, 7, 3], "attention_mask": [1, 1, 1]}
    data.write_text("\n".join([json.dumps(row)] * 3))
    config = open_subject(make_plan(tmp_path, classifier, data), tmp_path / "m" / "s").build.config
    assert config.preprocess is None and config.inputs[0].name == "input_ids"


def test_token_classifiers_are_not_measured_from_text(tmp_path):
    source = tiny.write_tagger(tmp_path / "t")
    data = write_csv(tmp_path / "d.csv", text=TEXTS)
    with pytest.raises(ConfigError, match="token classifiers are not measured from text"):
        open_subject(make_plan(tmp_path, source, data), tmp_path / "m" / "t")


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"a": TEXTS, "b": TEXTS}, "has 'a', 'b'; expected one column of texts, called 'text'"),
        ({"text": range(len(TEXTS))}, "'TEXT' holds numbers"),
        ({"text": [*TEXTS, " "]}, "data: input 'TEXT': empty"),
    ],
)
def test_data_that_holds_no_texts_is_refused(tmp_path, classifier, columns, problem):
    data = write_csv(tmp_path / "d.csv", **columns)
    with pytest.raises(ConfigError) as caught:
        open_subject(make_plan(tmp_path, classifier, data), tmp_path / "m" / "s")
    assert problem in str(caught.value)
