"""A worker and its shards: each row runs once, nothing waits for ever, no shard starves."""

import random
from collections import deque
from dataclasses import dataclass, field, replace

import pytest
from example_counts import at_most
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import BatchPolicy, ladder
from penstock.serving.claims import (
    AHEAD_S,
    FIRST_LEAD_S,
    LONGER_S,
    MAX_LEAD,
    MAX_SKIPPED,
    MAX_WAIT_S,
    SILENCE_S,
    ClaimRows,
    Claims,
    Offer,
    StartBatch,
)
from penstock.serving.shares import Queued

FIXED = BatchPolicy(max_batch_size=8, is_dynamic=True)
SLO = BatchPolicy(max_batch_size=64, is_dynamic=True, slo_latency_s=0.020)


def duration_s(num_rows: float) -> float:
    return 0.002 + 0.0001 * num_rows


def make_claims(
    policy: BatchPolicy = FIXED, num_shards: int = 3, num_slots: int = 1, **options: object
) -> Claims:
    claims = Claims(policy, num_slots=num_slots, **options)  # type: ignore[arg-type]
    claims.seed({rows: duration_s(rows) for rows in ladder(policy.max_batch_size)})
    for shard in range(num_shards):
        claims.attach(shard)
    return claims


def want(num_rows: int, due: float = 0.0, **options: object) -> Queued:
    return Queued((num_rows,), due=due, **options)  # type: ignore[arg-type]


def shares(decisions: list[ClaimRows | StartBatch]) -> dict[int, int]:
    """Return the rows claimed, by shard. Everything must be a claim."""
    assert all(isinstance(each, ClaimRows) for each in decisions)
    return {each.shard: each.share.max_rows for each in decisions if isinstance(each, ClaimRows)}


def only(decisions: list[ClaimRows | StartBatch]) -> StartBatch:
    (batch,) = decisions
    assert isinstance(batch, StartBatch)
    return batch


def parts(batch: StartBatch) -> list[tuple[int, int]]:
    return [(offer.shard, offer.num_rows) for offer in batch.offers]


