"""Two lines in the log for each stretch of overload."""

from penstock.serving.overload import QUIET_S, Overload, Stretch


def test_only_the_first_refusal_begins_it():
    overload = Overload()
    assert overload.refused(10.0)
    assert not any(overload.refused(10.0 + i / 10) for i in range(1, 21))
    assert overload.ended(12.0 + QUIET_S - 0.01) is None
    assert overload.ended(12.0 + QUIET_S) == Stretch(21, 2.0)
    assert overload.ended(100.0) is None, "it is told once"


def test_a_refusal_after_the_end_begins_another():
    overload = Overload()
    overload.refused(0.0)
    overload.ended(QUIET_S)
    assert overload.refused(QUIET_S + 1)
    assert overload.ended(2 * QUIET_S + 1) == Stretch(1, 0.0)


def test_without_refusals_nothing_ends():
    assert Overload().ended(1e9) is None
