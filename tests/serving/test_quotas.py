"""How much each API key may send, on a clock of its own."""

import math

import pytest
from doubles import FakeClock

from penstock.errors import Overloaded, QuotaExceeded
from penstock.serving.quotas import FULL_GROWTH_S, QueueShares, QueueSize, Quota, Quotas
from penstock.serving.shared_page import HELD_CELLS, PageElsewhere, PageLayout, SharedPage

A, B = b"team-a", b"team-b"


def num_passed(quotas: Quotas, caller: bytes, num_sent: int, clock: FakeClock) -> int:
    passed = 0
    for _ in range(num_sent):
        try:
            quotas.check_rate(caller, clock())
            passed += 1
        except QuotaExceeded:
            pass
    return passed


def test_without_quotas_everything_passes():
    quotas, clock = Quotas(), FakeClock()
    assert not quotas.is_active
    assert num_passed(quotas, A, 1000, clock) == 1000
    quotas.check_share(A, 10**6, 1)


def test_a_key_sends_a_second_of_requests_at_once_and_then_its_rate():
    quotas, clock = Quotas({A: Quota(requests_per_s=10)}), FakeClock()
    assert num_passed(quotas, A, 50, clock) == 10
    for _ in range(20):
        clock.advance(0.1)
        assert num_passed(quotas, A, 5, clock) == 1
    clock.advance(3600)
    assert num_passed(quotas, A, 50, clock) == 10, "an hour of silence is not saved up"
    assert num_passed(quotas, B, 50, clock) == 50, "of the others nothing is taken"
    assert num_passed(quotas, b"", 50, clock) == 50


@pytest.mark.parametrize(("rate", "wait_s"), [(0.5, 2.0), (1, 1.0), (4, 0.25)])
def test_a_refusal_says_when_to_come_back_and_then_it_passes(rate: float, wait_s: float):
    quotas, clock = Quotas({A: Quota(requests_per_s=rate)}), FakeClock()
    num_passed(quotas, A, 10, clock)
    with pytest.raises(QuotaExceeded, match=f"may send {rate:g} requests/s") as caught:
        quotas.check_rate(A, clock())
    assert caught.value.retry_after_s == pytest.approx(wait_s)
    clock.advance(0.99 * wait_s)
    assert num_passed(quotas, A, 1, clock) == 0
    clock.advance(0.02 * wait_s)
    assert num_passed(quotas, A, 1, clock) == 1


def test_a_key_fills_only_its_share_of_a_queue():
    quotas = Quotas({A: Quota(queue_share=0.25), B: Quota(requests_per_s=1)})
    assert quotas.numbers == {A: 0}
    assert not Quotas({A: Quota(queue_share=1)}).numbers, "the whole queue is no limit"
    quotas.check_share(A, 24, 100)
    with pytest.raises(QuotaExceeded, match="its share is 25 of 100"):
        quotas.check_share(A, 25, 100)
    quotas.check_share(B, 10**6, 100)
    quotas.check_share(A, 0, 1)  # The smallest queue has room for one.


def test_a_queue_is_as_large_as_it_was_when_requests_were_refused():
    size = QueueSize(8192)
    assert size.estimate(0.0) == 8192
    size.refused(48, 1.0)
    assert size.estimate(1.0) == 48
    size.refused(40, 1.0)
    assert size.estimate(1.0) == 46, "one overload does not decide alone"
    for _ in range(50):
        size.refused(20, 1.0)
    assert size.estimate(1.0) == 20
    assert size.estimate(1.0 + FULL_GROWTH_S) == 40, "it grows while no request is refused"
    assert size.estimate(1e6) == 8192
    size.refused(100, 1e6)
    assert size.estimate(1e6) == 100, "old overloads say nothing"
    size.refused(10**6, 1e6)
    assert size.estimate(1e6) == 8192


def test_a_queue_that_was_empty_has_room_for_one():
    size = QueueSize(8)
    for _ in range(100):
        size.refused(1, 0.0)
    assert size.estimate(0.0) == 1


def start_prompt(quotas, caller, now, num_tokens=0):
    """The core decides at once."""
    assert quotas.start_prompt(caller, num_tokens, now, pytest.fail)


def test_new_quotas_hold_at_once_and_unchanged_ones_go_on():
    quotas, clock = Quotas({A: Quota(10, 10), B: Quota(10)}), FakeClock()
    for caller in (A, B):
        num_passed(quotas, caller, 10, clock)
    quotas.use_tokens(A, 10, clock())
    quotas.replace({A: Quota(10, 10), B: Quota(20)})
    with pytest.raises(QuotaExceeded):
        start_prompt(quotas, A, clock())
    assert num_passed(quotas, A, 10, clock) == 0
    assert num_passed(quotas, B, 100, clock) == 20
    quotas.replace({})
    assert num_passed(quotas, A, 10, clock) == 10 and not quotas.is_active


def test_it_is_no_overload_of_the_server_though_clients_may_treat_it_as_such():
    error = QuotaExceeded("why", 2.5)
    assert isinstance(error, Overloaded)
    assert (error.reason, error.retry_after_s, str(error)) == ("quota", 2.5, "why")


