"""The gate as the lab asks it: every output, every part, whatever a step is called."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_evaluators import made_evaluator
from made_optimizations import machine

from penstock import slo
from penstock.config import BatchPolicy, ModelConfig
from penstock.errors import ConfigError
from penstock.optimizer import trials
from penstock.optimizer.answer_source import HELD_OUT
from penstock.optimizer.budget import parse
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.data_checks import NO_DATA, ONLY_AGREEMENT
from penstock.optimizer.evaluator import Evaluator
from penstock.optimizer.examples import Examples, split_examples
from penstock.optimizer.journal import Journal
from penstock.optimizer.plan import Plan
from penstock.optimizer.subject import Subject
from penstock.types import Array, TensorSpec

Answer = dict[str, Array]
NUM, NUM_CLASSES = 1000, 10
RANDOM = np.random.default_rng(5)
LABELS = RANDOM.integers(0, NUM_CLASSES, NUM)
# Pixels, and a score of what is in them.
BOXES = np.concatenate([RANDOM.uniform(0, 640, (NUM, 4)), RANDOM.uniform(0, 1, (NUM, 1))], axis=1)
EMBEDDINGS = RANDOM.normal(size=(NUM, 16))


def original(row: int) -> Answer:
    logits = RANDOM.normal(size=NUM_CLASSES)
    logits[LABELS[row]] += 9
    return {
        "logits": logits.astype(np.float32),
        "embedding": EMBEDDINGS[row].astype(np.float32),
        "dets": BOXES[row].astype(np.float32),
    }


ORIGINAL = [original(row) for row in range(NUM)]


def zeroed(answer: Answer) -> Answer:
    return {**answer, "embedding": np.zeros_like(answer["embedding"])}


def without_scores(answer: Answer) -> Answer:
    dets = answer["dets"].copy()
    dets[4] = 0
    return {**answer, "dets": dets}


def rounded(answer: Answer) -> Answer:
    return {name: array * np.float32(1 + 1e-6) for name, array in answer.items()}


def build(name: str) -> Build:
    inputs = (TensorSpec("x", "FP32", (1,)),)
    sizes = {"logits": NUM_CLASSES, "embedding": 16, "dets": 5}
    outputs = tuple(TensorSpec(name, "FP32", (size,)) for name, size in sizes.items())
    config = ModelConfig("m", "1", "null", "", inputs, outputs, 8, BatchPolicy(8, is_dynamic=True))
    return Build(Candidate((Step(name),)) if name else Candidate(), Path("m"), config)


CHANGES: dict[str, Callable[[Answer], Answer]] = {
    "": lambda answer: answer,
    "zeroed": zeroed,
    "without_scores": without_scores,
    "rounded": rounded,
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children answer as the step in the build's name says."""

    def answers(
        asked: Build, rows: Sequence[dict[str, Array]], told: object, rules: object
    ) -> list[Answer]:
        change = CHANGES[asked.candidate.steps[-1].pass_name if asked.candidate.steps else ""]
        return [change(ORIGINAL[int(row["x"][0])]) for row in rows]

    monkeypatch.setattr(trials, "answers", answers)


@pytest.fixture
def lab(asked: None, tmp_path: Path) -> Iterator[Callable[..., Evaluator]]:
    with Journal(tmp_path / "journal") as journal:

        def make(labels: Array | None = LABELS, **wishes: object) -> Evaluator:
            wishes = {"data": "data.npz", "slo": slo.parse("p99 < 1s"), **wishes}
            plan = Plan("m.onnx", "m", "models", **wishes)  # type: ignore[arg-type]
            rows = [{"x": np.array([row], np.float32)} for row in range(NUM)]
            examples = Examples(rows, labels, split_examples(NUM, 0), "", "")
            subject = Subject(build(""), "ONNX", "", "ONNX")
            return made_evaluator(plan, machine(), subject, examples, journal)

        yield make


def test_an_output_that_labels_do_not_read_is_guarded(lab: Callable[..., Evaluator]) -> None:
    """An INT8 version whose embeddings were all zeros had passed by its labels."""
    judged = lab().gate.judge(build("zeroed"), "choice")
    assert judged.loss == 0 and not judged.is_passed
    assert judged.text.startswith("output 'embedding': ")
    assert {each.name for each in judged.outputs} == {"logits", "embedding", "dets"}
    assert lab().gate.judge(build("rounded"), "choice").is_passed


def test_a_small_column_beside_large_ones_is_guarded(lab: Callable[..., Evaluator]) -> None:
    judged = lab().gate.judge(build("without_scores"), "choice")
    assert not judged.is_passed and "output 'dets': column 4" in judged.text
    found = lab().gate.numerics(build("without_scores"), is_exact=True)
    assert "output 'dets': column 4" in found.problems[0]
    assert lab().gate.numerics(build("rounded"), is_exact=True).problems == []