class TestRounds:
    def test_an_idle_worker_runs_an_offer_at_once(self) -> None:
        claims = make_claims()
        assert claims.is_idle
        claims.offered(Offer(0, 2, "a"))
        assert parts(only(claims.decide(0.0))) == [(0, 2)]
        assert not claims.is_idle

    def test_everything_that_lies_in_the_sockets_runs_together(self) -> None:
        claims = make_claims()
        for shard in range(3):
            claims.offered(Offer(shard, 2, "a"))
        assert parts(only(claims.decide(0.0))) == [(0, 2), (1, 2), (2, 2)]

    def test_a_want_that_finds_an_idle_worker_is_claimed_at_once(self) -> None:
        claims = make_claims()
        claims.wanted(1, want(3))
        assert shares(claims.decide(0.0)) == {1: 8}
        assert not claims.is_idle
        claims.offered(Offer(1, 3, "a", round=1))
        assert parts(only(claims.decide(0.0001))) == [(1, 3)]

    def test_claims_follow_when_the_slot_is_free(self) -> None:
        claims = make_claims()
        claims.offered(Offer(0, 1, "a"))
        batch = only(claims.decide(0.0))
        claims.wanted(1, want(1))
        assert claims.decide(0.001) == []
        claims.ended(batch, 0.002)
        assert not claims.is_idle
        assert shares(claims.decide(0.002)) == {1: 8}

    def test_a_batch_starts_when_all_have_answered(self) -> None:
        claims = make_claims()
        claims.wanted(0, want(2))
        claims.wanted(1, want(2))
        claims.decide(0.0)
        claims.offered(Offer(0, 2, "a", round=1))
        assert claims.decide(0.00001) == []
        claims.passed(1, 1)
        batch = only(claims.decide(0.00002))
        assert parts(batch) == [(0, 2)] and batch.began == 0.0

    def test_a_late_answer_runs_in_the_next_batch(self) -> None:
        claims = make_claims()
        for shard in range(2):
            claims.wanted(shard, want(2))
        claims.decide(0.0)
        claims.offered(Offer(0, 2, "a", round=1, queued=want(1)))
        assert claims.decide(0.001) == []
        wake_at = claims.wake_at
        assert wake_at is not None and 0.001 < wake_at <= 0.001 + MAX_WAIT_S
        first = only(claims.decide(wake_at))
        assert parts(first) == [(0, 2)]
        claims.offered(Offer(1, 2, "a", round=1))
        claims.ended(first, 0.004)
        # What is there counts: the other shard may give the rest.
        assert shares(claims.decide(0.004)) == {0: 6}
        claims.offered(Offer(0, 1, "a", round=2))
        assert parts(only(claims.decide(0.005))) == [(1, 2), (0, 1)]

    def test_long_batches_wait_for_shards_that_get_their_core_late(self) -> None:
        claims = make_claims(num_shards=2)
        claims.seed({rows: 0.1 for rows in ladder(FIXED.max_batch_size)})
        for shard in range(2):
            claims.wanted(shard, want(20))
        assert shares(claims.decide(0.0)) == {0: 4, 1: 4}
        claims.offered(Offer(0, 4, "a", round=1))
        assert claims.decide(0.0001) == []
        assert claims.decide(0.0015) == []
        claims.offered(Offer(1, 4, "a", round=1))
        assert parts(only(claims.decide(0.0018))) == [(0, 4), (1, 4)]

    def test_a_full_batch_does_not_wait_for_others(self) -> None:
        claims = make_claims()
        for shard in range(2):
            claims.wanted(shard, want(2))
        claims.decide(0.0)
        claims.offered(Offer(0, 8, "a"))
        assert parts(only(claims.decide(0.00001))) == [(0, 8)]

    def test_a_silent_shard_does_not_stop_the_others(self) -> None:
        claims = make_claims()
        claims.wanted(0, want(100))
        claims.decide(0.0)
        claims.wanted(1, want(1))
        assert claims.decide(0.001) == [] and claims.wake_at == SILENCE_S
        assert shares(claims.decide(SILENCE_S)) == {1: 8}
        claims.offered(Offer(1, 1, "a", round=2))
        batch = only(claims.decide(0.003))
        claims.ended(batch, 0.005)
        # It still has an unanswered claim and is not asked again, but its answer counts.
        assert claims.decide(0.005) == [] and claims.is_idle
        claims.offered(Offer(0, 8, "a", round=1))
        assert parts(only(claims.decide(0.006))) == [(0, 8)]

    def test_a_page_without_rows_is_not_trusted_before_the_worker_goes_idle(self) -> None:
        page = {0: Queued((0,)), 1: Queued((5,), due=1.0)}
        claims = make_claims(read=lambda shard, now: page.get(shard))
        claims.wanted(0, want(1))
        claims.wanted(1, want(1))
        assert shares(claims.decide(0.0)) == {1: 8}
        claims.passed(1, 1)
        assert shares(claims.decide(0.0)) == {0: 8}
        claims.passed(0, 2)
        assert claims.decide(0.0) == [] and claims.is_idle

    def test_a_wrong_page_cannot_starve_a_shard(self) -> None:
        page = {0: Queued((0,)), 1: Queued((5,), due=1.0)}
        claims = make_claims(read=lambda shard, now: page.get(shard))
        claims.wanted(0, want(1))
        claims.wanted(1, want(5))
        for number in range(1, 200):
            claimed = shares(claims.decide(0.0))
            if 0 in claimed:
                break
            claims.offered(Offer(1, 5, "a", round=number, queued=want(5)))
            claims.ended(only(claims.decide(0.0)), 0.0)
        assert claimed == {0: 8} and number <= MAX_SKIPPED + 1

    def test_a_page_that_contradicts_itself_does_not_stop_the_worker(self) -> None:
        page = {0: Queued((5,), (0,), 0.0), 1: Queued((0,), (900,), 1.0)}
        claims = make_claims(replace(FIXED, max_tokens=100), read=lambda s, now: page.get(s))
        claims.wanted(0, Queued((1,), (10,), 0.0))
        claims.wanted(1, Queued((1,), (10,), 0.0))
        assert sum(shares(claims.decide(0.0)).values()) > 0

    def test_two_slots_are_filled_one_after_the_other(self) -> None:
        claims = make_claims(num_slots=2)
        claims.wanted(0, want(9))
        claims.decide(0.0)
        claims.offered(Offer(0, 8, "a", round=1, queued=want(1)))
        first, second = claims.decide(0.0)
        assert isinstance(first, StartBatch) and isinstance(second, ClaimRows)
        claims.offered(Offer(0, 1, "a", round=2))
        assert parts(only(claims.decide(0.0))) == [(0, 1)]


