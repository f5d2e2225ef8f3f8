"""From answers to scores: by labels, by an evaluator, by agreement."""

import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.optimizer.budget import parse
from penstock.optimizer.examples import Examples, split_examples
from penstock.optimizer.plan import Plan
from penstock.optimizer.scores import Scorer, make_scorer
from penstock.types import Array

Made = list[dict[str, Array]]
ALL = tuple(range(20))


def made_plan(accuracy: str = "", evaluator: str = "") -> Plan:
    budget = parse(accuracy) if accuracy else None
    return Plan("m.onnx", "m", "models", accuracy=budget, evaluator=evaluator)


def made_examples(labels: object | None) -> Examples:
    rows = [{"x": np.zeros(1)} for _ in ALL]
    array = None if labels is None else np.array(labels)
    return Examples(rows, array, split_examples(len(rows), 0), "", "")


def answers(name: str, values: object, dtype: type = np.float32) -> Made:
    return [{name: np.array(value, dtype)} for value in values]  # type: ignore[attr-defined]


def scored(scorer: Scorer, found: Made, original: Made | None = None) -> list[float]:
    result: list[float] = scorer.score(found, ALL, original or found).tolist()
    return result


def problem(plan: Plan, examples: Examples, original: Made) -> str:
    with pytest.raises(ConfigError) as caught:
        make_scorer(plan, examples, original)
    return str(caught.value)


LABELS = [index % 4 for index in ALL]
LOGITS = answers("logits", np.eye(4)[LABELS] + 0.1)
WRONG_AT_2 = [*LOGITS[:2], {"logits": np.array([9, 0, 0, 0], np.float32)}, *LOGITS[3:]]
EXPECTED = [float(index != 2) for index in ALL]


def test_best_class_by_labels() -> None:
    scorer = make_scorer(made_plan(), made_examples(LABELS), LOGITS)
    assert (scorer.metric, scorer.is_agreement) == ("top1", False)
    assert scorer.text == "top1 of output 'logits' by labels"
    assert scored(scorer, LOGITS) == [1.0] * 20
    assert scored(scorer, WRONG_AT_2) == EXPECTED
    assert scorer.predict is not None
    assert scorer.predict(LOGITS).tolist() == LABELS


def test_scores_are_of_the_examples_that_were_answered() -> None:
    scorer = make_scorer(made_plan(), made_examples(LABELS), LOGITS)
    picked = (7, 2, 11)
    found = [WRONG_AT_2[index] for index in picked]
    assert scorer.score(found, picked, found).tolist() == [1.0, 0.0, 1.0]
    assert scorer.score([], (), []).shape == (0,)


def test_among_the_best() -> None:
    scorer = make_scorer(made_plan("top3 drop <= 1 %"), made_examples(LABELS), LOGITS)
    found = answers("logits", [[4, 3, 2, 1]] * 20)
    assert scored(scorer, found) == [float(label < 3) for label in LABELS]
    equal = answers("logits", [[1, 1, 1, 1]] * 20)
    assert scored(scorer, equal) == [float(label < 3) for label in LABELS]


@pytest.mark.parametrize("accuracy", ["", "top3 drop <= 1 %", "agreement drop <= 1 %"])
def test_what_is_not_finite_cannot_be_scored(accuracy: str) -> None:
    scorer = make_scorer(made_plan(accuracy), made_examples(LABELS), LOGITS)
    broken = [*LOGITS[:2], {"logits": np.full(4, np.nan, np.float32)}, *LOGITS[3:]]
    assert np.flatnonzero(np.isnan(scored(scorer, broken, LOGITS))).tolist() == [2]


def test_one_number_for_two_classes() -> None:
    labels = [index % 2 for index in ALL]
    logits = answers("out", [[4.0 * label - 2] for label in labels])
    scorer = make_scorer(made_plan(), made_examples(labels), logits)
    assert scored(scorer, logits) == [1.0] * 20
    shares = answers("out", [[0.4 + 0.2 * label] for label in labels])
    scorer = make_scorer(made_plan(), made_examples(labels), shares)
    assert scored(scorer, shares) == [1.0] * 20
    assert "class 3 is not among" in problem(made_plan(), made_examples(LABELS), logits)