def test_outputs_that_do_not_matter_may_break(lab: Callable[..., Evaluator]) -> None:
    named = lab(outputs=("logits", "dets"))
    assert named.gate.judge(build("zeroed"), "choice").is_passed
    assert not named.gate.judge(build("without_scores"), "choice").is_passed
    named.data.check()
    assert named.run.unchecked == [
        "outputs 'embedding' were not checked: --outputs leaves them out"
    ]


def test_outputs_that_do_not_exist_are_told_beside_those_that_do(
    lab: Callable[..., Evaluator],
) -> None:
    with pytest.raises(ConfigError) as caught:
        lab(outputs=("boxes",)).data.check()
    assert str(caught.value) == (
        "outputs: the model has no output 'boxes'; it has 'logits', 'embedding', 'dets'"
    )


def test_answers_of_the_original_that_are_nan_are_told(
    lab: Callable[..., Evaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A candidate that does the same agrees in all of them."""
    nan = {name: np.full_like(array, np.nan) for name, array in ORIGINAL[0].items()}
    told = lab()
    told.source.original_answers("choice")
    assert told.run.notes == []
    places = told.run.samples.split.choice[:3]
    answers = [nan if row in places else answer for row, answer in enumerate(ORIGINAL)]
    monkeypatch.setattr(sys.modules[__name__], "ORIGINAL", answers)
    told = lab()
    num = len(told.source.original_answers("choice"))
    assert told.run.notes == [f"the original answers 3 of {num} examples with NaN"]


def test_a_lossless_step_is_compared_on_every_held_out_example(
    lab: Callable[..., Evaluator],
) -> None:
    budget = parse("top1 drop <= 1 %")
    refused = lab(accuracy=budget).gate.judge_lossless(build("without_scores"), HELD_OUT, 0.05)
    assert not refused.is_passed and "of its range" in refused.text
    passed = lab(accuracy=budget).gate.judge_lossless(build("rounded"), HELD_OUT, 0.05)
    assert passed.is_passed


@pytest.mark.parametrize("part", ["calibration", "choice", "held_out"])
def test_a_lossless_step_is_compared_on_all_other_rows_too(
    lab: Callable[..., Evaluator], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A row that only calibration has, say, is as good a witness as any."""
    wrong = getattr(split_examples(NUM, 0), part)[-1]
    step = lambda answer: without_scores(answer) if answer is ORIGINAL[wrong] else answer  # noqa: E731
    monkeypatch.setitem(CHANGES, "rare", step)
    budget = parse("top1 drop <= 1 %")
    refused = lab(accuracy=budget).gate.judge_lossless(build("rare"), HELD_OUT, 0.05)
    assert not refused.is_passed and "output 'dets': column 4" in refused.text
    assert refused.num_compared == NUM


def test_a_survey_ends_with_its_time(
    lab: Callable[..., Evaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that neither build had time for are not compared, and are counted as such."""
    asked: list[float] = []
    whole = trials.answers

    def some(each: Build, rows: Any, told: Any, rules: Any) -> list[Answer]:
        asked.append(rules.stop_after_s)
        found = whole(each, rows, told, rules)
        return found if rules.stop_after_s == math.inf else [*found[:5], *([{}] * len(found[5:]))]

    monkeypatch.setattr(trials, "answers", some)
    wishes = {"accuracy": parse("top1 drop <= 1 %"), "budget_s": 60.0}
    judged = lab(**wishes).gate.judge_lossless(build("rounded"), HELD_OUT, 0.05)
    assert judged.is_passed
    assert judged.num_compared == len(split_examples(NUM, 0).held_out) + 5
    assert max(each for each in asked if each < math.inf) == pytest.approx(1.2)


def test_what_is_not_checked_is_told(lab: Callable[..., Evaluator]) -> None:
    without = lab(labels=None)
    without.data.check()
    assert without.run.unchecked == [ONLY_AGREEMENT]
    blind = lab(data="")
    blind.data.check()
    assert blind.run.unchecked == [NO_DATA]


def test_what_an_evaluator_does_not_use_is_told_also_when_resumed(
    lab: Callable[..., Evaluator], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "def score(outputs, labels):\n    return [float(o['dets'][4]) for o in outputs]\n"
    (tmp_path / "lab_evaluator.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    for _ in range(2):
        resumed = lab(evaluator="lab_evaluator:score")
        resumed.data.check()
        assert resumed.run.unchecked == [
            "parts of 'dets' that lab_evaluator:score does not use were not checked beyond their "
            "scale"
        ]
        assert not resumed.gate.judge(build("without_scores"), "choice").is_passed
        assert not resumed.gate.judge(build("zeroed"), "choice").is_passed
