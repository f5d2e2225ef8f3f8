"""The story of `make verify-operate`: its models, what it counts, and the whole of it."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from operate_story import Sent, StoryLine, begin, describe, differences, losses, tell
from story_versions import NUM_INPUTS, Digits, make_digits, make_model, random_layers, right_classes


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    return make_digits(tmp_path_factory.mktemp("digits"))


def classes(model: onnx.ModelProto, rows: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString())
    return session.run(None, {"x": rows})[0].argmax(axis=1)


def test_the_original_is_right_about_digits_that_it_was_not_fitted_to(digits: Digits) -> None:
    labels = np.load(digits.data)["label"]
    assert (right_classes(digits) == labels).mean() > 0.95


def test_the_planted_versions_differ_as_the_story_says() -> None:
    rows = np.random.default_rng(0).normal(size=(8, NUM_INPUTS)).astype(np.float32)
    weights = [*random_layers(), np.eye(random_layers()[-1].shape[1], 10, dtype=np.float32)]
    right = classes(make_model("original", weights), rows)
    assert (classes(make_model("slow", weights), rows) == right).all()
    assert (classes(make_model("wrong", weights), rows) != right).all()


def test_requests_without_a_good_answer_or_refusal_are_lost() -> None:
    sent = [Sent(0.0, 0, status) for status in (200, 503, 500, -1, 0)]
    assert losses(sent) == ["3 requests lost, by status {500: 1, -1: 1, 0: 1}"]
    assert "5 requests, 1 refused, 3 lost" in describe(sent)[0]
    assert losses(sent[:2]) == []


def test_more_different_answers_than_promised_are_a_missed_goal() -> None:
    right, wrong = Sent(0.0, 0, 200), Sent(0.0, 0, 200, is_right=False)
    assert differences([right] * 97 + [wrong] * 3) == ["3.0 % of the answers differ"]
    assert differences([right] * 98 + [wrong] * 2) == differences([Sent(0.0, 0, 503)]) == []


def test_a_missed_goal_is_shown() -> None:
    line = StoryLine("version 3 is slow", ["rolled back"], ["too late"])
    assert str(line) == "FAILED  version 3 is slow: rolled back; MISSED: too late"


@pytest.mark.verify
@pytest.mark.timeout(900)
def test_the_story(digits: Digits) -> None:
    root = digits.model.parent / "models"
    told = [*begin(root, digits)]
    for shards in (1, 2):
        told += tell(root, digits, shards)
    print(*told, sep="\n")
    assert [line.missed for line in told] == [[]] * len(told)
