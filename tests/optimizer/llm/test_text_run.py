"""`penstock optimize` with a language model, all of it: a tiny one, real engines and servers."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import text_server
from optimizer import made_optimizations as made
from served_builds import a_config

from penstock.errors import ConfigError
from penstock.llm.settings import settings_of
from penstock.optimizer import budget, outcomes, run, time_plan
from penstock.optimizer.accuracy import Judgement
from penstock.optimizer.candidates import Build, Candidate, Step
from penstock.optimizer.facts import Facts
from penstock.optimizer.findings import Contender, Finalist, Findings
from penstock.optimizer.llm import text_evaluator, text_run
from penstock.optimizer.llm.text_search import serving_offers
from penstock.optimizer.optimization_files import (
    read_optimization,
    write_optimization,
)
from penstock.optimizer.plan import Plan
from penstock.optimizer.results import Try
from penstock.report import optimize as optimize_report
from penstock.report import optimize_table
from penstock.repository import layout
from penstock.slo import parse

# Servers start and stop often; on a machine with others that takes its time.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
WORDS = ["the", "cat", "sat", "on", "mat", "a", "café", "def", "return", "x", "2024"]


def a_plan(root, **others):
    wishes = {
        "model": str(root / "smol"),
        "name": "smol",
        "out": str(root / "out"),
        "slo": parse("ttft p99 < 5 s, tpot p99 < 2 s at 2/s"),
        "data": str(root / "prompts.jsonl"),
        "duration_s": 1.0,
        "device": "cpu",
        "budget_s": 3600.0,
        "is_exhaustive": True,
        # Weights of no use are far from each other in any datatype.
        "accuracy": budget.parse("kl rise <= 1"),
    }
    return Plan(**{**wishes, **others})


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("text-run")
    text_server.write_model(root)
    draw = random.Random(4)
    rows = [
        {"prompt": " ".join(draw.choices(WORDS, k=draw.randint(4, 12))), "max_tokens": 4}
        for _ in range(48)
    ]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def found(root):
    """One level a candidate, one datatype, one knob: all that happens, none of it often."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time_plan, "TEXT_SEARCH_S", 0.1)
        patch.setattr(text_evaluator, "NUM_ROUNDS", 1)
        patch.setattr(text_run, "DTYPES", ("auto", "float32", "bfloat16", "fp8"))
        patch.setattr(text_run, "serving_offers", lambda *asked: serving_offers(*asked)[:1])
        optimization = run.optimize(a_plan(root), told.append, "penstock optimize smol")
        again = run.optimize(a_plan(root), told.append, "penstock optimize smol")
    # What was measured once is known.
    assert again.num_measured == 0 < again.num_remembered == optimization.num_measured
    assert (again.version, again.chosen) == (optimization.version, optimization.chosen)
    assert again.after.p99 == optimization.after.p99
    assert {"baseline", "proof"} <= {each.stage for each in told}
    assert all(each.left_s is not None for each in told)
    # What Ctrl-C would save is known as soon as the original is measured.
    assert all(each.to_save for each in told if each.best)
    return optimization


def test_the_slo_is_kept_and_proven_by_streams(found):
    assert found.outcome == "kept" and found.form == "text"
    assert found.headline.startswith("SLO kept")
    for served in (found.before, found.after):
        assert served.load == "2/s poisson" and served.is_met
        assert served.streams is not None and served.streams.tokens_per_s > 0


def test_every_datatype_of_the_device_was_judged_and_served_or_told_why_not(found):
    tried = {str(each.candidate): each for each in found.tries}
    assert tried["original"].outcome == "kept" and tried["original"].served is not None
    half = tried["dtype(dtype=bfloat16)"]
    assert half.accuracy is not None and half.accuracy.metric == "kl"
    assert 0 < half.accuracy.candidate < 1 and "agreement" in half.accuracy.text
    assert half.outcome == "kept" and half.served.max_rate.value == pytest.approx(2.2)
    paced = tried["dtype(dtype=bfloat16) → pace(tpot_ms=2000)"]
    assert paced.outcome == "kept" and paced.accuracy is None
    assert [phase.label for phase in found.phases][0] == "original"
    assert "dtype(dtype=fp8)" in {str(each.step) for each in found.skipped}


def test_the_version_is_served_as_it_was_measured_and_is_nobody_elses(found, root):
    config = layout.read(root / "out" / "smol").configs[-1]
    assert config.version == found.version == "1" and config.backend == "llm"
    settings = settings_of(config)
    steps = [step.settings.get("dtype") for step in found.chosen.steps]
    assert settings.dtype == next(filter(None, steps), "float32")
    weights = root / "out" / "smol" / "1" / "model.safetensors"
    # Whoever writes to his own file changes no version.
    source = root / "smol" / "model.safetensors"
    assert weights.read_bytes() == source.read_bytes() and not weights.samefile(source)
    manifest = json.loads((weights.parent / "manifest.json").read_text())
    assert manifest["evidence"]["slo"] == found.slo and manifest["evidence"]["measured"]["streams"]


