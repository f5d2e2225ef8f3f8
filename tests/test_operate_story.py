"""The story of `make verify-operate`: its models, what it counts, and the whole of it."""

import numpy as np
import onnxruntime as ort
import pytest
from operate_story import NUM_INPUTS, Sent, StoryLine, describe, losses, make_model, tell


def classes(kind: str, rows: np.ndarray) -> np.ndarray:
    session = ort.InferenceSession(make_model(kind).SerializeToString())
    return session.run(None, {"x": rows})[0].argmax(axis=1)


def test_the_versions_differ_as_the_story_says() -> None:
    rows = np.random.default_rng(0).normal(size=(8, NUM_INPUTS)).astype(np.float32)
    right = classes("fast", rows)
    assert (classes("plain", rows) == right).all()
    assert (classes("wrong", rows) != right).all()


def test_requests_without_a_good_answer_or_refusal_are_lost() -> None:
    sent = [Sent(0.0, 0, status) for status in (200, 503, 500, -1, 0)]
    assert losses(sent) == ["3 requests lost, by status {500: 1, -1: 1, 0: 1}"]
    assert "5 requests, 1 refused, 3 lost" in describe(sent)[0]
    assert losses(sent[:2]) == []


def test_a_missed_goal_is_shown() -> None:
    line = StoryLine("version 3 is slow", ["rolled back"], ["too late"])
    assert str(line) == "FAILED  version 3 is slow: rolled back; MISSED: too late"


@pytest.mark.verify
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shards", [1, 2], ids=["1 shard", "2 shards"])
def test_the_story(shards: int) -> None:
    for line in tell(shards):
        print(f"\n{shards} shards: {line.title}: {'; '.join(line.figures)}")
        assert line.missed == []