class TestAhead:
    """The next batch is claimed shortly before the current one ends."""

    def test_the_batch_that_was_claimed_ahead_starts_when_the_slot_is_free(self) -> None:
        claims, batch = busy()
        claims.wanted(1, want(3))
        early = batch.ends_at - FIRST_LEAD_S
        assert claims.decide(0.0) == [] and claims.wake_at == pytest.approx(early)
        assert shares(claims.decide(early)) == {1: 8}
        # Once: the answer is on its way.
        assert claims.decide(early) == [] and not claims.is_idle
        claims.offered(Offer(1, 3, "a", round=1))
        assert claims.decide(batch.ends_at - 1e-6) == []
        claims.ended(batch, batch.ends_at)
        following = only(claims.decide(batch.ends_at))
        assert parts(following) == [(1, 3)] and following.began == batch.ends_at

    def test_the_page_is_enough_when_wants_have_not_been_received(self) -> None:
        page = {0: Queued((0,)), 1: Queued((5,), due=1.0)}
        claims, batch = busy(read=lambda shard, now: page.get(shard))
        assert shares(claims.decide(batch.ends_at)) == {1: 8}

    def test_nothing_to_claim_is_no_reason_to_wake_up(self) -> None:
        claims, batch = busy()
        assert claims.decide(batch.ends_at) == [] and claims.wake_at is None

    def test_a_late_answer_is_waited_for_and_makes_the_next_claim_earlier(self) -> None:
        claims, batch = busy()
        claims.wanted(1, want(3))
        claims.decide(batch.ends_at)
        ended = batch.ends_at
        claims.ended(batch, ended)
        assert claims.decide(ended) == [] and claims.wake_at == ended + SILENCE_S
        claims.offered(Offer(1, 3, "a", round=1))
        batch = only(claims.decide(ended + 1e-4))
        claims.decide(ended + 1e-4)
        lead_s = batch.ends_at - claims.wake_at
        assert lead_s == pytest.approx(FIRST_LEAD_S + LONGER_S)

    def test_claims_in_time_come_later_and_later(self) -> None:
        claims, batch = busy()
        for number in range(1, 100):
            claims.wanted(1, want(3))
            assert shares(claims.decide(batch.ends_at)) == {1: 8}
            claims.offered(Offer(1, 3, "a", round=number))
            claims.ended(batch, batch.ends_at)
            batch = only(claims.decide(batch.ends_at))
            assert claims.decide(batch.began) == []
        assert claims.wake_at == batch.ends_at

    def test_the_lead_is_a_small_part_of_the_batch(self) -> None:
        claims, batch = busy()
        for number in range(1, 100):
            claims.wanted(1, want(3))
            claims.decide(batch.ends_at)
            claims.ended(batch, batch.ends_at)
            claims.decide(batch.ends_at)
            claims.offered(Offer(1, 8, "a", round=number))
            batch = only(claims.decide(batch.ends_at))
            assert claims.decide(batch.began) == []
        lead_s = MAX_LEAD * (batch.ends_at - batch.began)
        assert claims.wake_at == pytest.approx(batch.ends_at - lead_s)

    def test_short_batches_and_those_that_run_alone_are_not_followed_ahead(self) -> None:
        claims, batch = busy(num_rows=1, is_alone=True)
        claims.wanted(1, want(3))
        assert claims.decide(batch.ends_at) == []
        claims = make_claims()
        claims.seed({1: AHEAD_S / 2, 8: AHEAD_S / 2})
        claims.offered(Offer(0, 1, "a"))
        batch = only(claims.decide(0.0))
        claims.wanted(1, want(3))
        assert claims.decide(batch.ends_at) == []

    def test_with_two_slots_one_is_busy_while_the_other_is_claimed_for(self) -> None:
        claims = make_claims(num_slots=2)
        for _ in range(2):
            claims.offered(Offer(0, 8, "a"))
            only(claims.decide(0.0))
        claims.wanted(1, want(3))
        assert claims.decide(1.0) == [] and claims.wake_at is None

    def test_a_shard_that_dies_with_a_claim_stops_nothing(self) -> None:
        claims, batch = busy()
        claims.wanted(1, want(3))
        claims.decide(batch.ends_at)
        claims.detach(1)
        claims.ended(batch, batch.ends_at)
        assert claims.decide(batch.ends_at) == [] and claims.is_idle

    def test_an_offer_that_is_recalled_does_not_run(self) -> None:
        claims, batch = busy()
        claims.offered(Offer(1, 2, "a", batch=7))
        claims.offered(Offer(2, 1, "a", batch=7))
        assert claims.recall(1, 7)
        assert not claims.recall(1, 7), "it is gone"
        claims.ended(batch, batch.ends_at)
        merged = only(claims.decide(batch.ends_at))
        assert parts(merged) == [(2, 1)]
        assert not claims.recall(2, 7), "it runs"

    def test_a_recalled_part_leaves_the_slot_idle(self) -> None:
        claims, batch = busy()
        claims.wanted(1, want(3))
        (claim,) = claims.decide(batch.ends_at)
        assert isinstance(claim, ClaimRows)
        claims.offered(Offer(1, 3, "a", round=claim.round, batch=4))
        assert claims.recall(1, 4)
        claims.ended(batch, batch.ends_at)
        assert claims.decide(batch.ends_at) == [] and claims.is_idle


