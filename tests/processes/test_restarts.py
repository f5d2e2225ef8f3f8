"""When processes that died are started again, on numbers alone."""

import pytest

from penstock.processes.restarts import (
    MAX_SPARES,
    SPARE_S,
    CrashLoop,
    SparePlan,
    backoff_s,
    deaths_in_a_row,
    spare_fits,
)


def test_deaths_in_a_row_cost_more_and_more_patience():
    delays = [backoff_s(num_deaths) for num_deaths in range(1, 11)]
    assert delays == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert backoff_s(100_000) == 10.0, "after days of crashes still a number"


def test_a_process_that_was_well_for_a_while_begins_anew():
    num_deaths = 0
    for well_s, expected in [(0.0, 1), (1.0, 2), (9.9, 3), (10.0, 1), (0.0, 2), (3600.0, 1)]:
        num_deaths = deaths_in_a_row(num_deaths, well_s)
        assert num_deaths == expected


def test_processes_that_were_worth_their_start_come_back_soon():
    num_deaths = 0
    for well_s, expected in [(0.8, 1), (0.8, 2), (0.8, 3), (0.8, 3), (0.7, 4), (0.0, 5), (0.8, 3)]:
        num_deaths = deaths_in_a_row(num_deaths, well_s, start_s=0.7)
        assert num_deaths == expected
    assert backoff_s(3) == 0.2


def test_excused_deaths_do_not_add_up():
    crashes = CrashLoop()
    for _ in range(100):
        crashes.died(well_s=0.5)
        assert crashes.delay_s == 0
        crashes.excuse()
    assert crashes.num_deaths == 0
    crashes.excuse()
    assert crashes.num_deaths == 0, "nothing is left to be excused"


def test_other_deaths_still_add_up_between_excused_ones():
    crashes = CrashLoop()
    delays = []
    for _ in range(3):
        crashes.died(well_s=0.5)
        crashes.died(well_s=0.5)
        crashes.excuse()
        delays.append(crashes.delay_s)
    assert delays == [0.0, 0.1, 0.2]
    crashes.recovered()
    assert crashes.delay_s == 0


@pytest.mark.parametrize(
    ("worker_gib", "fits"),
    [(1, True), (5, False), (4.7, True)],
)
def test_a_spare_leaves_a_tenth_of_the_memory_free(worker_gib, fits):
    gib = 1 << 30
    assert spare_fits(int(worker_gib * gib), 8 * gib, 32 * gib) is fits


def test_a_spare_is_wanted_for_a_while_after_a_request_killed():
    plan = SparePlan()
    assert plan.num_wanted(0.0, 1.0) == 0
    plan.killed(100.0)
    assert plan.num_wanted(100.0 + SPARE_S - 1, 1.0) == 1
    plan.killed(200.0)
    assert plan.num_wanted(100.0 + SPARE_S + 1, 1.0) == 1
    assert plan.num_wanted(200.0 + SPARE_S, 1.0) == 0


@pytest.mark.parametrize(
    ("rate", "start_s", "num_wanted"), [(1, 0.2, 1), (2, 0.5, 2), (2, 1.4, 4), (10, 60, MAX_SPARES)]
)
def test_as_many_spares_are_wanted_as_die_while_one_starts(rate, start_s, num_wanted):
    plan, now = SparePlan(), 0.0
    for _ in range(20 * rate):
        plan.killed(now)
        now += 1 / rate
    assert plan.num_wanted(now, start_s) == num_wanted
    assert plan.num_wanted(now + 60, start_s) == num_wanted, "what is loaded stays"
    assert plan.num_wanted(now + SPARE_S, start_s) == 0
