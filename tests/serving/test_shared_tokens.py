"""Tokens of API keys that several shards use together."""

import pytest

from penstock.errors import QuotaExceeded
from penstock.serving.quotas import Quota, Quotas
from penstock.serving.shared_tokens import SharedTokens
from penstock.wire import frames

KEY, OTHER = b"team-a", b"team-b"


class Core:
    """The core's quotas, and the turn of a loop."""

    def __init__(self, rate=10.0):
        self.quotas = Quotas({KEY: Quota(tokens_per_s=rate)})
        self.now = 100.0
        self.sent = []
        self.due = []

    def shard(self):
        tokens = SharedTokens(
            lambda frame: self.sent.append((tokens, frame)), lambda call: self.due.append(call)
        )
        tokens.replace(self.quotas.token_rates)
        return tokens

    def end_turn(self):
        due, self.due = self.due, []
        for each in due:
            each()
        sent, self.sent = self.sent, []
        for tokens, frame in sent:
            match frame:
                case frames.TakeTokens(call, key, amount):
                    wait_s = self.quotas.take_tokens(key, amount, self.now)
                    tokens.taken(frames.TokensTaken(call, wait_s))
                case frames.UseTokens(key, amount):
                    self.quotas.use_tokens(key, amount, self.now)


def asked(core, tokens, num_tokens=5, caller=KEY):
    """The outcomes, as they come."""
    found = []
    if tokens.start_prompt(caller, num_tokens, 0.0, found.append):
        found.append(None)
    return found


def test_a_key_without_a_limit_asks_nobody():
    core = Core()
    assert asked(core, core.shard(), caller=OTHER) == [None]
    core.shard().use_tokens(OTHER, 100, 0.0)
    assert core.sent == core.due == []


def test_what_one_shard_uses_is_not_there_for_another():
    core = Core()
    one, two = core.shard(), core.shard()
    found = asked(core, one)
    assert found == []
    core.end_turn()
    assert found == [None]
    for _ in range(25):
        one.use_tokens(KEY, 1, 0.0)
    core.end_turn()
    found = asked(core, two)
    core.end_turn()
    (error,) = found
    assert isinstance(error, QuotaExceeded) and "may use 10 tokens/s" in str(error)
    # 10 were there, 30 are used, and one more is needed.
    assert error.retry_after_s == pytest.approx(2.1)
    core.now += 2.11
    found = asked(core, two)
    core.end_turn()
    assert found == [None]


def test_tokens_of_a_turn_are_one_frame_and_come_before_the_next_prompt():
    core = Core()
    tokens = core.shard()
    for _ in range(7):
        tokens.use_tokens(KEY, 1, 0.0)
    assert core.sent == [] and len(core.due) == 1
    asked(core, tokens)
    kinds = [type(frame) for _, frame in core.sent]
    assert kinds == [frames.UseTokens, frames.TakeTokens] and core.sent[0][1].amount == 7
    core.end_turn()
    assert core.sent == []


def test_together_they_take_no_more_than_one_would():
    """Whoever asks: a prompt is started only while the bucket holds a token."""
    core = Core(rate=100.0)
    shards = [core.shard() for _ in range(4)]
    outcomes = [asked(core, shards[number % 4], 10) for number in range(40)]
    core.end_turn()
    assert sum(each == [None] for each in outcomes) == 10
