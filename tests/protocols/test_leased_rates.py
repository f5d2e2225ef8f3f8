"""What waits for a token of its key, against a core that the test plays."""

from penstock.errors import QuotaExceeded
from penstock.protocols.leased_rates import LeasedRates
from penstock.wire import frames

KEY, OTHER = b"key", b"other"


class Asked:
    """The rates of a shard, what it sent to the core, and what was decided, in order."""

    def __init__(self, rate: float) -> None:
        self.sent: list[frames.Frame] = []
        self.decided: list[tuple[int, QuotaExceeded | None]] = []
        self.rates = LeasedRates(self.sent.append)
        self.rates.replace({KEY: rate})

    def take(self, number: int, key: bytes = KEY) -> bool:
        return self.rates.take(key, lambda error: self.decided.append((number, error)))

    def lease(self, amount: int, wait_s: float = 3.0) -> None:
        self.rates.leased(frames.Leased(KEY, amount, wait_s))


def test_a_key_without_a_limit_never_waits():
    asked = Asked(1)
    assert all(asked.take(number, OTHER) for number in range(100))
    assert not asked.sent and not asked.decided


def test_those_that_wait_go_on_in_order_while_there_are_tokens():
    asked = Asked(40)
    assert [asked.take(number) for number in range(3)] == [False] * 3
    assert asked.sent == [frames.Lease(KEY, 2)]
    asked.lease(2)
    assert asked.decided == [(0, None), (1, None)]
    # All that was wanted came, so there may be more for the third.
    assert asked.sent[1:] == [frames.Lease(KEY, 1)]
    asked.lease(1)
    assert asked.decided[2:] == [(2, None)]


def test_those_that_get_no_token_hear_when_there_is_one():
    asked = Asked(40)
    for number in range(3):
        asked.take(number)
    asked.lease(1)
    (first, error), *refused = asked.decided
    assert (first, error) == (0, None)
    assert [number for number, _ in refused] == [1, 2]
    for _, error in refused:
        assert isinstance(error, QuotaExceeded)
        assert "may send 40 requests/s" in str(error) and error.retry_after_s == 3.0


def test_one_that_goes_on_may_ask_again_at_once():
    """As the next request of a stream does."""
    asked = Asked(40)
    again: list[bool] = []
    asked.rates.take(KEY, lambda error: again.append(asked.take(7)))
    asked.lease(1)
    assert again == [False] and not asked.decided
    asked.lease(2)
    assert asked.decided == [(7, None)]


def test_tokens_that_nobody_uses_go_back(monkeypatch):
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    asked = Asked(40)
    asked.take(0)
    asked.lease(2)
    now += 1
    asked.rates.give_back()
    assert asked.sent[-1] == frames.Lease(KEY, -1)
