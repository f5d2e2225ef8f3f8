"""What a lab keeps of what it finds out about a language model, and what it finds out again."""

import json

import pytest

pytest.importorskip("torch")

import text_server
from optimizer import made_optimizations as made

from penstock.errors import BackendFailed
from penstock.llm.text_files import read_text
from penstock.optimizer import budget
from penstock.optimizer.candidates import Candidate, Step
from penstock.optimizer.findings import Findings
from penstock.optimizer.journal import Journal
from penstock.optimizer.llm import likelihoods, text_evaluator, text_trials
from penstock.optimizer.llm.text_prompts import read_prompts
from penstock.optimizer.llm.text_subject import open_text_subject
from penstock.optimizer.plan import Plan
from penstock.optimizer.served import ServedBench
from penstock.optimizer.time_plan import TextTime
from penstock.slo import parse

HALF = Candidate((Step("dtype", {"dtype": "bfloat16"}),))
# Prompts of both kinds: those that are judged whole, and those that are not.
LONG = (1, 34)
SLO = parse("ttft p99 < 5 s, tpot p99 < 2 s")


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    root = tmp_path_factory.mktemp("text-lab")
    return open_text_subject(str(text_server.write_model(root)), "cpu", root / "original" / "smol")


@pytest.fixture
def opened(subject, tmp_path):
    """A lab of another run on the same journal, each time it is called."""
    rows = [
        {"prompt": f"{number} the cat sat " * LONG[number % 2], "max_tokens": 4}
        for number in range(48)
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = read_text(str(subject.build.version_folder), is_made_up=False)
    prompts = read_prompts(str(tmp_path / "p.jsonl"), text, subject.max_length)
    labs = []

    def another(price=None, accuracy=likelihoods.DEFAULT):
        if labs:
            close(labs.pop())
        plan = Plan(
            "m",
            "smol",
            "out",
            slo=SLO,
            duration_s=1.0,
            price_per_hour=price,
            accuracy=accuracy,
            budget_s=3600.0,
        )
        # A search of 80 s, which is not the longest.
        clock = TextTime(plan, Findings(), lambda: 1960.0, 0.0, is_on_gpu=False)
        journal = Journal(tmp_path / "run")
        labs.append(
            text_evaluator.TextEvaluator(plan, subject, prompts, journal, clock, lambda doing: None)
        )
        return labs[0]

    yield another
    if labs:
        close(labs.pop())


def close(lab):
    lab.close()
    lab.journal.__exit__(None, None, None)


class Measurements:
    """One after the other: a rate, how far the search got, or what went wrong."""

    def __init__(self, *found):
        self.left = list(found)

    def rate_from(self, *asked):
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        rate, has_ended = found
        return made.served_text(rate, 0.05), has_ended

    def prove(self, *asked):
        found, has_ended = self.rate_from()
        if not has_ended:
            found.max_rate = None
        return [found]


class TestMeasurements:
    def test_one_that_failed_is_made_again(self, opened, monkeypatch):
        found = Measurements(BackendFailed("busy"), (2.0, True))
        monkeypatch.setattr(ServedBench, "rate_from", found.rate_from)
        with pytest.raises(BackendFailed, match="busy"):
            opened().rated(HALF, None)
        for _ in range(2):
            assert opened().rated(HALF, None).max_rate.value == 2.0

    def test_a_search_that_was_cut_short_is_made_again(self, opened, monkeypatch):
        found = Measurements((2.0, False), (3.0, True))
        monkeypatch.setattr(ServedBench, "rate_from", found.rate_from)
        rates = [opened().rated(HALF, None).max_rate.value for _ in range(3)]
        assert rates == [2.0, 3.0, 3.0] and not found.left

    def test_a_proof_without_rates_is_made_again(self, opened, subject, monkeypatch):
        found = Measurements((2.0, False), (3.0, True))
        monkeypatch.setattr(ServedBench, "prove", found.prove)
        proofs = [opened().prove([subject.build], [None]) for _ in range(3)]
        assert [each.max_rate is None for (each,) in proofs] == [True, False, False]
        assert not found.left

    def test_costs_are_at_the_price_of_today(self, opened, monkeypatch):
        found = Measurements((2.0, True), (2.0, True))
        monkeypatch.setattr(ServedBench, "rate_from", found.rate_from)
        monkeypatch.setattr(ServedBench, "prove", found.prove)
        for price, cost in ((7.2, 1000.0), (3.6, 500.0), (None, None)):
            lab = opened(price)
            (proven,) = lab.prove([lab.build(HALF)], [None])
            for served in (lab.rated(HALF, None), proven):
                assert served.cost_per_million == (cost and pytest.approx(cost))
        assert not found.left


class TestAccuracy:
    def test_what_is_just_as_the_original_passes(self, opened):
        lab = opened(accuracy=budget.parse("agreement drop <= 1 %"))
        judged = lab.judge(Candidate())
        assert judged.num_examples == 24 and judged.candidate == 1.0
        assert judged.is_passed, judged.text

    @pytest.mark.parametrize(
        ("num", "pair", "is_asked_for"), [(12, [0.0001, 0.0269], True), (24, [0.004, 0.031], False)]
    )
    def test_no_more_prompts_are_asked_for_than_are_judged(self, opened, num, pair, is_asked_for):
        lab = opened()
        for candidate, kl in ((Candidate(), [0.0, 0.0]), (HALF, pair)):
            by_metric = {"kl": kl * (num // 2)}
            scores = text_evaluator.Scores(by_metric, num)
            lab.journal.remember(
                "scores", candidate.key, text_evaluator.Scores, lambda found=scores: found
            )
        judged = lab.judge(HALF)
        assert not judged.is_passed and "not shown; needs about" in judged.text
        assert (judged.num_needed is not None) == is_asked_for
        assert ("24 are judged at most" in judged.text) != is_asked_for

    def test_long_prompts_keep_their_beginning_and_their_end(self, opened, subject):
        lab = opened()
        lab.judge(Candidate())
        texts = text_trials.read(lab.journal.path.with_name(text_evaluator.REFERENCE)).texts
        whole = {len(each.tokens): each.tokens for each in lab.prompts.asked}
        assert min(whole) < text_evaluator.FIRST + text_evaluator.LAST < max(whole)
        prompts = {tuple(text[: -text_evaluator.NUM_NEW]) for text in texts}
        for asked in lab.prompts.asked:
            tokens = asked.tokens
            if len(tokens) > text_evaluator.FIRST + text_evaluator.LAST:
                tokens = tokens[: text_evaluator.FIRST] + tokens[-text_evaluator.LAST :]
            assert tuple(tokens) in prompts

    @pytest.mark.parametrize(
        "content", [b"", pytest.param(b"PK\x03\x04 and no more", marks=pytest.mark.slow)]
    )
    def test_a_reference_that_cannot_be_read_is_made_again(self, opened, content):
        lab = opened()
        path = lab.journal.path.with_name(text_evaluator.REFERENCE)
        path.write_bytes(content)
        assert lab.judge(Candidate()).num_examples == 24
        assert len(text_trials.read(path).texts) == 48