def busy(num_rows: int = 8, is_alone: bool = False, **options: object) -> tuple[Claims, StartBatch]:
    """Return a worker that runs a batch, as predicted, from time 0."""
    claims = make_claims(**options)  # type: ignore[arg-type]
    claims.offered(Offer(0, num_rows, "a", is_alone=is_alone))
    return claims, only(claims.decide(0.0))


class TestMerging:
    def test_other_geometries_wait_for_their_own_batch(self) -> None:
        claims = make_claims()
        for shard, geometry in enumerate("aba"):
            claims.offered(Offer(shard, 1, geometry))
        batch = only(claims.decide(0.0))
        assert parts(batch) == [(0, 1), (2, 1)]
        claims.ended(batch, 0.001)
        assert parts(only(claims.decide(0.001))) == [(1, 1)]

    def test_claims_name_the_geometry_of_the_oldest_head(self) -> None:
        claims = make_claims()
        claims.wanted(0, want(1, due=2.0, geometry="a"))
        claims.wanted(1, want(1, due=1.0, geometry="b"))
        claimed = [each for each in claims.decide(0.0) if isinstance(each, ClaimRows)]
        assert {each.share.geometry for each in claimed} == {"b"}
        # A shard that has only others says so, and is asked for those next.
        claims.passed(0, 1, want(1, due=2.0, geometry="a"))
        claims.offered(Offer(1, 1, "b", round=1))
        batch = only(claims.decide(0.0))
        claims.ended(batch, 0.001)
        (claim,) = claims.decide(0.001)
        assert isinstance(claim, ClaimRows) and claim.share.geometry == "a"

    def test_alone_means_alone(self) -> None:
        claims = make_claims(num_slots=2)
        claims.offered(Offer(0, 1, "a"))
        first = only(claims.decide(0.0))
        claims.offered(Offer(1, 1, "a", is_alone=True))
        claims.offered(Offer(2, 1, "a"))
        assert claims.decide(0.0) == []
        claims.ended(first, 0.001)
        second = only(claims.decide(0.001))
        assert parts(second) == [(1, 1)]
        assert claims.decide(0.001) == []
        claims.ended(second, 0.002, has_failed=True)
        assert parts(only(claims.decide(0.002))) == [(2, 1)]

    def test_a_model_that_does_not_batch_runs_one_request_at_a_time(self) -> None:
        claims = make_claims(replace(FIXED, is_dynamic=False))
        claims.wanted(0, want(5, due=2.0))
        claims.wanted(1, want(5, due=1.0, head_rows=3))
        assert shares(claims.decide(0.0)) == {1: 3}
        claims.offered(Offer(1, 3, "a", round=1))
        claims.offered(Offer(0, 1, "a"))
        assert parts(only(claims.decide(0.0))) == [(1, 3)]

    def test_offers_of_a_dead_shard_are_forgotten(self) -> None:
        claims = make_claims()
        for shard in range(2):
            claims.wanted(shard, want(1))
        claims.decide(0.0)
        claims.offered(Offer(0, 1, "a", round=1))
        claims.detach(1)
        batch = only(claims.decide(0.0))
        claims.offered(Offer(0, 1, "a"))
        claims.detach(0)
        # Frames that arrive out of a dead shard's socket are ignored as well.
        claims.wanted(0, want(1))
        claims.ended(batch, 0.1)
        assert claims.decide(0.1) == [] and claims.is_idle


