"""What a lab keeps of what it finds out about a language model, and what it finds out again."""

import json

import pytest

pytest.importorskip("torch")

import text_server
from optimizer import made_optimizations as made

from penstock.errors import BackendFailed
from penstock.llm.text_model import read_text
from penstock.optimizer.candidates import Candidate, Step
from penstock.optimizer.journal import Journal
from penstock.optimizer.llm import likelihoods, text_lab, text_served
from penstock.optimizer.llm.text_prompts import read_prompts
from penstock.optimizer.llm.text_subject import open_text_subject
from penstock.optimizer.plan import Plan
from penstock.slo import parse

HALF = Candidate((Step("dtype", {"dtype": "bfloat16"}),))
SLO = parse("ttft p99 < 5 s, tpot p99 < 2 s")


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    root = tmp_path_factory.mktemp("text-lab")
    return open_text_subject(str(text_server.write_model(root)), "cpu", root / "original" / "smol")


@pytest.fixture
def opened(subject, tmp_path):
    """A lab of another run on the same journal, each time it is called."""
    rows = [{"prompt": f"{number} the cat sat", "max_tokens": 4} for number in range(48)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = read_text(str(subject.build.version_folder), is_made_up=False)
    prompts = read_prompts(str(tmp_path / "p.jsonl"), text, subject.max_length)
    labs = []

    def another(price=None, budget=likelihoods.DEFAULT, prompts=prompts):
        if labs:
            close(labs.pop())
        plan = Plan("m", "smol", "out", slo=SLO, duration_s=1.0, price_per_hour=price)
        journal = Journal(tmp_path / "run")
        labs.append(text_lab.TextLab(plan, subject, prompts, journal, budget))
        return labs[0]

    another.prompts = prompts
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

    def rated(self, *asked):
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        rate, is_through = found
        return made.served_text(rate, 0.05), is_through

    def prove(self, *asked):
        found, is_through = self.rated()
        if not is_through:
            found.max_rate = None
        return [found], is_through


class TestMeasurements:
    def test_one_that_failed_is_made_again(self, opened, monkeypatch):
        found = Measurements(BackendFailed("busy"), (2.0, True))
        monkeypatch.setattr(text_served, "rated", found.rated)
        with pytest.raises(BackendFailed, match="busy"):
            opened().rated(HALF, None)
        for _ in range(2):
            assert opened().rated(HALF, None).max_rate.value == 2.0

    def test_a_search_that_was_cut_short_is_made_again(self, opened, monkeypatch):
        found = Measurements((2.0, False), (3.0, True))
        monkeypatch.setattr(text_served, "rated", found.rated)
        rates = [opened().rated(HALF, None).max_rate.value for _ in range(3)]
        assert rates == [2.0, 3.0, 3.0] and not found.left

    def test_a_proof_without_rates_is_made_again(self, opened, monkeypatch):
        found = Measurements((2.0, False), (3.0, True))
        monkeypatch.setattr(text_served, "prove", found.prove)
        proofs = [opened().prove([Candidate()], [None], lambda: None) for _ in range(3)]
        assert [each.max_rate is None for (each,) in proofs] == [True, False, False]
        assert not found.left

    def test_costs_are_at_the_price_of_today(self, opened, monkeypatch):
        found = Measurements((2.0, True), (2.0, True))
        monkeypatch.setattr(text_served, "rated", found.rated)
        monkeypatch.setattr(text_served, "prove", found.prove)
        for price, cost in ((7.2, 1000.0), (3.6, 500.0), (None, None)):
            lab = opened(price)
            (proven,) = lab.prove([HALF], [None], lambda: None)
            for served in (lab.rated(HALF, None), proven):
                assert served.cost_per_million == (cost and pytest.approx(cost))
        assert not found.left
