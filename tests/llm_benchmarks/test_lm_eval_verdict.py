"""What the comparison with lm-eval's own transformers calls wrong, and what its tasks are."""

import math
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch):
    folders = [ROOT / "benchmarks" / "llm", ROOT / "examples", ROOT / "benchmarks"]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])
    import eval_tasks
    import lm_eval_scores

    class Scripts:
        tasks, scores = eval_tasks, lm_eval_scores

    return Scripts


def a_run(scripts, name, answers, scores):
    (way,) = [each for each in scripts.scores.WAYS if each.name == name]
    return scripts.scores.Run(way, 1.0, scores, answers)


def likely(value, is_best="False"):
    """As lm-eval writes it down."""
    return [[[str(value), is_best]]]


class TestVerdicts:
    def problems(self, scripts, task, ours, theirs, score=0.5, expected=0.5):
        name = "byte_perplexity" if task == "perplexity" else "acc"
        row = scripts.scores.compared(
            a_run(scripts, "tokens", {task: ours}, {task: {name: score}}),
            a_run(scripts, "hf", {task: theirs}, {task: {name: expected}}),
            task,
        )
        return scripts.scores.problems_of(row)

    def test_the_same_is_right(self, scripts):
        mine, theirs = likely(-81.2403), likely(-81.2409)
        assert self.problems(scripts, "endings", [mine], [theirs]) == []
        assert self.problems(scripts, "perplexity", [[["-12.5"]]], [[["-12.5004"]]]) == []
        assert self.problems(scripts, "opinions", [[[" good"]]], [[[" good"]]]) == []

    @pytest.mark.parametrize("value", [-81.242, math.nan, 0.0])
    def test_one_that_is_far_off(self, scripts, value):
        mine, theirs = [likely(-3), likely(value)], [likely(-3), likely(-81.24)]
        (problem,) = self.problems(scripts, "endings", mine, theirs)
        assert problem.startswith("tokens, endings: a log-likelihood differs by ")
        (problem,) = self.problems(scripts, "perplexity", [[[str(value)]]], [[["-81.24"]]])
        assert problem.startswith("tokens, perplexity: a log-likelihood differs by ")

    def test_the_most_likely_text_is_another(self, scripts):
        (problem,) = self.problems(scripts, "endings", [likely(-3, "True")], [likely(-3)])
        assert problem == "tokens, endings: 1 of 1 answers differ; expected none"

    def test_another_text(self, scripts):
        (problem,) = self.problems(scripts, "opinions", [[["a"]], [["b"]]], [[["a"]], [["c"]]])
        assert problem == "tokens, opinions: 1 of 2 answers differ; expected none"

    @pytest.mark.parametrize("score", [0.51, math.nan])
    def test_another_score(self, scripts, score):
        (problem,) = self.problems(scripts, "endings", [likely(-3)], [likely(-3)], score)
        assert problem == f"tokens, endings: acc is {score}; expected 0.5"
        same = [[["-3"]]]
        assert self.problems(scripts, "perplexity", same, same, 2.0001, 2.0) == []
        assert self.problems(scripts, "perplexity", same, same, 2.001, 2.0)

    def test_nothing_at_all(self, scripts):
        (problem,) = self.problems(scripts, "endings", [], [])
        assert problem == "tokens, endings: nothing was compared"

    def test_answers_that_are_missing(self, scripts):
        with pytest.raises(ValueError, match="longer"):
            self.problems(scripts, "endings", [], [likely(-3)])


def test_every_way_is_held_to_transformers(scripts):
    ways = {each.name: each for each in scripts.scores.WAYS}
    asked = [each for each in ways.values() if each.like]
    assert {each.kind for each in asked} == {"local-completions", "local-chat-completions"}
    for each in asked:
        assert ways[each.like].kind == "hf" and set(each.tasks) <= set(ways[each.like].tasks)


class TestTasks:
    def reviews(self, scripts, count=300):
        return [
            scripts.tasks.Review(" ".join(f"w{number}x{word}" for word in range(20)), number % 2)
            for number in range(count)
        ]

    def test_endings_have_one_that_is_right(self, scripts):
        rows = scripts.tasks.endings(random.Random(1), self.reviews(scripts))
        assert len(rows) == scripts.tasks.NUM_ENDINGS
        for number, row in enumerate(rows):
            right = row["choices"][row["right"]]
            assert len(set(row["choices"])) == 4
            assert f"{row['begin']} {right}" == self.reviews(scripts)[number].text
        assert {row["right"] for row in rows} == {0, 1, 2, 3}

    def test_texts_grow_and_some_are_not_english(self, scripts):
        rows = scripts.tasks.texts(self.reviews(scripts, 700))
        sizes = [len(row["text"]) for row in rows[len(scripts.tasks.OTHERS) :]]
        assert len(rows) == 20 and sizes == sorted(sizes) and sizes[-1] > 30 * sizes[0]

    def test_those_that_are_asked_about_are_no_examples(self, scripts):
        reviews = self.reviews(scripts)
        for rows, key in ((scripts.tasks.opinions(reviews), "asked"),
                          (scripts.tasks.words(reviews), "begin")):  # fmt: skip
            for row in rows:
                asked = row[key].splitlines()[-2]
                assert row[key].count(asked) == 1 and row[key].endswith("Opinion:")

    def test_the_first_few_have_some_of_both(self, scripts):
        mixed = scripts.tasks.mixed(["a", "b", "c"], ["1"])
        assert mixed == ["a", "1", "b", "c"]