class TestCaps:
    def test_without_an_slo_a_preferred_size_is_claimed(self) -> None:
        policy = replace(FIXED, preferred_batch_sizes=(4,), max_queue_delay_s=0.01)
        claims = make_claims(policy)
        claims.wanted(0, want(3, due=0.0))
        claims.wanted(1, want(3, due=0.0))
        assert sum(shares(claims.decide(0.005)).values()) == 4
        late = make_claims(policy)
        late.wanted(0, want(3, due=0.0))
        late.wanted(1, want(3, due=0.0))
        assert sum(shares(late.decide(0.010)).values()) == 8

    def test_a_want_for_requests_that_ran_elsewhere_leaves_the_decision_to_its_shard(self) -> None:
        policy = replace(FIXED, preferred_batch_sizes=(4,), max_queue_delay_s=0.01)
        claims = make_claims(policy, read=lambda shard, now: Queued((int(shard == 0),), due=0.0))
        claims.wanted(0, want(4, due=0.0))
        (claim,) = claims.decide(0.005)
        assert isinstance(claim, ClaimRows) and not claim.share.is_due
        claims.passed(0, 1)
        assert claims.decide(0.005) == [] and claims.is_idle
        claims.wanted(0, want(1, due=0.0))
        (claim,) = claims.decide(0.010)
        assert isinstance(claim, ClaimRows) and claim.share.is_due

    def test_backlog_is_claimed_in_batches_of_the_target_size(self) -> None:
        claims = make_claims(SLO)
        for shard in range(3):
            claims.wanted(shard, want(100, due=0.020))
        decisions = claims.decide(0.0)
        share = decisions[0].share  # type: ignore[union-attr]
        assert sum(shares(decisions).values()) == 64
        assert share.drops_late and share.others_rows == 64 - share.max_rows
        assert share.ends_at == pytest.approx(duration_s(64))

    def test_the_oldest_head_limits_the_batch(self) -> None:
        claims = make_claims(SLO)
        claims.wanted(0, want(20, due=0.0051))
        claims.wanted(1, want(20, due=0.020))
        decisions = claims.decide(0.0)
        assert sum(shares(decisions).values()) == 31
        assert all(
            each.share.ends_at <= 0.0051 and not each.share.drops_late
            for each in decisions
            if isinstance(each, ClaimRows)
        )

    def test_a_batch_is_not_shrunk_by_more_than_a_quarter(self) -> None:
        claims = make_claims(SLO)
        claims.wanted(0, want(20, due=0.0048))
        claims.wanted(1, want(20, due=0.020))
        decisions = claims.decide(0.0)
        assert sum(shares(decisions).values()) == 64
        assert all(each.share.drops_late for each in decisions if isinstance(each, ClaimRows))

    def test_the_cap_follows_what_batches_take(self) -> None:
        claims = make_claims(SLO)
        for index in range(200):
            claims.offered(Offer(0, 32, None))
            batch = only(claims.decide(index * 0.1))
            claims.ended(batch, index * 0.1 + 0.018)
        claims.wanted(0, want(100, due=30.020))
        assert sum(shares(claims.decide(30.0)).values()) < 32

    def test_token_budgets_are_divided_too(self) -> None:
        claims = make_claims(replace(FIXED, max_tokens=100))
        for shard, due in ((0, 2.0), (1, 1.0)):
            claims.wanted(shard, Queued((3,), (90,), due, head_tokens=30))
        decisions = claims.decide(0.0)
        tokens = {
            each.shard: each.share.max_tokens for each in decisions if isinstance(each, ClaimRows)
        }
        assert tokens == {0: 50, 1: 50}
        for shard in range(2):
            claims.offered(Offer(shard, 1, "a", round=1, num_tokens=50))
        assert len(only(claims.decide(0.0)).offers) == 2


