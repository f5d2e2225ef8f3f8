"""Shares of a batch: the sum fits, levels come first, the oldest head always fits."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.serving.shares import Queued, split

QUEUES = st.lists(st.lists(st.integers(0, 50), min_size=2, max_size=2), min_size=1, max_size=8)


class TestSplit:
    def test_what_fits_leaves_room_for_late_arrivals(self) -> None:
        assert split([[3], [1]], [1, 1], 9) == [6, 3]

    def test_a_full_batch_is_divided_in_proportion(self) -> None:
        assert split([[60], [20], [20]], [1, 1, 1], 10) == [6, 2, 2]
        assert split([[50], [25], [25]], [1, 1, 1], 5) == [3, 1, 1]

    def test_the_oldest_head_always_fits(self) -> None:
        assert split([[1], [1000], [1000]], [1, 1, 1], 8) == [1, 3, 4]
        assert split([[6], [1000], [1000]], [6, 1, 1], 8) == [6, 0, 2]

    def test_the_oldest_head_of_the_level_that_is_cut_fits(self) -> None:
        assert split([[2, 0], [0, 1], [0, 1000]], [1, 1, 1], 8) == [2, 1, 5]

    def test_higher_levels_come_first(self) -> None:
        assert split([[5, 10], [0, 10]], [1, 1], 8) == [7, 1]

    def test_lower_levels_take_nothing_from_a_level_that_fills_the_batch(self) -> None:
        assert split([[1, 5], [2, 1], [1, 7], [0, 7]], [1, 1, 1, 1], 4) == [1, 2, 1, 0]
        assert split([[2, 2], [1, 9], [0, 3], [0, 3]], [1, 1, 1, 1], 4) == [2, 1, 1, 0]
        # The oldest head of the lower level waits until there is room for it.
        assert split([[5, 0], [0, 6]], [1, 6], 8) == [5, 0]

    def test_a_grant_below_the_first_request_goes_to_others(self) -> None:
        assert split([[40], [8]], [1, 8], 12) == [12, 0]

    def test_a_request_beyond_the_cap_runs_alone(self) -> None:
        assert split([[90], [30]], [90, 30], 50) == [90, 0]

    def test_no_queue_gets_nothing(self) -> None:
        assert split([], [], 8) == []

    @given(queues=QUEUES, cap=st.integers(1, 64))
    def test_the_sum_is_the_cap_or_all_there_is(self, queues: list[list[int]], cap: int) -> None:
        grants = split(queues, [1] * len(queues), cap)
        assert sum(grants) == cap and min(grants) >= 0
        if sum(map(sum, queues)) > cap:
            assert all(grant <= sum(rows) for grant, rows in zip(grants, queues, strict=True))
        else:
            assert all(grant >= sum(rows) for grant, rows in zip(grants, queues, strict=True))

    @given(queues=QUEUES, cap=st.integers(1, 64))
    def test_no_row_runs_before_one_of_a_higher_level(
        self, queues: list[list[int]], cap: int
    ) -> None:
        ranked = sorted(queues, key=lambda rows: not rows[0])
        grants = split(ranked, [1] * len(ranked), cap)
        # Queues give their higher level first.
        num_high = sum(min(grant, rows[0]) for grant, rows in zip(grants, ranked, strict=True))
        assert num_high == min(cap, sum(rows[0] for rows in ranked))

    @given(queues=QUEUES, cap=st.integers(8, 64), data=st.data())
    def test_large_requests_never_exceed_the_cap(
        self, queues: list[list[int]], cap: int, data: st.DataObject
    ) -> None:
        heads = [data.draw(st.integers(1, min(8, max(1, sum(rows))))) for rows in queues]
        grants = split(queues, heads, cap)
        assert sum(grants) <= cap
        if sum(queues[0]) and queues[0][0]:
            assert grants[0] >= heads[0]


def test_rank_is_the_highest_level_then_the_earliest_due() -> None:
    queues = [Queued((0, 5), due=1.0), Queued((1, 0), due=3.0), Queued((2, 0), due=2.0)]
    assert sorted(queues, key=lambda each: each.rank) == [queues[2], queues[1], queues[0]]
