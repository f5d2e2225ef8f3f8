"""When the first token of a new request would come; `test_engine.py` has the refusals."""

import pytest
from test_pace import a_pace

from penstock.llm.blocks import BlockPool
from penstock.llm.pace import StepWork, Targets
from penstock.llm.scheduler import Scheduler, StepLimits
from penstock.llm.ttft_admission import IDLE, TtftAdmission


def admission_of(*targets) -> TtftAdmission:
    scheduler = Scheduler(BlockPool(8, 16), StepLimits(4, 64, 128))
    return TtftAdmission(scheduler, a_pace(*targets))


def test_the_first_token_is_behind_those_before_it():
    admission = admission_of()
    alone = admission.first_token_s(400, IDLE)
    assert alone == pytest.approx(4e-3 + 400 * 50e-6, rel=0.01)
    behind = admission.first_token_s(4400, IDLE)
    assert behind == pytest.approx(4e-3 + 4400 * 50e-6, rel=0.01)


def test_the_first_token_takes_many_steps_where_others_are_promised_theirs():
    admission = admission_of(Targets(tpot_s=10e-3))
    running = StepWork(0, 32, 0)
    # 100 tokens a step of 10 ms.
    assert admission.first_token_s(1000, running) == pytest.approx(0.1, rel=0.1)