@dataclass
class Link:
    """A shard that keeps the rules, and both directions of its socket."""

    shard: int
    rng: random.Random
    max_batch: int
    waiting: deque[tuple[str, int]] = field(default_factory=deque)
    to_worker: deque[tuple[str, object]] = field(default_factory=deque)
    to_shard: deque[ClaimRows] = field(default_factory=deque)
    has_said_want: bool = False

    def queued(self) -> Queued | None:
        if not self.waiting:
            return None
        geometry, row = self.waiting[0]
        return Queued((len(self.waiting),), due=float(row), geometry=geometry)

    def arrive(self, row: int, page_says_idle: bool) -> None:
        self.waiting.append((self.rng.choice("aab"), row))
        if page_says_idle and self.rng.random() < 0.7:
            self.give(0, self.max_batch, None)
        elif not self.has_said_want:
            self.to_worker.append(("want", self.queued()))
            self.has_said_want = True

    def answer(self) -> None:
        claim = self.to_shard.popleft()
        self.give(claim.round, claim.share.max_rows, claim.share.geometry)

    def give(self, round: int, max_rows: int, geometry: object) -> None:
        wanted = geometry or (self.waiting[0][0] if self.waiting else None)
        given = [each for each in self.waiting if each[0] == wanted][:max_rows]
        self.waiting = deque(each for each in self.waiting if each not in given)
        left = self.queued()
        self.has_said_want = left is not None
        if given:
            rows = tuple(row for _, row in given)
            is_alone = len(rows) == 1 and self.rng.random() < 0.3
            kind = ("offer", Offer(self.shard, len(rows), wanted, round, 0, is_alone, left, rows))
            self.to_worker.append(kind)
        elif round:
            self.to_worker.append(("pass", (round, left)))