def test_an_output_that_is_the_class() -> None:
    numbers = answers("label", [[label] for label in LABELS], np.int64)
    scorer = make_scorer(made_plan(), made_examples(LABELS), numbers)
    assert scored(scorer, numbers) == [1.0] * 20
    assert "says nothing" in problem(made_plan("top5 drop <= 1 %"), made_examples(LABELS), numbers)


def test_which_of_several_outputs() -> None:
    both = [{"first": a["logits"], "Logits": a["logits"]} for a in LOGITS]
    scorer = make_scorer(made_plan(), made_examples(LABELS), both)
    assert scorer.text == "top1 of output 'Logits' by labels"
    unclear = [{"first": a["logits"], "second": a["logits"]} for a in LOGITS]
    said = problem(made_plan(), made_examples(LABELS), unclear)
    assert "outputs 'first', 'second' could all be scores" in said


def test_values_by_labels() -> None:
    labels = [index / 3 for index in ALL]
    found = answers("price", [[value + 0.5] for value in labels])
    scorer = make_scorer(made_plan(), made_examples(labels), found)
    assert scorer.metric == "mae"
    assert scored(scorer, found) == pytest.approx([0.5] * 20, rel=1e-5)
    assert "outputs are {'logits': [4]}" in problem(made_plan(), made_examples(labels), LOGITS)


def test_without_labels_the_original_is_the_truth() -> None:
    scorer = make_scorer(made_plan(), made_examples(None), LOGITS)
    assert (scorer.metric, scorer.is_agreement) == ("agreement", True)
    assert scored(scorer, LOGITS) == [1.0] * 20
    assert scored(scorer, WRONG_AT_2, LOGITS) == EXPECTED


def test_answers_that_are_no_scores_agree_by_direction() -> None:
    original = answers("hidden", np.random.default_rng(0).normal(0, 1, (20, 5, 3)))
    scorer = make_scorer(made_plan(), made_examples(None), original)
    turned = [{"hidden": -answer["hidden"]} for answer in original]
    assert scored(scorer, turned, original) == pytest.approx([-1.0] * 20)


def test_answers_in_words_agree_when_they_are_the_same() -> None:
    original = [{"name": np.array([b"cat"], object), "sure": np.float32([0.5])} for _ in ALL]
    scorer = make_scorer(made_plan(), made_examples(None), original)
    other = [{**each, "sure": np.float32([0.4])} for each in original]
    other[2] = {**other[2], "name": np.array([b"dog"], object)}
    assert scored(scorer, other, original) == pytest.approx(EXPECTED)


def test_answers_that_became_more_or_fewer_do_not_agree() -> None:
    original = [{"box": np.ones((3, 4), np.float32), "kind": np.array([1, 2, 3])} for _ in ALL]
    scorer = make_scorer(made_plan(), made_examples(None), original)
    fewer = {name: array[:2] for name, array in original[2].items()}
    assert scored(scorer, [*original[:2], fewer, *original[3:]], original) == EXPECTED


def test_metrics_that_do_not_fit() -> None:
    assert "needs labels or an evaluator" in problem(
        made_plan("top1 drop <= 1 %"), made_examples(None), LOGITS
    )
    assert "'f1' is not known" in problem(
        made_plan("f1 drop <= 1 %"), made_examples(LABELS), LOGITS
    )
    assert "needs class numbers" in problem(
        made_plan("top1 drop <= 1 %"), made_examples([0.5] * 20), LOGITS
    )
    outside = made_examples([label + 1 for label in LABELS])
    assert "class 4 is not among those of output 'logits', which are 0 to 3" in problem(
        made_plan(), outside, LOGITS
    )
    hidden = answers("hidden", np.zeros((20, 5, 3)))
    assert "no output gives one score per class" in problem(
        made_plan(), made_examples(LABELS), hidden
    )