def test_what_was_found_is_a_file_and_a_page(found, tmp_path):
    write_optimization(found, tmp_path / "found.json")
    again = read_optimization(tmp_path / "found.json")
    assert again.after.streams == found.after.streams and again.form == "text"
    page = optimize_report.page(again)
    for part in ("p99 first token", "ttft_curves", "openai+http", "backend: &#34;llm&#34;"):
        assert part in page
    optimize_table.shown(again)


class TestWrongInputs:
    def test_without_prompts(self, root):
        with pytest.raises(ConfigError, match="--data is required for language models"):
            run.optimize(a_plan(root, data=""), lambda progress: None, "")

    def test_functions_and_labels_are_for_others(self, root):
        plan = a_plan(root, labels="y", evaluator="a:b", preprocess="a:b")
        with pytest.raises(ConfigError) as caught:
            run.optimize(plan, lambda progress: None, "")
        assert [each.partition(" ")[0] for each in caught.value.problems] == [
            "--labels",
            "--eval",
            "--preprocess",
        ]

    def test_a_metric_that_is_not_known(self, root):
        plan = a_plan(root, accuracy=budget.parse("top1 drop <= 1 %"))
        with pytest.raises(ConfigError, match="expected kl, agreement, nll"):
            run.optimize(plan, lambda progress: None, "")

    def test_prompts_that_are_longer_than_the_model(self, root, tmp_path):
        (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "the " * 300}) + "\n")
        plan = a_plan(root, data=str(tmp_path / "x.jsonl"))
        with pytest.raises(ConfigError, match="leaves room for its answer within 256 tokens"):
            run.optimize(plan, lambda progress: None, "")

    def test_a_file_of_something_else(self, root, tmp_path):
        (tmp_path / "x.jsonl").write_text('{"image": 3}\n')
        plan = a_plan(root, data=str(tmp_path / "x.jsonl"))
        with pytest.raises(ConfigError, match="expected 'prompt', 'messages' or 'conversations'"):
            run.optimize(plan, lambda progress: None, "")


class HeldOut:
    """A lab whose held-out prompts allow some datatypes."""

    plan, journal, budget = None, None, "kl rise <= 0.02"

    def __init__(self, *allowed):
        self.allowed = allowed
        self.asked = []

    def judge(self, candidate, part, alpha):
        (step,) = candidate.steps
        dtype = step.settings["dtype"]
        self.asked.append((dtype, part, alpha))
        is_passed = dtype in self.allowed
        return Judgement(
            "kl", 0.0, 0.01, 0.01, 0.015, 0.02, 24, 0, 24, "b", alpha, is_passed, text=dtype
        )


HALF, EIGHT = (Step("dtype", {"dtype": name}) for name in ("bfloat16", "int8"))
MORE = Step("sequences", {"max_num_seqs": "32"})


def findings_of(*candidates):
    finalists = []
    for number, steps in enumerate(((), *candidates)):
        build = Build(Candidate(steps), Path("m"), a_config())
        contender = Contender(
            build, Facts("llm"), {}, [((), 1.0 + number)], HALF in steps or EIGHT in steps
        )
        finalists.insert(0, Finalist(contender, build, made.served_text(1.0 + number, 0.05)))
    return Findings(finalists=finalists)


def concluding(lab, findings):
    search = SimpleNamespace(findings=findings, budget=None, progress=None)
    return text_run.TextConclusion(lab, search, SimpleNamespace())


class TestChoice:
    def test_is_the_best_that_the_held_out_prompts_allow(self):
        lab = HeldOut("bfloat16")
        conclusion = concluding(lab, findings_of((HALF,), (EIGHT,), (EIGHT, MORE)))
        choice = conclusion.choose()
        assert choice.finalist.build.candidate.steps == (HALF,) and choice.held_out.is_passed
        # A datatype is asked about once, however it is served, and each costs some of the risk.
        assert [each[:2] for each in lab.asked] == [("int8", "held out"), ("bfloat16", "held out")]
        assert lab.asked[0][2] > lab.asked[1][2]
        assert [each.text for each in conclusion.refused.values()] == ["int8"]

    def test_what_loses_nothing_is_not_asked_about(self):
        lab = HeldOut()
        choice = concluding(lab, findings_of((MORE,))).choose()
        assert choice.finalist.build.candidate.steps == (MORE,)
        assert choice.held_out is None and lab.asked == []

    def test_is_the_original_where_nothing_else_is_allowed(self):
        conclusion = concluding(HeldOut(), findings_of((HALF,)))
        choice = conclusion.choose()
        assert choice.finalist.build.candidate.steps == () and len(conclusion.refused) == 1


def test_a_datatype_that_was_refused_is_so_however_it_is_served():
    findings = findings_of((HALF,), (EIGHT,), (EIGHT, MORE))
    tries = [Try(each.build.candidate, "quantise", "kept", "") for each in findings.finalists[::-1]]
    conclusion = concluding(HeldOut("bfloat16"), findings)
    conclusion.choose()
    outcomes.mark_refused(tries, conclusion.refused)
    assert [each.outcome for each in tries] == ["kept", "kept", "rejected", "rejected"]
