"""Two lines in the log for each stretch of refusals."""

from penstock.serving.replies import QUIET_S, Refusals


def test_only_the_first_refusal_begins_it():
    refusals = Refusals()
    assert refusals.refused(10.0)
    assert not any(refusals.refused(10.0 + i / 10) for i in range(1, 21))
    assert refusals.ended(12.0 + QUIET_S - 0.01) is None
    assert refusals.ended(12.0 + QUIET_S) == (21, 2.0)
    assert refusals.ended(100.0) is None, "it is told once"


def test_a_refusal_after_the_end_begins_another():
    refusals = Refusals()
    refusals.refused(0.0)
    refusals.ended(QUIET_S)
    assert refusals.refused(QUIET_S + 1)
    assert refusals.ended(2 * QUIET_S + 1) == (1, 0.0)


def test_without_refusals_nothing_ends():
    assert Refusals().ended(1e9) is None