EVALUATOR = """
def halves(outputs, labels):
    return [0.5 if labels is None else float(label) / 2 for label in labels]

def count(outputs, labels):
    assert labels is None
    return [len(output["logits"]) for output in outputs]

def short(outputs, labels):
    return [1.0]

def words(outputs, labels):
    return ["good"] * len(outputs)

def broken(outputs, labels):
    raise KeyError("nothing")

number = 3
"""


@pytest.fixture
def evaluators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, as a user has it."""
    (tmp_path / "my_evaluators.py").write_text(EVALUATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    monkeypatch.delitem(sys.modules, "my_evaluators", raising=False)
    return "my_evaluators"


def test_an_evaluator_scores_with_labels_or_without(evaluators: str) -> None:
    scorer = make_scorer(made_plan(evaluator=f"{evaluators}:halves"), made_examples(LABELS), LOGITS)
    assert scorer.metric == "score"
    assert scored(scorer, LOGITS) == [label / 2 for label in LABELS]
    plan = made_plan("width drop <= 1 %", f"{evaluators}:count")
    scorer = make_scorer(plan, made_examples(None), LOGITS)
    assert scorer.metric == "width"
    assert scored(scorer, LOGITS) == [4.0] * 20


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("short", "expected 20 scores, one per example, got shape [1]"),
        ("words", "failed: ValueError"),
        ("broken", "failed: KeyError: 'nothing'"),
    ],
)
def test_an_evaluator_that_is_wrong(evaluators: str, name: str, words: str) -> None:
    plan = made_plan(evaluator=f"{evaluators}:{name}")
    scorer = make_scorer(plan, made_examples(LABELS), LOGITS)
    with pytest.raises(ConfigError) as caught:
        scored(scorer, LOGITS)
    assert f"evaluator '{evaluators}:{name}': {words}" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("my_evaluators", "expected package.module:function"),
        ("no.such:function", "cannot be imported: ModuleNotFoundError"),
        ("my_evaluators:nothing", "has no function 'nothing'"),
        ("my_evaluators:number", "has no function 'number'"),
    ],
)
def test_an_evaluator_that_is_not_there(evaluators: str, path: str, words: str) -> None:
    assert words in problem(made_plan(evaluator=path), made_examples(LABELS), LOGITS)


READERS = """
def item(outputs, labels):
    return [float(each["logits"][0]) for each in outputs]

def given(outputs, labels):
    return [float(each.get("logits")[0]) for each in outputs]

def copied(outputs, labels):
    return [float(dict(each)["logits"][0]) for each in outputs]

def unpacked(outputs, labels):
    def of(logits, embedding):
        return float(logits[0])
    return [of(**each) for each in outputs]

def every(outputs, labels):
    return [float(sum(value.sum() for value in each.values())) for each in outputs]
"""


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("item", {"logits"}),
        ("given", {"logits"}),
        ("copied", {"logits", "embedding"}),
        ("unpacked", {"logits", "embedding"}),
        ("every", {"logits", "embedding"}),
    ],
)
def test_which_outputs_an_evaluator_reads_is_known(
    name: str, read: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_readers.py").write_text(READERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_readers", raising=False)
    both = [{**each, "embedding": np.ones(3, np.float32)} for each in LOGITS]
    plan = made_plan(evaluator=f"my_readers:{name}")
    scorer = make_scorer(plan, made_examples(LABELS), both)
    assert scorer.reads == set()
    scored(scorer, both)
    assert scorer.reads == read


def test_labels_read_one_output_and_agreement_leaves_all_to_the_checks() -> None:
    assert make_scorer(made_plan(), made_examples(LABELS), LOGITS).reads == {"logits"}
    assert make_scorer(made_plan(), made_examples(None), LOGITS).reads == set()
