"""Several shards with one bucket: together they never exceed a key's rate, and no request is left
waiting."""

from collections import deque

from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.serving.leases import IDLE_S, Leases
from penstock.serving.quotas import BURST_S, Quota, Quotas

KEY = b"key"


class Shard:
    """A shard whose questions wait until the test lets the core answer them."""

    def __init__(self, rate: float) -> None:
        self.asked: deque[int] = deque()
        self.leases = Leases(lambda key, amount: self.asked.append(amount))
        self.leases.replace({KEY: rate})
        self.num_waiting = self.num_served = self.num_refused = 0

    def request(self, now: float) -> None:
        if self.leases.take(KEY, now, self.num_waiting):
            self.num_served += 1
        else:
            self.num_waiting += 1

    def hear(self, quotas: Quotas, now: float) -> None:
        """Let the core answer one question."""
        amount = self.asked.popleft()
        leased, _ = quotas.lease(KEY, amount, now)
        if amount < 0:
            return
        assert 0 <= leased <= amount
        num_served, may_wait = self.leases.granted(KEY, leased, self.num_waiting)
        self.num_served += num_served
        self.num_waiting -= num_served
        if not may_wait:
            self.num_refused += self.num_waiting
            self.num_waiting = 0


@settings(max_examples=at_most(300), deadline=None)
@given(
    st.sampled_from([0.5, 1.0, 7.0, 100.0, 5000.0]),
    st.lists(
        st.tuples(
            st.sampled_from(["request", "request", "request", "hear", "time", "give back"]),
            st.integers(0, 2),
            st.floats(0.0, 0.3),
        ),
        max_size=200,
    ),
)
def test_shards_together_keep_the_rate_and_every_request_ends(rate, events):
    quotas, shards, now = Quotas({KEY: Quota(requests_per_s=rate)}), [], 100.0
    began, num_requests = now, 0
    shards = [Shard(rate) for _ in range(3)]
    for event, index, seconds in events:
        shard = shards[index]
        if event == "request":
            shard.request(now)
            num_requests += 1
        elif event == "hear" and shard.asked:
            shard.hear(quotas, now)
        elif event == "time":
            now += seconds
        elif event == "give back":
            shard.leases.give_back(now)
        num_served = sum(each.num_served for each in shards)
        assert num_served <= max(1.0, rate * BURST_S) + rate * (now - began) + 1e-6
    for shard in shards:
        while shard.asked:
            shard.hear(quotas, now)
        assert shard.num_waiting == 0
    assert sum(each.num_served + each.num_refused for each in shards) == num_requests


def test_one_shard_alone_gets_the_whole_burst_and_idle_tokens_go_back():
    quotas, now = Quotas({KEY: Quota(requests_per_s=100.0)}), 5.0
    one, two = Shard(100.0), Shard(100.0)
    for _ in range(120):
        one.request(now)
        while one.asked:
            one.hear(quotas, now)
    assert (one.num_served, one.num_refused) == (100, 20)
    now += 1.0
    one.request(now)
    one.hear(quotas, now)
    now += IDLE_S
    one.leases.give_back(now)
    while one.asked:
        one.hear(quotas, now)
    for _ in range(120):
        two.request(now)
        while two.asked:
            two.hear(quotas, now)
    assert two.num_served >= 99, "what the other had leased came back"


def test_keys_without_a_rate_need_no_token():
    shard = Shard(1.0)
    assert shard.leases.take(b"other", 0.0) and not shard.asked
    shard.leases.replace({})
    assert shard.leases.take(KEY, 0.0) and not shard.asked
