"""How long steps take, and what follows from it."""

from dataclasses import replace

import numpy as np
import pytest

from penstock.llm.pace import MIN_CHUNK, MIN_STEPS, StepTimeModel, StepWork, Targets


def took_s(work: StepWork, per_token_s=50e-6) -> float:
    """A machine: 4 ms by itself, and so on."""
    own = 4e-3 + 30e-6 * work.num_generating + 2e-8 * work.num_context_tokens
    return own + per_token_s * work.num_prompt_tokens


def works(count, seed=0):
    draw = np.random.default_rng(seed)
    for _ in range(count):
        num = int(draw.integers(0, 64))
        prompt = int(draw.integers(0, 512)) if draw.random() < 0.5 else 0
        yield StepWork(prompt, num, num * int(draw.integers(1, 2000)))


NOTHING = Targets()


def a_pace(targets=NOTHING, count=400, noise=0.0, **machine) -> StepTimeModel:
    pace, draw = StepTimeModel(targets), np.random.default_rng(1)
    for work in works(count):
        pace.add(work, took_s(work, **machine) * (1 + noise * draw.standard_normal()))
    return pace


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_times_are_learnt(noise):
    pace = a_pace(noise=noise)
    for work in works(50, seed=9):
        assert pace.step_s(work) == pytest.approx(took_s(work), rel=1e-3 + noise)


def test_drafts_have_costs_of_their_own():
    """One for each sequence that drafts, and one for each drafted token."""
    pace, draw = StepTimeModel(), np.random.default_rng(1)
    for number, work in enumerate(works(400)):
        drafting = int(draw.integers(1, 4)) if number % 3 == 0 else 0
        drafted = drafting * int(draw.integers(1, 9)) if drafting else 0
        drafts_s = 3e-3 * drafting + 1e-4 * drafted
        pace.add(replace(work, num_drafting=drafting, num_drafted=drafted), took_s(work) + drafts_s)
    assert pace.num_drafting == 134
    for work in works(50, seed=9):
        assert pace.step_s(work) == pytest.approx(took_s(work), rel=1e-3)
        longer = replace(work, num_drafting=2, num_drafted=10)
        assert pace.step_s(longer) == pytest.approx(took_s(work) + 7e-3, rel=1e-3)


def test_a_machine_that_became_slower_is_learnt_anew():
    pace = a_pace(count=1000)
    for work in works(2000, seed=3):
        pace.add(work, took_s(work, per_token_s=200e-6))
    work = StepWork(500, 0)
    assert pace.step_s(work) == pytest.approx(took_s(work, per_token_s=200e-6), rel=0.05)


@pytest.mark.parametrize("prompt", [1, 100])
def test_steps_that_are_always_the_same_stay_known(prompt):
    """What cannot be told apart must not be divided by."""
    pace, draw = StepTimeModel(), np.random.default_rng(2)
    for number in range(6000):
        work = StepWork(prompt, 0) if number % 100 == 0 else StepWork(0, 1, prompt + number % 100)
        pace.add(work, took_s(work) * (1 + 0.02 * draw.standard_normal()))
    for work in (StepWork(prompt, 0), StepWork(0, 1, prompt + 50)):
        assert pace.step_s(work) == pytest.approx(took_s(work), rel=0.1)
    same = StepTimeModel()
    for _ in range(12_000):
        same.add(StepWork(1, 0), 0.1)
    assert same.step_s(StepWork(1, 0)) == pytest.approx(0.1, rel=0.01)


def test_nothing_takes_less_than_no_time():
    pace = StepTimeModel()
    # As if those who generate made it faster.
    for number in range(1, 100):
        pace.add(StepWork(0, number), 0.01 / number)
    assert pace.step_s(StepWork(0, 1000)) >= 0


def test_as_many_tokens_of_prompts_as_the_promise_allows():
    pace = a_pace(Targets(tpot_s=10e-3))
    # 4 ms and 32 x 30 us of 10 ms are taken: 5.04 ms are left for 50 us each.
    found = pace.max_tokens(StepWork(0, 32), 4096)
    assert found - 32 == pytest.approx(100, abs=2)
    assert pace.max_tokens(StepWork(0, 0), 4096) == 4096


@pytest.mark.parametrize("context", [10**6, 10**9])
def test_a_promise_that_cannot_be_kept_stops_nobody_who_waits(context):
    pace = a_pace(Targets(tpot_s=1e-3))
    assert pace.max_tokens(StepWork(0, 32, context), 4096) == 32 + MIN_CHUNK


def test_without_promise_or_knowledge_the_limit_counts():
    assert a_pace().max_tokens(StepWork(0, 32), 2048) == 2048
    assert (
        a_pace(Targets(tpot_s=1e-3), count=MIN_STEPS - 1).max_tokens(StepWork(0, 32), 2048) == 2048
    )