def test_tokens_are_counted_after_they_were_used():
    quotas, clock = Quotas({A: Quota(tokens_per_s=100), B: Quota(requests_per_s=1)}), FakeClock()
    start_prompt(quotas, A, clock(), 50)
    quotas.use_tokens(A, 300, clock())
    with pytest.raises(QuotaExceeded, match="may use 100 tokens/s") as caught:
        start_prompt(quotas, A, clock())
    assert caught.value.retry_after_s == pytest.approx(2.51)
    clock.advance(2.52)
    start_prompt(quotas, A, clock())
    clock.advance(3600)
    quotas.use_tokens(A, 100, clock())
    with pytest.raises(QuotaExceeded):
        start_prompt(quotas, A, clock())
    for caller in (B, b""):
        quotas.use_tokens(caller, 10**9, clock())
        start_prompt(quotas, caller, clock())


def test_a_share_counts_what_is_held_and_forgets_what_left():
    shares = QueueShares(Quotas({A: Quota(queue_share=0.5)}), 8)
    first, second = object(), object()
    shares.enter(first, A, 3)
    shares.check(A, 0.0)
    shares.enter(second, A)
    with pytest.raises(
        QuotaExceeded, match="4 requests in this model's queue; its share is 4 of 8"
    ):
        shares.check(A, 0.0)
    shares.leave(first)
    shares.leave(first)
    shares.check(A, 0.0)
    shares.leave(second)
    shares.enter(first, B)
    assert not shares.held


def test_lower_levels_do_not_count_and_have_a_size_of_their_own():
    shares = QueueShares(Quotas({A: Quota(queue_share=0.5)}), 8, 2)
    for _ in range(4):
        shares.enter(object(), A, level=1)
    shares.check(A, 0.0, 0)
    with pytest.raises(QuotaExceeded, match="its share is 4 of 8"):
        shares.check(A, 0.0, 1)
    shares.enter(object(), A)
    shares.refused(2, 0.0)
    with pytest.raises(QuotaExceeded, match="its share is 1 of 2"):
        shares.check(A, 0.0, 0)


class SharesOfShards:
    """The shares of one model in several shards, with the same quotas."""

    def __init__(self, quotas: dict[bytes, Quota], num_levels: int = 1) -> None:
        page = SharedPage.in_memory(PageLayout(3, 1, 1))
        self.quotas = [Quotas(quotas) for _ in range(3)]
        self.shards = [
            QueueShares(each, 8, num_levels, PageElsewhere(page, 0, shard, 1, num_levels))
            for shard, each in enumerate(self.quotas)
        ]
        self.page = page

    def num_refused(self, caller: bytes, level: int = 0) -> int:
        """In how many shards the share is full."""
        refused = 0
        for shard in self.shards:
            try:
                shard.check(caller, 0.0, level)
            except QuotaExceeded:
                refused += 1
        return refused


def test_a_share_counts_what_all_shards_hold():
    shares = SharesOfShards({A: Quota(queue_share=0.5), B: Quota(queue_share=0.25)})
    held = [(shard, object()) for shard in shares.shards for _ in range(2)]
    for shard, request in held[:3]:
        shard.enter(request, A)
    assert shares.num_refused(A) == 0
    shares.shards[2].enter(held[-1][1], A)
    assert shares.num_refused(A) == 3 and shares.num_refused(B) == 0
    shares.shards[0].leave(held[0][1])
    assert shares.num_refused(A) == 0
    shares.shards[1].enter(object(), A)
    assert shares.num_refused(A) == 3
    shares.page.clear_shard(1)
    assert shares.num_refused(A) == 1, "only the shard that was cleared counts its own"


@pytest.mark.parametrize("num_levels", [2, 6])
def test_lower_levels_of_other_shards_do_not_count(num_levels: int):
    shares = SharesOfShards({A: Quota(queue_share=0.5)}, num_levels)
    for number in range(4):
        shares.shards[number % 2].enter(object(), A, level=1)
    assert (shares.num_refused(A, 0), shares.num_refused(A, 1)) == (0, 3)
    assert shares.num_refused(A, num_levels - 1) == 3


def test_the_size_of_a_queue_is_that_of_all_shards():
    shares = SharesOfShards({A: Quota(queue_share=0.5)})
    for number in range(4):
        shares.shards[1].enter(object(), B if number else A)
    shares.shards[0].refused(2, 0.0)
    with pytest.raises(QuotaExceeded, match="its share is 3 of 6"):
        for _ in range(9):
            shares.shards[0].check(A, 0.0)
            shares.shards[0].enter(object(), A)


def test_new_keys_get_numbers_of_their_own_within_a_tick():
    shares = SharesOfShards({B: Quota(queue_share=0.5)})
    for _ in range(4):
        shares.shards[0].enter(object(), B)
    assert shares.num_refused(B) == 3
    for quotas in shares.quotas:
        quotas.replace({A: Quota(queue_share=0.5), B: Quota(queue_share=0.5)})
    for shard in shares.shards:
        shard.show()
    assert (shares.num_refused(A), shares.num_refused(B)) == (0, 3)
    for quotas in shares.quotas:
        quotas.replace({})
    for shard in shares.shards:
        shard.show()
    held = shares.page.layout.held_at(0, 0)
    assert not any(shares.page.cells[held : held + HELD_CELLS])


def test_wrong_numbers_of_other_shards_only_change_what_is_refused():
    shares = SharesOfShards({A: Quota(queue_share=0.5)})
    at = shares.page.layout.held_at(0, 1)
    for wrong in (math.nan, math.inf, -5.0, 1e300):
        shares.page.cells[at] = wrong
        assert shares.num_refused(A) == 0
    shares.shards[1].show()
    assert shares.page.cells[at] == 0.0