class World:
    """Shards and a worker whose messages are delivered in any order between shards."""

    def __init__(
        self, seed: int, num_shards: int, num_slots: int, policy: BatchPolicy, has_page: bool
    ) -> None:
        self.rng = random.Random(seed)
        self.max_batch = policy.max_batch_size
        read = self.read_lies if has_page else (lambda shard, now: None)
        self.claims = make_claims(policy, num_shards, num_slots, read=read)
        self.links = {shard: Link(shard, self.rng, self.max_batch) for shard in range(num_shards)}
        self.now = 0.0
        self.page_says_idle = True
        self.num_rows = 0
        self.running: list[StartBatch] = []
        self.ran: list[int] = []
        self.lost: set[int] = set()

    def read_lies(self, shard: int, now: float) -> Queued:
        num_rows = self.rng.choice((0, 0, 1, 10, 10**6))
        return Queued((num_rows,), due=self.rng.uniform(-1, 1), head_rows=self.rng.choice((1, 8)))

    def decide(self) -> None:
        for decision in self.claims.decide(self.now):
            if isinstance(decision, ClaimRows):
                self.links[decision.shard].to_shard.append(decision)
                assert decision.share.max_rows > 0
            else:
                self.check(decision)
                self.running.append(decision)
        assert len(self.running) <= self.claims.num_slots
        if self.rng.random() < 0.8:
            self.page_says_idle = self.claims.is_idle

    def check(self, batch: StartBatch) -> None:
        assert 0 < batch.num_rows <= self.max_batch
        assert len({offer.geometry for offer in batch.offers}) == 1
        if any(offer.is_alone for offer in (*batch.offers, *self.in_flight())):
            assert len(batch.offers) == 1 and not self.running
        for offer in batch.offers:
            assert isinstance(offer.frame, tuple)
            self.ran += offer.frame

    def in_flight(self) -> list[Offer]:
        return [offer for batch in self.running for offer in batch.offers]

    def deliver(self, link: Link) -> None:
        kind, message = link.to_worker.popleft()
        if isinstance(message, Offer):
            self.claims.offered(message)
        elif isinstance(message, Queued):
            self.claims.wanted(link.shard, message)
        else:
            assert kind == "pass" and isinstance(message, tuple)
            self.claims.passed(link.shard, *message)

    def kill(self, link: Link) -> None:
        self.claims.detach(link.shard)
        del self.links[link.shard]
        self.lost |= {row for _, row in link.waiting}

    def act(self) -> None:
        """Let one thing happen; several only if they lie in the sockets."""
        self.now += self.rng.choice((0.0, 0.0001, 0.001))
        link = self.rng.choice(list(self.links.values()))
        choice = self.rng.random()
        if choice < 0.35:
            link.arrive(self.num_rows, self.page_says_idle)
            self.num_rows += 1
        elif choice < 0.6 and link.to_shard:
            link.answer()
        elif choice < 0.85 and link.to_worker:
            self.deliver(link)
        elif choice < 0.95 and self.running:
            self.claims.ended(self.running.pop(0), self.now)
        elif choice > 0.999 and len(self.links) > 1:
            self.kill(link)
        self.decide()

    def drain(self) -> None:
        """Deliver everything, with little time between, until nothing is left to do."""
        for _ in range(100 * (self.num_rows + 10)):
            links = self.links.values()
            busy = [link for link in links if link.to_worker or link.to_shard]
            self.now += 0.0001
            if busy:
                link = self.rng.choice(busy)
                self.deliver(link) if link.to_worker else link.answer()
            elif self.running:
                self.claims.ended(self.running.pop(0), self.now)
            elif self.claims.wake_at is not None:
                self.now = max(self.now, self.claims.wake_at)
            elif not any(link.waiting for link in links):
                assert self.claims.is_idle
                return
            self.decide()
        raise AssertionError("something waits for ever")


class TestLaws:
    @settings(max_examples=at_most(400))
    @given(
        seed=st.integers(0, 2**32),
        num_shards=st.integers(1, 5),
        num_slots=st.integers(1, 2),
        policy=st.sampled_from([FIXED, SLO]),
        has_page=st.booleans(),
    )
    def test_each_row_runs_once_and_nothing_waits_for_ever(
        self, seed: int, num_shards: int, num_slots: int, policy: BatchPolicy, has_page: bool
    ) -> None:
        """Also if every figure of the page is wrong."""
        world = World(seed, num_shards, num_slots, policy, has_page)
        alive = dict(world.links)
        for _ in range(300):
            world.act()
        world.drain()
        assert len(world.ran) == len(set(world.ran))
        never = set(range(world.num_rows)) - set(world.ran)
        if world.links.keys() == alive.keys():
            assert not never
        else:
            in_dead = {
                row
                for shard, link in alive.items()
                if shard not in world.links
                for _, message in link.to_worker
                if isinstance(message, Offer) and isinstance(message.frame, tuple)
                for row in message.frame
            }
            # Lost with their shard: queued there, on their way, or offered and not started.
            assert world.lost | in_dead <= never
            assert all(link.waiting == deque() for link in world.links.values())

    def test_a_shard_with_one_row_is_served_beside_full_ones(self) -> None:
        claims = make_claims()
        now = 0.0
        claims.wanted(0, want(1, due=0.0))
        for shard in (1, 2):
            claims.wanted(shard, want(1000, due=-1.0))
        rounds = 0
        while True:
            rounds += 1
            claimed = shares(claims.decide(now))
            if 0 in claimed:
                break
            for shard, num_rows in claimed.items():
                # The others' heads are older each time, but become younger.
                offer = Offer(shard, num_rows, None, rounds, queued=want(1000, due=now - 1.0))
                claims.offered(offer)
            (batch,) = claims.decide(now)
            assert isinstance(batch, StartBatch)
            now += 0.3
            claims.ended(batch, now)
        assert rounds <= 6
