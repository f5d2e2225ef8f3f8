"""The first line says what was promised, whether it is kept, and by what."""

import msgspec
import pytest
from optimizer import made_optimizations as made

from penstock.optimizer.report.first_line import chosen_try, decisive_refusal, exit_code, headline
from penstock.optimizer.results import Optimization

LINES = {
    "kept": "SLO kept: p99 11.8 ms (11.4-12.2) < 20 ms at 200/s poisson; 3.1x the original's"
    " highest rate; top1 91.2 % → 91.0 % (loss at most 0.6 points, limit 1 point)",
    "missed": "SLO missed by 34 %: p99 26.8 ms (26.0-27.6) >= 20 ms at 200/s poisson; what binds is"
    " compute: 71 % of p99; 1.54x the original's highest rate; top1 91.2 % → 91.0 % (loss at most"
    " 0.6 points, limit 1 point)",
    "refused": "Refused by the accuracy gate: nothing keeps top1 drop <= 1 % for sure; 50 examples"
    " cannot tell: top1 may lose 5.8 points; needs about 900 examples",
    "text": "SLO kept: p99 ttft 180 ms (175-185) < 500 ms, p99 tpot 60.0 ms (58.2-61.8) < 100 ms at"
    " 2/s poisson; 2.0x the original's highest rate; kl 0 → 0.0014 (loss at most 0.0016, limit"
    " 0.02)",
    "already-met": "SLO kept by the original: p99 14.2 ms (13.8-14.6) < 20 ms at 200/s poisson;"
    " nothing had to be changed",
    "without-data": "SLO kept: p99 11.8 ms (11.4-12.2) < 20 ms at 200/s poisson; 3.1x the"
    " original's highest rate",
    "interrupted": "Interrupted after 1 min 35 s: the best by then is onnx-export →"
    " transformer-fusion(heads=12); predicted to reach 168/s, not yet served",
    "nothing": "Interrupted after 1 min 35 s: nothing was found by then",
    "unknown-figures": "SLO missed by 34 %: p99 26.8 ms (26.0-27.6) >= 20 ms at 200/s poisson; what"
    " binds is compute: 71 % of p99; up to 151/s, the original at no rate; top1 91.2 % → 91.0 %"
    " (loss at most 0.6 points, limit 1 point)",
    "served-otherwise": "SLO missed by 34 %: p99 26.8 ms (26.0-27.6) >= 20 ms at 200/s poisson;"
    " what binds is compute: 71 % of p99; top1 91.2 % → 91.0 % (loss at most 0.6 points, limit 1"
    " point)",
}


@pytest.mark.parametrize("name", made.MAKERS)
def test_the_line_of_every_end(name: str) -> None:
    assert headline(made.MAKERS[name]()) == LINES[name]


@pytest.mark.parametrize(
    ("optimization", "code"),
    [
        (made.kept(), 0),
        (made.already_met(), 0),
        (made.missed(), 2),
        (made.refused(), 3),
        (made.interrupted(), 130),
    ],
    ids=["kept", "already met", "missed", "refused", "interrupted"],
)
def test_the_exit_code_says_the_same(optimization: Optimization, code: int) -> None:
    assert exit_code(optimization) == code


def test_a_choice_that_did_not_have_to_pass_is_no_refusal() -> None:
    """It loses nothing by its making; its held-out score is for the record."""
    found = made.refused()
    found.held_out = made.judgement(0.0, 0.02, part="held out")
    refusal = decisive_refusal(found)
    assert refusal is not None and refusal is not found.held_out
    kept = made.kept()
    assert "loss at most" in headline(kept)
    kept.held_out = found.held_out
    assert "limit" not in headline(kept)


def test_a_refusal_that_more_examples_would_lift_is_told_before_one_that_none_would() -> None:
    found = made.refused()
    hopeless = found.tries[7].accuracy
    assert hopeless is not None and found.tries[8].accuracy is not None
    assert hopeless.loss_bound < found.tries[8].accuracy.loss_bound
    assert decisive_refusal(found) is found.tries[8].accuracy
    found.tries[8].accuracy = None
    assert decisive_refusal(found) is hopeless
    found.tries[7].accuracy = None
    assert decisive_refusal(found) is None
    assert headline(found).endswith("nothing keeps top1 drop <= 1 % for sure")


def test_without_an_slo_nothing_is_said_to_be_kept() -> None:
    found = msgspec.structs.replace(made.kept(), slo="")
    assert found.after is not None
    found.after.verdicts = []
    assert headline(found).startswith("No SLO was given: 3.1x the original's highest rate; ")


def test_a_term_that_was_not_measured_is_no_kept_one() -> None:
    found = made.missed()
    assert found.after is not None
    found.after.verdicts[0].outcome = "not measured"
    found.after.verdicts[0].measured = None
    assert headline(found).startswith("SLO missed: p99 was not measured (p99 < 20ms) at 200/s")


def test_an_interrupted_run_that_served_its_best_says_how_that_went() -> None:
    found = made.kept()
    found.outcome = "interrupted"
    line = headline(found)
    assert line.startswith("Interrupted after 6 min 52 s: the best by then is onnx-export")
    assert "p99 11.8 ms (11.4-12.2) < 20 ms at 200/s poisson; 3.1x the" in line


def test_the_chosen_may_be_a_try_served_in_its_own_way() -> None:
    assert chosen_try(made.kept()) is not None
    found = made.served_otherwise()
    assert chosen_try(found) is found.tries[8]
    assert chosen_try(made.nothing()) is None
    found.tries = []
    assert chosen_try(found) is None
